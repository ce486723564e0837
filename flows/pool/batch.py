"""Trains a batch on a pool: measures what is not known, hands the jobs to the pool's executor, and follows them.

The jobs are the pool's from then on: this process may end, and be started again, without any of them noticing.
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
from ringmaster.flows.batch_artifacts import DecisionArtifact
from ringmaster.flows.batch_records import finish_records, log_decision, tell_refused
from ringmaster.flows.flow_runs import is_being_cancelled, is_started_by_prefect, root_run
from ringmaster.flows.fusing import choose_together
from ringmaster.flows.interrupts import stopped_by_signals
from ringmaster.flows.page_links import flow_run_page, show_records
from ringmaster.flows.pool.own_node import healthy
from ringmaster.flows.pool.profiling import profile_on_pool
from ringmaster.flows.pool.run import IS_OVER, PoolRun, place_of_run, reopen
from ringmaster.flows.result import BatchResult, collect
from ringmaster.flows.run_folder import alone_in, base_weights, begun, checkpoint_root_of, note_start
from ringmaster.flows.settings import PoolAddress
from ringmaster.flows.views import current_view
from ringmaster.flows.waiting import for_prefect, notices
from ringmaster.model_lineage.ledger import Ledger
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.model_lineage.waiting import Waiting
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.batch.parents import with_teachers
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.directions import GOAL, Directions
from ringmaster.tasks.execution.events import ExecutionEvent, Listener, Planned
from ringmaster.tasks.execution.historian import Historian
from ringmaster.tasks.execution.journal import Journal
from ringmaster.tasks.execution.task import GanttArtifact, ProgressArtifact
from ringmaster.tasks.pool import requests as wishes
from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.pool.handed_over import followed
from ringmaster.tasks.pool.nodes import Nodes
from ringmaster.tasks.pool.releases import check_release
from ringmaster.tasks.pool.requests import Requests
from ringmaster.tasks.pool.submissions import Submission
from ringmaster.tasks.pool.told import Told
from ringmaster.tasks.profiling.stage import Profiled
from ringmaster.tasks.recording import PoolRecorder, Recorded
from ringmaster.tasks.scribe import FLOW_RUN_PAGE
from ringmaster.tasks.sweeping.conductor import Conductor
from ringmaster.techniques.surveys import Refusal, Survey
from ringmaster.techniques.values import digest, from_json, to_json

FUSING_TIME_LIMIT_S = 10.0  # for choosing which jobs are trained together
SILENCE_S = 30.0  # longer than a first plan takes
SILENCE = "the pool has no plan for it yet: see that an executor leads (`ringmaster executor`) and that nodes serve"


class OpenLedger(Protocol):
    """How the pool's records are opened, as `Ledger` does it."""

    def __call__(self, uri: str, /, *, waiting: Waiting | None = None) -> Ledger:
        """The records at an address; calls wait for a server that is away where something is given to wait by."""


class ProfileJobs(Protocol):
    """How the jobs of a batch are measured, as `profile_on_pool` does it."""

    def __call__(self, batch: Batch, *, key: str, database: Database) -> Profiled:
        """What was measured."""


def shown_in_prefect(run: PoolRun, submission: Submission) -> Sequence[Listener]:
    """Listeners that show a batch's progress, its part of the pool's plan and what is decided in Prefect's pages."""
    total_steps = sum(job.total_steps for job in submission.jobs)
    historian = Historian(run.database, name="the pool", is_pool=True)
    return [
        ProgressArtifact(run.journal, total_steps=total_steps).listen,
        GanttArtifact(historian, batch=run.id).listen,
        log_decision,
        DecisionArtifact().listen,
    ]


def train_on_pool(
    batch: Batch,
    address: PoolAddress,
    *,
    resume: bool = False,
    checkpoint_every_s: float | None = None,
    profile: ProfileJobs = profile_on_pool,
    open_ledger: OpenLedger = Ledger,
    shown: Callable[[PoolRun, Submission], Sequence[Listener]] = shown_in_prefect,
    conductor: Conductor | None = None,
) -> BatchResult:
    """Has a pool train the jobs of a batch, and returns what became of them.

    A flow run that is run again finds the jobs that it has handed over already, and follows those. resume: goes on with
    the newest run of the batch. conductor: of the sweep whose trials the jobs are.

    Raises InputError where devices, base models or a batch to resume are not there, OtherRelease where the pool is of
    another release.
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
        key, folder = place_of_run(batch, database, home=home, resume=resume)
        note_start(batch, home)
        # A process that followed the run before us, and was taken for dead, may still be about to end.
        stack.enter_context(alone_in(folder, waits=is_started_by_prefect()))
        run = PoolRun(batch=batch, id=key, folder=folder, database=database, ledger=open_ledger(address.mlflow_uri))
        submission = run.submissions.find(key)
        shown_until = 0
        if submission is None:
            submission = _hand_over(
                replace(run, ledger=open_ledger(address.mlflow_uri, waiting=Waiting(notices()))),
                home=home,
                profile=profile,
                checkpoint_every_s=checkpoint_every_s,
                conductor=conductor,
            )
            view.notice(f"{key} waits for its place in the pool's plan")
        else:
            if resume or run.journal.get(IS_OVER):
                shown_until = reopen(run, submission)
            view.notice(f"{key} is followed again")
        begun(batch, home)
        return _follow(run, submission, shown, after=shown_until, conductor=conductor)


def _hand_over(
    run: PoolRun,
    *,
    home: Path,
    profile: ProfileJobs,
    checkpoint_every_s: float | None,
    conductor: Conductor | None = None,
) -> Submission:
    """Measures the batch, and submits it to the pool; the ledger of `run` waits for an MLflow that is away."""
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
        {name: {"facts": s.facts, "refusals": to_json(s.refusals)} for name, s in profiled.surveys.items()},
    )
    jobs = tuple(job for job in profiled.jobs if job.name not in faults)
    details: Mapping[str, Mapping[str, Any]] = {}
    if conductor is not None:
        jobs = conductor.judged(jobs)
        conductor.begin(journal, jobs, num_slots=_num_devices(run))
        details = conductor.details()
    together = choose_together(
        profiled,
        jobs=jobs,
        name=batch.name,
        cluster=Cluster(nodes=tuple(healthy(node) for node in Nodes(run.database).all() if healthy(node).devices)),
        journal=journal,
        goals={name: said[GOAL] for name, said in details.items() if GOAL in said},
        on_terms=batch.terms.on,
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
        data={job.name: profiled.surveys[job.name].data for job in jobs},
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
    """The faults, and those of the jobs that adapt a job which cannot be trained."""
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
    after: int,
    conductor: Conductor | None = None,
) -> BatchResult:
    """Shows, after an event, and records what becomes of a batch until it has ended."""
    view, journal, notice = current_view.get(), run.journal, notices()
    told = Told(run.database)
    profiling = journal.get("profiling", {"num_trials": 0, "seconds": 0.0})
    surveys = surveys_of(submission, journal.get("surveyed", {}))
    tensors = TensorStore(settings.tensors(settings.home()))
    recorder = PoolRecorder(run.ledger, journal, batch=run.batch, told=told, key=run.id, notice=notice, tensors=tensors)
    recorder.begin(
        Recorded(
            jobs={job.name: job for job in (*run.batch.jobs, *submission.jobs)},
            surveys=surveys,
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
    if conductor is not None:
        listeners.append(conductor.listen)
        _conduct(conductor, run, submission)
    silence = threading.Timer(SILENCE_S, view.notice, [SILENCE])
    silence.daemon = True
    with _cancelled_by_signals(run) as is_left, ExitStack() as stack:
        stack.callback(silence.cancel)
        silence.start()
        for entry in told.follow(run.id, after, until=lambda: is_left.is_set() or run.has_ended()):
            silence.cancel()
            for listener in listeners:
                listener(entry.event)
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
        refused=lambda name: to_json(surveys[name].refusals) if name in surveys else [],
    )
    result = summary()
    journal.put("status", result.status)
    finish_records(recorder, result)
    # Nobody waits for a run that Prefect has started: it ends once all is recorded, however long that takes.
    faults = recorder.close(patience_s=math.inf if is_started_by_prefect() else None)
    if conductor is not None:
        conductor.close(run_id=recorder.run_of())
    journal.put("is_recorded", recorder.is_complete)
    result = summary(faults=faults)  # the models have their addresses now
    show_records(recorder, result)
    journal.put(IS_OVER, True)
    return result


def _conduct(conductor: Conductor, run: PoolRun, submission: Submission) -> None:
    """Has a sweep's trials steered from here; what was asked for before we died is asked for again."""

    def ask(directions: Directions) -> None:
        if directions and not run.has_ended():
            Requests(run.database).ask(wishes.DIRECT, {"batch": run.id, **directions.to_json()})

    conductor.begin(run.journal, submission.jobs, num_slots=_num_devices(run))
    ask(conductor.asked())
    conductor.attach(ask, later=lambda act: act(), started_s=float(run.journal.get("started_s")))


def _num_devices(run: PoolRun) -> int:
    return sum(len(node.devices) for node in Nodes(run.database).all())


def surveys_of(submission: Submission, known: Mapping[str, Any]) -> dict[str, Survey]:
    """What was found of each job before it was measured, as far as records tell it. known: what was kept of it."""
    return {
        name: Survey(
            job=name,
            data=submission.data.get(name, {}),
            facts=found["facts"],
            candidates=(),
            refusals=tuple(from_json(Refusal, refusal) for refusal in found["refusals"]),
        )
        for name, found in known.items()
    }


def _keep_first_plan(journal: Journal, event: ExecutionEvent, *, since_s: float) -> None:
    """The first plan since then is what the result is compared with; the pool's own are of all its batches."""
    if isinstance(event, Planned) and not journal.plans(since_s=since_s):
        journal.write_plan({"problem": event.problem.to_json(), "plan": event.plan.to_json()}, why=event.why)


@contextmanager
def _cancelled_by_signals(run: PoolRun) -> Iterator[threading.Event]:
    """Ctrl-C or SIGTERM cancels the batch: its jobs write checkpoints and end; once more, and we do not wait for it.

    A process that Prefect has started and ends for another reason leaves the batch alone: the event tells so.
    """
    is_left = threading.Event()
    notice = current_view.get().notice

    def act() -> None:
        if is_started_by_prefect() and not is_being_cancelled():
            is_left.set()
            return
        notice(f"cancelling {run.id}: its jobs write checkpoints; once more to leave at once")
        run.ask(wishes.CANCEL)

    with stopped_by_signals(act):
        yield is_left
