"""A run of a batch on a pool: what the stages of `train_batch` do there.

The pool's controller plans the batch together with all others, and executes it. This process profiles the jobs,
submits them, and follows and records what becomes of them. It may end and be started again without any effect on them.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from prefect.exceptions import TerminationSignal

from ringmaster.errors import BatchCancelled
from ringmaster.flows import settings
from ringmaster.flows.batch import run_folder
from ringmaster.flows.batch.artifacts import flow_run_page
from ringmaster.flows.batch.batch_run import BatchRun
from ringmaster.flows.batch.flow_runs import (
    current_flow_run,
    for_prefect,
    is_being_cancelled,
    is_started_by_prefect,
    notices,
    root_run,
)
from ringmaster.flows.batch.group_choice import choose_job_groups, goals_in
from ringmaster.flows.batch.result import are_measured
from ringmaster.flows.batch.run_options import RunOptions
from ringmaster.flows.caller import Caller
from ringmaster.flows.pool.batch_requests import check_terms
from ringmaster.flows.pool.follower import (
    PoolRun,
    followed_batch,
    known_preflights,
    num_devices,
    place_of_run,
    reopen,
    shown_in_prefect,
)
from ringmaster.flows.pool.own_node import healthy
from ringmaster.flows.pool.profiling import keeping_a_node, profile_on_pool
from ringmaster.flows.settings import PoolAddress
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.mlflow_calls import OutageRetry
from ringmaster.tasks.background_worker import background_thread
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.control.requests import RequestKind, Requests
from ringmaster.tasks.execution.execution_events import PlanUpdate
from ringmaster.tasks.execution.steering import first_goals
from ringmaster.tasks.planning.term_features import submitted_features
from ringmaster.tasks.pool.active_batches import with_features_of_pool
from ringmaster.tasks.pool.event_log import BatchEvents, LogPosition
from ringmaster.tasks.pool.node_hooks import store_facts
from ringmaster.tasks.pool.nodes import NodeRegistry
from ringmaster.tasks.pool.submissions import (
    BatchMeasurement,
    Submission,
    Submissions,
    followed,
    is_cancelled,
    measured,
)
from ringmaster.tasks.profiling.stage import ProfilingResult
from ringmaster.tasks.recording.async_recorder import PoolRecorder
from ringmaster.tasks.storage.database import Database, DatabaseClosed
from ringmaster.tasks.storage.fact_keys import (
    BATCH,
    CHECKPOINT_ROOT,
    FLOW_RUN_PAGE,
    IS_MEASURED,
    IS_OVER,
    SINCE,
    STARTED,
)
from ringmaster.tasks.storage.journal import JobRecord, changed
from ringmaster.tasks.storage.schema import check_release
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.techniques.checkpoints.checkpoint import store_model

CANCELLED_EARLY = "batch {} was cancelled before its jobs were planned"
DEVICES_OF_USERS = (
    "devices: the jobs without a user get {} at a time; to limit those of {}, set max_devices under users:"
)
CANCELLED_EVERY_S = 2.0  # how often a process looks whether its batch is cancelled
FUSING_WORK_S = 10.0  # to choose which jobs are trained together


@contextmanager
def open_pooled_run(
    batch: Batch,
    address: PoolAddress,
    options: RunOptions,
    *,
    caller: Caller,
    sweep_scheduler: SweepScheduler | None = None,
) -> Iterator[PooledRun]:
    """Opens a run of a batch on a pool.

    A flow run that is run again finds the jobs that it has submitted before, and follows those. So Retry on its page in
    Prefect resumes the batch: jobs that failed or were cancelled are due again (`reopen`). Cancel cancels it: its
    jobs write checkpoints and end (`cancel_batches`, `_cancelled_by_signals`).

    address: the pool.
    caller: the caller of the flow, which shows the progress.
    sweep_scheduler: the scheduler of the sweep whose trials are the jobs.

    Raises InputError if devices, base models or a batch to resume do not exist, ReleaseMismatch if the pool is of
    another release.
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
        run_folder.mark_starting(batch, home)
        # An earlier process that followed the run, and was considered dead, may still be about to end.
        stack.enter_context(run_folder.exclusive_lock(folder, waits=is_started_by_prefect()))
        ledger = Ledger(address.mlflow_uri)
        if Submissions(database).status(key) is None:
            check_terms(batch, database, notice=caller.view.notice)
        pool_run = PoolRun(caller=caller, batch=batch, id=key, folder=folder, database=database, ledger=ledger)
        stack.enter_context(cancelled_from_outside(pool_run))
        yield PooledRun(pool_run, options, sweep_scheduler=sweep_scheduler, stack=stack)


@contextmanager
def cancelled_from_outside(run: PoolRun) -> Iterator[None]:
    """Inside the context, the batch is cancelled once `ringmaster jobs cancel` or the flow run's state requests it.

    Of a process that Prefect has started, Prefect takes care. Before the jobs are submitted, this process is stopped,
    as Ctrl-C would; BatchCancelled is raised then. After that, the pool's controller cancels them.
    """
    flow_run, was_stopped, signals = root_run(), threading.Event(), run.caller.interrupts
    is_command = signals.is_of_command  # else a program of the user's, which is not ended: its jobs are, once they are

    def cancel_submitted() -> bool:
        is_submitted = run.submissions.status(run.id) is not None
        if is_submitted:
            key = f"cancel {run.id} of {flow_run}"
            Requests(run.database).ask(RequestKind.CANCEL, {"batch": run.id, "jobs": []}, key=key)
        return is_submitted

    def poll(over: threading.Event) -> None:
        with suppress(DatabaseClosed):
            while not over.wait(CANCELLED_EVERY_S):
                if not (is_cancelled(run.database, run.id, flow_run=flow_run) or is_being_cancelled(flow_run)):
                    continue
                if cancel_submitted():
                    return
                if is_command:
                    was_stopped.set()
                    os.kill(os.getpid(), signal.SIGINT)  # not SIGTERM, which Prefect sends once more
                    return

    check_cancelled(run)
    if is_started_by_prefect() or not flow_run:
        yield
        return
    with background_thread(poll, name="cancellation", timeout_s=0.0):
        try:
            yield
        except SystemExit:
            if not was_stopped.is_set():
                raise
            signals.first_signal = None  # nobody has pressed Ctrl-C
            cancel_submitted()  # a moment ago
            raise BatchCancelled(CANCELLED_EARLY.format(run.batch.name)) from None


def check_cancelled(run: PoolRun) -> None:
    """Raises BatchCancelled if the batch was cancelled and none of its jobs is submitted.

    Prefect starts the process of a flow run that is cancelled a moment before all the same.
    """
    if run.submissions.status(run.id) is None and is_cancelled(run.database, run.id, flow_run=root_run()):
        raise BatchCancelled(CANCELLED_EARLY.format(run.batch.name))


class PooledRun(BatchRun):
    """A run of a batch on a pool, followed by this process.

    run: the run's place in the pool.
    """

    def __init__(
        self,
        run: PoolRun,
        options: RunOptions,
        *,
        sweep_scheduler: SweepScheduler | None,
        stack: ExitStack,
    ) -> None:
        events = BatchEvents(run.database, run.id)
        recorder = PoolRecorder(
            run.ledger, run.journal, batch=run.batch, events=events, notice=notices(run.caller.view.notice)
        )
        super().__init__(
            run.batch,
            run.journal,
            folder=run.folder,
            view=run.caller.view,
            recorder=recorder,
            sweep_scheduler=sweep_scheduler,
            stack=stack,
        )
        self._run, self._options = run, options
        # A run that Prefect has started ends once all is recorded, however long that takes: no person waits for it.
        self.record_timeout_s = math.inf if is_started_by_prefect() else None
        self._kept_node = stack.enter_context(ExitStack())  # from the profiling until the jobs are submitted
        self._weights: Mapping[str, Path] = {}  # the folders of the models that jobs adapt, by job or model
        self._submission = run.submissions.find(run.id)
        self._shown_until = LogPosition()
        if self._submission is not None:
            if options.resume or run.journal.get(IS_OVER):
                self._shown_until = reopen(run, self._submission)
            self.view.notice(f"{run.id} is followed again")

    # -- the stages ----------------------------------------------------------------------------------------------------

    def profile(self) -> ProfilingResult:
        """Has the jobs profiled on the pool's nodes, unless the pool has them already."""
        if (submission := self._submission) is None:
            return super().profile()
        preflights = known_preflights(self._run, submission)
        return ProfilingResult(jobs=submission.jobs, preflights=preflights, profiles=submission.profiles)

    def _profile_jobs(self) -> ProfilingResult:
        """Measures or predicts the options of the jobs on one node of each kind."""
        batch, journal = self.batch, self.journal
        ledger = Ledger(self._run.ledger.tracking_uri, waiting=OutageRetry(notices(self.view.notice)))
        jobs = tuple(job.name for job in batch.jobs)
        self._kept_node.enter_context(
            measured(
                self._run.database, BatchMeasurement(id=self._run.id, name=batch.name, jobs=jobs, flow_run=root_run())
            )
        )
        self._kept_node.enter_context(keeping_a_node(Requests(self._run.database)))
        ledger.warm_up()
        since_s = journal.clock()
        journal.put_all({BATCH: batch.to_json(), STARTED: journal.get(STARTED, since_s), SINCE: since_s})
        store_facts(batch.jobs, journal)
        run_folder.checkpoint_root_of(journal, resume=False)
        batch, self._weights = run_folder.with_models(batch, ledger, journal, settings.home())
        profiling = profile_on_pool(batch, key=self._run.id, database=self._run.database, caller=self._run.caller)
        journal.put(IS_MEASURED, are_measured(profiling.profiles) and are_measured(profiling.groups))
        return profiling

    def begin(self, profiling: ProfilingResult) -> None:
        """Submits the jobs, unless the pool has them already, and begins to record and to follow them."""
        run, submission = self._run, self._submission
        if submission is None:
            submission = self._submit(profiling)
            self.view.notice(f"{run.id} waits for its place in the pool's plan")
        self._kept_node.close()
        run_folder.mark_started(self.batch, settings.home())
        nodes = NodeRegistry(run.database).all()
        run.journal.put(FLOW_RUN_PAGE, flow_run_page())
        self._begin_records(profiling, [f"{node.name}:{n}" for node in nodes for n in range(len(node.devices))])
        self._follower = self._stack.enter_context(
            followed_batch(
                run,
                submission,
                after=self._shown_until,
                listeners=for_prefect(lambda: shown_in_prefect(run, submission), self.view.notice),
                sweep_scheduler=self._scheduler,
            )
        )
        self._listener_faults = self._follower.listener_faults

    def make_plan(self, profiling: ProfilingResult) -> PlanUpdate | None:
        """Waits until the pool's controller has a plan with the batch; returns None if it has ended without one."""
        return self._follower.follow_to_plan()

    def show_plan(self, plan: PlanUpdate | None) -> None:
        """Does nothing: the listeners of the follower show plans."""

    def execute(self, plan: PlanUpdate | None) -> Mapping[str, JobRecord]:
        """Follows the batch until the pool's controller has ended it."""
        try:
            self._follower.run()
        except TerminationSignal:
            self._recorder.close(timeout_s=0.0)
            raise
        return self.journal.jobs()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _submit(self, profiling: ProfilingResult) -> Submission:
        """Chooses the groups of jobs to train together, and submits the jobs to the pool."""
        run, batch, journal, scheduler = self._run, self.batch, self.journal, self._scheduler
        jobs = tuple(job for job in profiling.jobs if job.name not in profiling.faults)
        if scheduler is not None:
            scheduler.begin(journal, jobs, num_slots=num_devices(run))
            changes = scheduler.record_changes()
        else:
            changes = {name: {"goal": goal} for name, goal in first_goals(jobs, known={}).items()}
        records = {name: changed(JobRecord(name=name), its) for name, its in changes.items()}
        groups = choose_job_groups(
            profiling,
            jobs=jobs,
            name=batch.name,
            cluster=Cluster(
                nodes=tuple(healthy(node) for node in NodeRegistry(run.database).all() if healthy(node).devices)
            ),
            records={},
            goals=goals_in(records),
            add_terms=with_features_of_pool(batch.terms, run.database).on,
            objective=batch.terms.objective,
            work_s=FUSING_WORK_S,
        )
        groups.report(journal, notice=self.view.notice)
        flow_run, terms = current_flow_run(), batch.terms
        number = next(iter(batch.devices.values())) if isinstance(batch.devices, Mapping) else None
        limit = number if isinstance(number, int) else None
        terms = replace(terms, features=submitted_features(terms.features, batch=run.id, max_devices=limit))
        if limit is not None and batch.users:
            self.view.notice(DEVICES_OF_USERS.format(limit, ", ".join(sorted({*batch.users.values()}))))
        submission = Submission(
            id=run.id,
            name=batch.name,
            jobs=jobs,
            profiles={each.name: profiling.profiles[each.name] for job in jobs for each in job.with_variants()},
            folder=str(run.folder),
            cache_dir=str(settings.home() / "cache"),
            terms=terms,
            data={job.name: profiling.preflights[job.name].data for job in jobs},
            weights={name: str(folder) for name, folder in self._weights.items()},
            import_paths=(str(batch.folder),),
            checkpoint_every_s=self._options.checkpoint_every_s,
            keep_checkpoints=batch.keep_checkpoints,
            checkpoint_root=journal.get(CHECKPOINT_ROOT),
            flow_run="" if flow_run is None else str(flow_run.id),
            started_s=float(journal.get(STARTED)),
            together=groups.profiles,
        )
        store_weights(submission)
        check_cancelled(run)
        run.submissions.submit(submission, failed=profiling.faults, records=records)
        if not jobs:
            run.submissions.end(run.id)
        return submission


def store_weights(submission: Submission) -> None:
    """Stores the models from outside of a batch that its jobs begin with, for nodes without their folders."""
    paths = submission.run_paths()
    for folder in set(paths.weights.values()):
        if (url := paths.weights_url(folder)) is not None:
            store_model(folder, url)
