"""The child runs of segments, in a real Prefect server."""

from dataclasses import replace

import pytest

pytest.importorskip("prefect")

from prefect import flow
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed

from ringmaster.flows.pool.runs.child_runs import ChildRuns
from ringmaster.tasks.pool.controller.launching import RunIsOver
from ringmaster.tasks.storage.message_store import GIVEN, OrderRecord, Share
from tests.integration.runtime.test_worker import prefect_server  # noqa: F401 - a fixture
from tests.unit.pool.bench import submission
from tests.unit.pool.workers import call

pytestmark = pytest.mark.full


@flow(name="parent")
def parent():
    pass


@pytest.fixture
def runs(client, submissions):
    runs = ChildRuns(submissions)
    yield runs
    runs.close()


def order(segment, *, batch="b1", node="alpha", incarnation="one"):
    share = Share(order=call(segment).order, num_ranks=1)
    return OrderRecord(
        segment=segment, node=node, batch=batch, share=share, incarnation=incarnation, status=GIVEN, flow_run=None
    )


def test_a_run_is_made_once_on_the_queue_of_its_node(client, runs):
    first = runs.launch(order(101))
    assert runs.launch(order(101)) == first
    made = client.read_flow_run(first)
    assert made.parameters == {"segment": 101, "node": "alpha"}
    assert (made.work_queue_name, made.parent_task_run_id) == ("node-alpha", None)
    assert runs.launch(order(101, node="beta")) != first


def test_a_run_stands_under_the_run_of_its_batch(client, runs, submissions):
    above = client.create_flow_run(parent)
    submissions.submit(replace(submission("b1"), flow_run=str(above.id)))
    made = client.read_flow_run(runs.launch(order(102)))
    task = client.read_task_run(made.parent_task_run_id)
    assert task.flow_run_id == above.id
    assert client.read_flow_run(runs.launch(order(102))).parent_task_run_id == task.id


@pytest.mark.parametrize(
    ("segment", "state", "status"),
    [(103, Cancelled(), "cancelled"), (104, Crashed(), "lost"), (108, Failed(), "crashed")],
)
def test_a_run_that_ended_before_it_began_says_what_that_means(client, runs, segment, state, status):
    one = order(segment)
    client.set_flow_run_state(runs.launch(one), state, force=True)
    with pytest.raises(RunIsOver) as over:
        runs.launch(one)
    assert over.value.outcome.status == status


def test_a_number_that_a_new_database_gives_again_is_another_run(client, runs):
    """Numbers are reused after an upgrade, or after a restore of the pool's database to an older state."""
    before = runs.launch(order(107))
    client.set_flow_run_state(before, Completed(), force=True)
    assert runs.launch(order(107, incarnation="another")) != before


def test_a_server_that_is_away_is_no_connection_and_comes_back(client, runs, prefect_server):  # noqa: F811
    before = runs.launch(order(105))
    prefect_server.stop()
    with pytest.raises(ConnectionError), temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        runs.launch(order(106))
    prefect_server.start()
    assert runs.launch(order(105)) == before
    assert runs.launch(order(106)) != before
