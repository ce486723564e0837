"""A run of a batch on this machine alone: what the steps of `train` do there."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial

from ringmaster.codec import from_json, to_json
from ringmaster.errors import InputError, LedgerError, ProblemError, UntrainableJobs, input_errors
from ringmaster.flows import settings
from ringmaster.flows.batch.artifacts import DecisionArtifact, show_plan
from ringmaster.flows.batch.context import RunContext, open_run_context
from ringmaster.flows.batch.fusing import ChosenGroups, choose_together, goals_in
from ringmaster.flows.batch.predictions import load_now, prediction_of, profiled_at, surroundings_of
from ringmaster.flows.batch.probe import unfit
from ringmaster.flows.batch.records import close_records, failure, failures_told, log_decision, tell_refused
from ringmaster.flows.batch.result import MEASURED, BatchResult, are_measured, collect
from ringmaster.flows.batch.run_options import RunOptions
from ringmaster.flows.process.interrupts import stopped_by_signals
from ringmaster.flows.reports.page_links import flow_run_page
from ringmaster.flows.reports.progress import current_view
from ringmaster.tasks.alarms import DeadlineAlarms
from ringmaster.tasks.alarms.task import sound
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.batch.parents import with_orphans
from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.execution.engine import LOCAL, Engine, EngineContext, build_engine
from ringmaster.tasks.execution.events import FIRST_PREDICTION, NEWEST_PREDICTION, JobEnded, Listener, Planned
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.forecast import ForecastConditions
from ringmaster.tasks.execution.job_table import JobState, JobTable
from ringmaster.tasks.execution.known_nodes import following
from ringmaster.tasks.execution.local_engine import StepEvents, watching
from ringmaster.tasks.execution.plan_manager import problem_left
from ringmaster.tasks.execution.replanner import POLICY, Replanner
from ringmaster.tasks.execution.task import as_task
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.gantt import counted
from ringmaster.tasks.planning.plans.checked_plans import checked_plan
from ringmaster.tasks.planning.problems.terms import plan_giving_up_deadlines
from ringmaster.tasks.profiling.preflight import AlikeJobs, distinct
from ringmaster.tasks.profiling.speed_beliefs import MachineLoad
from ringmaster.tasks.profiling.stage import Profiled, profile_jobs
from ringmaster.tasks.recording.async_recorder import JobsToRecord
from ringmaster.tasks.recording.mlflow_writer import FLOW_RUN_PAGE
from ringmaster.tasks.storage.journal import JobStatus, begin
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.tasks.timeline.task import GanttArtifact, ProgressArtifact
from ringmaster.techniques.preflight import Preflight

INSPECTED = "inspected"  # the fact: what was found of the jobs, a list of `AlikeJobs`
PLANNING_WORK_S = 10.0  # seconds of a quiet machine; a busy one takes longer and plans the same


@contextmanager
def open_local_run(
    batch: Batch, options: RunOptions, *, sweep_scheduler: SweepScheduler | None = None
) -> Iterator[LocalRun]:
    """Opens a run of a batch on this machine. However it is left, what has happened is recorded.

    Raises InputError if devices, base models or a batch to resume do not exist.
    """
    with open_run_context(batch, options) as context, ExitStack() as stack:
        run = LocalRun(context, options, sweep_scheduler=sweep_scheduler, stack=stack)
        try:
            yield run
        finally:
            if run.is_begun and not run.is_recorded:
                for fault in close_records(run, run.result()):
                    current_view.get().notice(f"not recorded: {fault}")


class LocalRun:
    """A run of a batch on this machine: the executor runs in this process.

    context: its resources.
    sweep_scheduler: the scheduler of the sweep whose trials are the jobs.
    stack: what is to be closed at the end of the run.
    """

    patience_s: float | None = None  # the default: a person waits for the end
    _engine: Engine  # from `make_plan` on

    def __init__(
        self, context: RunContext, options: RunOptions, *, sweep_scheduler: SweepScheduler | None, stack: ExitStack
    ) -> None:
        self._context, self._options, self.sweep_scheduler, self._stack = context, options, sweep_scheduler, stack
        self._cluster = context.node_context.cluster
        self.batch, self.journal, self.recorder = context.node_context.batch, context.journal, context.recorder
        self.is_begun = self.is_recorded = False
        self.listener_faults: Mapping[Listener, str] = {}
        self._profiled: Profiled | None = None
        self._plan: Planned | None = None  # None where nothing is left to be planned
        self._began_at_s, self._profiling_s = time.time(), 0.0
        self._load, self._surroundings = MachineLoad(), ForecastConditions()
        self._failures: list[JobEnded] = []
        self._groups = ChosenGroups()
        self.journal.put("started_s", self.journal.get("started_s", self._began_at_s))  # resuming keeps deadlines
        self.journal.put("status", JobStatus.RUNNING)
        self.journal.put(FLOW_RUN_PAGE, flow_run_page())

    # -- the steps -----------------------------------------------------------------------------------------------------

    def profile(self) -> None:
        """Finds the options of the jobs that are left. Raises InputError if jobs cannot take a step."""
        node_context, began_s = self._context.node_context, time.monotonic()
        begun = self.journal.jobs()
        are_over = [name for name, record in begun.items() if record.status in (JobStatus.DONE, JobStatus.STOPPED)]
        failed = failures_told(but=are_over)
        # A placeholder of a sweep may take the profiles of any trial.
        ended = {} if self.sweep_scheduler is not None else self._inspected_before(are_over)
        try:
            profiled = profile_jobs(
                [job for job in node_context.batch.jobs if job.name not in ended],
                environment=node_context.environment,
                cluster=node_context.cluster,
                known=node_context.known,
                notice=current_view.get().notice,
                lend=node_context.lend,
                failed=failed,
                # Trials of a sweep may fail one by one; a batch whose jobs have begun goes on without its unfit jobs.
                all_or_none=self.sweep_scheduler is None and not begun,
                share=node_context.batch.profiling_share,
            )
        except UntrainableJobs as error:
            raise InputError(unfit(error.faults)) from error
        tell_refused(profiled)
        profiled = profiled.beside(ended, jobs=node_context.batch.jobs)
        self.journal.put(INSPECTED, to_json(distinct(profiled.preflights)))
        if self.sweep_scheduler is not None:
            profiled = replace(profiled, jobs=self.sweep_scheduler.judged(profiled.jobs))
        self._load = load_now(node_context)
        profiled = profiled_at(profiled, self._load)
        self._profiling_s += time.monotonic() - began_s
        self._profiled = replace(profiled, faults=with_orphans(profiled.jobs, profiled.faults))
        for name, why in self._profiled.faults.items():
            failed(name, why)

    def make_plan(self) -> None:
        """Chooses the groups of jobs to train together, and plans what is left.

        Raises ProblemError if no plan meets the deadlines of a new batch.
        """
        profiled = self._profiled
        assert profiled is not None, "the jobs are profiled"
        current_view.get().notice(f"planning {counted(len(profiled.jobs), 'job')}")
        self._prepare(profiled)
        self._groups = choose_together(
            profiled,
            jobs=[job for job in profiled.jobs if job.name not in profiled.faults],
            name=self.batch.name,
            cluster=self._cluster,
            journal=self.journal,
            goals=goals_in(self.journal.jobs()),
            add_terms=self._add_terms,
            objective=self.batch.terms.objective,
            work_s=PLANNING_WORK_S,
            seed=self._options.seed,
        )
        job_table = JobTable(self.journal)
        job_table.add(self._entries())
        problem = problem_left(job_table, self._cluster, name=self.batch.name, add_terms=self._add_terms)
        if problem is None:
            return
        is_first = not self.journal.plans()
        plan = self._first_plan(problem) if is_first else self._later_plan(problem)
        self._surroundings = surroundings_of(self._context.node_context, self._load)
        prediction = prediction_of(plan, problem, job_table.profiles, self._surroundings)
        self.journal.put(FIRST_PREDICTION, prediction.to_json())
        self.journal.remove(NEWEST_PREDICTION)  # of a run before it was resumed
        is_measured = are_measured(job_table.profiles)
        self.journal.put(MEASURED, is_measured)
        show_plan(plan, problem, prediction, device=self._cluster.device_kind(), is_measured=is_measured)
        self._plan = Planned(problem=problem, plan=plan, why="start" if is_first else "resumed")

    @contextmanager
    def executor(self) -> Iterator[Executor]:
        """Yields the executor of the batch, which Ctrl-C and SIGTERM stop."""
        node_context, engine = self._context.node_context, self._engine
        with ExitStack() as stack:
            executor = Executor(
                name=self.batch.name,
                cluster=self._cluster,
                leases=node_context.leases,
                holder=node_context.holder,
                entries=self._entries(),
                journal=self.journal,
                engine=engine,
                plan=self._plan,
                make_plan=self._later_plan,
                add_terms=self._add_terms,
                replanner=self._replanner(),
                listeners=stack.enter_context(self._listeners()),
                steering=self.sweep_scheduler,
            )
            # However the batch ends, its gangs end, and their devices are free for the next batch of this process.
            stack.callback(node_context.leases.give_back, tuple(self._cluster.lease_names().values()))
            stack.callback(engine.close)
            stack.enter_context(following(engine, executor, cluster=self._cluster))
            stack.enter_context(stopped_by_signals(partial(_stop, executor)))
            self.listener_faults = executor.listener_faults
            yield executor

    def result(self, *, faults: Sequence[str] = ()) -> BatchResult:
        """Returns the result so far. faults: what could not be recorded."""
        assert self._profiled is not None, "the jobs are profiled"
        return collect(
            self.batch,
            self.batch.jobs,
            self.journal,
            since_s=self._began_at_s,
            num_trials=self._profiled.num_trials,
            profiling_s=self._profiling_s,
            faults=faults,
            refused=self._profiled.refused,
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _inspected_before(self, jobs: Collection[str]) -> dict[str, Preflight]:
        """Returns the preflights of jobs that an earlier process of this run has inspected."""
        alike = [from_json(AlikeJobs, each) for each in self.journal.get(INSPECTED, [])]
        return {name: replace(each.preflight, job=name) for each in alike for name in each.names if name in jobs}

    def _prepare(self, profiled: Profiled) -> None:
        """Opens the engine, whose nodes are planned for, and begins the records."""
        self._engine = self._open_engine()
        self._cluster = Cluster(nodes=tuple(Node(name=n.name, devices=n.devices) for n in self._engine.nodes()))
        self._begin(profiled)

    def _open_engine(self) -> Engine:
        """Builds the engine that RINGMASTER_ENGINE names, by default that of this machine."""
        node_context = self._context.node_context
        context = EngineContext(
            folder=self._context.run_paths.folder,
            cluster=node_context.cluster,
            launcher=node_context.server,
            spawn=as_task,
            telemetry=self._stack.enter_context(watching(node_context.cluster)),
        )
        with input_errors():
            return self._stack.enter_context(closing(build_engine(settings.engine(default=LOCAL), context)))

    def _begin(self, profiled: Profiled) -> None:
        """Records the jobs that are about to run, and those that have failed already."""
        every = {job.name: job for job in (*self.batch.jobs, *profiled.jobs)}
        with input_errors(LedgerError, about="the batch cannot be recorded, so it is not trained: "):
            self.recorder.begin(
                JobsToRecord(jobs=every, preflights=profiled.preflights, profiles=profiled.profiles),
                devices=tuple(self._cluster.lease_names().values()),
                num_trials=profiled.num_trials,
            )
        self.is_begun = True
        begin(self.journal, self.batch.jobs, faults=profiled.faults)
        records = self.journal.jobs()
        self._failures = [
            failure(name, why) for name, why in profiled.faults.items() if records[name].status == JobStatus.FAILED
        ]
        for event in self._failures:
            self.recorder.listen(event)
        if self.sweep_scheduler is not None:
            jobs = [job for job in profiled.jobs if job.name not in profiled.faults]
            self.sweep_scheduler.begin(self.journal, jobs, num_slots=len(self._cluster.devices))
            for name, details in self.sweep_scheduler.details().items():
                self.journal.write_job(name, details=details)

    def _entries(self) -> list[JobState]:
        """Returns the batch's jobs as the executor takes them."""
        profiled = self._profiled
        assert profiled is not None, "the jobs are profiled"
        data = {name: preflight.data for name, preflight in profiled.preflights.items()}
        jobs = {job.name: job for job in profiled.jobs}
        return [
            JobState(
                job=jobs.get(job.name, job),
                profiles=profiled.profiles.get(job.name, ()),
                place=replace(self._context.run_paths, data=data),
                together=self._groups.profiles.get(job.name, ()),
            )
            for job in self.batch.jobs
        ]

    @contextmanager
    def _listeners(self) -> Iterator[list[Listener]]:
        """Yields the executor's listeners: the view, the records, the artifacts in Prefect, the sweep."""
        assert self._profiled is not None, "the jobs are profiled"
        database = self.journal.database
        deadlines = DeadlineAlarms(
            self.batch.name, deadlines_s=self.batch.deadlines_s, started_s=self.journal.get("started_s")
        )
        progress = ProgressArtifact(self.journal, total_steps=sum(job.total_steps for job in self._profiled.jobs))
        gantt = GanttArtifact(
            TimelineReader(database, name=self.batch.name),
            look=lambda run_timeline: deadlines.tell(run_timeline, sound),
        )
        decisions = DecisionArtifact()
        for event in self._failures:
            decisions.listen(event)
        with ExitStack() as stack:
            for artifact in (progress, gantt, decisions):
                stack.callback(artifact.close)
            yield [
                current_view.get().listen,
                self.recorder.listen,
                progress.listen,
                gantt.listen,
                StepEvents(database).listen,
                log_decision,
                decisions.listen,
            ]

    def _replanner(self) -> Replanner:
        """Returns the replanner, which plans the remaining work while the batch runs."""
        return Replanner(
            name=self.batch.name,
            make_plan=self._checked_plan,
            add_terms=self._add_terms,
            policy=replace(POLICY, objective=self.batch.terms.objective),
            surroundings=self._surroundings,
        )

    def _checked_plan(self, problem: Problem, *, start: Plan | None = None) -> Plan:
        return checked_plan(
            problem,
            work_s=PLANNING_WORK_S,
            seed=self._options.seed,
            objective=self.batch.terms.objective,
            start=start,
        )

    def _first_plan(self, problem: Problem) -> Plan:
        """Returns a plan that meets all deadlines, the one by which groups were chosen if it is as good."""
        try:
            return self._checked_plan(problem, start=self._groups.plan)
        except ProblemError as error:
            if not self.batch.deadlines_s:
                raise
            so_far_s = self._elapsed_s()
            faults = [f"{fault} (seconds from now, {so_far_s:.1f} s after the start)" for fault in error.faults]
            remedy = "To fix: give the jobs that are named more time, fewer steps or more devices"
            raise ProblemError([*faults, remedy]) from None

    def _later_plan(self, problem: Problem) -> Plan:
        """Returns a plan that meets the deadlines that can still be met."""
        plan, given_up = plan_giving_up_deadlines(problem, self._checked_plan)
        if given_up:
            current_view.get().notice(f"deadlines that cannot be met any more: {', '.join(given_up)}")
        return plan

    def _add_terms(self, problem: Problem) -> Problem:
        """Applies the batch's terms to a problem; deadlines count from the batch's first start."""
        return self.batch.terms.on(problem, elapsed_s=self._elapsed_s())

    def _elapsed_s(self) -> float:
        return time.time() - float(self.journal.get("started_s"))


def _stop(executor: Executor) -> None:
    """Stops the batch: gangs write checkpoints, and the journal records where to resume."""
    executor.stop()
    executor.call(executor.stop_segments)
