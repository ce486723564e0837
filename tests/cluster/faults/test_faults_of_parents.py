"""Flows that submit batches: killed, cancelled, several at once, and without the server that they record in."""

import json
import signal
import subprocess
import time

import pytest
from mlflow import MlflowClient

from ringmaster.tasks.control.requests import RequestKind, Requests
from tests.cluster.checks import assert_well
from tests.cluster.faults.test_faults_of_servers import MINUTE_S, SPARE_STEPS, trains_for
from tests.cluster.jobs import batch_file, torch_job
from tests.cluster.machines import end
from tests.cluster.waiting import TIMEOUT_S, until
from tests.integration.workbench import Layout


def batch_of(pool, name, parent, *, but=()):
    """Waits until a named batch is submitted; returns its id."""

    def poll():
        has_ended = parent.poll() is not None  # polled first: a small batch may end between the two queries
        found = next((id for id, known, _ in pool.batches() if known == name and id not in but), None)
        assert found or not has_ended, parent.log.read_text()[-3000:]
        return found

    return until(f"batch {name} is handed over", poll)


def assert_done(parent, *, seconds=TIMEOUT_S):
    """Asserts that the process exits with code 0."""
    try:
        code = parent.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        code = None
    assert code == 0, parent.log.read_text()[-3000:]


def answer_of(parent):
    """Returns the JSON object of an ended process: its last JSON line, as libraries may print warnings after it."""
    return json.loads([line for line in parent.log.read_text().splitlines() if line.startswith("{")][-1])


def layouts_of(pool, batch):
    """Returns the one option that each job of a batch used throughout."""
    found = {}
    for segment in pool.segments(batch):
        layout = Layout(segment.spec.technique, segment.spec.num_devices, segment.spec.config)
        assert found.setdefault(segment.job, layout) == layout
    return found


def test_a_parent_that_is_killed_and_run_again(pool, parents, bench, tmp_path, recovered):
    job = torch_job("child", trace=pool.trace.file, num_steps=760)
    file = batch_file(tmp_path, "family", [job])
    parent = parents("run", file, "--checkpoint-every", 0.4)
    batch = batch_of(pool, "family", parent)
    pool.wait_for_checkpoint(batch)
    end(parent, number=signal.SIGKILL)
    again_s = time.monotonic()
    parent = parents("run", file, "--resume", "--json")
    until("it follows", lambda: "followed again" in parent.log.read_text())
    recovered("a parent killed and run again: it follows", time.monotonic() - again_s)
    pool.trace.hurry("child")
    assert_done(parent)
    said = answer_of(parent)
    assert (said["status"], said["jobs"][0]["num_steps"]) == ("done", job.num_steps)
    assert said["jobs"][0]["model_uri"]
    assert len(pool.segments(batch)) == 1, "the gang never noticed"
    assert_well(pool, batch, [job], bench, layouts=layouts_of(pool, batch))


def test_mlflows_server_is_down_for_a_minute(pool, parents, mlflow, bench, tmp_path, recovered):
    job = torch_job("recorded", trace=pool.trace.file, num_steps=int(4 * MINUTE_S) + SPARE_STEPS)
    parent = parents("run", batch_file(tmp_path, "records", [job]), "--checkpoint-every", 0.4, "--json")
    batch = batch_of(pool, "records", parent)
    pool.wait_for_checkpoint(batch)
    mlflow.stop()
    trains_for(pool, "recorded", seconds=MINUTE_S)
    mlflow.start()
    pool.trace.hurry("recorded")
    up_s = time.monotonic()
    assert_done(parent)
    recovered("MLflow's server down: all is recorded, after its start", time.monotonic() - up_s)
    assert len(pool.segments(batch)) == 1, "the gang never noticed"
    said = answer_of(parent)
    assert said["jobs"][0]["model_uri"]
    client = MlflowClient(mlflow.url)
    (run,) = [run for run in all_runs(client) if run.info.run_name == "recorded"]
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted({metric.step for metric in losses}) == list(range(1, job.num_steps + 1)), "no record is lost"
    assert run.info.status == "FINISHED"
    assert_well(pool, batch, [job], bench, layouts=layouts_of(pool, batch))


def all_runs(client):
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return client.search_runs(experiments)


def test_a_segment_is_preempted_and_its_job_retried_in_the_ui(pool, recovered):
    job = torch_job("unwanted", trace=pool.trace.file, num_steps=120)
    other = torch_job("wanted", trace=pool.trace.file, num_steps=760)
    batch = pool.submit([job, other])

    def segments():
        return [segment for segment in pool.segments(batch) if segment.job == "unwanted"]

    def state(segment):
        run = pool.flow_run(segment)
        return run and run["state_name"]

    def act(segment, state):
        pool.prefect.call("POST", f"/flow_runs/{pool.flow_run(segment)['id']}/set_state", state)

    pool.wait_for_checkpoint(batch, job="unwanted")
    (first,) = segments()
    until("Prefect shows it", lambda: state(first) == "Running")
    before_s = time.monotonic()
    act(first, {"state": {"type": "CANCELLING"}})
    until("the job continues", lambda: len(segments()) == 2)
    recovered("a segment cancelled in the UI: its job continues", time.monotonic() - before_s)
    until("Prefect says so", lambda: state(first) == "Cancelled")
    Requests(pool.database).ask(RequestKind.CANCEL, {"batch": batch, "jobs": ["unwanted"]})
    until("its gang has stopped", lambda: segments()[-1].outcome is not None)
    assert pool.jobs(batch)["unwanted"].status == "cancelled"
    until("Prefect shows its end", lambda: state(segments()[-1]) == "Preempted")
    act(segments()[-1], {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True})
    pool.trace.hurry("unwanted")
    until("the job is done", lambda: pool.jobs(batch)["unwanted"].status == "done")
    assert len(pool.trace.of(job="unwanted")) == job.num_steps, "no step is repeated"
    pool.trace.hurry("wanted")
    until("the other job is done", lambda: pool.jobs(batch)["wanted"].status == "done")


def test_a_batch_that_is_cancelled_in_the_ui(pool, recovered):
    """Prefect's server starts the flow run on a node, from the deployment."""
    job = torch_job("dismissed", trace=pool.trace.file, num_steps=760)
    file = batch_file(pool.folder, "dismissed", [job])
    deployment = pool.prefect.call("GET", "/deployments/name/train-batch/train-batch")["id"]
    parameters = {"batch": {"path": str(file)}, "name": "dismissed", "checkpoint_every_s": 0.4}
    run = pool.prefect.call("POST", f"/deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"]

    def handed_over():
        state = pool.prefect.call("GET", f"/flow_runs/{run}")["state"]
        assert state["type"] not in ("FAILED", "CRASHED"), f"{state}\n{pool.tail('alpha')}"
        return next((id for id, name, _ in pool.batches() if name == "dismissed"), None)

    batch = until("the batch is handed over", handed_over)
    pool.wait_for_checkpoint(batch)
    before_s = time.monotonic()
    pool.prefect.call("POST", f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    until("the batch is cancelled", lambda: pool.jobs(batch)["dismissed"].status == "cancelled")
    recovered("a batch cancelled in the UI: its jobs have ended", time.monotonic() - before_s)
    until("Prefect says so", lambda: pool.prefect.call("GET", f"/flow_runs/{run}")["state_type"] == "CANCELLED")
    assert 0 < pool.jobs(batch)["dismissed"].step < job.num_steps


# test_chaos.py has two batches at once, and tests/browser/test_sweep.py a sweep on a pool.
@pytest.mark.full
def test_two_batches_and_a_sweep_at_once(pool, parents, bench, tmp_path, recovered):
    began_s = time.monotonic()
    jobs = {
        name: [torch_job(f"{name}{i}", trace=pool.trace.file, num_steps=60, step_s=0.1) for i in range(2)]
        for name in ("nightly", "second")
    }
    runs = {
        name: parents("run", batch_file(tmp_path, name, found), "--checkpoint-every", 0.4)
        for name, found in jobs.items()
    }
    kwargs = {"job": "swept", "step_s": 0.05, "trace": ""}
    template = {
        "name": "swept",
        "model": {"factory": "tests.cluster.stubs:slow", "kwargs": kwargs},
        "data": {"factory": "tests.cluster.stubs:points"},
        "loss": "tests.cluster.stubs:cross_entropy",
        "techniques": ["single"],
        "num_devices": [1],
        "global_batch_size": 8,
        "num_steps": 40,
    }
    sweep = tmp_path / "rates.json"
    sweep.write_text(json.dumps({"name": "rates", "template": {"job": template}, "over": {"optimizer.lr": [0.1, 0.2]}}))
    swept = parents("sweep", sweep, node="beta")
    batches = {name: batch_of(pool, name, run) for name, run in {**runs, "rates": swept}.items()}
    for parent in (*runs.values(), swept):
        assert_done(parent, seconds=2 * TIMEOUT_S)
    recovered("two batches and a sweep at once: all are done", time.monotonic() - began_s)
    for name, found in jobs.items():
        assert_well(pool, batches[name], found, bench, layouts=layouts_of(pool, batches[name]))
    assert {record.status for record in pool.jobs(batches["rates"]).values()} == {"done"}
