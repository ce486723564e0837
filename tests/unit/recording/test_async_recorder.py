"""The async recorder: records arrive late while MLflow is unavailable, in order, none lost or doubled."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import insert

from ringmaster.errors import LedgerError
from ringmaster.features.warm_start.job import WarmStart
from ringmaster.model_lineage import mlflow_calls
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.execution_events import (
    GangReport,
    JobEnded,
    PlanUpdate,
    Prediction,
    PredictionUpdate,
    SegmentEnded,
    SegmentStarted,
)
from ringmaster.tasks.pool import controller
from ringmaster.tasks.pool.event_log import BatchEvents, EventLog, content_of, kind_of
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.profiling.search import planning_problem
from ringmaster.tasks.recording import ancestry, async_recorder
from ringmaster.tasks.recording.async_recorder import AWAY, AsyncRecorder, PoolRecorder
from ringmaster.tasks.recording.mlflow_writer import MlflowWriter
from ringmaster.tasks.recording.model_writer import JobsToRecord
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.fact_keys import FLOW_RUN_PAGE, UNRECORDED
from ringmaster.tasks.storage.journal import JobRecord, JobStatus, Journal, SegmentSpec, Variation, begin_jobs
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.tasks.storage.schema import ORDERS
from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.preflight_result import Preflight
from ringmaster.techniques.processes.gang_events import (
    CheckpointFailed,
    CheckpointSaved,
    EvaluationReported,
    JobResult,
    Outcome,
    OutcomeStatus,
    Steps,
)
from tests.unit.execution.fakes import cluster, in_a_row, job, profile
from tests.unit.pool.bench import submission
from tests.unit.profiling.solos import FACTS
from tests.unit.recording.ledgers import FakeLedger

KEY = "nightly-1"
JOBS = (job("a"), job("b"))
BATCH = Batch(name="nightly", jobs=JOBS, folder=None, text="name: nightly\n")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(mlflow_calls, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(mlflow_calls, "LONGEST_WAIT_S", 0.01)
    monkeypatch.setattr(async_recorder, "LOOK_EVERY_S", 0.01)


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


def preflight(name):
    data = {"name": "d", "digest": "1", "source": "s", "num_samples": 1, "num_held_out": 0}
    return Preflight(job=name, data=data, facts=replace(FACTS, num_parameters=5), candidates=(), refusals=())


def recorded():
    profiles = {each.name: (profile(),) for each in JOBS}
    return JobsToRecord(
        jobs={j.name: j for j in JOBS}, preflights={j.name: preflight(j.name) for j in JOBS}, profiles=profiles
    )


def planned():
    problem = planning_problem(JOBS, {j.name: (profile(),) for j in JOBS}, cluster(1), name="nightly")
    return PlanUpdate(problem=problem, plan=in_a_row(problem), why="start")


def story(name="a", *, status=JobStatus.DONE):
    """The events of one job."""
    segment = PlannedSegment(job=name, option=0, devices=(("here", 0),), start_s=0.0, end_s=10.0, last_step=10)
    started = SegmentStarted(number=1, segment=segment, technique="single", num_devices=1, first_step=0, attempt=1)
    steps = Steps(first_step=0, losses=(2.0, 1.0), seconds=(1.0, 1.0), wall_s=5.0)
    metrics = EvaluationReported(step=2, metrics={"loss": 0.5})
    made = {"step": 2, "metrics": {"loss": 0.5}, "model_dir": "/models/a"} if status == JobStatus.DONE else {}
    ended = JobEnded(record=JobRecord(name=name, status=status, **made))
    return [started, *(GangReport(number=1, job=name, event=said) for said in (steps, metrics)), ended]


def check(ledger):
    """Asserts that all records of job a exist, once."""
    named = sorted((point.key, point.step) for run, point in ledger.points if run == "run of a")
    rows = [("eval/loss", 2), ("train/loss", 1), ("train/loss", 2), ("train/step_s", 1), ("train/step_s", 2)]
    assert named == rows
    assert [model.registered_name for model in ledger.models.values()] == ["nightly.a"]
    assert ledger.statuses["run of a"] == "FINISHED"
    assert len([run for run in ledger.runs if isinstance(run, str)]) == 1


def finish(recorder):
    recorder.finish(status="FINISHED", metrics={"makespan_s": 1.0}, table=[])


def test_what_is_said_while_mlflow_is_away_is_recorded_once_it_is_back(database):
    ledger, notices = FakeLedger(), []
    ledger.away = -1
    recorder = AsyncRecorder(ledger, Journal(database, batch=KEY), batch=BATCH, notice=notices.append)
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    ledger.refused.clear()
    for event in [planned(), *story()]:
        recorder.listen(event)
    finish(recorder)
    assert ledger.refused.wait(120)
    ledger.away = 0
    assert recorder.close() == []
    assert recorder.is_complete
    check(ledger)
    assert ledger.statuses["run of nightly"] == "FINISHED"
    assert AWAY in notices[0] and notices[-1].startswith("MLflow is back")


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_warm_clone_is_a_child_of_its_source_whichever_ends_first(database, order):
    ledger, journal, parents = FakeLedger(), Journal(database, batch=KEY), {}
    record_model = ledger.record_model
    ledger.record_model = lambda name, **more: parents.update({name: more["parents"]}) or record_model(name, **more)
    recorder = AsyncRecorder(ledger, journal, batch=BATCH)
    begin_jobs(journal, JOBS, faults={})
    clone = JOBS[1].with_features(WarmStart(checkpoints="/run/checkpoints/b/start", step=1))
    recorder.begin(replace(recorded(), jobs={"a": JOBS[0], "b": clone}), devices=["d"], num_trials=0)
    for name in order:
        (*_, ended) = story(name)
        variation, made = Variation(job="a", step=1) if name == "b" else None, ended.record
        journal.write_job(
            name, status=JobStatus.DONE, step=2, metrics=made.metrics, model_dir=made.model_dir, variation=variation
        )
        recorder.listen(ended)
    assert recorder.close() == []
    assert parents == {"nightly.a": [], "nightly.b": ["models:/nightly.a/1"]}


def test_a_warm_clone_whose_run_was_purged_is_not_recorded_again_for_its_source(database):
    ledger, journal, notices = FakeLedger(), Journal(database, batch=KEY), []
    begin_jobs(journal, JOBS, faults={})
    variation, uri = Variation(job="a", step=1), "models:/nightly.b/1"
    journal.write_job("b", status=JobStatus.DONE, variation=variation, model_dir="/models/b", model_uri=uri)
    recorder = AsyncRecorder(ledger, journal, batch=BATCH, notice=notices.append)
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    recorder.listen(story()[-1])
    assert recorder.close() == []
    assert list(ledger.models) == ["run of a"]
    assert notices == ["models:/nightly.b/1 does not show that it is from models:/nightly.a/1: its run was purged"]


def test_a_job_that_failed_before_anything_was_known_of_it_has_a_failed_run_with_the_reason(database):
    ledger = FakeLedger()
    recorder = AsyncRecorder(ledger, Journal(database, batch=KEY), batch=BATCH)
    recorder.begin(replace(recorded(), preflights={}, profiles={}), devices=["d"], num_trials=0)
    recorder.listen(JobEnded(record=JobRecord(name="b", status=JobStatus.FAILED, message="no such file")))
    assert recorder.close() == []
    assert ledger.statuses["run of b"] == "FAILED"
    assert ledger.notes["run of b"] == "**Failed**: no such file"
    assert ledger.tags["run of b"] == {"ringmaster.reason": "no such file"}


def test_the_page_of_a_job_says_for_what_it_waits_and_no_longer(database):
    ledger, journal = FakeLedger(), Journal(database, batch=KEY)
    writer = MlflowWriter(ledger, journal, batch=BATCH)
    writer.begin(recorded(), key=KEY, devices=["d"], num_trials=0)
    waits, saved = CheckpointFailed(step=2, message="disk full", waits=True), CheckpointSaved(step=2)
    for event, note in ((waits, "**Waits**: disk full"), (saved, "")):
        writer.write(GangReport(number=1, job="a", event=event), at_ms=0)
        assert ledger.notes["run of a"] == note


def test_the_page_of_a_run_says_why_a_metric_has_no_value(database):
    ledger = FakeLedger()
    recorder = AsyncRecorder(ledger, Journal(database, batch=KEY), batch=BATCH)
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    *events, ended = story()
    ended = JobEnded(record=replace(ended.record, metrics={"auroc": float("nan")}))
    for event in [planned(), *events, ended]:
        recorder.listen(event)
    finish(recorder)
    assert recorder.close() == []
    assert "auroc has no value, as the evaluated rows are all of one class." in ledger.notes["run of a"]


def test_a_batchs_page_leads_to_its_flow_run(database):
    ledger, journal = FakeLedger(), Journal(database, batch=KEY)
    journal.put(FLOW_RUN_PAGE, "http://host:4200/runs/flow-run/1")
    recorder = AsyncRecorder(ledger, journal, batch=BATCH)
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    finish(recorder)
    assert recorder.close() == []
    assert "(http://host:4200/runs/flow-run/1)" in ledger.notes["run of nightly"]


@pytest.mark.parametrize("seed", range(5))
def test_calls_that_fail_now_and_then_double_nothing(database, seed):
    ledger, chance = FakeLedger(), random.Random(seed)
    answer = ledger._answer

    def now_and_then():
        ledger.away = int(chance.random() < 0.4)
        answer()

    ledger._answer = now_and_then
    recorder = AsyncRecorder(ledger, Journal(database, batch=KEY), batch=BATCH)
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    for event in story():
        recorder.listen(event)
    assert recorder.close() == []
    assert ledger.num_refused
    check(ledger)


def test_patience_ends_and_what_is_missing_is_told(database):
    ledger = FakeLedger()
    ledger.away = -1
    recorder = AsyncRecorder(ledger, Journal(database, batch=KEY), batch=BATCH)
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    for event in story():
        recorder.listen(event)
    (fault,) = recorder.close(timeout_s=0.0)
    assert "start it. Then `ringmaster run --resume` records the rest" in fault
    assert not recorder.is_complete


def test_predictions_do_not_wait_for_mlflow(database):
    """There is one every two seconds, with the ends of all jobs."""
    ledger, journal = FakeLedger(), Journal(database, batch=KEY)
    ledger.away = -1
    recorder = AsyncRecorder(ledger, journal, batch=BATCH)
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    prediction = Prediction(makespan_s=1.0, low_s=1.0, high_s=1.0, load=1.0, spread=0.1, num_earlier=0)
    for event in [*story(), *[PredictionUpdate(batch="", prediction=prediction)] * 9]:
        recorder.listen(event)
    recorder.close(timeout_s=0.0)
    kinds = [kind for kind, *_ in journal.get(UNRECORDED)["events"]]
    assert kinds == ["SegmentStarted", "JobEnded"]


class RefusingLedger(FakeLedger):
    """A ledger that refuses some methods for good, by name."""

    def __init__(self, *methods):
        super().__init__()
        for method in methods:
            setattr(self, method, self._refuse)

    def _refuse(self, *_, **__):
        raise LedgerError("permission denied")


def test_a_fault_that_stays_is_told_and_does_not_hold_up_the_rest(database):
    ledger = RefusingLedger("write_svg")
    recorder = AsyncRecorder(ledger, Journal(database, batch=KEY), batch=BATCH)
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    for event in [planned(), *story()]:
        recorder.listen(event)
    assert recorder.close() == ["permission denied"]
    check(ledger)


def test_a_run_that_mlflow_refuses_is_an_error_before_anything_is_trained(database):
    recorder = AsyncRecorder(RefusingLedger("start_batch"), Journal(database, batch=KEY), batch=BATCH)
    with pytest.raises(LedgerError, match="permission denied"):
        recorder.begin(recorded(), devices=["d"], num_trials=0)
    recorder.close()


@pytest.mark.parametrize("method", ["log_metrics", "write_json", "start_job", "record_model", "finish_run"])
@pytest.mark.parametrize("is_away", [False, True])
def test_what_was_not_written_is_written_when_the_batch_is_resumed(database, method, is_away):
    journal = Journal(database, batch=KEY)
    begin_jobs(journal, JOBS, faults={})
    ledger = RefusingLedger(*([] if is_away else [method]))
    first = AsyncRecorder(ledger, journal, batch=BATCH)
    first.begin(recorded(), devices=["d"], num_trials=0)
    ledger.away = -1 if is_away else 0
    for event in [planned(), *story()]:
        first.listen(event)
    first.finish(status="FINISHED", metrics={"makespan_s": 10.0}, table=[])
    assert first.close(timeout_s=0.0)
    assert not first.is_complete

    ledger.away = 0
    for name in list(vars(ledger)):
        if name == method:
            delattr(ledger, name)
    second = AsyncRecorder(ledger, journal, batch=BATCH)
    second.begin(recorded(), devices=["d"], num_trials=0)
    second.finish(status="FINISHED", metrics={"makespan_s": 10.0}, table=[])
    assert second.close() == []
    assert second.is_complete
    check(ledger)
    assert ledger.statuses["run of nightly"] == "FINISHED"
    points = [(point.key, point.value) for run, point in ledger.points if run == "run of nightly"]
    assert [value for key, value in points if key == "makespan_s"][-1] == 10.0
    assert [key for key, _ in points].count("plan/makespan_s") == 1
    assert journal.get(UNRECORDED) == {}


def test_a_batch_that_is_resumed_with_another_mlflow_is_recorded_there(database):
    """As where MLflow has another address by now, and its earlier database is not behind that one."""
    first, second, notices = FakeLedger(), FakeLedger(), []
    journal = Journal(database, batch=KEY)
    begin_jobs(journal, JOBS, faults={})
    for ledger, events in ((first, story()), (second, [])):
        recorder = AsyncRecorder(ledger, journal, batch=BATCH, notice=notices.append)
        recorder.begin(recorded(), devices=["d"], num_trials=0)
        for event in events:
            recorder.listen(event)
        finish(recorder)
        assert recorder.close() == []
        journal.write_job("a", status=JobStatus.DONE, model_dir="/models/a", metrics={"loss": 0.5})
    assert [model.registered_name for model in second.models.values()] == ["nightly.a"]
    assert second.statuses["run of nightly"] == second.statuses["run of a"] == "FINISHED"
    assert any("not the one that has the records" in notice for notice in notices)


def test_a_batch_that_is_resumed_after_its_runs_were_deleted_goes_on_in_them(database):
    ledger, notices = FakeLedger(), []
    journal = Journal(database, batch=KEY)
    begin_jobs(journal, JOBS, faults={})
    for events in (story(), []):
        recorder = AsyncRecorder(ledger, journal, batch=BATCH, notice=notices.append)
        recorder.begin(recorded(), devices=["d"], num_trials=0)
        for event in events:
            recorder.listen(event)
        finish(recorder)
        assert recorder.close() == []
        ledger.deleted = {"run of nightly", "run of a"}
    assert notices == ["2 of the batch's runs were deleted in MLflow, and are restored"]
    assert ledger.statuses["run of nightly"] == "FINISHED"


PURGED = "the run of a is not in MLflow any more: "


def resumed(ledger, database, *, status=JobStatus.DONE, kept=()):
    """Resumes a batch whose job a had ended, in a run that MLflow may not have. Returns its journal and the notices.

    kept: the events that the earlier process could not write.
    """
    journal, notices = Journal(database, batch=KEY), []
    begin_jobs(journal, JOBS, faults={})
    (number,) = journal.start_segments([("a", SegmentSpec(technique="single", last_step=10, devices=("d",)))])
    journal.end_segment(number, JobResult(status=OutcomeStatus.DONE))
    events = [[kind_of(event), content_of(event), 0] for event in kept]
    journal.put_all({"run": "run of nightly", "run:a": "a run of before", UNRECORDED: {"events": events}})
    journal.write_job("a", status=status, model_dir="/models/a", metrics={"loss": 0.5})
    ledger.runs[KEY] = "run of nightly"
    recorder = AsyncRecorder(ledger, journal, batch=BATCH, notice=notices.append)
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    finish(recorder)
    assert recorder.close() == []
    return journal, notices


def test_a_job_whose_run_was_purged_is_recorded_in_a_new_one(database):
    ledger = FakeLedger()
    journal, notices = resumed(ledger, database)
    assert ledger.statuses["run of a"] == "FINISHED"
    assert journal.jobs()["a"].model_uri is not None
    assert [row["technique"] for row in ledger.tables["run of a", "segments.json"]] == ["single"]
    assert notices == [f"{PURGED}what is left to record of it goes to a new one"]


def test_a_job_whose_run_is_there_has_no_other_one(database):
    """Also where no search finds it, as it was deleted again, or lost its tag of the batch's run."""
    ledger = FakeLedger()
    ledger.runs["without a parent"] = "a run of before"
    assert resumed(ledger, database)[1] == []
    assert ledger.statuses["a run of before"] == "FINISHED"
    assert list(ledger.models) == ["a run of before"]


@pytest.mark.parametrize("status", [JobStatus.CANCELLED, JobStatus.STOPPED])
def test_nothing_is_said_of_a_purged_run_to_which_nothing_more_is_written(database, status):
    ledger = FakeLedger()
    journal, notices = resumed(ledger, database, status=status)
    assert notices == []
    assert "run of a" not in ledger.runs.values()
    assert journal.get("run:a") is None, "it has a new run if it is trained again"


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_model_whose_run_was_purged_before_the_journal_knew_of_it_is_not_recorded_twice(database, is_kept):
    """A process died, or MLflow went away, after it had registered the model's version."""
    ledger, (*_, ended) = FakeLedger(), story()
    ledger.record_model("nightly.a", run_id="a run of before")
    journal, notices = resumed(ledger, database, kept=[ended] * is_kept)
    assert list(ledger.models) == ["a run of before"]
    assert journal.jobs()["a"].model_uri == "models:/nightly.a/1"
    assert notices == [f"{PURGED}its model is models:/nightly.a/1"]


def test_records_that_stop_are_told(database, monkeypatch):
    recorder = AsyncRecorder(FakeLedger(), Journal(database, batch=KEY), batch=BATCH)
    recorder._todo.put(lambda: 1 / 0)
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    assert recorder.close() == ["the records have stopped: ZeroDivisionError: division by zero"]
    assert not recorder.is_complete


def tell(database, *events):
    """Stores events as a pool does: the executor its decisions, and nodes what their gangs say."""
    for event in events:
        if isinstance(event, GangReport):
            store = MessageStore(database)
            store.store(event.number, "n", events=[(len(store.events(after=0)), event.event)])
            continue
        if isinstance(event, SegmentStarted):
            spec = SegmentSpec(technique="single", last_step=10, devices=("d",))
            assert Journal(database, batch=KEY).start_segments([(event.segment.job, spec)])[0] == event.number
        EventLog(database).append(KEY, event)


def pool_recorder(ledger, database):
    notice = lambda _: None  # noqa: E731
    recorder = PoolRecorder(
        ledger, Journal(database, batch=KEY), batch=BATCH, events=BatchEvents(database, KEY), notice=notice
    )
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    return recorder


def test_a_recorder_goes_on_where_the_last_one_ended_however_it_ended(database):
    journal, ledger = Journal(database, batch=KEY), FakeLedger()
    events = [planned(), *story()]
    tell(database, *events[:3])
    first = pool_recorder(ledger, database)
    assert first.close() == []
    at = journal.get(PoolRecorder.CURSOR)
    assert at == {"told": 2, "said": 1, "plans": 1}

    tell(database, events[3])
    ledger.away = -1  # the second recorder ends before MLflow is back
    assert pool_recorder(ledger, database).close(timeout_s=0.0)
    assert journal.get(PoolRecorder.CURSOR) == at

    ledger.away = 0
    tell(database, events[4])
    third = pool_recorder(ledger, database)
    finish(third)
    assert third.close() == []
    check(ledger)

    journal.put(PoolRecorder.CURSOR, {"told": 0, "said": 0, "plans": 0})  # killed before it could store its cursor
    fourth = pool_recorder(ledger, database)
    finish(fourth)
    assert fourth.close() == []
    check(ledger)


def test_a_recorder_that_comes_after_the_end_of_twenty_other_batches_finds_all_events(database):
    submissions = Submissions(database)
    submissions.submit(submission(KEY, jobs=("a",)))
    order = {"segment": 1, "node": "n", "batch": KEY, "content": {}, "incarnation": "one", "status": "ended"}
    database.write(lambda connection: connection.execute(insert(ORDERS).values(**order)))
    tell(database, *story())
    submissions.end(KEY)
    for number in range(controller.MAX_MESSAGES + 1):
        submissions.submit(submission(f"other-{number}"))
        submissions.end(f"other-{number}")
    controller.clear_messages(database)
    ledger = FakeLedger()
    recorder = pool_recorder(ledger, database)
    finish(recorder)
    assert recorder.close() == []
    check(ledger)


def test_a_pools_recorder_waits_for_mlflow_and_keeps_the_order(database):
    ledger = FakeLedger()
    ledger.away = -1
    recorder = pool_recorder(ledger, database)
    tell(database, *story())
    finish(recorder)
    assert ledger.refused.wait(120)
    ledger.away = 0
    assert recorder.close() == []
    check(ledger)


def test_a_cancelled_job_is_no_failed_one(database):
    ledger = FakeLedger()
    recorder = AsyncRecorder(ledger, Journal(database, batch=KEY), batch=BATCH)
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    for event in story(status=JobStatus.CANCELLED):
        recorder.listen(event)
    assert recorder.close() == []
    assert ledger.statuses["run of a"] == "KILLED"


def told(database, ledger, notices):
    """Records a job whose model also goes to a tensor store. Returns the faults."""
    ledger.store = TensorStore(Path("/nowhere"))
    journal = Journal(database, batch=KEY)
    recorder = AsyncRecorder(ledger, journal, batch=BATCH, notice=notices.append)
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    for event in story():
        recorder.listen(event)
    return recorder.close()


def test_a_base_that_is_not_in_the_lineage_is_recorded_when_the_batch_is_resumed(database, monkeypatch):
    ledger, known = FakeLedger(), recorded()
    tuned = replace(known.jobs["a"], model=ModelSpec(from_pretrained="org/base"))
    known = replace(known, jobs={**known.jobs, "a": tuned})
    parents = []
    record_model = ledger.record_model
    ledger.record_model = lambda *args, **said: (
        parents.append((said["kind"], said["parents"])) or record_model(*args, **said)
    )

    def record(record_base, events):
        monkeypatch.setattr(ancestry, "record_base", record_base)
        recorder = AsyncRecorder(ledger, Journal(database, batch=KEY), batch=BATCH)
        recorder.begin(known, devices=["d"], num_trials=0)
        for event in events:
            recorder.listen(event)
        finish(recorder)
        return recorder.close(), recorder.is_complete

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    faults = ["org/base is not in the lineage: [Errno 28] No space left on device"]
    assert record(full, story()) == (faults, False)
    check(ledger)
    assert record(lambda *_, **__: "m-base", []) == ([], True)
    check(ledger)
    assert parents == [("fine-tuned", []), ("fine-tuned", ["m-base"])]


def test_a_recorded_model_is_kept_in_the_tensor_store(database):
    ledger, notices = FakeLedger(), []
    assert told(database, ledger, notices) == []
    assert (ledger.kept, notices) == ([("nightly.a", Path("/models/a"))], [])


def test_a_tensor_store_that_fails_is_told_and_is_no_fault(database):
    ledger, notices = FakeLedger(), []

    def keep_tensors(*_, **__):
        raise OSError(28, "No space left on device")

    ledger.keep_tensors = keep_tensors
    assert told(database, ledger, notices) == []
    check(ledger)
    assert notices == ["nightly.a is not in the tensor store: [Errno 28] No space left on device"]


class CountingLedger(FakeLedger):
    """Counts the calls that MLflow would get for runs and tables."""

    def __init__(self):
        super().__init__()
        self.resumed, self.written = [], []

    def resume_run(self, run_id):
        self.resumed.append(run_id)
        super().resume_run(run_id)

    def write_table(self, run_id, path, rows):
        if path == "segments.json":
            self.written.append((run_id, [row["status"] for row in rows]))
        super().write_table(run_id, path, rows)


def writer_of(ledger, journal):
    writer = MlflowWriter(ledger, journal, batch=BATCH)
    writer.begin(recorded(), key=KEY, devices=["d"], num_trials=0)
    return writer


def train_segments(writer, journal, numbers):
    """Starts and ends segments of job a."""
    started, *_ = story()
    for number in numbers:
        journal.start_segments([("a", SegmentSpec(technique="single", last_step=10, devices=("d",)))])
        writer.write(replace(started, number=number), at_ms=0)
        journal.end_segment(number, JobResult(status="preempted"))
        outcome = Outcome(status="preempted", result=JobResult(step=number))
        ended = SegmentEnded(number=number, segment=started.segment, outcome=outcome, decision="", profile=None)
        writer.write(ended, at_ms=0)


def test_segments_cost_no_call_of_mlflow_each(database):
    """A run is running since it was opened, and a job's segments are written once it has ended."""
    ledger, journal = CountingLedger(), Journal(database, batch=KEY)
    begin_jobs(journal, JOBS, faults={})
    writer = writer_of(ledger, journal)
    train_segments(writer, journal, (1, 2, 3))
    assert ledger.written == []
    writer.write(JobEnded(record=journal.write_job("a", status=JobStatus.STOPPED)), at_ms=0)
    writer.finish(status="FINISHED", metrics={}, table=[])
    assert ledger.written == [("run of a", ["preempted"] * 3)]
    assert ledger.resumed == []


def test_segments_of_a_job_that_has_not_ended_are_written_with_the_end_of_the_batch(database):
    ledger, journal = CountingLedger(), Journal(database, batch=KEY)
    begin_jobs(journal, JOBS, faults={})
    writer = writer_of(ledger, journal)
    train_segments(writer, journal, (1,))
    writer.finish(status="KILLED", metrics={}, table=[])
    assert ledger.written == [("run of a", ["preempted"])]
    again = writer_of(ledger, journal)  # of the process that resumes the batch
    train_segments(again, journal, (2, 3))
    assert ledger.resumed.count("run of a") == 1
