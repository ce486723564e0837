"""A user's own metric from examples/custom, installed with an entry point and read by every stage."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ringmaster.codec import to_json
from ringmaster.errors import BatchFileError
from ringmaster.registry import installed
from ringmaster.tasks.batch import parse_batch
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation.examination import ExaminationRequest, examine, figure
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.tasks.retraining.policy import PromotionPolicy, decide_by, load_policy
from ringmaster.tasks.sweeping.ranking import Ranking
from ringmaster.tasks.sweeping.results import best, leaderboard
from ringmaster.techniques import EvaluationSpec
from ringmaster.techniques.data import prepare
from ringmaster.techniques.metric import BUILTIN_METRICS, gain, metric_names, ranked
from ringmaster.techniques.scoring import score_together
from tests.integration.workbench import SINGLE, VIT, Layout

ROOT = Path(__file__).parents[3]
GAP = "calibration_gap"
DEVICE = Device(kind="cpu", index=0, name="cpu", memory_bytes=2**32, cores=())


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with a distribution that has the metric, on this process's import path."""
    site = tmp_path / "site"
    (site / "my_metric-1.dist-info").mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "custom" / "my_metric.py", site)
    (site / "my_metric-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: my-metric\nVersion: 1\n")
    (site / "my_metric-1.dist-info" / "entry_points.txt").write_text(
        f"[ringmaster.metrics]\n{GAP} = my_metric:CalibrationGap\n"
    )
    monkeypatch.syspath_prepend(site)
    installed.cache_clear()
    yield site
    installed.cache_clear()
    sys.modules.pop("my_metric", None)


@pytest.fixture
def job(bench):
    return bench.job(VIT, evaluation=EvaluationSpec(metrics=("loss", GAP), max_batches=3))


def batch_with(*metrics):
    job = {
        "name": "a",
        "model": {"architecture": "ViTForImageClassification"},
        "data": {"source": "digits"},
        "num_steps": 1,
        "evaluation": {"metrics": metrics},
    }
    return parse_batch(json.dumps({"jobs": [job]}), folder=Path(), name="batch.yaml")


def test_a_batch_file_may_name_it(site):
    assert metric_names()[-1] == GAP
    assert batch_with("loss", GAP).jobs[0].evaluation.metrics == ("loss", GAP)
    with pytest.raises(BatchFileError, match=f"'calibration_gab' is unknown. To fix: write `{GAP}`"):
        batch_with("calibration_gab")


def test_the_form_of_a_sweep_lists_it(site):
    program = "import json; from ringmaster.flows.sweep_form import Sweep; print(json.dumps(Sweep.model_json_schema()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(site)])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    choices, nothing = json.loads(done.stdout)["properties"]["objective"]["anyOf"]
    assert choices == {"enum": [*BUILTIN_METRICS, GAP], "type": "string"}
    assert nothing == {"type": "null"}


def test_it_is_measured_by_the_trainer_scored_by_row_and_decides_on_promotions(site, bench, job, tmp_path):
    """Its sums over two ranks, over rows of 24 held-out images, and its definition agree."""
    paths = (str(site),)
    one = bench.train(job, SINGLE, tmp_path / "one", import_paths=paths)
    two = bench.train(job, Layout("ddp", 2, {"micro_batch": 2}), tmp_path / "two", import_paths=paths)
    value = one.outcome.result.metrics[GAP]
    assert set(two.outcome.result.metrics) == {"loss", GAP}
    assert two.outcome.result.metrics[GAP] == pytest.approx(value, rel=1e-4)

    folder = Path(one.order.model_dir)
    scores = score_together({"it": folder}, job=job, cache_dir=bench.cache_dir).scores["it"].arrays
    assert scores["correct"].shape == (24,)
    assert scores["correct"].tolist() == scores["hits"].tolist()
    confidence, share = scores["probabilities"].max(1).mean(), scores["hits"].mean()
    assert value == pytest.approx(abs(confidence - share), rel=1e-4)

    worse = bench.train(replace(job, num_steps=1, seed=1), SINGLE, tmp_path / "worse", import_paths=paths, last_step=1)
    other = worse.outcome.result.metrics[GAP]
    assert other != value
    environment = GangEnvironment(server=bench.server, devices=(DEVICE,), cache_dir=bench.cache_dir, import_paths=paths)
    unnamed = replace(job, evaluation=EvaluationSpec(max_batches=3))  # the metric is named by a policy
    request = ExaminationRequest(
        job=unnamed, data=to_json(prepare(job.data, cache_dir=bench.cache_dir)), metrics=[GAP],
        against=Path(worse.order.model_dir), environment=environment, device=DEVICE,
    )  # fmt: skip
    found = examine(folder, request)
    (line,) = found.measured
    assert (line.value, line.other) == (pytest.approx(value, rel=1e-4), pytest.approx(other, rel=1e-4))
    assert line.gain == pytest.approx(other - value, rel=1e-3)
    assert line.low <= line.value <= line.high
    assert GAP in figure("it", found.measured)
    policy = PromotionPolicy(name="calibrated", metric=GAP, significance=None)
    assert decide_by(policy, [found], metric="loss", is_first=False).promote is (value < other)


def test_models_are_compared_in_its_direction(site, tmp_path):
    assert gain(0.1, 0.2, metric=GAP) > 0 > gain(0.2, 0.1, metric=GAP)
    assert ranked({"a": 0.3, "b": 0.1, "c": np.nan}, metric=GAP) == ["b", "a", "c"]
    reports = {"a": {1: {GAP: 0.3}}, "b": {1: {GAP: 0.1}}}
    jobs = [{"name": name, "status": "done", "num_steps": 1, "segments": [], "model_uri": ""} for name in reports]
    rows = leaderboard(list(reports), ranking=Ranking(metric=GAP), values={}, reports=reports, jobs=jobs)
    assert best(rows)["job"] == "b"
    (tmp_path / "policy.yaml").write_text(f"name: calibrated\nmetric: {GAP}\n")
    assert load_policy(tmp_path / "policy.yaml").metric == GAP


def test_where_it_is_not_installed_it_is_unknown():
    with pytest.raises(
        BatchFileError, match=f"'{GAP}' is unknown. To fix: use one of accuracy, auroc, character_error_rate"
    ):
        batch_with(GAP)
    with pytest.raises(ValueError, match=f"unknown metric '{GAP}': there are loss, perplexity, accuracy"):
        gain(0.1, 0.2, metric=GAP)
