"""Handed-over batches: one is in the database at once, gets a flow run once Prefect answers, and is never lost."""

import math
import threading
import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import httpx
import pytest
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelled, Completed, Crashed, Failed, Pending, Running, Scheduled

from ringmaster.errors import InputError
from ringmaster.flows.pool import controller
from ringmaster.flows.pool.batch_requests import meant
from ringmaster.flows.pool.controller import MAX_RUNS, BatchRuns
from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.pool.submissions import (
    BatchMeasurement,
    Submissions,
    followed,
    hand_over,
    is_cancelled,
    measured,
    measurements,
    pending,
)
from ringmaster.tasks.storage.fact_keys import MEASURING_PROGRESS
from ringmaster.tasks.storage.journal import Journal
from tests.unit.pool.bench import Clock as PoolClock
from tests.unit.pool.bench import PoolBench, submission

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

    def read_flow_run(self, id):
        found = next((run for run in self.runs.values() if run.id == id), None)
        if found is None:
            raise ObjectNotFound(http_exc=None)
        return found

    def read_flow_runs(self, *, flow_run_filter, limit):
        assert len(flow_run_filter.id.any_) <= limit == 200
        return [run for run in self.runs.values() if run.id in flow_run_filter.id.any_]

    def set_flow_run_state(self, id, state, *, force):
        assert force
        next(run for run in self.runs.values() if run.id == id).state = state

    @property
    def states(self):
        return [run.state.name for run in self.runs.values()]


@pytest.fixture
def prefect(monkeypatch):
    server = Prefect()
    monkeypatch.setattr(controller, "get_client", lambda **_: server)
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

    def poll(*, seconds=10.0, beats=False):
        for _ in range(max(1, int(seconds / 10))):
            clock.now_s += 10.0
            if beats:
                requests.renew(number)
            runs.poll()
        return requests.read(number)

    def patiently():
        over = threading.Event()
        controller.poll_repeatedly(lambda: (over.set(), runs.poll()), over, 0.0)

    return SimpleNamespace(
        poll=poll,
        patiently=patiently,
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
    request = bench.poll()
    assert (request.status, request.answer["flow_run"]) == (RequestStatus.GRANTED, str(bench.run().id))
    assert bench.run().parameters["batch"] == {"path": str(tmp_path / "nightly" / "submitted.json")}
    assert (tmp_path / "nightly" / "submitted.json").exists()  # written from the database
    assert "flow run dotted-owl" in stages(database)[0][3]


def test_an_executor_that_died_before_it_noted_the_run_makes_no_second_one(prefect, bench):
    bench.poll()
    bench.requests.answer(bench.number, status=RequestStatus.OPEN)
    bench.poll()
    assert len(prefect.runs) == 1


def test_a_run_whose_process_fell_silent_is_put_on_its_queue_again(bench):
    bench.poll()
    bench.poll(seconds=10 * SILENT_S)
    assert bench.run().state.name == "Scheduled"  # a run that waits for a worker is not silent
    bench.run().state = Running()
    bench.poll(seconds=10 * SILENT_S, beats=True)
    assert bench.run().state.name == "Running"
    bench.poll(seconds=SILENT_S + 10)
    assert bench.run().state.name == "AwaitingRetry"
    assert bench.run().state.state_details.scheduled_time == bench.run().expected_start_time  # before later batches


def test_while_the_database_was_away_nobody_was_silent(bench):
    bench.poll()
    bench.run().state = Running()
    bench.poll()
    bench.clock.now_s += 10 * SILENT_S
    bench.poll()
    assert bench.run().state.name == "Running"


def test_a_run_that_prefect_has_lost_is_made_anew(prefect, bench):
    bench.poll()
    before = bench.run()
    prefect.runs.clear()
    bench.poll()
    assert bench.poll().answer["flow_run"] == str(bench.run().id) != str(before.id)


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (Completed(), RequestStatus.DONE),
        (Failed(message="no"), RequestStatus.REFUSED),
        (Cancelled(), RequestStatus.REFUSED),
    ],
)
def test_what_the_run_came_to_is_the_answer(database, bench, state, status):
    bench.poll()
    bench.run().state = state
    assert bench.poll().status == status
    bench.poll()
    assert [over for *_, over, _ in stages(database)] == [True] * (status == RequestStatus.REFUSED)


def test_what_crashes_each_time_is_reported(database, bench):
    bench.poll()
    bench.run().state = Crashed(message="killed")
    assert bench.poll().status == RequestStatus.GRANTED  # it runs again
    bench.run().run_count = MAX_RUNS
    assert bench.poll().status == RequestStatus.REFUSED
    assert stages(database) == [("nightly", ("a", "b"), True, "its flow run is Crashed: killed")]


def test_a_batch_whose_jobs_the_executor_has_is_shown_by_them_alone(database, bench):
    bench.poll()
    Submissions(database).submit(replace(submission("nightly-1"), flow_run=str(bench.run().id)))
    assert stages(database) == []


def test_whoever_follows_a_batch_renews_it(database, bench, monkeypatch):
    monkeypatch.setenv("RINGMASTER_PATIENCE", "0.01,2,1")
    bench.poll()
    with followed(database, str(bench.run().id)):
        while bench.requests.read(bench.number).content["beats"] < 2:
            pass
    with followed(database, "somebody else's"):
        pass
    assert bench.requests.open(RequestKind.TRAIN, status=RequestStatus.GRANTED)


@pytest.fixture
def cancel(database):
    """Cancels a batch as `ringmaster jobs cancel` does, by its name; returns the answer of the pool's controller."""
    pool = PoolBench(database, PoolClock())

    def ask(batch="nightly"):
        (key,) = meant(database, batch=batch, jobs=[], kind=RequestKind.CANCEL)
        return pool.ask(RequestKind.CANCEL, batch=key, jobs=[])

    return ask


def test_hundreds_of_batches_are_followed_by_a_few_requests(database, prefect, bench, tmp_path, monkeypatch):
    for number in range(250):
        hand_over(bench.requests, {**BATCH, "name": f"b{number}"}, file=tmp_path / f"{number}.json")
    bench.poll()
    pages, read = [], prefect.read_flow_runs

    def counted(_, **filters):
        pages.append(filters)
        return read(**filters)

    monkeypatch.setattr(Prefect, "read_flow_runs", counted)
    bench.poll()
    assert len(pages) == 2


def test_a_batch_that_waits_for_its_run_is_cancelled_and_gets_none(database, prefect, bench, cancel):
    answer = cancel()
    assert answer.status == RequestStatus.DONE
    assert answer.answer["message"] == "cancelled: batch nightly, whose jobs were not measured yet"
    assert bench.poll().status == RequestStatus.WITHDRAWN
    assert not prefect.runs
    assert [(each.status, each.message) for each in pending(database)] == [("cancelled", "cancelled by hand")]
    with pytest.raises(InputError, match="there is no batch 'nightly'"):
        cancel()


@pytest.mark.parametrize(
    ("state", "then"), [(Scheduled(), "Cancelled"), (Pending(), "Cancelling"), (Running(), "Cancelling")]
)
def test_a_batch_that_is_measured_is_cancelled_with_its_run(database, prefect, bench, cancel, state, then):
    bench.poll()
    bench.run().state = state
    measurement = BatchMeasurement(id="nightly-7", name="nightly", jobs=("a", "b"), flow_run=str(bench.run().id))
    with measured(database, measurement):
        Journal(database, batch="nightly-7").put(MEASURING_PROGRESS, "in preflight: b (done: 1 of 2 jobs)")
        (row,) = pending(database)
        assert (row.run, row.status, row.message) == (
            "nightly-7",
            "measuring",
            "in preflight: b (done: 1 of 2 jobs)",
        )
        assert cancel().status == RequestStatus.DONE
        bench.poll()
        assert prefect.states == [then]
        bench.run().state = Cancelled(message="cancelled by hand")
        bench.poll()
    assert [(each.status, each.is_over) for each in pending(database)] == [("cancelled", True)]


def test_a_run_whose_process_does_not_end_is_taken_for_dead(prefect, bench, cancel):
    bench.poll()
    bench.run().state = Running()
    cancel()
    bench.poll()
    assert prefect.states == ["Cancelling"]
    bench.poll()
    assert prefect.states == ["Cancelling"]
    bench.run().state.timestamp -= timedelta(minutes=2)
    bench.poll()
    assert prefect.states == ["Cancelled"]


def test_a_batch_that_a_command_measures_is_cancelled_by_its_id_and_forgotten_with_its_run(database, prefect, cancel):
    runs = BatchRuns(database, silent_s=SILENT_S, clock=Clock())
    run = prefect.create_flow_run_from_deployment("of a command", parameters={}, idempotency_key="own")
    run.state = Running()
    measurement = BatchMeasurement(id="own-1", name="own", jobs=("a",), flow_run=str(run.id))
    with measured(database, measurement):
        runs.poll()
        assert [(each.run, each.jobs, each.status) for each in pending(database)] == [("own-1", ("a",), "measuring")]
        assert cancel("own-1").status == RequestStatus.DONE
        assert is_cancelled(database, "own-1", flow_run="")
        runs._followed_s = -math.inf
        runs.poll()
        assert run.state.name == "Cancelling"
        run.state = Crashed()
        runs._followed_s = -math.inf
        runs.poll()
        assert measurements(database) == []


def test_single_jobs_of_a_batch_that_is_not_measured_cannot_be_cancelled(database, bench):
    with pytest.raises(InputError, match="To fix: cancel the whole batch, or wait"):
        meant(database, batch="nightly", jobs=["a"], kind=RequestKind.CANCEL)
    with pytest.raises(InputError, match="batch 'nightly' is not measured yet"):
        meant(database, batch="nightly", jobs=[], kind=RequestKind.PAUSE)


@pytest.mark.parametrize(
    "change",
    [
        {"file": None},
        {"file": "{folder}/a\0b"},
        {"batch": {"name": "bad", "jobs": "\ud800"}, "file": "{folder}/bad.json"},
        {"batch": None, "file": "{folder}/bad.json"},
    ],
    ids=str,
)
def test_a_batch_whose_row_is_damaged_is_refused_and_the_next_one_starts(
    database, prefect, bench, tmp_path, change, monkeypatch
):
    bench.requests.note(
        bench.number, **{k: v.format(folder=tmp_path) if k == "file" and v else v for k, v in change.items()}
    )
    number = hand_over(bench.requests, {**BATCH, "name": "next"}, file=tmp_path / "next.json")
    bench.poll()
    request = bench.poll()
    assert bench.requests.read(number).status == RequestStatus.GRANTED
    assert request.status in (RequestStatus.REFUSED, RequestStatus.GRANTED)
    assert {each.name for each in pending(database)} >= {"next"}


def test_a_batch_that_cannot_be_followed_holds_up_no_other(bench, tmp_path):
    number = hand_over(bench.requests, {**BATCH, "name": "next"}, file=tmp_path / "next.json")
    bench.poll()
    bench.requests.answer(bench.number, status=RequestStatus.GRANTED, answer={"flow_run": None, "attempt": "many"})
    bench.run().state = Failed(message="its data is missing")
    for _ in range(3):
        bench.patiently()
        bench.clock.now_s += 10.0
    assert bench.requests.read(bench.number).status == RequestStatus.REFUSED
    assert bench.requests.read(number).status == RequestStatus.REFUSED
    assert "its data is missing" in bench.requests.read(number).answer["message"]


def test_what_prefect_refuses_holds_up_no_other_batch(prefect, bench, tmp_path, monkeypatch):
    create, response = (
        prefect.create_flow_run_from_deployment,
        httpx.Response(422, request=httpx.Request("POST", "http://p")),
    )

    def refuse(deployment, *, parameters, idempotency_key):
        if parameters["name"] == "nightly":
            raise PrefectHTTPStatusError.from_httpx_error(
                httpx.HTTPStatusError("422", request=response.request, response=response)
            )
        return create(deployment, parameters=parameters, idempotency_key=idempotency_key)

    monkeypatch.setattr(prefect, "create_flow_run_from_deployment", refuse, raising=False)
    number = hand_over(bench.requests, {**BATCH, "name": "next"}, file=tmp_path / "next.json")
    bench.poll()
    assert bench.poll().status == RequestStatus.REFUSED
    assert bench.requests.read(number).status == RequestStatus.GRANTED


def test_a_watcher_that_fails_is_logged_once_and_begins_again(monkeypatch, caplog):
    monkeypatch.setattr(controller, "BEGIN_AGAIN_S", 0.0)
    over, num_begun = threading.Event(), []

    def poll():
        num_begun.append(1)
        if len(num_begun) == 5:
            over.set()
        raise KeyError("file")

    controller.poll_repeatedly(poll, over, 0.0)
    assert len(num_begun) == 5
    assert caplog.text.count("has failed, and begins again") == 1
