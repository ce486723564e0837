"""A run of a batch on a pool: what the steps of `train` do there.

The pool's controller plans the batch together with all others, and executes it. This process profiles the jobs,
submits them, and follows and records what becomes of them. It may end and be started again without any effect on them.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal

from ringmaster.flows import settings
from ringmaster.flows.batch.artifacts import DecisionArtifact
from ringmaster.flows.batch.flow_runs import is_being_cancelled, is_started_by_prefect, root_run
from ringmaster.flows.batch.fusing import choose_together
from ringmaster.flows.batch.records import log_decision, tell_refused
from ringmaster.flows.batch.result import BatchResult, collect
from ringmaster.flows.batch.run_folder import alone_in, base_weights, begun, checkpoint_root_of, note_start
from ringmaster.flows.batch.run_options import RunOptions
from ringmaster.flows.batch.waiting import for_prefect, notices
from ringmaster.flows.pool.own_node import healthy
from ringmaster.flows.pool.profiling import profile_on_pool
from ringmaster.flows.pool.run import IS_OVER, PoolRun, place_of_run, reopen
from ringmaster.flows.process.interrupts import stopped_by_signals
from ringmaster.flows.reports.page_links import flow_run_page
from ringmaster.flows.reports.progress import current_view
from ringmaster.flows.settings import PoolAddress
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.model_lineage.waiting import Waiting
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.batch.parents import with_orphans, with_teachers
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.events import ExecutionEvent, Listener, Planned
from ringmaster.tasks.execution.steering import GOAL, SteeringRequest
from ringmaster.tasks.pool import requests as wishes
from ringmaster.tasks.pool.batch_events import BatchEvents, Position
from ringmaster.tasks.pool.handed_over import followed
from ringmaster.tasks.pool.nodes import Nodes
from ringmaster.tasks.pool.requests import Requests
from ringmaster.tasks.pool.submissions import Submission
from ringmaster.tasks.profiling.stage import Profiled
from ringmaster.tasks.recording.async_recorder import JobsToRecord, PoolRecorder
from ringmaster.tasks.recording.mlflow_writer import FLOW_RUN_PAGE
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.releases import check_release
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.tasks.timeline.task import GanttArtifact, ProgressArtifact
from ringmaster.techniques import Job
from ringmaster.techniques.interface.preflight import Preflight, Refusal
from ringmaster.techniques.interface.values import digest, from_json, to_json

FUSING_TIME_LIMIT_S = 10.0  # to choose which jobs are trained together
SILENCE_S = 30.0  # longer than a first plan takes
SILENCE = (
    "the pool has no plan for it yet: see that an executor leads (`ringmaster pool executor`) and that nodes serve"
)


class OpenLedger(Protocol):
    """A function that opens the pool's records, such as `Ledger`."""

    def __call__(self, uri: str, /, *, waiting: Waiting | None = None) -> Ledger:
        """Opens the records at a URI; with `waiting`, calls wait for a server that is away."""


class ProfileJobs(Protocol):
    """A function that profiles the jobs of a batch, such as `profile_on_pool`."""

    def __call__(self, batch: Batch, *, key: str, database: Database) -> Profiled:
        """Returns the profiles of the batch, which has the id `key` in the pool."""


def shown_in_prefect(run: PoolRun, submission: Submission) -> Sequence[Listener]:
    """Returns listeners that show a batch's progress, its part of the plan and its decisions in Prefect's pages."""
    total_steps = sum(job.total_steps for job in submission.jobs)
    timeline_reader = TimelineReader(run.database, name="the pool", is_pool=True)
    return [
        ProgressArtifact(run.journal, total_steps=total_steps).listen,
        GanttArtifact(timeline_reader, batch=run.id).listen,
        log_decision,
        DecisionArtifact().listen,
    ]


@contextmanager
def open_pooled_run(
    batch: Batch,
    address: PoolAddress,
    options: RunOptions,
    *,
    profile: ProfileJobs = profile_on_pool,
    open_ledger: OpenLedger = Ledger,
    shown: Callable[[PoolRun, Submission], Sequence[Listener]] = shown_in_prefect,
    sweep_scheduler: SweepScheduler | None = None,
) -> Iterator[PooledRun]:
    """Opens a run of a batch on a pool.

    A flow run that is run again finds the jobs that it has submitted before, and follows those. So Retry on its page in
    Prefect resumes the batch: jobs that failed or were cancelled are due again (`reopen`). Cancel cancels it: its
    jobs write checkpoints and end (`cancel_batches`, `_cancelled_by_signals`).

    address: the pool.
    profile, open_ledger, shown: parts that tests replace.
    sweep_scheduler: the scheduler of the sweep whose trials are the jobs.

    Raises InputError if devices, base models or a batch to resume do not exist, OtherRelease if the pool is of another
    release.
    """
    home = settings.home()
    for name, value in settings.MLFLOW_PATIENCE.items():
        os.environ.setdefault(name, value)
    with ExitStack() as stack:
        database = Database(address.database)
        stack.callback(database.close)
        database.read(check_release)
        stack.enter_context(followed(database, root_run()))
        key, folder = place_of_run(batch, database, home=home, resume=options.resume)
        note_start(batch, home)
        # An earlier process that followed the run, and was considered dead, may still be about to end.
        stack.enter_context(alone_in(folder, waits=is_started_by_prefect()))
        ledger = open_ledger(address.mlflow_uri)
        pool_run = PoolRun(batch=batch, id=key, folder=folder, database=database, ledger=ledger)
        yield PooledRun(
            pool_run,
            options,
            profile=profile,
            patient_ledger=lambda: open_ledger(address.mlflow_uri, waiting=Waiting(notices())),
            shown=shown,
            sweep_scheduler=sweep_scheduler,
            stack=stack,
        )


class PooledRun:
    """A run of a batch on a pool, followed by this process.

    run: the run's place in the pool.
    patient_ledger: opens the records so that calls wait for an MLflow server that is away.
    stack: what is to be closed at the end of the run.
    """

    recorder: PoolRecorder

    def __init__(
        self,
        run: PoolRun,
        options: RunOptions,
        *,
        profile: ProfileJobs,
        patient_ledger: Callable[[], Ledger],
        shown: Callable[[PoolRun, Submission], Sequence[Listener]],
        sweep_scheduler: SweepScheduler | None,
        stack: ExitStack,
    ) -> None:
        self._run, self._options, self._profile, self._stack = run, options, profile, stack
        self._patient_ledger, self._shown, self.sweep_scheduler = patient_ledger, shown, sweep_scheduler
        self.batch, self.journal, self.is_recorded = run.batch, run.journal, False
        # A run that Prefect has started ends once all is recorded, however long that takes: no person waits for it.
        self.patience_s = math.inf if is_started_by_prefect() else None
        self._profiled: Profiled | None = None
        self._weights: Mapping[str, Path] = {}
        self._preflights: Mapping[str, Preflight] = {}
        self._events: Iterator[ExecutionEvent] = iter(())
        self._listeners: list[Listener] = []
        self._submission = run.submissions.find(run.id)
        self._shown_until = Position()
        if self._submission is not None:
            if options.resume or run.journal.get(IS_OVER):
                self._shown_until = reopen(run, self._submission)
            current_view.get().notice(f"{run.id} is followed again")

    # -- the steps -----------------------------------------------------------------------------------------------------

    def profile(self) -> None:
        """Has the jobs profiled on the pool's nodes, unless the pool has the jobs already."""
        if self._submission is not None:
            return
        batch, journal, ledger = self.batch, self.journal, self._patient_ledger()
        ledger.warm_up()
        since_s, began_s = time.time(), time.monotonic()
        facts = {"batch": batch.to_json(), "digest": digest(batch.to_json())}
        journal.put_all({**facts, "started_s": journal.get("started_s", since_s), "since_s": since_s})
        self._weights = base_weights(batch, ledger, journal, settings.home())
        batch = replace(batch, jobs=with_teachers(batch.jobs, self._weights))
        profiled = self._profile(batch, key=self._run.id, database=self._run.database)
        tell_refused(profiled)
        journal.put("profiling", {"num_trials": profiled.num_trials, "seconds": time.monotonic() - began_s})
        journal.put(
            "surveyed",
            {name: {"facts": s.facts, "refusals": to_json(s.refusals)} for name, s in profiled.preflights.items()},
        )
        self._profiled = replace(profiled, faults=with_orphans(profiled.jobs, profiled.faults))

    def make_plan(self) -> None:
        """Submits the jobs, and waits until the pool has a plan with them, or they have ended without one."""
        if self._profiled is not None:
            self._submission = self._submit(self._profiled)
            current_view.get().notice(f"{self._run.id} waits for its place in the pool's plan")
        begun(self.batch, settings.home())
        self._follow()
        for event in self._events:
            self._show(event)
            if isinstance(event, Planned):
                return

    @contextmanager
    def executor(self) -> Iterator[PooledRun]:
        """Yields this run, whose `run` follows the pool's executor."""
        yield self

    def run(self) -> bool:
        """Follows the batch to its end. Returns True; raises TerminationSignal if Prefect ends this process alone."""
        for event in self._events:
            self._show(event)
        if self._is_left.is_set():
            self.recorder.close(patience_s=0.0)
            raise TerminationSignal(signal.SIGTERM)
        return True

    def result(self, *, faults: Sequence[str] = ()) -> BatchResult:
        """Returns the result so far. faults: what could not be recorded."""
        profiling = self._profiling()
        return collect(
            self.batch,
            self.batch.jobs,
            self.journal,
            since_s=float(self.journal.get("since_s")),
            num_trials=profiling["num_trials"],
            profiling_s=profiling["seconds"],
            refused=lambda name: to_json(self._preflights[name].refusals) if name in self._preflights else [],
            faults=faults,
        )

    # -- submitting ----------------------------------------------------------------------------------------------------

    def _submit(self, profiled: Profiled) -> Submission:
        """Chooses the groups of jobs to train together, and submits the jobs to the pool."""
        run, batch, journal, scheduler = self._run, self.batch, self.journal, self.sweep_scheduler
        jobs = tuple(job for job in profiled.jobs if job.name not in profiled.faults)
        details: Mapping[str, Mapping[str, Any]] = {}
        if scheduler is not None:
            jobs = scheduler.judged(jobs)
            scheduler.begin(journal, jobs, num_slots=_num_devices(run))
            details = scheduler.details()
        together = choose_together(
            profiled,
            jobs=jobs,
            name=batch.name,
            cluster=Cluster(nodes=tuple(healthy(node) for node in Nodes(run.database).all() if healthy(node).devices)),
            journal=journal,
            goals={name: said[GOAL] for name, said in details.items() if GOAL in said},
            add_terms=batch.terms.on,
            objective=batch.terms.objective,
            time_limit_s=FUSING_TIME_LIMIT_S,
        )
        submission = self._submission_of(profiled, jobs, together=together.profiles)
        run.submissions.submit(submission, failed=profiled.faults, details=details)
        if not jobs:
            run.submissions.end(run.id)
        return submission

    def _submission_of(
        self, profiled: Profiled, jobs: tuple[Job, ...], *, together: Mapping[str, tuple[Any, ...]]
    ) -> Submission:
        context, home, batch = FlowRunContext.get(), settings.home(), self.batch
        return Submission(
            id=self._run.id,
            name=batch.name,
            jobs=jobs,
            profiles={job.name: profiled.profiles[job.name] for job in jobs},
            folder=str(self._run.folder),
            cache_dir=str(home / "cache"),
            terms=to_json(batch.terms),
            data={job.name: profiled.preflights[job.name].data for job in jobs},
            weights={name: str(folder) for name, folder in self._weights.items()},
            import_paths=(str(batch.folder),),
            checkpoint_every_s=self._options.checkpoint_every_s,
            checkpoint_root=checkpoint_root_of(self.journal, resume=False),
            flow_run=str(context.flow_run.id) if context is not None and context.flow_run is not None else "",
            started_s=float(self.journal.get("started_s")),
            together=together,
        )

    # -- following -----------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Begins to record the batch, and to read its events from the event log."""
        run, submission = self._run, self._submission
        assert submission is not None, "the jobs are submitted"
        events = BatchEvents(run.database, run.id)
        self._preflights = preflights_of(submission, self.journal.get("surveyed", {}))
        self.recorder = PoolRecorder(
            run.ledger,
            self.journal,
            batch=self.batch,
            events=events,
            notice=notices(),
            tensors=TensorStore(settings.tensors(settings.home())),
        )
        self.recorder.begin(
            JobsToRecord(
                jobs={job.name: job for job in (*self.batch.jobs, *submission.jobs)},
                preflights=self._preflights,
                profiles=submission.profiles,
            ),
            devices=[f"{node.name}:{n}" for node in Nodes(run.database).all() for n in range(len(node.devices))],
            num_trials=self._profiling()["num_trials"],
        )
        self.journal.put(FLOW_RUN_PAGE, flow_run_page())
        self.recorder.follow()
        self._listeners = [current_view.get().listen, *for_prefect(lambda: self._shown(run, submission))]
        if self.sweep_scheduler is not None:
            self._listeners.append(self.sweep_scheduler.listen)
            self._attach(self.sweep_scheduler, submission)
        self._is_left = self._stack.enter_context(_cancelled_by_signals(run))
        self._silence = threading.Timer(SILENCE_S, current_view.get().notice, [SILENCE])
        self._silence.daemon = True
        self._stack.callback(self._silence.cancel)
        self._silence.start()
        self._events = events.follow(self._shown_until, until=lambda: self._is_left.is_set() or run.has_ended())

    def _show(self, event: ExecutionEvent) -> None:
        self._silence.cancel()
        if isinstance(event, Planned):
            self._keep_first_plan(event)
        for listener in self._listeners:
            listener(event)

    def _keep_first_plan(self, event: Planned) -> None:
        """Stores the first plan since the start, to compare the result with; the pool plans all its batches."""
        if not self.journal.plans(since_s=float(self.journal.get("since_s"))):
            self.journal.write_plan({"problem": event.problem.to_json(), "plan": event.plan.to_json()}, why=event.why)

    def _attach(self, scheduler: SweepScheduler, submission: Submission) -> None:
        """Attaches the sweep scheduler to the run; repeats the steering requests that an earlier process has made."""
        run = self._run

        def ask(steering: SteeringRequest) -> None:
            if steering and not run.has_ended():
                Requests(run.database).ask(wishes.RequestKind.DIRECT, {"batch": run.id, **steering.to_json()})

        scheduler.begin(self.journal, submission.jobs, num_slots=_num_devices(run))
        ask(scheduler.asked())
        scheduler.attach(ask, later=lambda act: act(), started_s=float(self.journal.get("started_s")))

    def _profiling(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.journal.get("profiling", {"num_trials": 0, "seconds": 0.0})
        return found


def _num_devices(run: PoolRun) -> int:
    return sum(len(node.devices) for node in Nodes(run.database).all())


def preflights_of(submission: Submission, known: Mapping[str, Any]) -> dict[str, Preflight]:
    """Returns the preflights of the jobs, as far as they are stored.

    submission: has the facts of the jobs' data.
    known: the other facts and the refusals, by job.
    """
    return {
        name: Preflight(
            job=name,
            data=submission.data.get(name, {}),
            facts=found["facts"],
            candidates=(),
            refusals=tuple(from_json(Refusal, refusal) for refusal in found["refusals"]),
        )
        for name, found in known.items()
    }


@contextmanager
def _cancelled_by_signals(run: PoolRun) -> Iterator[threading.Event]:
    """Makes Ctrl-C or SIGTERM cancel the batch: its jobs write checkpoints and end. A second signal ends this process.

    A process that Prefect has started, and that a signal ends without a cancellation, leaves the batch alone: it sets
    the event that this context yields.
    """
    is_left = threading.Event()
    notice = current_view.get().notice

    def act() -> None:
        if is_started_by_prefect() and not is_being_cancelled():
            is_left.set()
            return
        notice(f"cancelling {run.id}: its jobs write checkpoints; once more to leave at once")
        run.ask(wishes.RequestKind.CANCEL)

    with stopped_by_signals(act):
        yield is_left
