"""The executor of plans: a state machine that starts segments, reads their outcomes and decides what follows.

A segment's task returns its outcome as a value; only the executor decides what follows (`outcome_policy`). Jobs and
nodes may be added and removed at any time. Running segments then continue, and the rest is re-planned in the
background.
"""

import logging
import math
import queue
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain, count

from sqlalchemy.exc import SQLAlchemyError

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.dispatch import Command, DeviceId
from ringmaster.tasks.execution.engine import Engine
from ringmaster.tasks.execution.execution_events import GangReport, Listener, Listeners, PlanUpdate, SegmentEnded
from ringmaster.tasks.execution.executor_hooks import ExecutorContext, executor_hooks
from ringmaster.tasks.execution.forecaster import Forecaster
from ringmaster.tasks.execution.job_price import JobPrice
from ringmaster.tasks.execution.job_rows import JobTableEntry
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.execution.outcome_policy import OutcomePolicy
from ringmaster.tasks.execution.plan_manager import PlanManager
from ringmaster.tasks.execution.progress import PlanProgress, RunningSegment
from ringmaster.tasks.execution.replanner import PendingPlan, Replanner
from ringmaster.tasks.execution.starter import Leases, Starter, is_known, segment_of
from ringmaster.tasks.execution.steering import SteeringPolicy, SteeringRequest
from ringmaster.tasks.storage.fact_keys import STARTED
from ringmaster.tasks.storage.journal import ENDED, JobStatus, SegmentRecord
from ringmaster.techniques import Job
from ringmaster.techniques.processes.gang_events import (
    CheckpointFailed,
    CheckpointSaved,
    EvaluationReported,
    Event,
    JobEvent,
    JobOfGroupEnded,
    JobReady,
    Outcome,
    OutcomeStatus,
    RefusedEvent,
    Steps,
)
from ringmaster.techniques.processes.reporter import leave_command
from ringmaster.text import printable_lines

logger = logging.getLogger(__name__)

MAX_AT_ONCE, AT_ONCE_S = 1000, 0.1  # messages, and seconds for them, before anything is started or stopped
MAX_FAILED_PLANS = 3  # in a row while nothing runs, before the executor gives up

EVENTS_WITH_STEP = (JobReady, Steps, EvaluationReported, CheckpointSaved)

Message = Event | Future[Outcome] | PendingPlan | Callable[[], None] | None


class Executor:
    """Executes the jobs of a job table.

    One thread calls `run` or `serve`. Any thread may call `call`, `post` and `stop_starting`.

    job_table: the jobs, with their journal.
    cluster: the devices to use.
    leases, holder: the register of leases, and the name under which this executor leases them.
    engine: runs the segments.
    plan: the plan to begin with; None where nothing is left to plan.
    replanner: makes the plans.
    listeners: receive each execution event, until they raise. `listener_faults` has those that did.
    steering: decides how far the jobs train; without it they train to their end.
    clock: monotonic seconds.
    wall_clock: seconds since the epoch, by which segments wait for their time.

    Its owner may set `on_expelled`, which is called with a node that gets no more work, and why.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        leases: Leases,
        holder: str,
        job_table: JobTable,
        engine: Engine,
        replanner: Replanner,
        plan: PlanUpdate | None = None,
        listeners: Sequence[Listener] = (),
        steering: SteeringPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._leases, self._engine, self._clock = leases, engine, clock
        self.job_table, self._journal, self._replanner = job_table, job_table.journal, replanner
        self._inbox: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._stopping, self._steering, self._first_plan = False, steering, plan
        self.on_expelled: Callable[[str, str], None] = lambda node, why: None
        self._bound: set[int] = set()  # the running segments whose jobs keep their layout, where they have to
        self._retry_in_s = math.inf  # until a segment that could not start is tried again
        self._listeners = Listeners([*listeners, *([] if steering is None else [steering.listen])])
        self._plan_progress = PlanProgress(
            totals=self.job_table.totals, after=self.job_table.after, wall_clock=wall_clock
        )
        execution = ExecutorContext(
            job_table=self.job_table,
            plan_progress=self._plan_progress,
            request_plan=lambda why: self._plan_manager.request_plan(why),
            stop=lambda running: self._stop_gangs([running]),
            command=self._command_gang,
            expel=self._expel,
            is_out=lambda device: device in self._plan_manager.out,
        )
        self.hooks = executor_hooks(execution)
        self._starter = Starter(
            self.job_table,
            self._plan_progress,
            leases=leases,
            holder=holder,
            engine=engine,
            post=self.post,
            notify=self._listeners.notify,
            clock=clock,
            outcome_of=self._outcome_of,
        )
        self._plan_manager = PlanManager(
            cluster=cluster,
            job_table=self.job_table,
            plan_progress=self._plan_progress,
            replanner=replanner,
            command=self._command,
            notify=self._listeners.notify,
            post=lambda pending_plan: self.post(0, pending_plan),
        )
        self._outcome_policy = OutcomePolicy(
            self.job_table,
            self._plan_progress,
            notify=self._listeners.notify,
            request_plan=self._plan_manager.request_plan,
            hold_back=self._starter.hold_back,
            forget_speed=replanner.forget,
        )
        self._forecaster = Forecaster(self._plan_manager, self.job_table, notify=self._listeners.notify, clock=clock)
        self._listeners.add(self._forecaster.listen)

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Runs jobs until nothing is left or `stop_starting` is called. Returns False if jobs are left to be resumed.

        Raises the last error of the planner if nothing runs and it has failed repeatedly.
        """
        if (steering := self._steering) is not None:
            perform = partial(self._listeners.guard, steering.listen)
            steering.attach(
                self.steer,
                later=lambda action: self.call(partial(perform, action)),
                elapsed_s=self._journal.clock() - float(self._journal.get(STARTED, self._journal.clock())),
            )
        if self._first_plan is not None:
            self._plan_manager.begin(self._first_plan)
        self._outcome_policy.fail_orphans()
        with self._journal.database.batched():
            while self._plan_progress.running or (self._has_more() and not self._stopping):
                self._turn()
                failures = self._replanner.failures
                if not self._plan_progress.running and len(failures) >= MAX_FAILED_PLANS:
                    raise failures[-1]
        return not self._has_more()

    def serve(self, *, num_turns: int | None = None) -> None:
        """Runs all jobs of the table, and those added later, until `stop_starting` is called.

        Segments that run then continue without this executor.

        num_turns: how many times to handle the messages that are there before it returns; None for no limit.
        """
        with self._journal.database.batched():
            for _ in count() if num_turns is None else range(num_turns):
                if self._stopping:
                    return
                self._turn()

    def stop_starting(self) -> None:
        """Starts no more segments; `stop_segments` stops the running ones. From any thread or signal handler."""
        self._stopping = True
        self.post(0, None)

    def call(self, action: Callable[[], None]) -> None:
        """Runs `action` on the executor's thread, between two messages. From any thread."""
        self.post(0, action)

    def post(self, number: int, message: Message) -> None:
        """Receives a message about a segment, such as an event of its gang. From any thread."""
        self._inbox.put((number, message))

    def _start(self) -> None:
        """Starts what may start. Jobs whose results depend on the layout keep the one that they start with."""
        progress, plan_manager = self._plan_progress, self._plan_manager
        self._retry_in_s = self._starter.start_what_can(plan_manager.cluster, out=plan_manager.out)
        fresh = [running for number, running in progress.running.items() if number not in self._bound]
        self._bound = {*progress.running}
        for running in fresh:
            job = running.segment.job
            if replaced := self.job_table.keep_layout(job, running.profile):
                self._replanner.forget(job)  # a plan that is being made may use the other options
                if any(s.job == job and s.option in replaced for s in progress.planned):
                    progress.drop(job)
                    plan_manager.request_plan(f"{job} stays on {running.profile.technique}, under which it started")

    @property
    def listener_faults(self) -> dict[Listener, str]:
        """What is missing, and why, since a listener raised an exception and was detached; by listener."""
        return self._listeners.faults

    def _has_more(self) -> bool:
        if self._plan_progress.planned or (self._plan_manager.is_wanted and self.job_table.left()):
            return True
        steering = self._steering
        return steering is not None and steering.listen not in self._listeners.faults and steering.is_open()

    def _turn(self) -> None:
        """Starts what may start, adjusts what runs, plans where that is due, and handles the messages that arrive."""
        left_s = math.inf
        if not self._stopping:
            self._start()
            running = self._plan_progress.running.values()
            if running:
                self._plan_manager.decide_after_trials()
                self._command(self._plan_progress.reconsider_ends(done_jobs=self.job_table.done()))
            if not self._plan_manager.start_planning_if_due():
                # No plan moves the jobs off devices that must not be used.
                self._stop_gangs(r for r in running if not self._plan_manager.out.isdisjoint(r.segment.devices))
            left_s = min(self._retry_in_s, self._plan_manager.seconds_to_look())
        self._handle_messages(timeout_s=left_s if left_s < math.inf else None)

    # -- requests, on the executor's thread ---------------------------------------------------------------------------

    def add_jobs(self, entries: Sequence[JobTableEntry], *, why: str) -> None:
        """Adds jobs to the table and requests a new plan."""
        self.job_table.add(entries)
        self._outcome_policy.fail_orphans()
        self._plan_manager.request_plan(why)

    def price(self, job: Job, *, source: str, step: int) -> JobPrice | None:
        """Returns what a variant of a job would cost, under its name in the table; None where it has to wait.

        step: that from which it would continue.
        """
        priced = self._plan_manager.price(job, profiles=self.job_table.profiles[source], step=step)
        return None if priced is None else priced[1]

    def add_variant(self, name: str, job: Job, *, source: str, step: int | None, why: str) -> None:
        """Adds a variant of a job of the table, and plans it where it costs least; see `JobTable.add_variant`."""
        self.job_table.add_variant(name, job, source=source, step=step)
        entry = self.job_table.entries[name]
        priced = self._plan_manager.price(
            entry.job, profiles=self.job_table.profiles[name], step=self.job_table.records[name].step
        )
        if priced is None:
            self._plan_manager.request_plan(why)
        else:
            self._plan_manager.take_in(*priced, why=why)

    def redefine(self, name: str, job: Job, *, why: str) -> None:
        """Replaces the definition of a job. Its gang writes a checkpoint first, from which it continues."""
        self.job_table.redefine(name, job)
        self._plan_progress.drop(name)
        self._replanner.forget(name)
        self._detach_and_replan([name], why=why)

    def forget(self, batch: str) -> None:
        """Removes a batch's jobs from the table, which have ended or are given up. Nothing follows from their gangs."""
        jobs = self.job_table.of_batch(batch)
        for job in jobs:
            self._plan_progress.drop(job)
        self.job_table.remove(jobs)

    def cancel(self, jobs: Sequence[str], *, message: str) -> None:
        """Cancels jobs for good. Running ones write a checkpoint first."""
        left = [job for is_paused in (False, True) for job in self.job_table.unended(jobs, paused=is_paused)]
        self._outcome_policy.cancel(*left, message=message)
        self._detach_and_replan(jobs, why="jobs were cancelled")

    def fail(self, jobs: Sequence[str], *, message: str) -> None:
        """Fails the jobs that have not ended. Running ones are stopped."""
        for job in jobs:
            if self.job_table.records[job].status not in ENDED:
                self._outcome_policy.fail(job, message)
        self._detach_and_replan(jobs, why="jobs have failed")

    def pause(self, jobs: Sequence[str]) -> None:
        """Pauses jobs until they are resumed. Running ones write a checkpoint first."""
        for job in self.job_table.unended(jobs, paused=False):
            self.job_table.write(job, status=JobStatus.PAUSED)
            self._plan_progress.drop(job)
        self._detach_and_replan(jobs, why="jobs were paused")

    def resume(self, jobs: Sequence[str]) -> None:
        """Resumes paused jobs."""
        active = self._plan_progress.active_jobs
        for job in self.job_table.unended(jobs, paused=True):
            self.job_table.write(job, status=JobStatus.RUNNING if job in active else JobStatus.WAITING)
        self._plan_manager.request_plan("jobs were resumed")

    def retry(self, jobs: Sequence[str]) -> None:
        """Makes jobs that have failed or were cancelled due again, with the jobs that failed because of them."""
        for job in self.job_table.with_dependents(jobs):
            if self.job_table.records[job].status in (JobStatus.FAILED, JobStatus.CANCELLED):
                self.job_table.begin_again(job)
        self._plan_manager.request_plan("jobs were retried")

    def steer(self, steering: SteeringRequest) -> None:
        """Applies a steering request: sets jobs' definitions, raises their goals, and stops jobs early."""
        planned = {job.name for job in self.job_table.left()}
        for hook in self.hooks:
            hook.steer(steering)
        for name, job in steering.jobs.items():
            self.job_table.settle(name, job, like=steering.likes[name])
        for name, why in steering.choices.items():
            self.job_table.write(name, choice=why)
        for name, phases in steering.phases.items():
            if not self.job_table.records[name].phases:  # else it is sent again, after a kill
                self.job_table.write(name, phases=phases)
                self.job_table.renew(name)
                self._replanner.forget(name)  # its options are those of another batch size
        for name, goal in steering.goals.items():
            self.job_table.allow(name, goal)
        stops = {n: why for n, why in steering.stops.items() if self.job_table.records[n].status not in ENDED}
        further = chain.from_iterable(steering.of_features.values())
        leads = {self.job_table.groups.lead_of(name) or name for name in (*steering.goals, *further, *stops)}
        for name, why in stops.items():
            self._outcome_policy.stop_early(name, why)
        self._detach(stops)
        # No gang runs while all jobs of a group are at their goals, so the group is dissolved here.
        for lead in leads:
            self._outcome_policy.split_group_if_needed(lead)
        self._outcome_policy.regroup(num_devices=self._plan_manager.num_devices_for)
        if steering.goals or not planned.isdisjoint(stops):
            self._plan_manager.request_plan(steering.in_words())

    def replan_soon(self, *, why: str) -> None:
        """Requests a new plan in the background, as the terms have changed."""
        self._plan_manager.request_plan(why)

    def move_to(self, cluster: Cluster, *, why: str, out: Collection[DeviceId] = ()) -> None:
        """Replaces the cluster and requests a new plan.

        A node that is still there keeps its devices' numbers.

        out: devices of `cluster` that must not be used; jobs that run there are moved elsewhere.
        """
        self._plan_manager.move_to(cluster, out=out)
        self._plan_manager.request_plan(why)

    def hold(self, node: str) -> None:
        """Starts nothing more on a node. Segments that run there checkpoint and stop."""
        self._starter.held_nodes.add(node)
        self._stop_gangs(
            r for r in self._plan_progress.running.values() if any(n == node for n, _ in r.segment.devices)
        )

    def release(self, node: str) -> None:
        """Allows segments to start on a node again."""
        self._starter.held_nodes.discard(node)

    def stop_segments(self) -> None:
        """Commands every running segment to checkpoint and stop."""
        self._stop_gangs(self._plan_progress.running.values())

    def awaited(self) -> set[DeviceId]:
        """Returns the devices of segments that may start and lack only these devices."""
        return self._starter.awaited()

    def vacate(self, devices: Collection[DeviceId]) -> None:
        """Keeps exactly these devices free, instead of those of an earlier call.

        Segments that run there checkpoint and stop, and none starts there.
        """
        fresh = {*devices} - self._starter.vacated
        self._starter.vacated = {*devices}
        if fresh:
            self._stop_gangs(r for r in self._plan_progress.running.values() if not fresh.isdisjoint(r.segment.devices))

    def leased(self) -> set[str]:
        """Returns the names of the devices that segments hold."""
        return {name for running in self._plan_progress.running.values() for name in running.names}

    def is_free(self, node: str) -> bool:
        """Whether no segment runs on the node."""
        return not any(n == node for r in self._plan_progress.running.values() for n, _ in r.segment.devices)

    def adopt(self, number: int, record: SegmentRecord, future: Future[Outcome]) -> None:
        """Takes over a segment that another executor started. Its gang's events arrive through `post`."""
        table = self.job_table
        if not is_known(record, profiles=table.profiles[record.job]):
            table.groups.restore(record.job)
        profiles = table.profiles[record.job]
        assert is_known(record, profiles=profiles), f"segment {number} ran under an option that is not known: {record}"
        segment = segment_of(record, profiles=profiles)
        self._starter.add_running(
            number,
            segment,
            profiles[segment.option],
            names=record.spec.devices,
            first_step=record.spec.first_step,
            first_steps=record.members,
        )
        self._outcome_of(number, future).add_done_callback(lambda ended: self.post(number, ended))

    def _outcome_of(self, number: int, outcome: Future[Outcome]) -> Future[Outcome]:
        running = self._plan_progress.running[number]
        for hook in self.hooks:
            outcome = hook.outcome_of(running, outcome)
        return outcome

    def _expel(self, node: str, why: str) -> None:
        self.hold(node)
        cluster, out = self._plan_manager.cluster, self._plan_manager.out
        self.move_to(cluster, why=why, out=out | {device for device in cluster.lease_names() if device[0] == node})
        self.on_expelled(node, why)

    def _detach_and_replan(self, jobs: Sequence[str], *, why: str) -> None:
        self._detach(jobs)
        self._plan_manager.request_plan(why)

    def _detach(self, jobs: Collection[str]) -> None:
        """Stops the gangs of jobs that train no further, and removes the jobs from their groups, which continue."""
        running = self._plan_progress.running.values()
        self._stop_gangs(r for r in running if r.segment.job in jobs)
        for job in jobs:
            self.job_table.groups.remove_member(job)
            name = self.job_table.entries[job].job_in_batch.name
            self._command([(r.number, leave_command(name)) for r in running if job in r.members])
            self._outcome_policy.split_group_if_needed(job)

    def _command_gang(self, job: str, command: str) -> None:
        running = self._plan_progress.running.values()
        self._command([(each.number, command) for each in running if job in each.jobs])

    def _stop_gangs(self, gangs: Iterable[RunningSegment]) -> None:
        self._command(command for running in gangs for command in running.stop())

    def _command(self, commands: Iterable[Command]) -> None:
        for number, command in commands:
            self._engine.send(number, command)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _handle_messages(self, *, timeout_s: float | None) -> None:
        """Waits for a message, and handles it and those that have arrived meanwhile.

        Hundreds of gangs report each second: what may start or stop is not computed again for each of their events, and
        what follows from them is written together, before it waits again.
        """
        self._journal.database.flush()
        try:
            number, message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        until_s = self._clock() + AT_ONCE_S
        self._handle(number, message)
        for _ in range(MAX_AT_ONCE):
            if self._stopping or self._inbox.empty() or self._clock() >= until_s:
                return
            self._handle(*self._inbox.get())

    def _handle(self, number: int, message: Message) -> None:
        if isinstance(message, PendingPlan):
            if not self._stopping:
                self._plan_manager.follow_if_better(message)
        elif isinstance(message, Event):
            self._handle_gang_event(number, message)
        elif callable(message):
            message()
        elif message is not None:  # a Future, or a task engine's equivalent
            self._end(number, _outcome(message))

    def _handle_gang_event(self, number: int, event: Event) -> None:
        """Acts on an event of a gang. One that cannot be acted on fails its job alone."""
        running = self._plan_progress.running.get(number)
        if running is None or running.segment.job not in self.job_table.entries:
            return
        lead = running.segment.job
        named = event.job if isinstance(event, JobEvent) else None
        job = lead if named is None else self.job_table.name_of(named, in_batch_of=lead)
        refusal = self._event_fault(running, job, event)
        if refusal is None:
            try:
                self._act_on_event(running, job, event)
            except SQLAlchemyError:
                raise
            except Exception as error:
                logger.exception("an event of the gang of %s cannot be handled: %r", lead, event)
                refusal = f"its event {event.NAME!r} cannot be handled: {type(error).__name__}: {error}"
        if refusal is not None:
            self._refuse(running, job, printable_lines(refusal))

    def _event_fault(self, running: RunningSegment, job: str, event: Event) -> str | None:
        """Returns why an event of a gang must not be acted on, or None."""
        if isinstance(event, RefusedEvent):
            return event.message
        if job != running.segment.job and job not in running.first_steps:
            return f"its event {event.NAME!r} is about {job!r:.100}, which its gang does not train"
        last_step = self.job_table.entries[job].job.num_steps
        # The steps of a job whose gang is stopping may have been changed.
        if not running.is_stopping and isinstance(event, EVENTS_WITH_STEP) and last_step and event.step > last_step:
            return f"its event {event.NAME!r} is about step {event.step}, and its last step is {last_step}"
        return None

    def _refuse(self, running: RunningSegment, job: str, message: str) -> None:
        """Fails a job because of an event of its gang, of which the other jobs continue."""
        if job in running.first_steps:
            self.fail([job], message=message)
        elif not running.refusal:  # it fails once its gang has ended
            running.refusal = message
            self._stop_gangs([running])

    def _act_on_event(self, running: RunningSegment, job: str, event: Event) -> None:
        if isinstance(event, JobOfGroupEnded):  # a member has ended; the gang continues
            self._outcome_policy.end_member(running, job, event.outcome)
            return
        if job == running.segment.job:
            running.handle_event(event)
            if isinstance(event, Steps):
                self._replanner.handle_event(running)
        else:
            running.handle_member_event(job, event)
        # If a gang died before it could report a checkpoint, the next gang reports it, as it begins there.
        record = self.job_table.records[job]
        if isinstance(event, (CheckpointSaved, JobReady)) and event.step > record.step:
            self.job_table.write(job, step=event.step)
        if record.status == JobStatus.RUNNING:  # the message of a job that runs is what it waits for
            waits_for = event.message if isinstance(event, CheckpointFailed) and event.waits else ""
            if waits_for or (record.message and isinstance(event, (CheckpointSaved, JobReady))):
                self.job_table.write(job, message=waits_for)
        if isinstance(event, EvaluationReported):
            self.job_table.evaluated(job, event)
            for hook in self.hooks:
                hook.handle_evaluation(job, event)
        self._listeners.notify(GangReport(number=running.number, job=job, event=event))

    def _end(self, number: int, outcome: Outcome) -> None:
        running = self._plan_progress.running.pop(number, None)
        if running is None:
            return
        if running.refusal:
            outcome = replace(outcome, status=OutcomeStatus.INVALID, message=running.refusal)
        self._journal.end_segment(number, replace(outcome.result, status=outcome.status, message=outcome.message))
        self._leases.give_back(running.names)
        if running.segment.job not in self.job_table.entries:
            return
        is_out_of_memory = outcome.status == OutcomeStatus.OUT_OF_MEMORY
        decision = self._decide(running, outcome)
        self._outcome_policy.regroup(num_devices=self._plan_manager.num_devices_for)
        if self._plan_manager.drop_unusable():  # its remaining steps were put back into the plan
            self._plan_manager.request_plan(f"{running.segment.job} has lost its devices")
        self._listeners.notify(
            SegmentEnded(
                number=number,
                segment=running.segment,
                outcome=outcome,
                decision=decision,
                members=tuple(running.first_steps),
                profile=running.profile if is_out_of_memory else running.measured(outcome.result),
            )
        )

    def _decide(self, running: RunningSegment, outcome: Outcome) -> str:
        """Returns what follows an outcome. One that lacks what it must have fails its jobs alone."""
        try:
            decisions = (hook.decide(running, outcome) for hook in self.hooks)
            return next(filter(None, decisions), None) or self._outcome_policy.decide(running, outcome)
        except SQLAlchemyError:
            raise
        except Exception as error:
            jobs = [running.segment.job, *running.members]
            logger.exception("the outcome %r of %s cannot be decided on", outcome, ", ".join(jobs))
            what = f"its gang ended with an outcome that cannot be read: {type(error).__name__}: {error}"
            self.fail(jobs, message=printable_lines(what))
            return "the job has failed"


def _outcome(future: Future[Outcome]) -> Outcome:
    """Returns the outcome of a segment's task. A task that could not start its gang counts as a crash."""
    try:
        return future.result()
    except Exception as error:  # noqa: BLE001 - an error of the task engine fails this segment alone
        return Outcome(status=OutcomeStatus.CRASHED, message=f"{type(error).__name__}: {error}")
