"""Flow runs whose process died are run again, in a real Prefect server."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("prefect")

from prefect import flow
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelled, Crashed, Pending, Running

from ringmaster.flows.pool.runs.batch_runs import MOST_RUNS
from ringmaster.flows.pool.runs.crashed_runs import BEGUN_WITHIN, CrashedRuns
from tests.integration.runtime.test_worker import prefect_server  # noqa: F401 - a fixture
from tests.unit.pool.bench import submission

pytestmark = pytest.mark.full


@flow(name="follows")
def follows():
    pass


def crashed(client, deployment, *, times=1, end=None):
    """A run of a deployment that started and crashed `times` times."""
    flow_id = client.create_flow(follows)
    run = client.create_flow_run_from_deployment(client.create_deployment(flow_id, name=deployment))
    for _ in range(times):
        client.set_flow_run_state(run.id, Running(), force=True)
        client.set_flow_run_state(run.id, end or Crashed(), force=True)
    return run.id


def state_of(client, run):
    return client.read_flow_run(run).state


def test_a_run_that_crashed_is_scheduled_again_and_others_are_left_alone(client, submissions):
    mine, others = crashed(client, "train-batch"), crashed(client, "somebody-elses")
    cancelled = crashed(client, "sweep", end=Cancelled())
    CrashedRuns(submissions).revive(client)
    assert (state_of(client, mine).type, state_of(client, mine).name) == (StateType.SCHEDULED, "AwaitingRetry")
    assert state_of(client, others).type == StateType.CRASHED
    assert state_of(client, cancelled).type == StateType.CANCELLED
    assert client.read_flow_run(mine).name not in CrashedRuns(submissions).revive(client)


def test_what_crashes_each_time_is_given_up(client, submissions):
    run = crashed(client, "retrain-daily", times=MOST_RUNS)
    CrashedRuns(submissions).revive(client)
    assert state_of(client, run).type == StateType.CRASHED


def test_a_run_of_long_ago_goes_on_only_where_its_batch_still_stands(client, submissions):
    stands, forgotten = crashed(client, "submit-jobs"), crashed(client, "submit-jobs")
    submissions.submit(replace(submission("b1"), flow_run=str(stands)))
    later = CrashedRuns(submissions, clock=lambda: datetime.now(UTC) + timedelta(days=1))
    later.revive(client)
    assert state_of(client, stands).type == StateType.SCHEDULED
    assert state_of(client, forgotten).type == StateType.CRASHED


def test_a_run_that_was_claimed_and_never_begun_is_scheduled_again(client, submissions):
    claimed = crashed(client, "train-batch", end=Pending())
    CrashedRuns(submissions).revive(client)
    assert state_of(client, claimed).type == StateType.PENDING
    later = CrashedRuns(submissions, clock=lambda: datetime.now(UTC) + 2 * BEGUN_WITHIN)
    later.revive(client)
    assert state_of(client, claimed).name == "AwaitingRetry"
