"""`ringmaster evaluate`: a registered model on held-out data, with tests, a comparison, and records in MLflow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringmaster.model_lineage import Ledger
from tests.integration.evaluation.test_scores import IMAGES, exported

TESTS = """\
name: digits
slices:
  - {name: class, column: labels}
  - {name: parity, by: "own_slices:parity"}
tests:
  - {name: as-it-is, kind: invariance, held_out: 20, change: {brightness: 0.0}}
  - {name: right, kind: minimum, held_out: 20}
assertions:
  - {name: sane, finite: [probabilities, loss]}
"""


@pytest.fixture
def home(tmp_path):
    (tmp_path / "own_slices.py").write_text("def parity(row): return 'odd' if row['labels'] % 2 else 'even'\n")
    (tmp_path / "tests.yaml").write_text(TESTS)
    return tmp_path


def ringmaster(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RINGMASTER_HOME": str(home / "home"), "OMP_NUM_THREADS": "1"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "ringmaster.flows.entry", *arguments]
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root)])
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=550, check=False)


@pytest.mark.full
def test_a_registered_model_is_examined_and_its_run_keeps_what_was_found(home):
    cache = home / "home" / "cache"
    ledger = Ledger(f"sqlite:///{home / 'home' / 'mlflow.db'}", artifact_root=home / "home" / "mlartifacts")
    run = ledger.start_job(ledger.start_batch("night", params={}), "digits", params={})
    folder = exported(home / "one", IMAGES, cache_dir=cache, seed=1)
    ledger.record_model("night.digits", run_id=run, folder=folder, kind="pretrained")
    other = exported(home / "two", IMAGES, cache_dir=cache, seed=2)
    done = ringmaster(
        home, "evaluate", "night.digits", "--data", "digits", "--tests", "tests.yaml", "--against", str(other),
        "--max-rows", "60", "--json",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr  # untrained weights are rarely right
    said = json.loads(done.stdout)
    assert (said["model"], said["against"], said["num_rows"]) == ("night.digits/1", str(other), 60)
    assert {line["metric"] for line in said["metrics"]} == {"accuracy", "loss"}
    slices = {line["slice"]: line["num_rows"] for line in said["metrics"]}
    assert slices["all"] == 60
    assert slices["parity=odd"] + slices["parity=even"] == 60
    assert [(test["test"], test["passed"]) for test in said["tests"]] == [("as-it-is", True), ("right", False)]
    assert said["assertions"][0]["passed"]
    assert said["faults"] == []
    assert ledger.read_text(run, "evaluation/metrics.svg").startswith("<svg")
    columns = json.loads(ledger.read_text(run, "evaluation/tests.json"))["columns"]
    assert columns == ["test", "kind", "num_cases", "failures", "allowed", "passed", "examples"]
    both = ringmaster(home, "evaluate", "night.digits", str(other), "--data", "digits", "--max-rows", "60", "--json")
    assert both.returncode == 0, both.stderr
    first, second = json.loads(both.stdout)["models"]
    assert (first["model"], second["model"], second["num_rows"]) == ("night.digits/1", str(other), 60)
    named = ringmaster(
        home, "evaluate", str(other), "--data", "digits", "--metric", "f1", "--metric", "auroc", "--json"
    )
    assert [line["metric"] for line in json.loads(named.stdout)["metrics"]] == ["f1", "auroc"], named.stderr
    assert all(0 <= line["low"] < line["value"] < line["high"] <= 1 for line in json.loads(named.stdout)["metrics"])
    of_all = [line["value"] for line in said["metrics"] if line["slice"] == "all"]
    assert [line["value"] for line in first["metrics"]] == of_all


@pytest.mark.full
def test_faults_in_what_is_asked_end_with_2_at_once(home):
    exported(home / "one", IMAGES, cache_dir=home / "cache")
    for arguments, told in (
        (["one"], "nothing to evaluate on"),
        (["one", "--tests", "tests.yaml"], "require held-out data"),
        (["one", "--data", "{source: digit}"], "'digit' is unknown"),
        (["one", "--data", "digits", "--metric", "f2"], "--metric: unknown metric 'f2': there are loss"),
        (["one", "one", "--data", "digits"], "named more than once"),
        (["none", "--data", "digits"], "none"),
        (["./none", "--data", "digits"], "there is no folder"),
        (["home", "--data", "digits"], "holds no model"),
    ):
        (home / "home").mkdir(exist_ok=True)
        done = ringmaster(home, "evaluate", *arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert told in done.stderr
        assert "Traceback" not in done.stderr
