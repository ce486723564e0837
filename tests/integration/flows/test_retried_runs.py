"""A process of a flow run that is killed after any step of a batch, on a Prefect server without a pool, and Retry."""

import signal
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("prefect")

from prefect.client.schemas.objects import StateType
from prefect.states import AwaitingRetry, Crashed

from ringmaster.compat.prefect import STARTED_RUN
from ringmaster.flows.batch_form import train_batch
from ringmaster.tasks.storage.journal import JobStatus, Journal
from tests.integration.flows.test_failed_runs import BATCH, FAILING, rows
from tests.integration.flows.test_run import TIMEOUT_S, Place
from tests.integration.training.test_worker import prefect_server  # noqa: F401 - a fixture

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

# Runs a flow run as Prefect's worker does, in a process that is killed at the end of a method of the batch's run.
PROGRAM = """
import os, runpy, signal, sys

from ringmaster.flows.batch.local_run import LocalRun

if method := sys.argv.pop(1):
    act = getattr(LocalRun, method)

    def act_and_die(run, *values):
        act(run, *values)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(LocalRun, method, act_and_die)
runpy.run_module("prefect.engine", run_name="__main__")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("place"))
    (place.folder / "failing.py").write_text(FAILING)
    return place


def run_flow(place, api, flow_run, *, method=""):
    """Returns the exit code of a process that Prefect has started for a flow run."""
    environment = {**place.environment, "PREFECT_API_URL": api, STARTED_RUN: str(flow_run)}
    command = [sys.executable, "-c", PROGRAM, method]
    done = subprocess.run(
        command, cwd=place.folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode in (0, 1, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


@pytest.mark.parametrize("method", ["profile", "make_plan", "execute", "evaluate", "_close_records"])
def test_retry_repeats_nothing_that_was_done(place, client, prefect_server, method):  # noqa: F811
    name = f"after{method.replace('_', '')}"
    batch = place.folder / f"{name}.yaml"
    batch.write_text(BATCH.replace("name: mixed", f"name: {name}"))
    deployment = client.create_deployment(
        client.create_flow(train_batch), name="here", entrypoint="ringmaster.flows.batch_form.train_batch"
    )
    flow_run = client.create_flow_run_from_deployment(deployment, parameters={"batch": {"path": str(batch)}}).id
    assert run_flow(place, prefect_server.api, flow_run, method=method) == -signal.SIGKILL
    client.set_flow_run_state(flow_run, Crashed(), force=True)  # as a worker reports it
    client.set_flow_run_state(flow_run, AwaitingRetry())  # as the button in Prefect's page does
    run_flow(place, prefect_server.api, flow_run)
    state = client.read_flow_run(flow_run).state
    assert (state.type, state.message) == (
        StateType.FAILED, "1 of 2 jobs are done; failed: bad (rank 0: RuntimeError: no such luck)",
    )  # fmt: skip
    (folder,) = (path for path in (place.home / "batches" / name).iterdir() if path.is_dir())
    journal = Journal.of_file(folder / "journal.db")
    assert {key: record.status for key, record in journal.jobs().items()} == {
        "good": JobStatus.DONE,
        "bad": JobStatus.FAILED,
    }
    assert Counter(segment.job for segment in journal.segments()) == {"good": 1, "bad": 1}
    run = journal.get("run")
    journal.close()
    recorded = rows(
        place.home / "mlflow.db",
        "select name, status from runs where run_uuid in (select run_uuid from tags "
        f"where key = 'mlflow.parentRunId' and value = '{run}') order by name",
    )
    assert recorded == [("bad", "FAILED"), ("good", "FINISHED")]
    versions = rows(place.home / "mlflow.db", f"select count(*) from model_versions where name = '{name}.good'")
    makespans = rows(
        place.home / "mlflow.db", f"select value from metrics where key = 'makespan_s' and run_uuid = '{run}'"
    )
    assert versions == [(1,)] and makespans and all(value > 0 for (value,) in makespans)
