"""Flow runs whose process died are run again, in a real Prefect server."""

from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("prefect")

from prefect import flow
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelled, Crashed, Pending, Running

from ringmaster.flows.batch.flow_runs import runs_fact
from ringmaster.flows.pool.controller import BEGUN_WITHIN, MAX_RUNS, revive_crashed_runs
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.journal import Journal
from tests.integration.training.test_worker import prefect_server  # noqa: F401 - a fixture
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


def test_a_run_that_crashed_is_scheduled_again_and_others_are_left_alone(client, pool_database):
    mine, others = crashed(client, "train-batch"), crashed(client, "somebody-elses")
    cancelled = crashed(client, "sweep", end=Cancelled())
    revive_crashed_runs(pool_database, client)
    assert (state_of(client, mine).type, state_of(client, mine).name) == (StateType.SCHEDULED, "AwaitingRetry")
    assert state_of(client, others).type == StateType.CRASHED
    assert state_of(client, cancelled).type == StateType.CANCELLED
    assert client.read_flow_run(mine).name not in revive_crashed_runs(pool_database, client)


def test_what_crashes_each_time_is_given_up(client, pool_database):
    run = crashed(client, "retrain-daily", times=MAX_RUNS)
    revive_crashed_runs(pool_database, client)
    assert state_of(client, run).type == StateType.CRASHED


def test_a_run_of_long_ago_goes_on_only_where_its_batch_still_stands(client, pool_database):
    stands, forgotten = crashed(client, "submit-jobs"), crashed(client, "submit-jobs")
    Submissions(pool_database).submit(submission("b1"))
    Journal(pool_database, batch="").put(runs_fact(str(stands)), {"nightly 0": ["b1", "/runs/b1"]})
    revive_crashed_runs(pool_database, client, clock=lambda: datetime.now(UTC) + timedelta(days=1))
    assert state_of(client, stands).type == StateType.SCHEDULED
    assert state_of(client, forgotten).type == StateType.CRASHED


def test_a_run_that_was_claimed_and_never_begun_is_scheduled_again(client, pool_database):
    claimed = crashed(client, "train-batch", end=Pending())
    revive_crashed_runs(pool_database, client)
    assert state_of(client, claimed).type == StateType.PENDING
    revive_crashed_runs(pool_database, client, clock=lambda: datetime.now(UTC) + 2 * BEGUN_WITHIN)
    assert state_of(client, claimed).name == "AwaitingRetry"
