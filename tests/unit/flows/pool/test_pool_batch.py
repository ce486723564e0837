"""A batch on a pool: submitted once, followed to its end however often its flow dies, and recorded completely."""

import json
import os
import signal
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from prefect.exceptions import TerminationSignal

from ringmaster.compat.prefect import STARTED_RUN
from ringmaster.errors import BatchCancelled, InputError
from ringmaster.features.quotas.job import UserQuota
from ringmaster.features.quotas.terms import Quotas
from ringmaster.flows import train_batch as steps
from ringmaster.flows.batch import batch_run
from ringmaster.flows.batch import result as records
from ringmaster.flows.batch.flow_runs import cancel_batches, runs_fact
from ringmaster.flows.batch.run_folder import exclusive_lock
from ringmaster.flows.batch.run_options import RunOptions
from ringmaster.flows.caller import Caller
from ringmaster.flows.interrupts import Interrupts
from ringmaster.flows.pool import follower, pooled_run
from ringmaster.flows.pool.pooled_run import PooledRun, open_pooled_run, store_weights
from ringmaster.flows.reports.progress import View
from ringmaster.flows.settings import PoolAddress
from ringmaster.model_lineage import mlflow_calls
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.batch.parent_rules import with_orphans
from ringmaster.tasks.control.batch_terms import combined_terms
from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.execution_events import JobEnded, PlanUpdate
from ringmaster.tasks.pool.active_batches import active_batch
from ringmaster.tasks.pool.submissions import (
    BatchStatus,
    Submission,
    Submissions,
    cancel_unsubmitted,
    hand_over,
    pending,
    unsubmitted,
)
from ringmaster.tasks.profiling.stage import ProfilingResult
from ringmaster.tasks.recording import async_recorder
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.techniques.checkpoints.checkpoint import fetch_model
from ringmaster.techniques.preflight_result import Preflight
from tests.unit.execution.fakes import job, profile
from tests.unit.flows.pool.standing_pool import played
from tests.unit.pool.bench import told
from tests.unit.profiling.solos import FACTS
from tests.unit.recording.ledgers import FakeLedger


def batch_of(*jobs):
    return Batch(name="nightly", jobs=jobs, folder=Path("/somewhere"), text="name: nightly\n")


BATCH = batch_of(job("a"), job("b"))


def test_models_that_jobs_begin_with_are_stored_where_nodes_have_no_common_folder(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.safetensors").write_bytes(b"weights")
    submission = Submission(
        id="nightly-1",
        name="nightly",
        jobs=(),
        profiles={},
        folder="/somewhere/nightly/1",
        cache_dir="/somewhere/cache",
        weights={"a": str(tmp_path / "base"), "b": str(tmp_path / "base")},
        checkpoint_root="memory://weights",
    )
    store_weights(submission)
    url = submission.run_paths().weights_url(tmp_path / "base")
    fetch_model(url, tmp_path / "copy")
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == b"weights"
    MemoryFileSystem.store.clear()


class Bench:
    """A pool's database, a ledger in memory, and a count of measurements."""

    def __init__(self, folder):
        self.address = PoolAddress(
            database=file_url(folder / "pool.db"), prefect_api="http://127.0.0.1:1/api", mlflow_uri="http://127.0.0.1:2"
        )
        self.database = Database(self.address.database, synced=False)
        self.ledger = FakeLedger()
        self.num_measured = 0
        self.faults = {}

    def profile(self, batch, *, key, database, caller):
        self.num_measured += 1
        data = {"name": "d", "digest": "1", "source": "s", "num_samples": 1, "num_held_out": 0}
        preflights = {
            each.name: Preflight(
                job=each.name, data=data, facts=replace(FACTS, num_parameters=5), candidates=(), refusals=()
            )
            for each in batch.jobs
        }
        profiles = {each.name: (profile(),) for each in batch.jobs}
        return ProfilingResult(
            jobs=batch.jobs, preflights=preflights, profiles=profiles, faults=self.faults, num_trials=3
        )

    def open_ledger(self, uri, *, waiting=None):
        """Opens the ledger as `Ledger` does: with `waiting`, calls are retried while MLflow is unavailable."""
        return self.ledger if waiting is None else Patient(self.ledger, waiting)

    def train(self, batch=BATCH, *, resume=False, view=None, signals=None, **options):
        caller = Caller(view=view or View(), interrupts=signals or Interrupts())
        with open_pooled_run(batch, self.address, RunOptions(resume=resume), caller=caller, **options) as run:
            profiles = steps.profile.fn(run)
            run.begin(profiles)
            records = steps.execute.fn(run, steps.make_plan.fn(run, profiles))
            return steps.record.fn(run, run.evaluate(profiles, records))

    def ids(self):
        return [key for key, _, _ in Submissions(self.database).names()]

    def statuses(self):
        return {name: record.status for name, record in Journal(self.database, batch=self.ids()[-1]).jobs().items()}


class Patient:
    """A ledger whose calls are retried."""

    def __init__(self, ledger, waiting):
        self._ledger, self._waiting = ledger, waiting

    def __getattr__(self, name):
        return lambda *args, **kwargs: self._waiting.call(lambda: getattr(self._ledger, name)(*args, **kwargs))


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    monkeypatch.delenv(STARTED_RUN, raising=False)
    monkeypatch.setattr(mlflow_calls, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(async_recorder, "LOOK_EVERY_S", 0.05)
    bench = Bench(tmp_path)
    monkeypatch.setattr(pooled_run, "profile_on_pool", lambda batch, **options: bench.profile(batch, **options))
    monkeypatch.setattr(pooled_run, "Ledger", bench.open_ledger)
    monkeypatch.setattr(pooled_run, "shown_in_prefect", lambda run, submission: [])
    yield bench
    bench.database.close()


def test_a_batch_is_measured_handed_over_followed_and_recorded(bench):
    with played(bench.database):
        result = bench.train()
    assert (result.status, result.num_trials, result.exit_code) == ("done", 3, 0)
    assert {row["name"]: row["model_uri"] for row in result.jobs} == {
        "a": "models:/nightly.a/1",
        "b": "models:/nightly.b/1",
    }
    assert result.plan["makespan_s"] > 0 and result.is_measured
    assert bench.ledger.statuses["run of nightly"] == "FINISHED"
    (key,) = bench.ids()
    assert key.startswith("nightly-")
    assert Submissions(bench.database).find(key).started_s == Journal(bench.database, batch=key).get("started_s")


def test_a_number_of_devices_is_a_quota_of_the_batch(bench):
    with played(bench.database):
        bench.train(replace(BATCH, devices={"cpu": 1}))
        bench.train(replace(BATCH, devices={"gpu": "all"}))
    limited, free = (Submissions(bench.database).find(key).terms.features for key in bench.ids())
    quotas = Quotas(users={bench.ids()[0]: UserQuota(max_devices=1)})
    assert (limited, free) == ((quotas,), ())
    submission = Submissions(bench.database).find(bench.ids()[0])
    combined = combined_terms([active_batch(submission, Journal(bench.database, batch=submission.id))])
    assert (combined.features, {*combined.users.values()}) == ((quotas,), {submission.id})


def test_jobs_that_fail_and_those_that_adapt_what_cannot_be_trained_are_told(bench):
    bench.faults = {"a": "no technique can train it here"}
    batch = batch_of(job("a"), job("b", base="a"), job("c"), job("d"))
    with played(bench.database) as executor:
        executor.failing = {"d": "its loss is NaN"}
        result = bench.train(batch)
    assert result.status == "failed"
    failed = "a (no technique can train it here), b (its base a has failed), d (its loss is NaN)"
    assert result.summary() == f"1 of 4 jobs are done; failed: {failed}"
    assert [each.name for each in Submissions(bench.database).find(bench.ids()[0]).jobs] == ["c", "d"]
    ends = [event for event in told(bench.database, bench.ids()[0]) if isinstance(event, JobEnded)]
    assert {e.job: e.record.message for e in ends if e.record.status == "failed"} == {
        "a": "no technique can train it here",
        "b": "its base a has failed",
        "d": "its loss is NaN",
    }
    assert {name: bench.ledger.statuses[f"run of {name}"] for name in "abcd"} == {
        "a": "FAILED",
        "b": "FAILED",
        "c": "FINISHED",
        "d": "FAILED",
    }


def test_a_batch_of_which_nothing_can_be_trained_ends_at_once(bench):
    bench.faults = {"a": "too large", "b": "too large"}
    assert bench.train().status == "failed"  # without any executor


def test_a_flow_run_that_is_run_again_finds_what_it_has_handed_over(bench, monkeypatch):
    monkeypatch.setenv(STARTED_RUN, "run-1")

    class Mortal(View):
        def listen(self, event):
            raise Killed

    with played(bench.database) as executor:
        with pytest.raises(Killed):
            bench.train(view=Mortal())
        result = bench.train()
        assert executor.num_trained == {"a": 1, "b": 1}
    assert (result.status, bench.num_measured, len(bench.ids())) == ("done", 1, 1)
    assert result.jobs[0]["model_uri"] == "models:/nightly.a/1"
    monkeypatch.setenv(STARTED_RUN, "run-2")
    with played(bench.database):
        assert bench.train().status == "done"
    assert len(bench.ids()) == 2


def test_a_flow_run_of_an_earlier_release_finds_what_it_has_handed_over_though_its_digest_was_another(
    bench, monkeypatch
):
    monkeypatch.setenv(STARTED_RUN, "run-1")
    with played(bench.database):
        bench.train()
        pool = Journal(bench.database, batch="")
        ((_, place),) = pool.get(runs_fact("run-1")).items()
        pool.put(runs_fact("run-1"), {"nightly 0123456789abcdef": place})
        assert bench.train().status == "done"
        assert len(bench.ids()) == 1
        assert bench.train(batch_of(job("a"), job("b", seed=1))).status == "done"  # a changed batch is another one
    assert len(bench.ids()) == 2


def test_a_view_that_fails_is_told_and_costs_the_batch_nothing(bench, caplog):
    said = []

    class Broken(View):
        def listen(self, event):
            raise KeyError("/top5")

        def say(self, text):
            said.append(text)

    with played(bench.database):
        result = bench.train(view=Broken())
    assert (result.status, result.faults, result.exit_code) == ("done", (), 0)
    assert said == ["the view of the progress stopped on an error: KeyError: '/top5'; the log has the traceback"]
    assert caplog.text.count("KeyError: '/top5'") == 1


def test_a_recorder_that_fails_is_told_and_the_run_does_not_end_well(bench, monkeypatch):
    with played(bench.database), monkeypatch.context() as patch:
        patch.setattr(async_recorder.PoolRecorder, "_follow", lambda recorder: 1 / 0)
        result = bench.train()
    assert (result.status, result.exit_code) == ("done", 1)
    assert result.faults == ("the records have stopped: ZeroDivisionError: division by zero",)
    assert bench.train(resume=True).faults == ()
    assert bench.ledger.statuses["run of nightly"] == "FINISHED"


class Killed(BaseException):
    """Stands for the sudden death of the process."""


def die(*_, **__):
    raise Killed


def test_a_flow_run_that_died_while_it_recorded_trains_nothing_again(bench, monkeypatch):
    monkeypatch.setenv(STARTED_RUN, "run-1")
    with played(bench.database) as executor:
        executor.failing = {"b": "its loss is NaN"}
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(batch_run, "show_records", die)
            bench.train()
        executor.failing = {}
        assert bench.train().status == "failed"
        assert executor.num_trained == {"a": 1, "b": 1}
        assert bench.train().status == "done"  # after its end was seen, a new run resumes the batch
        assert executor.num_trained == {"a": 1, "b": 2}


class MortalLedger:
    """The ledger of a process that dies: then its threads, which live on in a test, call it no more."""

    def __init__(self, ledger):
        self._ledger, self.is_dead = ledger, False

    def __getattr__(self, name):
        if self.is_dead:
            raise SystemExit  # ends the thread without a word
        return getattr(self._ledger, name)


@pytest.mark.parametrize("method", ["profile", "begin", "make_plan", "execute", "evaluate", "_close_records"])
def test_what_was_done_before_the_process_died_is_not_repeated(bench, monkeypatch, method):
    monkeypatch.setenv(STARTED_RUN, "run-1")
    act, lasting = getattr(PooledRun, method), bench.ledger
    bench.ledger = MortalLedger(lasting)

    def act_and_die(run, *values):
        act(run, *values)
        bench.ledger.is_dead = True
        raise Killed

    with played(bench.database) as executor:
        executor.failing = {"b": "its loss is NaN"}
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(PooledRun, method, act_and_die)
            bench.train()
        bench.ledger = lasting
        result = bench.train()
        assert executor.num_trained == {"a": 1, "b": 1}
    assert (result.status, result.num_trials, len(bench.ids())) == ("failed", 3, 1)
    assert bench.num_measured == (2 if method == "profile" else 1)
    assert result.makespan_s > 0 and result.plan["makespan_s"] > 0
    assert result.jobs[0]["model_uri"] == "models:/nightly.a/1"
    statuses = {"run of nightly": "FAILED", "run of a": "FINISHED", "run of b": "FAILED"}
    assert bench.ledger.statuses == statuses


def test_what_a_resume_that_died_had_left_waiting_is_trained_by_the_next(bench, monkeypatch):
    with played(bench.database) as executor:
        executor.failing = {"b": "its loss is NaN"}
        bench.train()
        executor.failing = {}
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Submissions, "reopen", die)
            bench.train(resume=True)
        assert bench.statuses() == {"a": JobStatus.DONE, "b": JobStatus.WAITING}
        assert bench.train(resume=True).status == "done"


def test_resume_goes_on_with_the_newest_run_and_only_with_what_is_left(bench):
    with played(bench.database) as executor:
        executor.failing = {"b": "its loss is NaN"}
        assert bench.train().status == "failed"
        executor.failing = {}
        result = bench.train(resume=True)
        assert (result.status, executor.num_trained) == ("done", {"a": 1, "b": 2})
        assert len(bench.ids()) == 1
        with pytest.raises(InputError, match="the last run of batch 'nightly' is done"):
            bench.train(resume=True)
        with pytest.raises(InputError, match="has changed since nightly-"):
            bench.train(batch_of(job("a")), resume=True)


def test_resume_starts_what_was_killed_before_the_pool_had_it(bench, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Submissions, "submit", die)
        bench.train()
    with played(bench.database):
        assert bench.train(resume=True).status == "done"
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Submissions, "submit", die)
            bench.train()
        assert bench.train(resume=True).status == "done", "not the one before, which is done"
    assert len(bench.ids()) == 2


def test_resume_has_paused_jobs_go_on(bench):
    with played(bench.database, held_back={"a", "b"}) as executor:
        follower = threading.Thread(target=bench.train, daemon=True)
        follower.start()
        while not bench.ids():
            follower.join(0.01)
        requests = Requests(bench.database)
        requests.wait(requests.ask(RequestKind.PAUSE, {"batch": bench.ids()[0], "jobs": []}))
        assert set(bench.statuses().values()) == {JobStatus.PAUSED}
        executor.held_back = set()
        requests.ask(RequestKind.RESUME, {"batch": bench.ids()[0], "jobs": []})
        follower.join(120)
        assert set(bench.statuses().values()) == {JobStatus.DONE}


def test_what_mlflow_could_not_take_is_recorded_by_resume(bench, monkeypatch):
    monkeypatch.setattr(async_recorder, "TIMEOUT_AT_END_S", 0.0)
    with played(bench.database) as executor:
        executor.failing = {}
        original = bench.ledger.warm_up

        def warm_up():
            original()
            bench.ledger.away = -1

        bench.ledger.warm_up = warm_up
        result = bench.train()
        assert result.status == "done"
        assert "`ringmaster run --resume` records the rest" in result.faults[0]
        bench.ledger.away = 0
        again = bench.train(resume=True)
        assert executor.num_trained == {"a": 1, "b": 1}
    assert again.faults == ()
    assert [row["model_uri"] for row in again.jobs] == ["models:/nightly.a/1", "models:/nightly.b/1"]
    assert bench.ledger.statuses["run of nightly"] == "FINISHED"


def test_an_mlflow_that_is_away_at_the_start_is_waited_for(bench):
    bench.ledger.away = 3
    notices = []

    class Seen(View):
        def notice(self, text):
            notices.append(text)

    with played(bench.database):
        result = bench.train(view=Seen())
    assert (result.status, result.faults, bench.num_measured) == ("done", (), 1)
    away, back = [text for text in notices if "MLflow" in text]
    assert away.startswith("MLflow is away: what needs it waits. ") and back == "MLflow is back"


def test_a_run_that_prefect_started_waits_until_all_is_recorded(bench, monkeypatch):
    monkeypatch.setattr(async_recorder, "TIMEOUT_AT_END_S", 0.0)
    monkeypatch.setenv(STARTED_RUN, "run-1")
    finish = records.finish_records

    def away_at_the_end(recorder, result):
        bench.ledger.away = 3
        finish(recorder, result)

    monkeypatch.setattr(batch_run, "finish_records", away_at_the_end)
    with played(bench.database):
        result = bench.train()
    assert result.faults == ()
    assert bench.ledger.statuses["run of nightly"] == "FINISHED"


def test_ctrl_c_cancels_the_batch(bench):
    before, is_sent = signal.getsignal(signal.SIGINT), threading.Event()  # a second signal would not wait for the batch
    with played(bench.database, held_back={"a", "b"}):

        class Impatient(View):
            def listen(self, event):
                if isinstance(event, PlanUpdate) and not is_sent.is_set():
                    is_sent.set()
                    os.kill(os.getpid(), signal.SIGINT)

        result = bench.train(view=Impatient())
    assert (result.status, set(bench.statuses().values())) == ("cancelled", {JobStatus.CANCELLED})
    assert bench.ledger.statuses["run of nightly"] == "KILLED"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_is_ended_for_another_reason_leaves_its_batch_alone(bench, monkeypatch):
    monkeypatch.setenv(STARTED_RUN, "run-1")
    monkeypatch.setattr(follower, "is_being_cancelled", lambda: False)

    class Ended(View):
        def listen(self, event):
            if isinstance(event, PlanUpdate):
                os.kill(os.getpid(), signal.SIGTERM)

    with played(bench.database, held_back={"a", "b"}) as executor:
        with pytest.raises(TerminationSignal):
            bench.train(view=Ended())
        assert set(bench.statuses().values()) == {JobStatus.WAITING}
        executor.held_back = set()
        assert bench.train().status == "done"
    assert len(bench.ids()) == 1


def test_a_cancelled_flow_run_cancels_the_batches_that_it_has_handed_over(bench, tmp_path, monkeypatch):
    class FlowRun:
        id = "run-1"

    for variable in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    fields = {key: getattr(bench.address, key) for key in ("database", "prefect_api", "mlflow_uri")}
    (tmp_path / "pool.json").write_text(json.dumps(fields))
    Journal(bench.database, batch="").put(runs_fact("run-1"), {"nightly x": ["nightly-1", "/runs"]})
    for _ in range(2):
        cancel_batches(flow=None, flow_run=FlowRun(), state=None)
    (request,) = Requests(bench.database).open()
    assert (request.kind, request.content["batch"]) == (RequestKind.CANCEL, "nightly-1")


def test_a_second_process_is_kept_out_of_a_run(bench, tmp_path):
    with played(bench.database):
        bench.train()
    journal = Journal(bench.database, batch=bench.ids()[0])
    journal.put("is_recorded", False)
    folder = next((tmp_path / "batches" / "nightly").iterdir())
    with exclusive_lock(folder), pytest.raises(InputError, match="is going on in another process"):
        bench.train(resume=True)


def test_a_run_that_prefect_starts_again_waits_for_the_process_that_was_taken_for_dead(bench, tmp_path, monkeypatch):
    monkeypatch.setenv(STARTED_RUN, "run-1")
    with played(bench.database):
        bench.train()
        folder = next((tmp_path / "batches" / "nightly").iterdir())
        with ExitStack() as former:
            former.enter_context(exclusive_lock(folder))
            threading.Timer(0.2, former.close).start()
            assert bench.train().status == "done"


def test_orphans_of_orphans_are_found():
    jobs = (job("c", base="b"), job("b", base="a"), job("a"), job("d", base="models:/x@champion"))
    found = with_orphans(jobs, {"a": "too large"})
    assert found.keys() == {"a", "b", "c"}


def test_statuses_are_those_of_the_submission(bench):
    with played(bench.database) as executor:
        executor.failing = {"a": "no"}
        bench.train()
    assert bench.statuses() == {"a": JobStatus.FAILED, "b": JobStatus.DONE}
    assert Submissions(bench.database).status(bench.ids()[0]) == BatchStatus.ENDED


@pytest.fixture
def of_command(monkeypatch):
    """Lets `train` be called as by a command, whose flow run is run-9; returns the set of runs that Prefect cancels."""
    cancelling = set()
    monkeypatch.setattr(pooled_run, "CANCELLED_EVERY_S", 0.01)
    monkeypatch.setattr(pooled_run, "root_run", lambda: "run-9")
    monkeypatch.setattr(pooled_run, "is_being_cancelled", lambda run: run in cancelling)
    return cancelling


@pytest.mark.parametrize("is_on_page", [False, True])
def test_a_command_that_measures_a_batch_is_stopped_where_the_batch_is_cancelled(bench, of_command, is_on_page):
    def measure(batch, *, key, database, caller):
        assert unsubmitted(database) == {key: "nightly"}
        if is_on_page:
            of_command.add("run-9")
        else:
            cancel_unsubmitted(database, key, why="by hand")
        threading.Event().wait(20)

    bench.profile = measure
    signals = Interrupts(say=lambda line: None)
    with signals.of_command():
        with pytest.raises(BatchCancelled, match="batch nightly was cancelled before its jobs were planned"):
            bench.train(signals=signals)
        assert signals.first_signal is None, "the command exits with 1, as nobody has interrupted it"
    assert bench.ids() == []
    assert pending(bench.database) == []


def test_a_batch_of_a_command_that_trains_is_cancelled_on_its_page(bench, of_command):
    with played(bench.database, held_back={"b"}):
        of_command.add("run-9")
        result = bench.train()
    assert result.status == "cancelled"


@pytest.mark.parametrize("when", ["before it begins", "while it measures"])
def test_a_flow_run_whose_batch_was_cancelled_submits_nothing(bench, monkeypatch, when, tmp_path):
    """Prefect may start a process, or let it continue, after its run was cancelled."""
    monkeypatch.setenv(STARTED_RUN, "run-1")
    requests = Requests(bench.database)
    number = hand_over(requests, {"name": "nightly", "jobs": []}, file=tmp_path / "nightly.json")
    requests.answer(number, status=RequestStatus.GRANTED, answer={"flow_run": "run-1"})
    (key,) = unsubmitted(bench.database)
    profile = bench.profile

    def measure(batch, **options):
        cancel_unsubmitted(bench.database, key, why="by hand")
        return profile(batch, **options)

    if when == "before it begins":
        cancel_unsubmitted(bench.database, key, why="by hand")
    else:
        bench.profile = measure
    with pytest.raises(BatchCancelled):
        bench.train()
    assert (bench.ids(), bench.num_measured) == ([], int(when == "while it measures"))
