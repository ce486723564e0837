"""Runs plans to their end: a small state machine that starts segments, reads their outcomes and decides what follows.

A segment's task returns its outcome as a value; only the executor decides (`verdicts`). Jobs may come and go, and so
may nodes: whatever changes, what runs goes on, and the rest is planned anew in the background.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future

from tasks.cluster import Cluster
from tasks.execution.course import Command, Course
from tasks.execution.dispatch import DeviceId, in_steps
from tasks.execution.events import (
    ExecutionEvent,
    GangSaid,
    Listener,
    Planned,
    SegmentEnded,
)
from tasks.execution.journal import CANCELLED, PAUSED, RUNNING, WAITING, Journal, SegmentRecord
from tasks.execution.orders import Submit
from tasks.execution.progress import RunningSegment
from tasks.execution.replanner import Replanner, State, Thought
from tasks.execution.roster import Enlisted, Roster
from tasks.execution.starting import Leases, Starter, segment_of
from tasks.execution.verdicts import Verdicts
from tasks.planning import Plan, Problem
from tasks.profiling.options import planning_problem
from techniques.engine.gang import CRASHED, Event, Outcome
from techniques.engine.reporter import STOP

MOST_FAILED_PLANS = 3  # in a row, of a batch of which nothing runs

Steer = Callable[[str, str], None]
"""Gives the gang of a folder a command: `STOP`, or what `until` makes."""

MakePlan = Callable[[Problem], Plan]

OnTerms = Callable[[Problem], Problem]
"""Adds what is asked of plans beside the jobs: deadlines, as they stand now, weights, prices."""

Message = Event | Future[Outcome] | Thought | Callable[[], None] | None


class Executor:
    """The jobs of a list on their way. One thread calls `run` or `serve`; from others come `call`, `said` and `stop`.

    leases, holder: who gives the devices of `cluster`, and to whom. replanner, steer: both, where the rest is planned
    anew as speeds are measured and things change; without them the first plan is followed.
    """

    def __init__(
        self,
        *,
        name: str,
        cluster: Cluster,
        leases: Leases,
        holder: str,
        journal: Journal,
        submit: Submit,
        make_plan: MakePlan,
        entries: Sequence[Enlisted] = (),
        on_terms: OnTerms = lambda problem: problem,
        listeners: Sequence[Listener] = (),
        replanner: Replanner | None = None,
        steer: Steer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert (replanner is None) == (steer is None), "a plan that changes needs gangs that can be told"
        self._name, self._cluster, self._leases, self._journal = name, cluster, leases, journal
        self._make_plan, self._on_terms, self._listeners = make_plan, on_terms, listeners
        self._replanner, self._steer = replanner, steer
        self._inbox: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._out: frozenset[DeviceId] = frozenset()
        self._wanted: str | None = None
        self._stopping = False
        self.roster = Roster(journal)
        self._course = Course(totals=self.roster.totals, after=self.roster.after)
        self._starter = Starter(
            self.roster, self._course, leases=leases, holder=holder, submit=submit, post=self._post, clock=clock
        )
        self._verdicts = Verdicts(
            self.roster,
            self._course,
            tell=self._tell,
            want=self._want,
            hold_back=self._starter.hold_back,
            forget_speed=self._forget_speed,
        )
        self.roster.add(entries)

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Runs the jobs; returns whether they came to their end (False: it was stopped on the way, to be resumed)."""
        self.roster.refresh()
        self._verdicts.fail_orphans()
        self.replan(why="start" if not self._journal.plans() else "resumed")
        while self._course.running or (self._has_more() and not self._stopping):
            self._turn()
            self._give_up_planning()
        return not self._has_more()

    def serve(self) -> None:
        """Runs whatever is on the list, and what will come, until `stop`; what runs then goes on without us."""
        while not self._stopping:
            self._turn()

    def stop(self) -> None:
        """No more segments; what runs is the caller's to tell. From any thread or signal."""
        self._stopping = True
        self._post(0, None)

    def call(self, action: Callable[[], None]) -> None:
        """Has `action` run between two messages, by the executor's thread. From any thread."""
        self._post(0, action)

    def said(self, number: int, event: Event) -> None:
        """Takes in what the gang of a segment says. From any thread."""
        self._post(number, event)

    def _post(self, number: int, message: Message) -> None:
        self._inbox.put((number, message))

    def _give_up_planning(self) -> None:
        """Raises why there is no plan where nothing runs and there will be none."""
        failures = self._replanner.failures if self._replanner is not None else []
        if not self._course.running and len(failures) >= MOST_FAILED_PLANS:
            raise failures[-1]

    def _has_more(self) -> bool:
        return bool(self._course.planned) or self._wanted is not None

    def _turn(self) -> None:
        """Starts what can start, considers what runs, and hears one message."""
        patience_s = [] if self._stopping else [self._starter.start_what_can(self._cluster, tell=self._tell)]
        if self._replanner is not None and not self._stopping:
            if self._course.running:
                self._command(self._course.reconsider_ends(done_jobs=self.roster.done()))
            self._think(self._replanner)
            patience_s.append(
                self._replanner.seconds_to_look(
                    is_running=bool(self._course.running), is_wanted=self._wanted is not None
                )
            )
        left_s = min(patience_s, default=math.inf)
        self._hear(timeout_s=left_s if left_s < math.inf else None)

    # -- what others ask, in the executor's thread ---------------------------------------------------------------------

    def enlist(self, entries: Sequence[Enlisted], *, why: str) -> None:
        """Takes on more jobs."""
        self.roster.add(entries)
        self._verdicts.fail_orphans()
        self._want(why)

    def forget(self, batch: str) -> None:
        """Takes the jobs of a batch, all of which have ended, off the list."""
        self.roster.remove(self.roster.of_batch(batch))

    def cancel(self, jobs: Sequence[str], *, message: str) -> None:
        """Ends jobs for good; those that run write a checkpoint first."""
        for job in self.roster.standing_still(jobs, paused=False) + self.roster.standing_still(jobs, paused=True):
            if self.roster.records[job].status != CANCELLED:  # it may have been an orphan of one before
                self._verdicts.cancel(job, message)
        self._dismiss(jobs, why="jobs were cancelled")

    def pause(self, jobs: Sequence[str]) -> None:
        """Has jobs stand still until they are resumed; those that run write a checkpoint first."""
        for job in self.roster.standing_still(jobs, paused=False):
            self.roster.write(job, status=PAUSED)
            self._course.drop(job)
        self._dismiss(jobs, why="jobs were paused")

    def resume(self, jobs: Sequence[str]) -> None:
        """Has paused jobs go on."""
        active = self._course.active_jobs
        for job in self.roster.standing_still(jobs, paused=True):
            self.roster.write(job, status=RUNNING if job in active else WAITING)
        self._want("jobs were resumed")

    def replan_soon(self, *, why: str) -> None:
        """The terms have changed: plans anew in the background."""
        self._want(why)

    def move_to(self, cluster: Cluster, *, why: str, out: Collection[DeviceId] = ()) -> None:
        """Other devices are there now. out: those of `cluster` that must not be used; what runs there is moved away.

        A node that is still there keeps its devices' numbers.
        """
        self._cluster, self._out = cluster, frozenset(out)
        self._drop_unusable()
        self._want(why)

    def hold(self, node: str) -> None:
        """Starts nothing more on a node, and has what runs there checkpoint and stop."""
        self._starter.held_nodes.add(node)
        self._stop_gangs(r for r in self._course.running.values() if any(n == node for n, _ in r.segment.devices))

    def release(self, node: str) -> None:
        """The node serves again."""
        self._starter.held_nodes.discard(node)

    def is_free(self, node: str) -> bool:
        """Whether no segment runs on the node."""
        return not any(n == node for r in self._course.running.values() for n, _ in r.segment.devices)

    def adopt(self, number: int, record: SegmentRecord, future: Future[Outcome]) -> None:
        """Goes on with a segment that another executor started; its gang's words come by `said`."""
        segment = segment_of(record, profiles=self.roster.profiles[record.job])
        names, first_step = tuple(record.what["devices"]), record.what["first_step"]
        self._starter.watch(number, segment, names=names, first_step=first_step)
        future.add_done_callback(lambda ended: self._post(number, ended))

    def _dismiss(self, jobs: Sequence[str], *, why: str) -> None:
        self._stop_gangs(r for r in self._course.running.values() if r.segment.job in jobs)
        self._want(why)

    def _stop_gangs(self, gangs: Iterable[RunningSegment]) -> None:
        for running in gangs:
            if not running.is_stopping:
                running.is_stopping = True
                self._command([(running.folder, STOP)])

    def _want(self, why: str) -> None:
        """Asks for a new plan of what is left."""
        if self._replanner is None:
            self.replan(why=why)
            return
        self._wanted = (
            why if self._wanted is None else f"{self._wanted}; {why}" if why not in self._wanted else self._wanted
        )
        self._replanner.void()

    def _drop_unusable(self) -> bool:
        """Plans nothing on devices that are gone or must not be used; returns whether anything was."""
        there = set(self._cluster.lease_names()) - self._out
        jobs = {s.job for s in self._course.planned if not there.issuperset(s.devices)}
        for job in jobs:
            self._course.drop(job)
        return bool(jobs)

    def _forget_speed(self, job: str) -> None:
        if self._replanner is not None:
            self._replanner.forget(job)

    # -- planning ----------------------------------------------------------------------------------------------------

    def replan(self, *, why: str) -> None:
        """Plans what is left, and waits for it; segments that run keep what the plan had for their jobs after them."""
        active = self._course.active_jobs
        jobs = [job for job in self.roster.left() if job.name not in active]
        kept = [segment for segment in self._course.planned if segment.job in active]
        if not jobs:
            self._course.planned = kept
            return
        done = {job.name: self.roster.records[job.name].step for job in jobs}
        problem = planning_problem(jobs, self.roster.profiles, self._cluster, name=self._name, steps_done=done)
        problem = self._on_terms(problem)
        plan = self._make_plan(problem)
        self._journal.write_plan({"problem": problem.to_json(), "plan": plan.to_json()}, why=why)
        steps = {job.name: job.total_steps for job in jobs}
        self._course.planned = [*kept, *in_steps(plan, num_steps=steps, steps_done=done)]
        if self._replanner is not None:
            self._replanner.planned(self._state())
        self._tell(Planned(problem=problem, plan=plan, why=why))

    def _state(self) -> State:
        jobs = self.roster.left()
        told = {running.segment.job: running.step for running in self._course.running.values()}
        steps = {job.name: max(told.get(job.name, 0), self.roster.records[job.name].step) for job in jobs}
        return State(
            cluster=self._cluster,
            out=self._out,
            jobs=jobs,
            profiles=self.roster.profiles,
            steps=steps,
            running=tuple(r for r in self._course.running.values() if r.segment.job in steps),
            planned=tuple(segment for segment in self._course.planned if segment.job in steps),
        )

    def _think(self, replanner: Replanner) -> None:
        """Has the rest planned anew in the background where it is time to; the plan comes as a message."""
        is_running, is_wanted = bool(self._course.running), self._wanted is not None
        if replanner.seconds_to_look(is_running=is_running, is_wanted=is_wanted) > 0:
            return
        state = self._state()
        thought = replanner.look(state) if self._wanted is None else replanner.demand(state, why=self._wanted)
        if thought is None:  # of what was wanted, nothing is left that could be planned
            self._wanted = None
            self._stop_gangs(r for r in self._course.running.values() if not self._out.isdisjoint(r.segment.devices))
        if thought is not None:
            thought.plan.add_done_callback(lambda _: self._post(0, thought))

    def _adopt(self, thought: Thought) -> None:
        """Follows a new plan where that pays: gangs that need not move never notice, the others are told to stop."""
        assert self._replanner is not None
        fresh = None if self._stopping else self._replanner.judge(thought, self._state())
        if fresh is None:
            return
        if thought.is_needed:
            self._wanted = None
        self._command(self._course.follow(fresh))
        plan, problem = thought.plan.result(), thought.rest.problem
        self._journal.write_plan({"problem": problem.to_json(), "plan": plan.to_json()}, why=thought.why)
        self._replanner.planned(self._state())
        self._tell(Planned(problem=problem, plan=plan, why=thought.why))

    def _command(self, commands: Iterable[Command]) -> None:
        assert self._steer is not None, "a plan that changes needs gangs that can be told"
        for folder, command in commands:
            self._steer(folder, command)

    # -- hearing -----------------------------------------------------------------------------------------------------

    def _hear(self, *, timeout_s: float | None) -> None:
        """Waits for one message and acts on it."""
        try:
            number, message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        if message is None:
            return
        if isinstance(message, Thought):
            self._adopt(message)
        elif isinstance(message, Mapping):
            self._note(number, message)
        elif callable(message):
            message()
        else:  # a Future, or what a task engine calls one
            self._end(number, _outcome(message))

    def _note(self, number: int, event: Event) -> None:
        running = self._course.running.get(number)
        if running is None:
            return
        job = running.segment.job
        running.hear(event)
        if self._replanner is not None and event["event"] == "steps":
            self._replanner.hear(running, self.roster.profiles[job][running.segment.option])
        # Of a checkpoint whose gang died before it could tell, the next gang tells, which begins there.
        is_newer = event["event"] in ("checkpoint", "ready") and event["step"] > self.roster.records[job].step
        if is_newer:
            self.roster.write(job, step=event["step"])
        self._tell(GangSaid(number=number, job=job, event=event))

    def _end(self, number: int, outcome: Outcome) -> None:
        running = self._course.running.pop(number)
        self._journal.end_segment(number, {"status": outcome.status, "message": outcome.message, **outcome.result})
        self._leases.give_back(running.names)
        decision = self._verdicts.decide(running, outcome)
        if self._drop_unusable():  # what is left of it was put back
            self._want(f"{running.segment.job} has lost its devices")
        self._tell(SegmentEnded(number=number, segment=running.segment, outcome=outcome, decision=decision))

    def _tell(self, event: ExecutionEvent) -> None:
        for listener in self._listeners:
            listener(event)


def _outcome(future: Future[Outcome]) -> Outcome:
    """What a segment's task returned; a task that could not even start its gang counts as a crash."""
    try:
        return future.result()
    except Exception as error:  # noqa: BLE001 - whatever a task engine raises: this segment's crash, not the batch's
        return Outcome(status=CRASHED, message=f"{type(error).__name__}: {error}")
