"""Handed-over batches: one is in the database at once, gets a flow run once Prefect answers, and is never lost."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import SimpleNamespace

import httpx
import pytest
from prefect.states import Cancelled, Completed, Crashed, Failed, Pending, Running, Scheduled

from ringmaster.flows.faults import InputError
from ringmaster.flows.pool.asking import ask_about
from ringmaster.flows.pool.profiling import keeping_a_node
from ringmaster.flows.pool.runs import batch_runs
from ringmaster.flows.pool.runs.batch_runs import MOST_RUNS, BatchRuns
from ringmaster.tasks.pool.controller.request_handler import RequestHandler
from ringmaster.tasks.pool.handed_over import followed, hand_over, pending
from ringmaster.tasks.pool.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.pool.submissions import Submissions
from tests.unit.pool.bench import submission

BATCH = {"name": "nightly", "text": "", "jobs": [{"name": "a"}, {"name": "b"}]}
SILENT_S = 60.0


@dataclass
class Prefect:
    """A Prefect server in memory. away: it does not answer."""

    away: bool = False
    runs: dict = field(default_factory=dict)  # by idempotency key

    def __enter__(self):
        if self.away:
            raise httpx.ConnectError("refused")
        return self

    def __exit__(self, *_):
        pass

    def read_deployment_by_name(self, name):
        assert name == "train-batch/train-batch"
        return SimpleNamespace(id=uuid.uuid4())

    def create_flow_run_from_deployment(self, deployment, *, parameters, idempotency_key):
        run = SimpleNamespace(
            id=uuid.uuid4(),
            name="dotted-owl",
            state=Scheduled(),
            run_count=0,
            parameters=parameters,
            expected_start_time=datetime(2026, 1, 1, tzinfo=UTC),
        )
        return self.runs.setdefault(idempotency_key, run)

    def read_flow_runs(self, *, flow_run_filter, limit):
        assert len(flow_run_filter.id.any_) <= limit == 200
        return [run for run in self.runs.values() if run.id in flow_run_filter.id.any_]

    def set_flow_run_state(self, id, state, *, force):
        assert force
        next(run for run in self.runs.values() if run.id == id).state = state


@pytest.fixture
def prefect(monkeypatch):
    server = Prefect()
    monkeypatch.setattr(batch_runs, "get_client", lambda **_: server)
    return server


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def bench(database, prefect, tmp_path):
    """A handed-over batch, and the controller's part that starts its flow run."""
    clock = Clock()
    runs, requests = BatchRuns(database, silent_s=SILENT_S, clock=clock), Requests(database)
    number = hand_over(requests, BATCH, file=tmp_path / "nightly" / "submitted.json")

    def look(*, seconds=10.0, beats=False):
        for _ in range(max(1, int(seconds / 10))):
            clock.now_s += 10.0
            if beats:
                requests.renew(number)
            runs.look()
        return requests.read(number)

    return SimpleNamespace(
        look=look,
        patiently=runs._look_patiently,
        requests=requests,
        number=number,
        run=lambda: next(reversed(prefect.runs.values())),
        clock=clock,
    )


def stages(database):
    return [(each.name, each.jobs, each.is_over, each.message) for each in pending(database)]


def test_it_is_there_before_prefect_is_and_starts_once_that_is_back(database, prefect, bench, tmp_path):
    prefect.away = True
    bench.patiently()
    assert bench.requests.read(bench.number).status == RequestStatus.OPEN
    assert stages(database) == [("nightly", ("a", "b"), False, "in the pool's database; it has no flow run yet")]
    prefect.away = False
    request = bench.look()
    assert (request.status, request.answer["flow_run"]) == (RequestStatus.GRANTED, str(bench.run().id))
    assert bench.run().parameters["batch"] == {"path": str(tmp_path / "nightly" / "submitted.json")}
    assert (tmp_path / "nightly" / "submitted.json").exists()  # written from the database
    assert "flow run dotted-owl" in stages(database)[0][3]


def test_an_executor_that_died_before_it_noted_the_run_makes_no_second_one(prefect, bench):
    bench.look()
    bench.requests.answer(bench.number, status=RequestStatus.OPEN)
    bench.look()
    assert len(prefect.runs) == 1


def test_a_run_whose_process_fell_silent_is_put_on_its_queue_again(bench):
    bench.look()
    bench.look(seconds=10 * SILENT_S)
    assert bench.run().state.name == "Scheduled"  # a run that waits for a worker is not silent
    bench.run().state = Running()
    bench.look(seconds=10 * SILENT_S, beats=True)
    assert bench.run().state.name == "Running"
    bench.look(seconds=SILENT_S + 10)
    assert bench.run().state.name == "AwaitingRetry"
    assert bench.run().state.state_details.scheduled_time == bench.run().expected_start_time  # before later batches


def test_while_the_database_was_away_nobody_was_silent(bench):
    bench.look()
    bench.run().state = Running()
    bench.look()
    bench.clock.now_s += 10 * SILENT_S
    bench.look()
    assert bench.run().state.name == "Running"


def test_a_run_that_prefect_has_lost_is_made_anew(prefect, bench):
    bench.look()
    before = bench.run()
    prefect.runs.clear()
    bench.look()
    assert bench.look().answer["flow_run"] == str(bench.run().id) != str(before.id)


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (Completed(), RequestStatus.DONE),
        (Failed(message="no"), RequestStatus.REFUSED),
        (Cancelled(), RequestStatus.REFUSED),
    ],
)
def test_what_the_run_came_to_is_the_answer(database, bench, state, status):
    bench.look()
    bench.run().state = state
    assert bench.look().status == status
    bench.look()
    assert [over for *_, over, _ in stages(database)] == [True] * (status == RequestStatus.REFUSED)


def test_what_crashes_each_time_is_reported(database, bench):
    bench.look()
    bench.run().state = Crashed(message="killed")
    assert bench.look().status == RequestStatus.GRANTED  # it runs again
    bench.run().run_count = MOST_RUNS
    assert bench.look().status == RequestStatus.REFUSED
    assert stages(database) == [("nightly", ("a", "b"), True, "its flow run is Crashed: killed")]


def test_a_batch_whose_jobs_the_executor_has_is_shown_by_them_alone(database, bench):
    bench.look()
    Submissions(database).submit(replace(submission("nightly-1"), flow_run=str(bench.run().id)))
    assert stages(database) == []


def test_whoever_follows_a_batch_renews_it(database, bench, monkeypatch):
    monkeypatch.setenv("RINGMASTER_PATIENCE", "0.01,2,1")
    bench.look()
    with followed(database, str(bench.run().id)):
        while bench.requests.read(bench.number).content["beats"] < 2:
            pass
    with followed(database, "somebody else's"):
        pass
    assert bench.requests.open(RequestKind.TRAIN, status=RequestStatus.GRANTED)


@pytest.fixture
def cancel(database):
    """Cancels batches as `ringmaster jobs cancel` does, while a controller answers."""
    handler = RequestHandler(
        database, executor=None, standing={}, on_priority=lambda *_: None, clock=Clock(), silent_s=SILENT_S
    )

    def ask(batch):
        with ThreadPoolExecutor() as threads:
            answers = threads.submit(ask_about, database, RequestKind.CANCEL, batch=batch)
            while not answers.done():
                handler.answer(handler.about_batches(handler.standing()))
            return answers.result()

    return ask


@pytest.mark.parametrize(
    ("state", "after"), [(Scheduled(), "Cancelled"), (Running(), "Cancelling"), (Pending(), "Cancelling")]
)
def test_a_batch_that_waits_or_is_measured_is_cancelled_with_its_flow_run(database, bench, cancel, state, after):
    bench.look()
    bench.run().state = state
    (answer,) = cancel("nightly")
    assert (answer.is_done, answer.message) == (True, "cancelled: batch nightly, whose jobs were not in the plan yet")
    bench.look()
    assert (bench.run().state.name, bench.run().state.message) == (after, "cancelled by hand")
    assert stages(database) == [("nightly", ("a", "b"), True, "cancelled by hand")]
    bench.run().state = Cancelled()
    assert bench.look().status == RequestStatus.REFUSED


def test_a_batch_that_has_no_flow_run_yet_is_cancelled_without_one(database, prefect, bench, cancel):
    cancel("nightly")
    assert (bench.look().status, prefect.runs) == (RequestStatus.REFUSED, {})


def test_a_batch_that_is_cancelled_while_its_flow_run_is_made_is_cancelled_with_it(prefect, bench, cancel, monkeypatch):
    make = prefect.create_flow_run_from_deployment

    def make_late(*args, **kwargs):
        cancel("nightly")
        return make(*args, **kwargs)

    monkeypatch.setattr(
        Prefect, "create_flow_run_from_deployment", lambda _, *args, **kwargs: make_late(*args, **kwargs)
    )
    bench.look()
    bench.look()
    assert bench.run().state.name == "Cancelled"


def test_a_batch_that_another_process_measures_is_told_so(database, cancel, monkeypatch):
    monkeypatch.setenv("RINGMASTER_PATIENCE", "0.01,2,1")
    told = threading.Event()
    monkeypatch.setattr("ringmaster.flows.pool.profiling.cancel_this_run", told.set)
    with keeping_a_node(Requests(database), batch="mine", run="mine-1"):
        cancel("mine")
        told.wait()
    with pytest.raises(InputError, match="there is no batch 'mine'"):
        cancel("mine")


def test_hundreds_of_batches_are_followed_by_a_few_requests(database, prefect, bench, tmp_path, monkeypatch):
    for number in range(250):
        hand_over(bench.requests, {**BATCH, "name": f"b{number}"}, file=tmp_path / f"{number}.json")
    bench.look()
    pages, read = [], prefect.read_flow_runs

    def counted(_, **filters):
        pages.append(filters)
        return read(**filters)

    monkeypatch.setattr(Prefect, "read_flow_runs", counted)
    bench.look()
    assert len(pages) == 2
