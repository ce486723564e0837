"""A run of a batch on this machine alone: what the steps of `train_batch` do there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from ringmaster.clock import SteadyClock
from ringmaster.codec import from_json, to_json
from ringmaster.errors import InputError, LedgerError, ProblemError, UntrainableJobs, input_errors
from ringmaster.features.target.job import Target
from ringmaster.files import write_patience_s
from ringmaster.flows import settings
from ringmaster.flows.batch.artifacts import DecisionArtifact, flow_run_page, show_plan, show_records
from ringmaster.flows.batch.context import NodeContext, RunOptions, open_node_context, profiled_at
from ringmaster.flows.batch.flow_runs import as_task
from ringmaster.flows.batch.group_choice import ChosenGroups, choose_job_groups, goals_in
from ringmaster.flows.batch.result import (
    BatchResult,
    are_measured,
    close_records,
    collect,
    failure,
    failure_reporter,
    log_decision,
    report_refusals,
)
from ringmaster.flows.batch.run_folder import (
    begun,
    begun_batch,
    checkpoint_root_of,
    exclusive_lock,
    folder_to_resume,
    is_done_and_recorded,
    mark_starting,
    share_models,
)
from ringmaster.flows.interrupts import stopped_by_signals
from ringmaster.flows.reports.progress import current_view
from ringmaster.flows.run_order import stamped_folder
from ringmaster.flows.services.first_processes import RunServers
from ringmaster.tasks.alarms import DeadlineAlarms
from ringmaster.tasks.alarms.task import emit_alarm
from ringmaster.tasks.background_worker import running
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.batch.adaptation_rules import with_orphans
from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.control.batch_terms import ALONE, ActiveBatch, combined_terms
from ringmaster.tasks.control.request_handler import RequestHandler
from ringmaster.tasks.execution.engine import Engine, EngineContext, StepEvents, watching
from ringmaster.tasks.execution.events import FIRST_PREDICTION, NEWEST_PREDICTION, JobEnded, Listener, PlanUpdate
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.forecast import ForecastConditions, predict_plan
from ringmaster.tasks.execution.job_table import JobState, JobTable, RunPaths, added_jobs
from ringmaster.tasks.execution.known_nodes import following
from ringmaster.tasks.execution.plan_manager import problem_left
from ringmaster.tasks.execution.replanner import POLICY, Replanner
from ringmaster.tasks.execution.target_scheduler import TargetScheduler, variant_options
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.fusion import checked_plan
from ringmaster.tasks.planning.gantt import counted
from ringmaster.tasks.planning.objectives import plan_giving_up_deadlines
from ringmaster.tasks.pool.engines import LOCAL, build_engine
from ringmaster.tasks.profiling.preflight import EquivalentJobs, distinct, with_chunk
from ringmaster.tasks.profiling.stage import ProfilingResult, profile_jobs
from ringmaster.tasks.recording.async_recorder import AsyncRecorder
from ringmaster.tasks.recording.mlflow_writer import FLOW_RUN_PAGE, IS_MEASURED, JobsToRecord
from ringmaster.tasks.storage.journal import CLOCK, JobStatus, Journal, begin
from ringmaster.tasks.storage.quarantine import Quarantine
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.tasks.timeline.task import GanttArtifact, ProgressArtifact

INSPECTED = "inspected"  # the fact: what was found of the jobs, a list of `EquivalentJobs`
PLANNING_WORK_S = 10.0  # seconds of a quiet machine; a busy one takes longer and plans the same
STOP_PATIENCE_S = 5.0  # for a disk that is full when a run is to end


@contextmanager
def open_local_run(
    batch: Batch,
    options: RunOptions,
    *,
    sweep_scheduler: SweepScheduler | None = None,
    servers: RunServers | None = None,
) -> Iterator[LocalRun]:
    """Opens a run of a batch on this machine. However it is left, what has happened is recorded.

    servers: what the caller has started ahead.

    Raises InputError if devices, base models or a batch to resume do not exist.
    """
    home = settings.home()
    resumed = folder_to_resume(batch, home) if options.resume else None
    if options.resume and resumed is None:
        current_view.get().notice(f"no run of {batch.name} has begun that could be resumed: it is started")
    batch = batch if resumed is None else begun_batch(resumed)
    mark_starting(batch, home)
    with open_node_context(batch, home=home, servers=servers) as node_context, ExitStack() as stack:
        folder = resumed or stamped_folder(home / "batches" / batch.name)
        stack.enter_context(exclusive_lock(folder))
        options_of_file = {"timeout_s": write_patience_s(), "notice": current_view.get().say}
        journal = stack.enter_context(closing(Journal.of_file(folder / "journal.db", **options_of_file)))
        node_context = node_context.with_models(journal)
        environment = node_context.environment
        checkpoint_root = checkpoint_root_of(journal, resume=resumed is not None)
        journal.put("batch", batch.to_json())
        begun(batch, home)
        run_paths = RunPaths(
            folder=folder,
            cache_dir=environment.cache_dir,
            import_paths=environment.import_paths,
            weights=environment.weights,
            checkpoint_every_s=options.checkpoint_every_s,
            checkpoint_root=checkpoint_root,
            keep_checkpoints=batch.keep_checkpoints,
        )
        recorder = AsyncRecorder(node_context.ledger, journal, batch=batch, notice=current_view.get().notice)
        yield LocalRun(
            node_context,
            journal,
            recorder=recorder,
            run_paths=run_paths,
            seed=options.seed,
            sweep_scheduler=sweep_scheduler,
            stack=stack,  # the last to be opened is closed first
        )


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """What is about to be executed on this machine.

    profiled: the profiles of the jobs at the machine's load.
    engine: starts the segments.
    cluster: the engine's devices.
    failures: the jobs that have failed before there was a plan.
    job_table: the jobs as the executor takes them.
    plan: the plan of the jobs; None where nothing is left to be planned.
    conditions: what predictions of ends take into account besides the plan.
    """

    profiled: ProfilingResult
    engine: Engine
    cluster: Cluster
    failures: Sequence[JobEnded]
    job_table: JobTable
    plan: PlanUpdate | None
    conditions: ForecastConditions


class LocalRun:
    """A run of a batch on this machine: the executor runs in this process.

    node_context: the resources for profiling, with the folders of the models that the jobs name.
    recorder: writes the records of the run.
    run_paths: the run's folders and checkpoint options.
    seed: seed of the planner.
    sweep_scheduler: the scheduler of the sweep whose trials are the jobs.
    stack: what is to be closed at the end of the run.
    """

    def __init__(
        self,
        node_context: NodeContext,
        journal: Journal,
        *,
        recorder: AsyncRecorder,
        run_paths: RunPaths,
        seed: int,
        sweep_scheduler: SweepScheduler | None,
        stack: ExitStack,
    ) -> None:
        self._node_context, self.batch, self.journal = node_context, node_context.batch, journal
        self._recorder, self._run_paths, self._seed = recorder, run_paths, seed
        self._scheduler, self._stack = sweep_scheduler, stack
        self._steering: SweepScheduler | TargetScheduler | None = sweep_scheduler
        self._is_recorded = False
        self._listener_faults: Mapping[Listener, str] = {}
        # Deadlines count from the batch's start, and durations are compared: neither follows corrections of the clock.
        newest_s = max((record.ended_s or record.started_s for record in self.journal.segments()), default=0.0)
        self.journal.clock = clock = SteadyClock(not_before_s=newest_s)
        self.journal.put(CLOCK, clock.to_json())
        self._began_at_s, self._profiling_s = self.journal.clock(), 0.0
        started_s = self.journal.get("started_s", self._began_at_s)  # resuming keeps deadlines
        self.journal.put("started_s", started_s)
        alone = ActiveBatch(
            id=ALONE,
            name=self.batch.name,
            job_names=tuple(job.name for job in self.batch.jobs),
            given=self.batch.terms,
            started_s=float(started_s),
        )
        self._active_batches = {ALONE: alone.with_changes(self.journal)}
        self._terms = combined_terms(self._active_batches.values())
        self.journal.put("status", JobStatus.RUNNING)
        self.journal.put(FLOW_RUN_PAGE, flow_run_page())

    # -- the steps -----------------------------------------------------------------------------------------------------

    def profile(self) -> ProfilingResult:
        """Returns the options of the jobs that are left. Raises InputError if jobs cannot take a step."""
        node_context, began_s = self._node_context, time.monotonic()
        begun = self.journal.jobs()
        are_over = [name for name, record in begun.items() if record.status in (JobStatus.DONE, JobStatus.STOPPED)]
        report_failure = failure_reporter(but=are_over)
        # A placeholder of a sweep may take the profiles of any trial.
        alike = [from_json(EquivalentJobs, each) for each in self.journal.get(INSPECTED, [])]  # by an earlier process
        known = {name: replace(each.preflight, job=name) for each in alike for name in each.names}
        ended = {} if self._scheduler is not None else {name: known[name] for name in are_over if name in known}
        left = [job for job in node_context.batch.jobs if job.name not in ended]
        try:
            profiled = profile_jobs(
                [with_chunk(job, known[job.name]) if job.name in known else job for job in left],
                environment=node_context.environment,
                cluster=node_context.cluster,
                known=node_context.known,
                notice=current_view.get().notice,
                lend=node_context.lend,
                failed=report_failure,
                # Trials of a sweep may fail one by one; a batch whose jobs have begun goes on without its unfit jobs.
                all_or_none=self._scheduler is None and not begun,
                share=node_context.batch.profiling_share,
            )
        except UntrainableJobs as error:
            raise InputError([f"job {name}: {why}" for name, why in error.faults.items()]) from error
        report_refusals(profiled)
        profiled = profiled.with_ended(ended, jobs=node_context.batch.jobs)
        self.journal.put(INSPECTED, to_json(distinct(profiled.preflights)))
        if self._scheduler is not None:
            profiled = replace(profiled, jobs=self._scheduler.with_rungs(profiled.jobs))
        self._profiling_s += time.monotonic() - began_s
        profiled = replace(profiled, faults=with_orphans(profiled.jobs, profiled.faults))
        for name, why in profiled.faults.items():
            report_failure(name, why)
        return profiled

    def make_plan(self, profiled: ProfilingResult) -> LocalPlan:
        """Records the jobs, chooses the groups of them to train together, plans what is left, and shows the plan.

        The segments will run on the engine that RINGMASTER_ENGINE names, by default this machine's. Raises ProblemError
        if no plan meets the deadlines of a new batch.
        """
        load = self._node_context.load()
        profiled = profiled_at(profiled, load)
        engine = self._open_engine()
        cluster = Cluster(nodes=tuple(Node(name=node.name, devices=node.devices) for node in engine.nodes()))
        failures = self._record_jobs(profiled, cluster)
        current_view.get().notice(f"planning {counted(len(profiled.jobs), 'job')}")
        groups = choose_job_groups(
            profiled,
            jobs=[job for job in profiled.jobs if job.name not in profiled.faults],
            name=self.batch.name,
            cluster=cluster,
            journal=self.journal,
            goals=goals_in(self.journal.jobs()),
            add_terms=self._add_terms,
            objective=self._terms.objective,
            work_s=PLANNING_WORK_S,
            seed=self._seed,
        )
        job_table = JobTable(self.journal)
        job_table.add(self._job_states(profiled, groups))
        update, conditions = None, ForecastConditions()
        if (problem := problem_left(job_table, cluster, name=self.batch.name, add_terms=self._add_terms)) is not None:
            conditions, is_first = self._node_context.conditions(load), not self.journal.plans()
            plan = self._first_plan(problem, start=groups.plan) if is_first else self._later_plan(problem)
            prediction = predict_plan(problem, plan, job_table.profiles, conditions=conditions)
            self.journal.put(FIRST_PREDICTION, prediction.to_json())
            self.journal.remove(NEWEST_PREDICTION)  # of a run before it was resumed
            is_measured = are_measured(job_table.profiles)
            self.journal.put(IS_MEASURED, is_measured)
            show_plan(plan, problem, prediction, device=cluster.device_kind(), is_measured=is_measured)
            update = PlanUpdate(problem=problem, plan=plan, why="start" if is_first else "resumed")
        return LocalPlan(
            profiled=profiled,
            engine=engine,
            cluster=cluster,
            failures=failures,
            job_table=job_table,
            plan=update,
            conditions=conditions,
        )

    def execute(self, plan: LocalPlan) -> None:
        """Executes the plan until all jobs have ended, or Ctrl-C or SIGTERM stops the batch."""
        node_context, engine, cluster = self._node_context, plan.engine, plan.cluster
        with ExitStack() as stack:
            replanner = Replanner(
                name=self.batch.name,
                make_plan=self._checked_plan,
                add_terms=self._add_terms,
                policy=replace(POLICY, objective=self._terms.objective),
                conditions=plan.conditions,
            )
            executor = Executor(
                cluster=cluster,
                leases=node_context.leases,
                holder=node_context.holder,
                job_table=plan.job_table,
                engine=engine,
                plan=plan.plan,
                replanner=replanner,
                listeners=stack.enter_context(self._listeners(plan)),
                steering=self._steering,
            )

            def stop() -> None:
                """Stops the batch: gangs write checkpoints, and the journal records where to resume."""
                self.journal.database.hurry(STOP_PATIENCE_S)
                executor.stop()
                executor.call(executor.stop_segments)

            # However the batch ends, its gangs end, and their devices are free for the next batch of this process.
            stack.callback(node_context.leases.give_back, tuple(cluster.lease_names().values()))
            stack.callback(engine.close)
            stack.enter_context(following(engine, executor, cluster=cluster))
            stack.enter_context(stopped_by_signals(stop))
            handler = RequestHandler(
                self.journal.database,
                executor=executor,
                active_batches=self._active_batches,
                quarantine=Quarantine(self.journal.database),
                on_terms=partial(self._on_terms, executor, replanner),
            )
            stack.enter_context(running(handler.keep_answering, name="requests"))
            self._listener_faults = executor.listener_faults
            executor.run()

    def result(self, plan: LocalPlan) -> BatchResult:
        """Returns the result so far."""
        return self._result(plan.profiled)

    def record(self, _: LocalPlan, result: BatchResult) -> BatchResult:
        """Records the result and waits until all is written; returns it with the URIs of the models."""
        self._is_recorded = True
        result = close_records(
            result,
            recorder=self._recorder,
            journal=self.journal,
            listener_faults=self._listener_faults,
            sweep_scheduler=self._scheduler,
        )
        show_records(self._recorder, result)
        if is_done_and_recorded(self.journal):
            share_models(self._run_paths.folder, home=settings.home())
        return result

    # -- inside --------------------------------------------------------------------------------------------------------

    def _open_engine(self) -> Engine:
        engine_context = EngineContext(
            folder=self._run_paths.folder,
            cluster=self._node_context.cluster,
            launcher=self._node_context.server,
            spawn=as_task,
            telemetry=self._stack.enter_context(watching(self._node_context.cluster)),
        )
        with input_errors():
            return self._stack.enter_context(closing(build_engine(settings.engine(default=LOCAL), engine_context)))

    def _record_jobs(self, profiled: ProfilingResult, cluster: Cluster) -> Sequence[JobEnded]:
        """Records the jobs that are about to run; returns those that have failed already.

        From here on, what has happened is recorded however the run is left.
        """
        every = {job.name: job for job in (*self.batch.jobs, *profiled.jobs)}
        with input_errors(LedgerError, about="the batch cannot be recorded, so it is not trained: "):
            self._recorder.begin(
                JobsToRecord(jobs=every, preflights=profiled.preflights, profiles=profiled.profiles),
                devices=tuple(cluster.lease_names().values()),
                num_trials=profiled.num_trials,
            )
        self._stack.callback(self._record_interrupted, profiled)
        begin(self.journal, (*self.batch.jobs, *added_jobs(self.journal.jobs())), faults=profiled.faults)
        records = self.journal.jobs()
        failures = [
            failure(name, why) for name, why in profiled.faults.items() if records[name].status == JobStatus.FAILED
        ]
        for event in failures:
            self._recorder.listen(event)
        jobs = [job for job in profiled.jobs if job.name not in profiled.faults]
        if self._scheduler is not None:
            self._scheduler.begin(self.journal, jobs, num_slots=len(cluster.devices))
        elif any(job.part(Target) is not None for job in profiled.jobs):
            place, notice = self._run_paths, current_view.get().notice
            self._steering = TargetScheduler(self.journal, jobs, profiled.profiles, place=place, notice=notice)
        for name, details in self._steering.details().items() if self._steering is not None else ():
            self.journal.write_job(name, details=details)
        return failures

    def _record_interrupted(self, profiled: ProfilingResult) -> None:
        """Records what has happened in a run that did not reach its last step."""
        if not self._is_recorded:
            result = close_records(
                self._result(profiled),
                recorder=self._recorder,
                journal=self.journal,
                listener_faults=self._listener_faults,
                sweep_scheduler=self._scheduler,
            )
            for fault in result.faults:
                current_view.get().notice(f"not recorded: {fault}")

    def _result(self, profiled: ProfilingResult) -> BatchResult:
        return collect(
            self.batch,
            self.journal,
            since_s=self._began_at_s,
            num_trials=profiled.num_trials,
            profiling_s=self._profiling_s,
            refused=profiled.refused,
        )

    def _job_states(self, profiled: ProfilingResult, groups: ChosenGroups) -> list[JobState]:
        """Returns the batch's jobs as the executor takes them."""
        data = {name: preflight.data for name, preflight in profiled.preflights.items()}
        jobs = {job.name: job for job in profiled.jobs}
        return [
            JobState(
                local_job=job,
                job=job,
                profiles=profiled.profiles.get(job.name, ()),
                place=replace(self._run_paths, data=data),
                group_profiles=groups.profiles.get(job.name, ()),
                variants=variant_options(job, profiled.profiles),
            )
            for job in (jobs.get(job.name, job) for job in self.batch.jobs)
        ]

    @contextmanager
    def _listeners(self, plan: LocalPlan) -> Iterator[list[Listener]]:
        """Yields the executor's listeners: the view, the records, the artifacts in Prefect, the sweep."""
        database = self.journal.database
        deadlines = DeadlineAlarms(
            self.batch.name, deadlines_s=self.batch.deadlines_s, started_s=self.journal.get("started_s")
        )
        progress = ProgressArtifact(self.journal, totals={job.name: job.total_steps for job in plan.profiled.jobs})
        gantt = GanttArtifact(
            TimelineReader(database, name=self.batch.name, clock=self.journal.clock),
            on_drawn=lambda run_timeline: deadlines.report_late(run_timeline, emit_alarm),
        )
        decisions = DecisionArtifact()
        for event in plan.failures:
            decisions.listen(event)
        with ExitStack() as stack:
            for artifact in (progress, gantt, decisions):
                stack.callback(artifact.close)
            yield [
                current_view.get().listen,
                self._recorder.listen,
                progress.listen,
                gantt.listen,
                StepEvents(database).listen,
                log_decision,
                decisions.listen,
            ]

    def _checked_plan(self, problem: Problem, *, start: Plan | None = None) -> Plan:
        return checked_plan(
            problem,
            work_s=PLANNING_WORK_S,
            seed=self._seed,
            objective=self._terms.objective,
            start=start,
        )

    def _first_plan(self, problem: Problem, *, start: Plan | None) -> Plan:
        """Returns a plan that meets all deadlines, the one by which groups were chosen if it is as good."""
        try:
            return self._checked_plan(problem, start=start)
        except ProblemError as error:
            if not self.batch.deadlines_s:
                raise
            so_far_s = self.journal.clock() - float(self.journal.get("started_s"))
            faults = [f"{fault} (seconds from now, {so_far_s:.1f} s after the start)" for fault in error.faults]
            remedy = "To fix: give the jobs that are named more time, fewer steps or more devices"
            raise ProblemError([*faults, remedy]) from None

    def _later_plan(self, problem: Problem) -> Plan:
        """Returns a plan that meets the deadlines that can still be met."""
        plan, given_up = plan_giving_up_deadlines(problem, self._checked_plan)
        if given_up:
            current_view.get().notice(
                f"deadlines that no plan meets any more, by these runtimes: {', '.join(given_up)}"
            )
        return plan

    def _on_terms(self, executor: Executor, replanner: Replanner, active: ActiveBatch, why: str) -> None:
        """Plans under the priorities, weights and deadlines that a person has set."""
        self._active_batches[ALONE] = active
        self._terms = combined_terms([active])
        replanner.pursue(self._terms.objective)
        if why:
            executor.replan_soon(why=why)

    def _add_terms(self, problem: Problem) -> Problem:
        """Applies the batch's terms to a problem; deadlines count from the batch's first start."""
        return self._terms.on(problem, elapsed_s=self.journal.clock())
