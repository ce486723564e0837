"""Evaluation of models that were trained earlier, and faults that affect one model only."""

from dataclasses import replace
from pathlib import Path

import pytest

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation.stage import Evaluation, evaluate_models
from ringmaster.tasks.profiling.trials import TrialEnvironment
from ringmaster.techniques import EvaluationSpec, Job
from ringmaster.techniques.interface.values import to_json
from ringmaster.techniques.runtime.data import prepare
from ringmaster.techniques.runtime.models import build_model, export_model
from tests.integration.workbench import DIGITS, VIT

JOB = Job(
    name="digits",
    model=VIT,
    data=DIGITS,
    num_steps=1,
    global_batch_size=32,
    evaluation=EvaluationSpec(metrics=("accuracy", "loss"), max_batches=2),
)
DEVICE = Device(kind="cpu", index=0, name="cpu", memory_bytes=2**32, cores=())


@pytest.fixture
def environment(bench, tmp_path):
    return TrialEnvironment(server=bench.server, devices=(DEVICE,), cache_dir=tmp_path / "cache")


def exported(folder: Path, job: Job, *, cache_dir: Path) -> Path:
    """Exports the model of `job` before its first step."""
    prepared = prepare(job.data, cache_dir=cache_dir)
    model = build_model(job.model, data=prepared, seed=job.seed)
    export_model(folder, spec=job.model, model=model, state=model.state_dict(), prepared=prepared)
    return folder


def test_models_are_measured_and_what_does_not_fit_is_told_alone(environment, tmp_path):
    data = to_json(prepare(JOB.data, cache_dir=environment.cache_dir))
    small = exported(tmp_path / "small", JOB, cache_dir=environment.cache_dir)
    config = {**VIT.config, "hidden_size": 64}
    other = replace(JOB, model=replace(VIT, config=config))
    large = exported(tmp_path / "large", other, cache_dir=environment.cache_dir)
    found = evaluate_models(
        [
            Evaluation(name="large", job=JOB, model_dir=large, data=data),
            Evaluation(name="small", job=JOB, model_dir=small, data=data),
            Evaluation(name="again", job=JOB, model_dir=small, data=data),
            Evaluation(name="nothing", job=JOB, model_dir=tmp_path / "nothing", data=data),
        ],
        environment=environment,
        device=DEVICE,
    )
    assert set(found.metrics) == {"small", "again"}
    assert found.metrics["small"] == found.metrics["again"]
    assert set(found.metrics["small"]) == {"accuracy", "loss"}
    assert found.metrics["small"]["loss"] > 0
    assert set(found.faults) == {"large", "nothing"}
    assert "does not fit" in found.faults["large"]


def test_other_data_than_was_prepared_is_refused(environment, tmp_path):
    prepared = prepare(JOB.data, cache_dir=environment.cache_dir)
    changed = {**to_json(prepared), "digest": "another", "folder": str(tmp_path / "gone")}
    model_dir = exported(tmp_path / "model", JOB, cache_dir=environment.cache_dir)
    evaluation = Evaluation(name="digits", job=JOB, model_dir=model_dir, data=changed)
    found = evaluate_models([evaluation], environment=environment, device=DEVICE)
    assert found.metrics == {}
    assert "has changed" in found.faults["digits"]
