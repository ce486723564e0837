"""Follows a batch that a pool trains: shows its events, has them recorded in MLflow, and passes on its cancellation.

The pool's controller trains the batch. A follower may end and another one begin without any effect on the jobs.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefect.exceptions import TerminationSignal

from ringmaster.codec import digest, from_json
from ringmaster.errors import InputError
from ringmaster.flows.batch.artifacts import DecisionArtifact, PlanArtifact, show_control
from ringmaster.flows.batch.batch_run import resume_jobs
from ringmaster.flows.batch.flow_runs import is_being_cancelled, is_started_by_prefect, root_run, runs_fact
from ringmaster.flows.batch.result import log_decision
from ringmaster.flows.batch.run_folder import is_batch, was_being_started
from ringmaster.flows.caller import Caller
from ringmaster.flows.dated_runs import stamped_folder
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.control.requests import RequestKind, Requests
from ringmaster.tasks.execution.execution_events import (
    ExecutionEvent,
    Listener,
    Listeners,
    PlanUpdate,
    PredictionUpdate,
    predictions_in,
)
from ringmaster.tasks.execution.forecaster import EVERY_S
from ringmaster.tasks.execution.job_table import added_jobs
from ringmaster.tasks.execution.steering import FeaturePolicy, SteeredBatch, SteeringRequest, steering_policy
from ringmaster.tasks.pool.event_log import BatchEvents, LogPosition
from ringmaster.tasks.pool.nodes import NodeRegistry
from ringmaster.tasks.pool.submissions import BatchStatus, Submission, Submissions
from ringmaster.tasks.profiling.preflight_runs import EquivalentJobs
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.fact_keys import (
    FORMER_PREFLIGHTS,
    IS_RECORDED,
    NEWEST_PREDICTION,
    PREFLIGHTS,
    SINCE,
    STARTED,
)
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.timeline.prefect_artifacts import GanttArtifact, ProgressArtifact
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.techniques.preflight_result import Preflight, Refusal


@dataclass(frozen=True, kw_only=True)
class PoolRun:
    """One run of a batch on a pool.

    caller: the caller of the flow, which shows the progress.
    batch: the batch.
    id: id of its submission.
    folder: folder of the run, on storage that all nodes share.
    database: the pool's database.
    ledger: the pool's MLflow records.
    """

    caller: Caller
    batch: Batch
    id: str
    folder: Path
    database: Database
    ledger: Ledger

    @property
    def journal(self) -> Journal:
        """The journal of this run."""
        return Journal(self.database, batch=self.id)

    @property
    def submissions(self) -> Submissions:
        """All batches of the pool."""
        return Submissions(self.database)

    def ask(self, kind: RequestKind, **more: str) -> None:
        """Sends the controller a request about the whole batch."""
        Requests(self.database).ask(kind, {"batch": self.id, "jobs": [], **more})

    def has_ended(self) -> bool:
        """Returns whether all jobs have ended, and all their events are in the log."""
        return self.submissions.status(self.id) == BatchStatus.ENDED


def reopen(run: PoolRun, submission: Submission) -> LogPosition:
    """Resumes the jobs of a batch that were cancelled or paused, or have failed, after somebody has fixed the cause.

    Returns the position after the last event before that.
    """
    records = run.journal.jobs()
    if not run.has_ended():
        if any(record.status == JobStatus.PAUSED for record in records.values()):
            run.ask(RequestKind.RESUME)
        return LogPosition()
    # The controller has dropped a batch that has ended, and reads it again from here.
    last = BatchEvents(run.database, run.id).newest()
    names = [*(job.name for job in submission.jobs), *(job.name for job in added_jobs(records))]
    if resume_jobs(run.journal, names, is_reported=True):
        run.submissions.reopen(run.id)
    return last


def place_of_run(batch: Batch, database: Database, *, home: Path, resume: bool) -> tuple[str, Path]:
    """Returns the id and folder of this run: those that this flow run had before, else the newest or new ones."""
    pool = Journal(database, batch="")
    root = root_run()
    known: Mapping[str, Any] = pool.get(runs_fact(root), {}) if root else {}
    which = f"{batch.name} {digest(batch.to_json())}"
    # The digest of a batch changes with fields that a later release adds; what is stored of it can still be read.
    stored = (place for place in known.values() if is_batch(batch, Journal(database, batch=place[0]).get("batch")))
    if (place := known.get(which) or next(stored, None)) is not None:
        key, folder = place
        return str(key), Path(folder)
    result = newest_run(batch, database, home) if resume else None
    if result is None:  # also if the last run was killed before it reached the pool
        folder = stamped_folder(home / "batches" / batch.name)
        result = f"{batch.name}-{folder.name}", folder
    key, folder = result
    if root:
        pool.put(runs_fact(root), {**known, which: [key, str(folder)]})
    return key, folder


def newest_run(batch: Batch, database: Database, home: Path) -> tuple[str, Path] | None:
    """Returns the newest run of the batch on the pool. Raises InputError if that run is done, or is of a changed file.

    Returns None if there is nothing to resume: the pool has no run, or the last one was killed before it reached the
    pool.
    """
    submissions = Submissions(database)
    own = [key for key, name, _ in submissions.names() if name == batch.name]
    if not own:
        return None
    same = [key for key in own if is_batch(batch, Journal(database, batch=key).get("batch"))]
    if not same:
        raise InputError(
            [
                f"the batch file has changed since {own[-1]}, so it cannot be resumed. "
                "To fix: undo the change, or leave out --resume to start afresh"
            ]
        )
    journal = Journal(database, batch=same[-1])
    is_done = all(record.status == JobStatus.DONE for record in journal.jobs().values())
    if is_done and journal.get(IS_RECORDED) and submissions.status(same[-1]) == BatchStatus.ENDED:
        if was_being_started(batch, home):
            return None
        raise InputError([f"the last run of batch {batch.name!r} is done. To fix: leave out --resume to run it again"])
    submission = submissions.find(same[-1])
    assert submission is not None, "its name is there"
    return same[-1], submission.run_folder()


SILENCE_S = 30.0  # longer than a first plan takes
SILENCE = (
    "the pool has no plan for it yet: see that a controller leads (`ringmaster pool controller`) and that nodes serve"
)


def shown_in_prefect(run: PoolRun, submission: Submission) -> Sequence[Listener]:
    """Returns listeners that show a batch's plan, progress, Gantt chart and decisions in Prefect's pages."""
    timeline_reader = TimelineReader(run.database, name="the pool", is_pool=True)
    show_control(run.id, [job.name for job in submission.jobs])
    kinds = {device.device_kind() for node in NodeRegistry(run.database).all() for device in node.devices}
    return [
        PlanArtifact(run.batch.name, device=" + ".join(sorted(kinds))).listen,
        ProgressArtifact(run.journal, totals={job.name: job.total_steps for job in submission.jobs}).listen,
        GanttArtifact(timeline_reader, batch=run.id).listen,
        log_decision,
        DecisionArtifact().listen,
    ]


@contextmanager
def followed_batch(
    run: PoolRun,
    submission: Submission,
    *,
    after: LogPosition,
    listeners: Sequence[Listener],
    sweep_scheduler: SweepScheduler | None,
) -> Iterator[BatchFollower]:
    """Yields the follower of a batch. Inside the context, Ctrl-C and SIGTERM cancel the batch.

    after: the position after which events are shown.
    listeners: receive the events, in addition to the terminal.
    sweep_scheduler: the scheduler of the sweep whose trials are the jobs.
    """
    view = run.caller.view
    scheduler = sweep_scheduler or steering_policy(
        SteeredBatch(
            journal=run.journal,
            jobs=submission.jobs,
            profiles=submission.profiles,
            paths=submission.run_paths(),
            notice=view.notice,
            is_replayed=after == LogPosition(),
        )
    )
    every: list[Listener] = [view.listen, *listeners]
    if scheduler is not None:
        every.append(scheduler.listen)
        _attach(scheduler, run, submission)

    def on_fault(listener: Listener, fault: str) -> None:
        if scheduler is not None and listener == scheduler.listen:
            run.ask(RequestKind.CANCEL, message=fault)  # without its scheduler a sweep would never end

    silence = threading.Timer(SILENCE_S, view.notice, [SILENCE])
    silence.daemon = True
    with ExitStack() as stack:
        is_left = stack.enter_context(_cancelled_by_signals(run))
        stack.callback(silence.cancel)
        silence.start()
        yield BatchFollower(
            run.journal,
            events=BatchEvents(run.database, run.id).follow(after, until=lambda: is_left.is_set() or run.has_ended()),
            listeners=Listeners([lambda _: silence.cancel(), *every], on_fault=on_fault),
            is_left=is_left,
        )


class BatchFollower:
    """Follows one batch of a pool.

    events: the events of the batch from now until it ends.
    is_left: set when Prefect ends this process without a cancellation.
    """

    def __init__(
        self, journal: Journal, *, events: Iterator[ExecutionEvent], listeners: Listeners, is_left: threading.Event
    ) -> None:
        self._journal, self._events, self._listeners, self._is_left = journal, events, listeners, is_left
        self._looked_s = time.monotonic()  # for a newer prediction

    def follow_to_plan(self) -> PlanUpdate | None:
        """Returns the plan of the pool with the batch, once it is there; None if the batch has ended without one."""
        for event in self._events:
            self._show(event)
            if isinstance(event, PlanUpdate):
                return event
        return None

    def run(self) -> None:
        """Follows the batch until it ends. Raises TerminationSignal if Prefect ends this process alone."""
        for event in self._events:
            self._show(event)
        if self._is_left.is_set():
            raise TerminationSignal(signal.SIGTERM)

    @property
    def listener_faults(self) -> Mapping[Listener, str]:
        """What is missing, and why, since a listener raised; by listener."""
        return self._listeners.faults

    def _show(self, event: ExecutionEvent) -> None:
        # The first plan since the start is what the result is compared with; the pool plans all its batches.
        if isinstance(event, PlanUpdate) and not self._journal.plans(since_s=float(self._journal.get(SINCE))):
            plan = {"problem": event.problem.to_json(), "plan": event.plan.to_json()}
            self._journal.write_plan(plan, why=event.why)
        self._listeners.notify(event)
        if isinstance(event, PlanUpdate) or time.monotonic() - self._looked_s >= EVERY_S:
            self._looked_s = time.monotonic()
            _, prediction = predictions_in({NEWEST_PREDICTION: self._journal.get(NEWEST_PREDICTION)})
            if prediction is not None:
                age_s = self._journal.clock() - prediction.since_s - prediction.made_s
                self._listeners.notify(PredictionUpdate(batch="", prediction=prediction, age_s=age_s))


def _attach(scheduler: SweepScheduler | FeaturePolicy, run: PoolRun, submission: Submission) -> None:
    """Attaches what steers the batch to the run; repeats the requests that an earlier process has made."""

    def ask(steering: SteeringRequest) -> None:
        if steering and not run.has_ended():
            Requests(run.database).ask(RequestKind.DIRECT, {"batch": run.id, **steering.to_json()})

    if isinstance(scheduler, SweepScheduler):
        scheduler.begin(run.journal, submission.jobs, num_slots=num_devices(run))
        ask(scheduler.pending_request())
    elapsed_s = run.journal.clock() - float(run.journal.get(STARTED))
    scheduler.attach(ask, later=lambda act: act(), elapsed_s=elapsed_s)


def num_devices(run: PoolRun) -> int:
    """Returns the number of devices of the pool's nodes."""
    return sum(len(node.devices) for node in NodeRegistry(run.database).all())


def known_preflights(run: PoolRun, submission: Submission) -> dict[str, Preflight]:
    """Returns the preflights of the jobs of a submitted batch, as far as they are stored."""
    if (alike := run.journal.get(PREFLIGHTS)) is not None:
        every = [from_json(EquivalentJobs, each) for each in alike]
        return {name: replace(each.preflight, job=name) for each in every for name in each.names}
    return {  # submitted by an earlier release
        name: Preflight(
            job=name,
            data=submission.data.get(name, {}),
            facts=known["facts"],
            candidates=(),
            refusals=tuple(from_json(Refusal, refusal) for refusal in known["refusals"]),
        )
        for name, known in run.journal.get(FORMER_PREFLIGHTS, {}).items()
    }


@contextmanager
def _cancelled_by_signals(run: PoolRun) -> Iterator[threading.Event]:
    """Makes Ctrl-C or SIGTERM cancel the batch: its jobs write checkpoints and end. A second signal ends this process.

    A process that Prefect has started, and that a signal ends without a cancellation, leaves the batch alone: it sets
    the event that this context yields.
    """
    is_left = threading.Event()

    def act() -> None:
        if is_started_by_prefect() and not is_being_cancelled():
            is_left.set()
            return
        run.caller.view.notice(f"cancelling {run.id}: its jobs write checkpoints; once more to leave at once")
        run.ask(RequestKind.CANCEL)

    with run.caller.interrupts.stopped_by(act):
        yield is_left
