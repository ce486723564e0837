"""One run of a batch: the stages of `train_batch`, whatever provides the devices.

A run is a folder, a journal, and records in MLflow. Its process may die at any moment. Another process then opens the
same run and runs the same stages, which repeat nothing that was done: the journal has the jobs that have ended.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ringmaster.codec import to_json
from ringmaster.flows import settings
from ringmaster.flows.batch.artifacts import show_records
from ringmaster.flows.batch.result import BatchResult, ProfilingCost, collect, finish_records, report_refusals
from ringmaster.flows.batch.run_folder import is_done_and_recorded, share_models
from ringmaster.flows.reports.progress import View
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.batch.parent_rules import with_orphans
from ringmaster.tasks.execution.execution_events import Listener, PlanUpdate
from ringmaster.tasks.execution.job_table import jobs_left
from ringmaster.tasks.profiling.preflight_runs import distinct
from ringmaster.tasks.profiling.stage import ProfilingResult
from ringmaster.tasks.recording.async_recorder import AsyncRecorder
from ringmaster.tasks.recording.model_writer import JobsToRecord
from ringmaster.tasks.storage.fact_keys import (
    FIRST_PREDICTION,
    IS_OVER,
    IS_RECORDED,
    NEWEST_PREDICTION,
    PREFLIGHTS,
    PROFILING,
    SINCE,
    STATUS,
)
from ringmaster.tasks.storage.journal import ENDED, JobRecord, JobStatus, Journal
from ringmaster.tasks.sweeping.scheduler import SweepScheduler


class BatchRun(ABC):
    """A run of a batch.

    folder: of this run.
    view: shows the progress.
    recorder: writes the records of the run.
    sweep_scheduler: the scheduler of the sweep whose trials are the jobs.
    stack: what is to be closed at the end of the run.
    """

    record_timeout_s: float | None = None
    """Seconds to wait at the end for an MLflow that is away; None for the recorder's default."""

    def __init__(
        self,
        batch: Batch,
        journal: Journal,
        *,
        folder: Path,
        view: View,
        recorder: AsyncRecorder,
        sweep_scheduler: SweepScheduler | None,
        stack: ExitStack,
    ) -> None:
        self.batch, self.journal, self._folder, self.view = batch, journal, folder, view
        self._recorder, self._scheduler, self._stack = recorder, sweep_scheduler, stack
        self._is_due = True  # whether jobs are left to train
        self._is_closed = False  # whether the records are
        self._listener_faults: Mapping[Listener, str] = {}  # what is missing, and why, since a listener raised

    # -- the stages ----------------------------------------------------------------------------------------------------

    def profile(self) -> ProfilingResult:
        """Returns the options of the jobs that are left. Raises InputError if jobs cannot take a step."""
        began_s = time.monotonic()
        profiling = self._profile_jobs()
        report_refusals(profiling, view=self.view)
        self.journal.put(PREFLIGHTS, to_json(distinct(profiling.preflights)))
        if self._is_due:
            cost = ProfilingCost(num_trials=profiling.num_trials, seconds=time.monotonic() - began_s)
            self.journal.put(PROFILING, to_json(cost))
        if self._scheduler is not None:
            profiling = replace(profiling, jobs=self._scheduler.with_rungs(profiling.jobs))
        return replace(profiling, faults=with_orphans(profiling.jobs, profiling.faults))

    @abstractmethod
    def _profile_jobs(self) -> ProfilingResult:
        """Measures or predicts the options of the jobs that are left."""

    @abstractmethod
    def begin(self, profiling: ProfilingResult) -> None:
        """Records the jobs, and gets the devices that they will run on."""

    @abstractmethod
    def make_plan(self, profiling: ProfilingResult) -> PlanUpdate | None:
        """Returns the plan of the jobs that are left; None where no job is left to be planned."""

    @abstractmethod
    def show_plan(self, plan: PlanUpdate | None) -> None:
        """Shows the plan, and stores what the result is compared with."""

    @abstractmethod
    def execute(self, plan: PlanUpdate | None) -> Mapping[str, JobRecord]:
        """Has the jobs trained, evaluated and recorded until all have ended; returns their records."""

    def evaluate(self, profiling: ProfilingResult, records: Mapping[str, JobRecord]) -> BatchResult:
        """Returns how the jobs and the plan have done since the run was started or resumed."""
        return collect(self.batch, self.journal, records, profiling.refused)

    def record(self, result: BatchResult) -> BatchResult:
        """Records the result, and waits until all is written; returns it with the URIs of the models."""
        result = self._close_records(result)
        show_records(self._recorder, result, notice=self.view.notice)
        if is_done_and_recorded(self.journal):
            share_models(self._folder, home=settings.home(), say=self.view.say)
        self.journal.put(IS_OVER, True)
        return result

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin_records(self, profiling: ProfilingResult, devices: Sequence[str]) -> None:
        jobs = {job.name: job for job in (*self.batch.jobs, *profiling.jobs)}
        self._recorder.begin(
            JobsToRecord(jobs=jobs, preflights=profiling.preflights, profiles=profiling.profiles),
            devices=devices,
            num_trials=(self.journal.read(PROFILING, ProfilingCost) or ProfilingCost()).num_trials,
        )

    def _close_records(self, result: BatchResult) -> BatchResult:
        """Records the result, and waits; returns it with the URIs of the models, and what could not be recorded."""
        self._is_closed = True
        self.journal.put(STATUS, result.status)
        finish_records(self._recorder, result)
        faults = self._listener_faults
        lost = [fault for listener, fault in faults.items() if listener == self._recorder.listen]
        for fault in faults.values():
            self.view.say(f"{fault}; the log has the traceback")
        unrecorded = self._recorder.close(timeout_s=self.record_timeout_s)
        self.journal.put(IS_RECORDED, self._recorder.is_complete and not lost)
        if self._scheduler is not None:
            self._scheduler.close(run_id=self._recorder.run_of())
        uris = {name: record.model_uri for name, record in self.journal.jobs().items()}
        jobs = tuple({**job, "model_uri": uris[job["name"]]} for job in result.jobs)
        return replace(result, faults=(*lost, *unrecorded), jobs=jobs)


def resume_jobs(journal: Journal, names: Iterable[str], *, is_reported: bool) -> bool:
    """Makes the jobs of a run due that are left to train; returns whether there are any.

    Jobs that have failed or were cancelled are due again, as somebody may have fixed the cause. Where all jobs had
    ended and the process died before it had reported that, they are not: the report alone is left.

    names: of all jobs of the run.
    is_reported: whether the end of the run was reported, if it has ended.
    """
    records = journal.jobs()
    left = jobs_left(records, names)
    if not is_reported and all(name in records and records[name].status in ENDED for name in left):
        return False
    for name in left:
        if name in records:
            journal.write_job(name, status=JobStatus.WAITING, message="", joined=None, leads_after=None)  # new groups
    if left:
        for key in (FIRST_PREDICTION, NEWEST_PREDICTION):
            journal.remove(key)
        journal.put_all({SINCE: journal.clock(), IS_RECORDED: False, IS_OVER: False})
    return bool(left)
