"""A run of a batch on this machine alone: what the stages of `train_batch` do there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

from prefect import Task
from prefect.cache_policies import NO_CACHE

from ringmaster.clock import SteadyClock
from ringmaster.codec import from_json
from ringmaster.errors import InputError, LedgerError, ProblemError, UntrainableJobs, input_errors
from ringmaster.files import write_patience_s
from ringmaster.flows import settings
from ringmaster.flows.batch.artifacts import DecisionArtifact, flow_run_page, show_plan
from ringmaster.flows.batch.batch_run import BatchRun, resume_jobs
from ringmaster.flows.batch.context import NodeContext, open_node_context, profiled_at
from ringmaster.flows.batch.flow_runs import current_flow_run, is_started_by_prefect, root_run
from ringmaster.flows.batch.group_choice import choose_job_groups, goals_in
from ringmaster.flows.batch.result import are_measured, failure_reporter, log_decision
from ringmaster.flows.batch.run_folder import (
    checkpoint_root_of,
    exclusive_lock,
    folder_of_flow_run,
    folder_to_resume,
    mark_started,
    mark_starting,
    resumed_batch,
)
from ringmaster.flows.batch.run_options import RunOptions
from ringmaster.flows.caller import Caller
from ringmaster.flows.dated_runs import stamped_folder
from ringmaster.tasks.alarms import DeadlineAlarms
from ringmaster.tasks.alarms.prefect_events import emit_alarm
from ringmaster.tasks.background_worker import background_thread
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.batch.parent_rules import with_orphans
from ringmaster.tasks.batch.placement import check_placement
from ringmaster.tasks.cluster import Cluster, Node, kind_of
from ringmaster.tasks.control.batch_terms import ALONE, ActiveBatch, combined_terms, past_use
from ringmaster.tasks.control.request_handler import RequestHandler
from ringmaster.tasks.execution.engine import EngineContext, watching
from ringmaster.tasks.execution.engine_registry import LOCAL, build_engine
from ringmaster.tasks.execution.execution_events import JobEnded, Listener, PlanUpdate
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.forecast import ForecastConditions, predict_plan
from ringmaster.tasks.execution.job_rows import JobTableEntry
from ringmaster.tasks.execution.job_table import JobTable, added_jobs, variant_options
from ringmaster.tasks.execution.known_nodes import watch_nodes
from ringmaster.tasks.execution.replanner import POLICY, Replanner
from ringmaster.tasks.execution.run_paths import RunPaths
from ringmaster.tasks.execution.steering import FeaturePolicy, SteeredBatch, first_goals, steering_policy
from ringmaster.tasks.execution.step_events import StepEvents
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.durations import counted
from ringmaster.tasks.planning.objectives import plan_giving_up_bounds
from ringmaster.tasks.planning.solve import checked_plan
from ringmaster.tasks.profiling.preflight_runs import EquivalentJobs
from ringmaster.tasks.profiling.search import planning_problem
from ringmaster.tasks.profiling.stage import ProfilingResult, profile_jobs
from ringmaster.tasks.recording.async_recorder import AsyncRecorder
from ringmaster.tasks.storage.fact_keys import (
    BATCH,
    CLOCK,
    FIRST_PREDICTION,
    FLOW_RUN_PAGE,
    FLOW_RUNS,
    IS_MEASURED,
    IS_OVER,
    PREFLIGHTS,
    SINCE,
    STARTED,
)
from ringmaster.tasks.storage.journal import ENDED, JobRecord, JobStatus, Journal, begin_jobs
from ringmaster.tasks.storage.quarantine import Quarantine
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.timeline.prefect_artifacts import GanttArtifact, ProgressArtifact
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.techniques.processes.gang_events import Outcome

PLANNING_WORK_S = 10.0  # seconds of a quiet machine; a busy one takes longer and plans the same
STOP_PATIENCE_S = 5.0  # for a disk that is full when a run is to end


@contextmanager
def open_local_run(
    batch: Batch,
    options: RunOptions,
    *,
    sweep_scheduler: SweepScheduler | None = None,
    caller: Caller,
) -> Iterator[LocalRun]:
    """Opens a run of a batch on this machine. However it is left, what has happened is recorded.

    caller: the caller of the flow, which may have started servers ahead.

    Raises InputError if devices, base models or a batch to resume do not exist.
    """
    home, flow_run = settings.home(), current_flow_run()
    flow_runs = [root_run(), "" if flow_run is None else str(flow_run.id)]
    resumed = folder_of_flow_run(batch, home, flow_runs, notice=caller.view.notice)
    if resumed is None and options.resume:
        resumed = folder_to_resume(batch, home)
        if resumed is None:
            caller.view.notice(f"no run of {batch.name} has begun that could be resumed: it is started")
    batch = batch if resumed is None else resumed_batch(resumed, batch)
    mark_starting(batch, home)
    with open_node_context(batch, home=home, caller=caller) as node_context, ExitStack() as stack:
        if resumed is None:
            kinds = {node.name: kind_of(node.devices) for node in node_context.cluster.nodes}
            is_here = settings.engine(default=LOCAL) == LOCAL
            check_placement(batch, nodes=kinds, notice=None if is_here else caller.view.notice)
        folder = resumed or stamped_folder(home / "batches" / batch.name)
        # An earlier process of the flow run, which Prefect considers dead, may still be about to end.
        stack.enter_context(exclusive_lock(folder, waits=is_started_by_prefect()))
        options_of_file = {"timeout_s": write_patience_s(), "notice": caller.view.say}
        journal = stack.enter_context(closing(Journal.of_file(folder / "journal.db", **options_of_file)))
        node_context = node_context.with_models(journal)
        environment = node_context.environment
        checkpoint_root = checkpoint_root_of(journal, resume=resumed is not None)
        journal.put_all({BATCH: batch.to_json(), FLOW_RUNS: flow_runs})
        mark_started(batch, home)
        run_paths = RunPaths(
            folder=folder,
            cache_dir=environment.cache_dir,
            import_paths=environment.import_paths,
            weights=environment.weights,
            checkpoint_every_s=options.checkpoint_every_s,
            checkpoint_root=checkpoint_root,
            keep_checkpoints=batch.keep_checkpoints,
        )
        yield LocalRun(
            node_context,
            journal,
            recorder=AsyncRecorder(node_context.ledger, journal, batch=batch, notice=caller.view.notice),
            run_paths=run_paths,
            seed=options.seed,
            sweep_scheduler=sweep_scheduler,
            stack=stack,  # the last to be opened is closed first
        )


class LocalRun(BatchRun):
    """A run of a batch on this machine: the executor runs in this process.

    node_context: what the run uses of this machine, with the folders of the models that the jobs name.
    run_paths: the run's folders and checkpoint options.
    seed: seed of the planner.
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
        super().__init__(
            node_context.batch,
            journal,
            folder=run_paths.folder,
            view=node_context.caller.view,
            recorder=recorder,
            sweep_scheduler=sweep_scheduler,
            stack=stack,
        )
        self._node_context, self._run_paths, self._seed = node_context, run_paths, seed
        self._steering: SweepScheduler | FeaturePolicy | None = sweep_scheduler
        self._conditions = ForecastConditions()
        # Deadlines count from the batch's start, and durations are compared: neither follows corrections of the clock.
        newest_s = max((record.ended_s or record.started_s for record in journal.segments()), default=0.0)
        journal.clock = clock = SteadyClock(not_before_s=newest_s)
        started_s = journal.get(STARTED, journal.clock())  # resuming keeps deadlines
        jobs = (*self.batch.jobs, *added_jobs(journal.jobs()))
        is_reported = journal.get(IS_OVER) is not False  # unset by earlier releases
        self._is_due = resume_jobs(journal, [job.name for job in jobs], is_reported=is_reported)
        journal.put_all(
            {
                CLOCK: clock.to_json(),
                STARTED: started_s,
                SINCE: journal.get(SINCE, started_s),
                "status": JobStatus.RUNNING,
                FLOW_RUN_PAGE: flow_run_page(),
            }
        )
        alone = ActiveBatch(
            id=ALONE,
            name=self.batch.name,
            job_names=tuple(job.name for job in self.batch.jobs),
            given=self.batch.terms,
            started_s=float(started_s),
        )
        self._active_batches = {ALONE: alone.with_changes(journal)}
        self._terms = combined_terms(self._active_batches.values())

    # -- the stages ----------------------------------------------------------------------------------------------------

    def _profile_jobs(self) -> ProfilingResult:
        """Measures or predicts the options of the jobs that are left, at the load of this machine."""
        node_context, records = self._node_context, self.journal.jobs()
        ended = [name for name, record in records.items() if record.status in ENDED]
        report_failure = failure_reporter(self.view, but=ended)
        # A placeholder of a sweep may take the profiles of any trial.
        alike = [from_json(EquivalentJobs, each) for each in self.journal.get(PREFLIGHTS, [])]  # by an earlier process
        known = {name: replace(each.preflight, job=name) for each in alike for name in each.names}
        if self._is_due and self._scheduler is not None:
            ended = []
        of_ended = {name: known[name] for name in ended if name in known}
        given_up = {name for name in ended if records[name].status in (JobStatus.FAILED, JobStatus.CANCELLED)}
        left = [job for job in self.batch.jobs if job.name not in of_ended.keys() | given_up]
        try:
            profiling = profile_jobs(
                [known[job.name].settled(job) if job.name in known else job for job in left],
                environment=node_context.environment,
                cluster=node_context.cluster,
                profile_store=node_context.profile_store,
                notice=self.view.notice,
                lend=node_context.lend,
                failed=report_failure,
                # Trials of a sweep may fail one by one; a batch whose jobs have begun continues without its unfit jobs.
                all_or_none=self._scheduler is None and not records,
                share=self.batch.profiling_share,
            )
        except UntrainableJobs as error:
            raise InputError([f"job {name}: {why}" for name, why in error.faults.items()]) from error
        profiling = profiling.with_ended(of_ended, jobs=self.batch.jobs)
        for name, why in with_orphans(profiling.jobs, profiling.faults).items():
            report_failure(name, why)
        self._load = node_context.load()
        return profiled_at(profiling, self._load)

    def begin(self, profiling: ProfilingResult) -> None:
        """Opens the engine, and records the jobs. From here on, however the run is left, what has happened is recorded.

        The segments will run on the engine that RINGMASTER_ENGINE names, by default this machine's.
        """
        engine_context = EngineContext(
            folder=self._folder,
            cluster=self._node_context.cluster,
            launcher=self._node_context.server,
            spawn=_as_task,
            telemetry=self._stack.enter_context(watching(self._node_context.cluster)),
        )
        with input_errors():
            engine = build_engine(settings.engine(default=LOCAL), engine_context)
        self._engine = self._stack.enter_context(closing(engine))
        nodes = self._engine.nodes()
        self._cluster = Cluster(nodes=tuple(Node(name=node.name, devices=node.devices) for node in nodes))
        self._totals = {job.name: job.total_steps for job in profiling.jobs}
        with input_errors(LedgerError, about="the batch cannot be recorded, so it is not trained: "):
            self._begin_records(profiling, tuple(self._cluster.lease_names().values()))
        self._stack.callback(self._record_interrupted, profiling)
        if self._is_due:
            begin_jobs(self.journal, (*self.batch.jobs, *added_jobs(self.journal.jobs())), faults=profiling.faults)
        records = self.journal.jobs()
        # Where all jobs had ended, a process that died may not have recorded the ends of those that are not done.
        self._failures = [
            JobEnded(record=records[name])
            for name in (profiling.faults if self._is_due else records)
            if records[name].status in ENDED and records[name].status != JobStatus.DONE
        ]
        for event in self._failures:
            self._recorder.listen(event)
        jobs = [job for job in profiling.jobs if job.name not in profiling.faults]
        if self._scheduler is not None:
            self._scheduler.begin(self.journal, jobs, num_slots=len(self._cluster.devices))
            changes = self._scheduler.record_changes()
        else:
            self._steering = steering_policy(
                SteeredBatch(
                    journal=self.journal,
                    jobs=jobs,
                    profiles=profiling.profiles,
                    paths=self._run_paths,
                    notice=self.view.notice,
                )
            )
            changes = {name: {"goal": goal} for name, goal in first_goals(jobs, known=records).items()}
        for name, its in changes.items():
            self.journal.write_job(name, **its)

    def make_plan(self, profiling: ProfilingResult) -> PlanUpdate | None:
        """Chooses the groups of jobs to train together, and plans what is left.

        Raises ProblemError if no plan meets the deadlines of a new batch.
        """
        self.view.notice(f"planning {counted(len(profiling.jobs), 'job')}")
        records = self.journal.jobs()
        self._groups = choose_job_groups(
            profiling,
            jobs=[job for job in profiling.jobs if job.name not in profiling.faults],
            name=self.batch.name,
            cluster=self._cluster,
            records=records,
            goals=goals_in(records),
            add_terms=self._add_terms,
            objective=self._terms.objective,
            work_s=PLANNING_WORK_S,
            seed=self._seed,
        )
        self._job_table = JobTable(self.journal)
        self._job_table.add(self._job_entries(profiling))
        begins_s, jobs = time.time(), self._job_table.left()
        if not jobs:
            return None
        problem = self._add_terms(
            planning_problem(
                jobs,
                self._job_table.profiles,
                self._cluster,
                name=self.batch.name,
                steps_done={name: record.step for name, record in self._job_table.records.items()},
            )
        )
        is_first = not self.journal.plans()
        plan = self._first_plan(problem, start=self._groups.plan) if is_first else self._later_plan(problem)
        return PlanUpdate(problem=problem, plan=plan, why="start" if is_first else "resumed", begins_s=begins_s)

    def show_plan(self, plan: PlanUpdate | None) -> None:
        """Shows the plan, its groups and the predicted end, and stores what the result is compared with."""
        if plan is None:
            return
        self._groups.report(self.journal, notice=self.view.notice)
        self._conditions = self._node_context.conditions(self._load)
        profiles = self._job_table.profiles
        prediction = predict_plan(plan.problem, plan.plan, profiles, conditions=self._conditions)
        is_measured = are_measured(profiles)
        self.journal.put_all({FIRST_PREDICTION: prediction.to_json(), IS_MEASURED: is_measured})
        device = self._cluster.device_kind()
        show_plan(plan.plan, plan.problem, prediction, device=device, is_measured=is_measured)

    def execute(self, plan: PlanUpdate | None) -> Mapping[str, JobRecord]:
        """Executes the plan until all jobs have ended, or Ctrl-C or SIGTERM stops the batch."""
        leases = self._node_context.leases
        with ExitStack() as stack:
            replanner = Replanner(
                name=self.batch.name,
                make_plan=self._checked_plan,
                add_terms=self._add_terms,
                policy=replace(POLICY, objective=self._terms.objective),
                conditions=self._conditions,
            )
            executor = Executor(
                cluster=self._cluster,
                leases=leases,
                holder=self._node_context.holder,
                job_table=self._job_table,
                engine=self._engine,
                plan=plan,
                replanner=replanner,
                listeners=stack.enter_context(self._listeners()),
                steering=self._steering,
            )

            def stop() -> None:
                """Stops the batch: gangs write checkpoints, and the journal records where to resume."""
                self.journal.database.hurry(STOP_PATIENCE_S)
                executor.stop_starting()
                executor.call(executor.stop_segments)

            # However the batch ends, its gangs end, and their devices are free for the next batch of this process.
            stack.callback(leases.give_back, tuple(self._cluster.lease_names().values()))
            stack.callback(self._engine.close)
            stack.enter_context(watch_nodes(self._engine, executor, cluster=self._cluster))
            stack.enter_context(self._node_context.caller.interrupts.stopped_by(stop))
            handler = RequestHandler(
                self.journal.database,
                executor=executor,
                active_batches=self._active_batches,
                quarantine=Quarantine(self.journal.database),
                on_terms=partial(self._on_terms, executor, replanner),
            )
            stack.enter_context(background_thread(handler.keep_answering, name="requests"))
            self._listener_faults = executor.listener_faults
            executor.run()
        return self.journal.jobs()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _record_interrupted(self, profiling: ProfilingResult) -> None:
        """Records what has happened in a run that did not reach its last step."""
        if not self._is_closed:
            result = self._close_records(self.evaluate(profiling, self.journal.jobs()))
            for fault in result.faults:
                self.view.notice(f"not recorded: {fault}")

    def _job_entries(self, profiling: ProfilingResult) -> list[JobTableEntry]:
        """Returns the batch's jobs as the executor takes them."""
        data = {name: preflight.data for name, preflight in profiling.preflights.items()}
        jobs = {job.name: job for job in profiling.jobs}
        return [
            JobTableEntry(
                job_in_batch=job,
                job=job,
                profiles=profiling.profiles.get(job.name, ()),
                paths=replace(self._run_paths, data=data),
                group_profiles=self._groups.profiles.get(job.name, ()),
                variants=variant_options(job, profiling.profiles),
            )
            for job in (jobs.get(job.name, job) for job in self.batch.jobs)
        ]

    @contextmanager
    def _listeners(self) -> Iterator[list[Listener]]:
        """Yields the executor's listeners: the view, the records, the artifacts in Prefect, the sweep."""
        database = self.journal.database
        deadlines = DeadlineAlarms(
            self.batch.name, deadlines_s=self.batch.deadlines_s, started_s=self.journal.get(STARTED)
        )
        progress = ProgressArtifact(self.journal, totals=self._totals)
        gantt = GanttArtifact(
            TimelineReader(database, name=self.batch.name, clock=self.journal.clock),
            on_drawn=lambda run_timeline: deadlines.report_late(run_timeline, emit_alarm),
        )
        decisions = DecisionArtifact()
        for event in self._failures:
            decisions.listen(event)
        with ExitStack() as stack:
            for artifact in (progress, gantt, decisions):
                stack.callback(artifact.close)
            yield [
                self.view.listen,
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
            if not self.batch.deadlines_s or problem.budgets:
                raise
            so_far_s = self.journal.clock() - float(self.journal.get(STARTED))
            faults = [f"{fault} (seconds from now, {so_far_s:.1f} s after the start)" for fault in error.faults]
            remedy = "To fix: give the jobs that are named more time, fewer steps or more devices"
            raise ProblemError([*faults, remedy]) from None

    def _later_plan(self, problem: Problem) -> Plan:
        """Returns a plan that meets the deadlines that can still be met."""
        plan, given_up = plan_giving_up_bounds(problem, self._checked_plan)
        if given_up:
            self.view.notice(f"deadlines that no plan meets any more, by these runtimes: {', '.join(given_up)}")
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
        return self._terms.on(
            problem,
            elapsed_s=self.journal.clock(),
            past=lambda: past_use(self.journal, self._active_batches.values()),
        )


def _as_task(label: str, run: Callable[[], Outcome]) -> Future[Outcome]:
    """Runs a segment as a Prefect task of the current flow run. A `Spawn` of the local engine.

    The task returns the gang's outcome as a value, even if the gang failed. It has no retries of its own: the executor
    decides whether and how the job continues.
    """
    # Without parameters: Prefect would serialise a function among them.
    segment = Task(run, name="segment", task_run_name=lambda: label, cache_policy=NO_CACHE, persist_result=False)
    # A Prefect future has the two methods of a Future that an executor uses.
    return cast("Future[Outcome]", segment.submit())
