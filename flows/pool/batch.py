"""Trains a batch on a pool: profiles its jobs, submits them to the pool's executor, and follows and records them.

From then on the pool owns the jobs: this process may end and be started again without any effect on them.
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
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal

from ringmaster.flows import settings
from ringmaster.flows.batch.artifacts import DecisionArtifact
from ringmaster.flows.batch.flow_runs import is_being_cancelled, is_started_by_prefect, root_run
from ringmaster.flows.batch.fusing import choose_together
from ringmaster.flows.batch.records import finish_records, log_decision, tell_refused
from ringmaster.flows.batch.result import BatchResult, collect
from ringmaster.flows.batch.run_folder import alone_in, base_weights, begun, checkpoint_root_of, note_start
from ringmaster.flows.batch.run_options import RunOptions
from ringmaster.flows.batch.waiting import for_prefect, notices
from ringmaster.flows.pool.own_node import healthy
from ringmaster.flows.pool.profiling import profile_on_pool
from ringmaster.flows.pool.run import IS_OVER, PoolRun, place_of_run, reopen
from ringmaster.flows.process.interrupts import stopped_by_signals
from ringmaster.flows.reports.page_links import flow_run_page, show_records
from ringmaster.flows.reports.progress import current_view
from ringmaster.flows.settings import PoolAddress
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.model_lineage.waiting import Waiting
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.batch.parents import with_teachers
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
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.releases import check_release
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.tasks.timeline.task import GanttArtifact, ProgressArtifact
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


def train_on_pool(
    batch: Batch,
    address: PoolAddress,
    options: RunOptions,
    *,
    profile: ProfileJobs = profile_on_pool,
    open_ledger: OpenLedger = Ledger,
    shown: Callable[[PoolRun, Submission], Sequence[Listener]] = shown_in_prefect,
    sweep_scheduler: SweepScheduler | None = None,
) -> BatchResult:
    """Trains the jobs of a batch on a pool, and returns its result.

    A flow run that is run again finds the jobs that it has submitted before, and follows those.

    batch: the batch.
    address: the pool.
    profile, open_ledger, shown: parts that tests replace.
    sweep_scheduler: the scheduler of the sweep whose trials are the jobs.

    Raises InputError if devices, base models or a batch to resume do not exist, OtherRelease if the pool is of another
    release.
    """
    home = settings.home()
    view = current_view.get()
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
        run = PoolRun(batch=batch, id=key, folder=folder, database=database, ledger=open_ledger(address.mlflow_uri))
        submission = run.submissions.find(key)
        shown_until = Position()
        if submission is None:
            submission = _hand_over(
                replace(run, ledger=open_ledger(address.mlflow_uri, waiting=Waiting(notices()))),
                home=home,
                profile=profile,
                checkpoint_every_s=options.checkpoint_every_s,
                sweep_scheduler=sweep_scheduler,
            )
            view.notice(f"{key} waits for its place in the pool's plan")
        else:
            if options.resume or run.journal.get(IS_OVER):
                shown_until = reopen(run, submission)
            view.notice(f"{key} is followed again")
        begun(batch, home)
        return _follow(run, submission, shown, after=shown_until, sweep_scheduler=sweep_scheduler)


def _hand_over(
    run: PoolRun,
    *,
    home: Path,
    profile: ProfileJobs,
    checkpoint_every_s: float | None,
    sweep_scheduler: SweepScheduler | None = None,
) -> Submission:
    """Profiles the batch and submits it to the pool; the ledger of `run` waits for an MLflow server that is away."""
    batch, journal = run.batch, run.journal
    run.ledger.warm_up()
    since_s, started_s = time.time(), time.monotonic()
    facts = {"batch": batch.to_json(), "digest": digest(batch.to_json())}
    journal.put_all({**facts, "started_s": journal.get("started_s", since_s), "since_s": since_s})
    weights = base_weights(batch, run.ledger, journal, home)
    checkpoint_root = checkpoint_root_of(journal, resume=False)
    batch = replace(batch, jobs=with_teachers(batch.jobs, weights))
    profiled = profile(batch, key=run.id, database=run.database)
    tell_refused(profiled)
    faults = with_orphans(profiled)
    journal.put("profiling", {"num_trials": profiled.num_trials, "seconds": time.monotonic() - started_s})
    journal.put(
        "surveyed",
        {name: {"facts": s.facts, "refusals": to_json(s.refusals)} for name, s in profiled.preflights.items()},
    )
    jobs = tuple(job for job in profiled.jobs if job.name not in faults)
    details: Mapping[str, Mapping[str, Any]] = {}
    if sweep_scheduler is not None:
        jobs = sweep_scheduler.judged(jobs)
        sweep_scheduler.begin(journal, jobs, num_slots=_num_devices(run))
        details = sweep_scheduler.details()
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
    context = FlowRunContext.get()
    submission = Submission(
        id=run.id,
        name=batch.name,
        jobs=jobs,
        profiles={job.name: profiled.profiles[job.name] for job in jobs},
        folder=str(run.folder),
        cache_dir=str(home / "cache"),
        terms=to_json(batch.terms),
        data={job.name: profiled.preflights[job.name].data for job in jobs},
        weights={name: str(folder) for name, folder in weights.items()},
        import_paths=(str(batch.folder),),
        checkpoint_every_s=checkpoint_every_s,
        checkpoint_root=checkpoint_root,
        flow_run=str(context.flow_run.id) if context is not None and context.flow_run is not None else "",
        started_s=float(journal.get("started_s")),
        together=together.profiles,
    )
    run.submissions.submit(submission, failed=faults, details=details)
    if not jobs:
        run.submissions.end(run.id)
    return submission


def with_orphans(profiled: Profiled) -> dict[str, str]:
    """Returns the faults of the jobs, and those of all jobs that adapt a job which cannot be trained."""
    faults = dict(profiled.faults)
    while True:
        left = [job for job in profiled.jobs if job.name not in faults]
        orphans = [(job, gone) for job in left if (gone := [parent for parent in job.parents if parent in faults])]
        if not orphans:
            return faults
        for job, gone in orphans:
            faults[job.name] = f"its {'base' if gone[0] == job.base else 'parent'} {gone[0]} has failed"


def _follow(
    run: PoolRun,
    submission: Submission,
    shown: Callable[[PoolRun, Submission], Sequence[Listener]],
    *,
    after: Position,
    sweep_scheduler: SweepScheduler | None = None,
) -> BatchResult:
    """Shows and records the events of a batch after the position `after` until the batch has ended."""
    view, journal, notice = current_view.get(), run.journal, notices()
    events = BatchEvents(run.database, run.id)
    profiling = journal.get("profiling", {"num_trials": 0, "seconds": 0.0})
    preflights = preflights_of(submission, journal.get("surveyed", {}))
    tensors = TensorStore(settings.tensors(settings.home()))
    recorder = PoolRecorder(run.ledger, journal, batch=run.batch, events=events, notice=notice, tensors=tensors)
    recorder.begin(
        JobsToRecord(
            jobs={job.name: job for job in (*run.batch.jobs, *submission.jobs)},
            preflights=preflights,
            profiles=submission.profiles,
        ),
        devices=[f"{node.name}:{n}" for node in Nodes(run.database).all() for n in range(len(node.devices))],
        num_trials=profiling["num_trials"],
    )
    journal.put(FLOW_RUN_PAGE, flow_run_page())
    recorder.follow()
    since_s = float(journal.get("since_s"))
    keep_plan = partial(_keep_first_plan, journal, since_s=since_s)
    listeners: list[Listener] = [keep_plan, view.listen, *for_prefect(lambda: shown(run, submission))]
    if sweep_scheduler is not None:
        listeners.append(sweep_scheduler.listen)
        _conduct(sweep_scheduler, run, submission)
    silence = threading.Timer(SILENCE_S, view.notice, [SILENCE])
    silence.daemon = True
    with _cancelled_by_signals(run) as is_left, ExitStack() as stack:
        stack.callback(silence.cancel)
        silence.start()
        for event in events.follow(after, until=lambda: is_left.is_set() or run.has_ended()):
            silence.cancel()
            for listener in listeners:
                listener(event)
        if is_left.is_set():
            recorder.close(patience_s=0.0)
            raise TerminationSignal(signal.SIGTERM)
    summary = partial(
        collect,
        run.batch,
        run.batch.jobs,
        journal,
        since_s=since_s,
        num_trials=profiling["num_trials"],
        profiling_s=profiling["seconds"],
        refused=lambda name: to_json(preflights[name].refusals) if name in preflights else [],
    )
    result = summary()
    journal.put("status", result.status)
    finish_records(recorder, result)
    # A run that Prefect has started ends once all is recorded, however long that takes: no person waits for it.
    faults = recorder.close(patience_s=math.inf if is_started_by_prefect() else None)
    if sweep_scheduler is not None:
        sweep_scheduler.close(run_id=recorder.run_of())
    journal.put("is_recorded", recorder.is_complete)
    result = summary(faults=faults)  # the models have their URIs now
    show_records(recorder, result)
    journal.put(IS_OVER, True)
    return result


def _conduct(sweep_scheduler: SweepScheduler, run: PoolRun, submission: Submission) -> None:
    """Attaches the sweep scheduler to the run; repeats the steering requests that an earlier process has made."""

    def ask(steering: SteeringRequest) -> None:
        if steering and not run.has_ended():
            Requests(run.database).ask(wishes.RequestKind.DIRECT, {"batch": run.id, **steering.to_json()})

    sweep_scheduler.begin(run.journal, submission.jobs, num_slots=_num_devices(run))
    ask(sweep_scheduler.asked())
    sweep_scheduler.attach(ask, later=lambda act: act(), started_s=float(run.journal.get("started_s")))


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


def _keep_first_plan(journal: Journal, event: ExecutionEvent, *, since_s: float) -> None:
    """Stores the first plan since then, to compare the result with; the pool's own plans are of all its batches."""
    if isinstance(event, Planned) and not journal.plans(since_s=since_s):
        journal.write_plan({"problem": event.problem.to_json(), "plan": event.plan.to_json()}, why=event.why)


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
