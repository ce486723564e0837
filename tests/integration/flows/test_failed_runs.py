"""Failures are visible in the terminal, the exit code, Prefect and MLflow; Ctrl-C is handled before any training."""

import json
import signal
import sqlite3
import subprocess
import sys

import pytest

from ringmaster.flows.interrupts import STOPPING
from tests.integration.flows.test_run import TIMEOUT_S, Place

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

BATCH = """
name: mixed
devices: {cpu: 1}
jobs:
  - &good
    name: good
    model: {architecture: GPT2LMHeadModel, config: {n_embd: 32, n_layer: 2, n_head: 2}}
    data: {path: prose.txt, seq_len: 24, vocab_size: 300}
    global_batch_size: 8
    num_steps: 3
  - {<<: *good, name: bad, loss: "failing:loss"}
"""
UNFIT = """
  - {<<: *good, name: odd, model: {architecture: GPT2LMHeadModel, config: {n_embd: 33, n_layers: 2, n_head: 2}}}
  - {<<: *good, name: one, data: {factory: "failing:one_set"}}
"""
# The preflight's tiny step has four samples, so that it does not meet the error.
FAILING = """
def loss(outputs, batch):
    if len(batch["input_ids"]) > 4:
        raise RuntimeError("no such luck")
    return outputs.logits.sum(), 1


def one_set():
    return [{}]
"""
WHY = "rank 0: RuntimeError: no such luck"
FROM_PYTHON = """
import sys
from ringmaster import BatchFailed, train_batch
try:
    train_batch(sys.argv[1])
except BatchFailed as failed:
    print(failed.result.status, {job["name"]: job["status"] for job in failed.result.jobs})
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("place"))
    (place.folder / "failing.py").write_text(FAILING)
    place.batch.write_text(BATCH)
    return place


def rows(file, query):
    """The rows of a database that match a query."""
    connection = sqlite3.connect(file)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_a_batch_with_failed_jobs_has_failed_wherever_one_looks(place):
    with place.run("--verbose") as run:
        result = run.result(exit_code=1)
    said = run.said.decode()
    assert {job["name"]: job["status"] for job in result["jobs"]} == {"good": "done", "bad": "failed"}
    before, after = said.split("planned (start)")
    assert "has failed" not in before
    assert f"bad has failed: {WHY}" in after
    assert after.count("bad has failed") == 1, "each is told once"
    assert "needs two devices or more" in before, "it was asked for"
    (prefect,) = (place.home / "prefect").glob("*.db")
    assert rows(prefect, "select state_name from flow_run") == [("Failed",)]
    errors = [message for (message,) in rows(prefect, "select message from log where level = 40 order by timestamp")]
    assert [error.split(" has failed: ")[0] for error in errors] == ["bad"]
    ((table,),) = rows(prefect, "select data from artifact where key = 'jobs'")
    table = json.loads(json.loads(table))
    assert [row["reason"] for row in table] == ["", WHY]
    runs = dict(rows(place.home / "mlflow.db", "select name, status from runs where name in ('good', 'bad')"))
    assert runs == {"good": "FINISHED", "bad": "FAILED"}
    reasons = rows(place.home / "mlflow.db", "select value from tags where key = 'ringmaster.reason'")
    assert any(reason.startswith(WHY) for (reason,) in reasons) and len(reasons) == 1
    done = subprocess.run(
        [sys.executable, "-c", FROM_PYTHON, str(place.batch)],
        cwd=place.folder,
        env=place.environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.stdout == "failed {'good': 'done', 'bad': 'failed'}\n", done.stderr
    assert rows(prefect, "select state_name from flow_run") == [("Failed",), ("Failed",)]


def test_a_job_that_cannot_take_a_step_has_the_batch_refused_with_every_fault(place):
    batch = place.folder / "unfit.yaml"
    batch.write_text(BATCH.replace("mixed", "unfit") + UNFIT)
    with place.run(batch=batch) as run:
        _, said = run.process.communicate(timeout=TIMEOUT_S)
    assert run.process.returncode == 2
    faults = [line for line in said.decode().splitlines() if line.startswith("job ")]
    assert [fault.split(":")[0] for fault in faults] == ["job odd", "job one"]
    assert "must be divisible" in faults[0] and "no field n_layers; did you mean n_layer" in faults[0]
    assert "To fix: return (training, held_out)" in faults[1]
    assert "trying" not in said.decode(), "nothing was measured"


def test_ctrl_c_before_anything_trains_is_heard_and_resume_starts_it(place):
    batch = place.folder / "alone.yaml"
    batch.write_text(BATCH[: BATCH.index("  - {<<: *good, name: bad")].replace("mixed", "alone"))
    with place.run(batch=batch) as run:
        run.read_until("in preflight: good")
        run.process.send_signal(signal.SIGINT)
        run.read_until(STOPPING)
        _, rest = run.process.communicate(timeout=TIMEOUT_S)
    assert run.process.returncode == 130, rest.decode()
    assert rest.decode().splitlines()[-1] == f"to continue: ringmaster run {batch} --json --resume"
    with place.run("--resume", batch=batch) as run:
        assert run.result(exit_code=0)["status"] == "done"
