"""Reports of a failed job at the moment it fails: an error in the flow run's log, in the terminal, in the job table."""

import io
import logging
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from rich.console import Console

from ringmaster.flows.batch import batch_run
from ringmaster.flows.batch import result as records
from ringmaster.flows.batch.local_run import LocalRun
from ringmaster.flows.batch.result import (
    BatchResult,
    failure_reporter,
    job_rows,
    log_decision,
    report_refusals,
)
from ringmaster.flows.caller import Caller
from ringmaster.flows.reports.progress import LinesView, LiveView
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.execution_events import DeviceWait, JobEnded
from ringmaster.tasks.profiling.stage import ProfilingResult
from ringmaster.tasks.recording.async_recorder import AsyncRecorder
from ringmaster.tasks.storage.journal import JobRecord, JobStatus, Journal
from ringmaster.techniques.preflight_result import Preflight, Refusal
from tests.unit.execution.fakes import cluster, job, profile
from tests.unit.profiling.solos import FACTS
from tests.unit.recording.ledgers import FakeLedger

WHY = "rank 0: RuntimeError: boom (in its trial)"


@pytest.fixture
def log(monkeypatch):
    """The lines of the flow run's log, each with its level."""
    lines = []
    logger = SimpleNamespace(log=lambda level, text: lines.append((level, text)))
    logger.info = lambda text: logger.log(logging.INFO, text)
    monkeypatch.setattr(records, "get_run_logger", lambda: logger)
    monkeypatch.setattr(records, "FlowRunContext", SimpleNamespace(get=lambda: "a run"))
    return lines


@pytest.fixture
def terminal():
    """A console in memory."""
    return Console(file=io.StringIO(), width=200)


def local_run(batch, journal, recorder, folder):
    return LocalRun(
        SimpleNamespace(batch=batch, cluster=cluster(1), caller=Caller(), server=None),
        journal,
        recorder=recorder,
        run_paths=SimpleNamespace(folder=folder, cache_dir=folder),
        seed=0,
        sweep_scheduler=None,
        stack=ExitStack(),
    )


def surveyed(name):
    refusal = Refusal(technique="ddp", num_devices=1, reason="needs two devices or more")
    return Preflight(job=name, data={}, facts=FACTS, candidates=(), refusals=(refusal,))


def test_a_failed_job_is_an_error_in_the_log_and_all_else_is_information(log):
    log_decision(JobEnded(record=JobRecord(name="a", status=JobStatus.FAILED, message="its loss is [NaN]")))
    log_decision(JobEnded(record=JobRecord(name="b", status=JobStatus.DONE, metrics={"loss": 1.0})))
    log_decision(DeviceWait(holders=("another",)))
    assert log[0] == (logging.ERROR, "a has failed: its loss is [NaN]")
    assert [level for level, _ in log[1:]] == [logging.INFO, logging.INFO]


def test_a_metric_without_a_value_says_why(log):
    metrics = {"auroc": float("nan"), "accuracy": 1.0}
    log_decision(JobEnded(record=JobRecord(name="a", status=JobStatus.DONE, metrics=metrics)))
    why = "auroc has no value, as the evaluated rows are all of one class. To fix: evaluate more rows"
    assert log == [(logging.INFO, f"a is done: auroc nan, accuracy 1; {why}")]


def test_a_job_that_fails_before_it_trains_is_told_once_and_at_once(log, terminal):
    tell = failure_reporter(LinesView(terminal), but=["done before"])
    tell("a", WHY)
    assert log == [(logging.ERROR, f"a has failed: {WHY}")]
    assert terminal.file.getvalue() == f"a has failed: {WHY}\n"
    tell("a", WHY)  # profiling is retried
    tell("done before", WHY)
    assert len(log) == 1


def test_the_table_of_jobs_has_the_reason():
    row = {"name": "a", "status": "failed", "message": WHY, "num_steps": 0, "metrics": {}, "segments": []}
    result = SimpleNamespace(jobs=[row, {**row, "name": "b", "status": "done", "message": ""}])
    assert [(row["job"], row["reason"]) for row in job_rows(result)] == [("a", WHY), ("b", "")]


def test_techniques_that_do_not_apply_are_in_the_log_and_shown_to_who_asks_for_all(log, terminal):
    profiled = ProfilingResult(jobs=(job("a"),), preflights={"a": surveyed("a")}, profiles={"a": (profile(),)})
    report_refusals(profiled, view=LinesView(terminal))
    line = "left out: ddp on 1: needs two devices or more"
    assert log == [(logging.INFO, line)] and terminal.file.getvalue() == ""
    for make in (LinesView, LiveView):
        console = Console(file=io.StringIO(), width=200)
        with make(console, is_verbose=True) as view:
            report_refusals(profiled, view=view)
        assert line in console.file.getvalue()


def test_what_failed_before_it_was_planned_is_recorded_but_not_what_had_ended_in_an_earlier_run(tmp_path, monkeypatch):
    batch = Batch(name="nightly", jobs=(job("a"), job("b"), job("c")), folder=None, text="")
    journal = Journal.of_file(tmp_path / "journal.db")
    journal.write_job("b", status=JobStatus.DONE)
    began, heard = [], []
    recorder = SimpleNamespace(begin=lambda known, **_: began.append(known), listen=heard.append)
    run = local_run(batch, journal, recorder, tmp_path)
    profiled = ProfilingResult(
        jobs=(job("c"),), preflights={}, profiles={"c": (profile(),)}, faults={"a": WHY, "b": "its data has gone"}
    )
    engine = SimpleNamespace(nodes=lambda: cluster(1).nodes, close=lambda: None)
    monkeypatch.setattr("ringmaster.flows.batch.local_run.build_engine", lambda *_: engine)
    run.begin(profiled)
    assert heard == [JobEnded(record=JobRecord(name="a", status=JobStatus.FAILED, message=WHY))]
    assert set(began[0].jobs) == {"a", "b", "c"}, "one that was never surveyed has a run in MLflow, too"
    journal.close()


def test_a_recorder_that_an_executor_has_detached_has_lost_records(tmp_path, monkeypatch):
    journal = Journal.of_file(tmp_path / "journal.db")
    batch = Batch(name="nightly", jobs=(), folder=None, text="")
    recorder = AsyncRecorder(FakeLedger(), journal, batch=batch)
    run = local_run(batch, journal, recorder, tmp_path)
    figures = {"makespan_s": 1.0, "idle_s": 0.0, "num_trials": 0, "profiling_s": 0.0, "current_practice_s": None}
    result = BatchResult(
        batch="nightly", status="done", plan={"makespan_s": 1.0}, objective="makespan", value=1.0, jobs=(), **figures
    )
    run._listener_faults = {recorder.listen: "the recorder stopped", journal.put: "the chart stopped"}
    monkeypatch.setattr(batch_run, "show_records", lambda *_, **__: None)
    recorded = run.record(result)
    assert recorded.faults == ("the recorder stopped",)
    assert journal.get("is_recorded") is False, "so that --resume records the rest"
    journal.close()
