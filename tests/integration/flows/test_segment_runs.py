"""The runs that show segments, in a real Prefect server: what the log tells of them, and what a person does to them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("prefect")

from prefect import flow
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import AwaitingRetry, Cancelling, Completed

from ringmaster.flows.pool import segment_runs
from ringmaster.flows.pool.segment_runs import AWAY, SegmentRuns
from ringmaster.tasks.control.requests import Requests, RequestStatus
from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.execution_events import SegmentEnded, SegmentStarted
from ringmaster.tasks.pool.event_log import EventLog
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import Journal, SegmentSpec
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.techniques.processes.gang_events import Outcome
from tests.integration.training.test_worker import prefect_server  # noqa: F401 - a fixture
from tests.unit.pool.bench import submission

pytestmark = pytest.mark.full


@flow(name="parent")
def parent():
    pass


class Pool:
    """A pool whose controller the test plays: it writes segments and their events."""

    def __init__(self, database, client):
        self.database, self.client, self.now_s = database, client, 0.0
        self.journal, self.log = Journal(database, batch="b1"), EventLog(database)
        self.above = client.create_flow_run(parent)
        Submissions(database).submit(replace(submission("b1"), flow_run=str(self.above.id)))
        self.requests = Requests(database)
        self.runs = SegmentRuns(database, clock=lambda: self.now_s)

    def start(self, devices=(("alpha", 0), ("alpha", 1), ("beta", 0))):
        planned = PlannedSegment(job="a", option=0, last_step=10, devices=devices, start_s=0, end_s=1)
        number = self.journal.start_segments([("a", SegmentSpec(technique="ddp"))])[0]
        started = SegmentStarted(
            number=number, segment=planned, technique="ddp", num_devices=3, first_step=4, attempt=1
        )
        self.log.append("b1", started)
        return SimpleNamespace(number=number, segment=planned)

    def end(self, one, status, decision="continues"):
        outcome = Outcome(status=status, message="")
        self.log.append("b1", SegmentEnded(number=one.number, segment=one.segment, outcome=outcome, decision=decision))

    def poll(self):
        self.now_s += segment_runs.ACTIONS_EVERY_S
        self.runs.poll(self.client)

    def run_of(self, one):
        (found,) = [r for r in self.client.read_flow_runs() if r.name == f"a {one.number} on alpha, beta"]
        return found

    def lines(self, run):
        logs = self.client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])))
        return [line.message for line in logs]


@pytest.fixture
def pool(client, tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    pool = Pool(database, client)
    yield pool
    for run in client.read_flow_runs():
        client.delete_flow_run(run.id)
    database.close()


def test_a_run_shows_where_its_segment_runs_and_how_it_ends(pool):
    one = pool.start()
    pool.poll()
    run = pool.run_of(one)
    assert (run.state_name, run.parameters, run.work_queue_name) == ("Running", {"segment": one.number}, "segments")
    assert pool.client.read_task_run(run.parent_task_run_id).flow_run_id == pool.above.id
    pool.end(one, "done", "the job is done")
    pool.poll()
    assert pool.run_of(one).state_name == "Completed"
    assert pool.lines(run) == ["ddp on alpha: 0, 1; beta: 0, steps 4 to 10", "done: the job is done"]


@pytest.mark.parametrize(
    ("status", "state"),
    [("preempted", "Preempted"), ("out_of_memory", "OutOfMemory"), ("invalid", "Failed"), ("lost", "Crashed")],
)
def test_the_state_says_how_it_ended(pool, status, state):
    one = pool.start()
    pool.end(one, status)
    pool.poll()
    assert pool.run_of(one).state_name == state


def test_another_controller_goes_on_where_the_former_one_stopped(pool):
    one, two = pool.start(), pool.start()
    pool.poll()
    pool.end(one, "done")
    pool.runs = SegmentRuns(pool.database, clock=lambda: pool.now_s)
    pool.poll()
    assert [pool.run_of(each).state_name for each in (one, two)] == ["Completed", "Running"]
    assert len(pool.lines(pool.run_of(two))) == 1


def test_a_run_is_made_once_whatever_moment_the_process_died_at(pool):
    one = pool.start()
    pool.poll()
    Journal(pool.database, batch="").put(segment_runs.CURSOR, 0)  # it had not noted what it had shown
    pool.runs = SegmentRuns(pool.database, clock=lambda: pool.now_s)
    pool.poll()
    assert pool.run_of(one).state_name == "Running"


def test_a_run_that_is_cancelled_preempts_its_segment(pool):
    one = pool.start()
    pool.poll()
    pool.client.set_flow_run_state(pool.run_of(one).id, Cancelling())
    pool.poll()
    pool.poll()
    assert MessageStore(pool.database).commands(after=0) == [(1, one.number, "stop")]
    pool.end(one, "preempted", "stopped at a checkpoint")
    pool.poll()
    run = pool.run_of(one)
    assert (run.state_name, run.state.message) == ("Cancelled", "stopped at a checkpoint")


@pytest.mark.parametrize(("answer", "state"), [(RequestStatus.DONE, "Retried"), (RequestStatus.REFUSED, "Failed")])
def test_a_run_that_is_retried_makes_its_job_due_again(pool, answer, state):
    one = pool.start()
    pool.end(one, "crashed")
    pool.poll()
    pool.client.set_flow_run_state(pool.run_of(one).id, AwaitingRetry(), force=True)
    pool.poll()
    pool.poll()  # the controller has not answered yet
    (request,) = pool.requests.open()
    assert (request.kind, request.content) == ("retry", {"batch": "b1", "jobs": ["a"]})
    assert pool.run_of(one).state_name == "AwaitingRetry"
    pool.requests.answer(request.id, status=answer, answer={"message": "what the controller says"})
    pool.poll()
    run = pool.run_of(one)
    assert (run.state_name, run.state.message) == (state, "what the controller says")


def test_a_batch_that_has_ended_cannot_go_on_without_its_flow_run(pool):
    one = pool.start()
    pool.end(one, "crashed")
    pool.poll()
    Submissions(pool.database).end("b1")
    pool.client.set_flow_run_state(pool.run_of(one).id, AwaitingRetry(), force=True)
    pool.poll()
    run = pool.run_of(one)
    assert (run.state_name, "ringmaster run FILE --resume" in run.state.message) == ("Failed", True)


def test_a_batch_that_has_ended_goes_on_with_its_flow_run(pool, client):
    deployment = client.create_deployment(client.create_flow(parent), name="parent", entrypoint="a.b", path=".")
    above = client.create_flow_run_from_deployment(deployment)
    client.set_flow_run_state(above.id, Completed(), force=True)
    Submissions(pool.database).submit(replace(submission("b2"), flow_run=str(above.id)))
    pool.journal = Journal(pool.database, batch="b2")
    one = pool.start()
    pool.end(one, "crashed")
    pool.poll()
    Submissions(pool.database).end("b2")
    pool.client.set_flow_run_state(pool.run_of(one).id, AwaitingRetry(), force=True)
    pool.poll()
    assert pool.run_of(one).state_name == "Retried"
    assert client.read_flow_run(above.id).state_name == "AwaitingRetry"


def test_a_run_that_was_started_by_hand_says_what_to_do(pool, client):
    deployment = client.read_deployment_by_name("segment/z-internal-segment")
    by_hand = client.create_flow_run_from_deployment(deployment.id, parameters={"segment": pool.start().number})
    pool.poll()
    state = client.read_flow_run(by_hand.id).state
    assert (state.name, "To fix" in state.message) == ("Failed", True)


def test_what_happened_while_prefect_was_away_is_shown_later(pool, prefect_server):  # noqa: F811
    one = pool.start()
    pool.poll()
    prefect_server.stop()
    pool.end(one, "done")
    two = pool.start()
    with pytest.raises(AWAY), temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        pool.poll()
    prefect_server.start()
    pool.poll()
    assert [pool.run_of(each).state_name for each in (one, two)] == ["Completed", "Running"]


def test_an_answer_that_is_none_is_tried_again(pool):
    """A proxy in front of Prefect answers with a page of HTML instead of JSON."""
    pool.start()
    proxy = SimpleNamespace(read_deployment_by_name=lambda name: json.loads("<html>back soon</html>"))
    with pytest.raises(AWAY):
        pool.runs.poll(proxy)
