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

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.course import Command, Course
from ringmaster.tasks.execution.directions import Directions
from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.tasks.execution.events import (
    ExecutionEvent,
    GangSaid,
    Listener,
    SegmentEnded,
)
from ringmaster.tasks.execution.forethought import Forethought, MakePlan, OnTerms
from ringmaster.tasks.execution.journal import CANCELLED, ENDED, PAUSED, RUNNING, WAITING, Journal, SegmentRecord
from ringmaster.tasks.execution.orders import Submit
from ringmaster.tasks.execution.progress import RunningSegment
from ringmaster.tasks.execution.replanner import Replanner, Thought
from ringmaster.tasks.execution.roster import Enlisted, Roster
from ringmaster.tasks.execution.starting import Leases, Starter, is_known, segment_of
from ringmaster.tasks.execution.verdicts import Verdicts
from ringmaster.techniques.engine.gang import CRASHED, Event, Outcome
from ringmaster.techniques.engine.reporter import STOP, leave

MOST_FAILED_PLANS = 3  # in a row, of a batch of which nothing runs

Steer = Callable[[str, str], None]
"""Gives the gang of a folder a command: `STOP`, or what `until` makes."""

Message = Event | Future[Outcome] | Thought | Callable[[], None] | None


class Executor:
    """The jobs of a list on their way. One thread calls `run` or `serve`; from others come `call`, `said` and `stop`.

    leases, holder: who gives the devices of `cluster`, and to whom. replanner, steer: both, where the rest is planned
    anew as speeds are measured and things change; without them the first plan is followed. is_open: whether somebody
    who steers the batch may have more of it trained, though nothing is left just now.
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
        is_open: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert (replanner is None) == (steer is None), "a plan that changes needs gangs that can be told"
        self._leases, self._journal, self._listeners, self._steer = leases, journal, listeners, steer
        self._inbox: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._stopping, self._is_open = False, is_open
        self.roster = Roster(journal)
        self._course = Course(totals=self.roster.totals, after=self.roster.after)
        self._starter = Starter(
            self.roster, self._course, leases=leases, holder=holder, submit=submit, post=self._post, clock=clock
        )
        self._forethought = Forethought(
            name=name,
            cluster=cluster,
            roster=self.roster,
            course=self._course,
            journal=journal,
            make_plan=make_plan,
            on_terms=on_terms,
            replanner=replanner,
            command=self._command,
            tell=self._tell,
            post=lambda thought: self._post(0, thought),
        )
        self._verdicts = Verdicts(
            self.roster,
            self._course,
            tell=self._tell,
            want=self._forethought.want,
            hold_back=self._starter.hold_back,
            forget_speed=self._forethought.forget_speed,
        )
        self.roster.add(entries)

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Runs the jobs; returns whether they came to their end (False: it was stopped on the way, to be resumed)."""
        self.roster.refresh()
        self._verdicts.fail_orphans()
        self._forethought.replan(why="start" if not self._journal.plans() else "resumed")
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
        failures = self._forethought.failures
        if not self._course.running and len(failures) >= MOST_FAILED_PLANS:
            raise failures[-1]

    def _has_more(self) -> bool:
        return bool(self._course.planned) or self._forethought.is_wanted or self._is_open()

    def _turn(self) -> None:
        """Starts what can start, considers what runs, and hears one message."""
        patience_s = []
        if not self._stopping:
            patience_s.append(self._starter.start_what_can(self._forethought.cluster, tell=self._tell))
            if self._steer is not None and self._course.running:
                self._command(self._course.reconsider_ends(done_jobs=self.roster.done()))
            if not self._forethought.look():  # nothing could be planned for those on devices that must not be used
                out = self._forethought.out
                self._stop_gangs(r for r in self._course.running.values() if not out.isdisjoint(r.segment.devices))
            patience_s.append(self._forethought.seconds_to_look())
        left_s = min(patience_s, default=math.inf)
        self._hear(timeout_s=left_s if left_s < math.inf else None)

    # -- what others ask, in the executor's thread ---------------------------------------------------------------------

    def enlist(self, entries: Sequence[Enlisted], *, why: str) -> None:
        """Takes on more jobs."""
        self.roster.add(entries)
        self._verdicts.fail_orphans()
        self._forethought.want(why)

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
        self._forethought.want("jobs were resumed")

    def direct(self, directions: Directions) -> None:
        """Settles what jobs are, raises how far they may train, and stops early those that are not worth it."""
        planned = {job.name for job in self.roster.left()}
        for name, job in directions.jobs.items():
            self.roster.settle(name, job, like=directions.likes[name])
        for name, goal in directions.goals.items():
            self.roster.allow(name, goal)
        stops = {n: why for n, why in directions.stops.items() if self.roster.records[n].status not in ENDED}
        for name, why in stops.items():
            self._verdicts.stop_early(name, why)
        if directions.goals or not planned.isdisjoint(stops):
            self._dismiss(list(stops), why=directions.in_words())

    def replan_soon(self, *, why: str) -> None:
        """The terms have changed: plans anew in the background."""
        self._forethought.want(why)

    def move_to(self, cluster: Cluster, *, why: str, out: Collection[DeviceId] = ()) -> None:
        """Other devices are there now. out: those of `cluster` that must not be used; what runs there is moved away.

        A node that is still there keeps its devices' numbers.
        """
        self._forethought.move_to(cluster, out=out)
        self._forethought.want(why)

    def hold(self, node: str) -> None:
        """Starts nothing more on a node, and has what runs there checkpoint and stop."""
        self._starter.held_nodes.add(node)
        self._stop_gangs(r for r in self._course.running.values() if any(n == node for n, _ in r.segment.devices))

    def release(self, node: str) -> None:
        """The node serves again."""
        self._starter.held_nodes.discard(node)

    def awaited(self) -> set[DeviceId]:
        """The devices of segments that may start, and wait for nothing but these."""
        return self._starter.awaited()

    def vacate(self, devices: Collection[DeviceId]) -> None:
        """Keeps devices free, and only these: what runs there checkpoints and stops, and nothing starts there."""
        fresh = {*devices} - self._starter.vacated
        self._starter.vacated = {*devices}
        if fresh:
            self._stop_gangs(r for r in self._course.running.values() if not fresh.isdisjoint(r.segment.devices))

    def is_free(self, node: str) -> bool:
        """Whether no segment runs on the node."""
        return not any(n == node for r in self._course.running.values() for n, _ in r.segment.devices)

    def adopt(self, number: int, record: SegmentRecord, future: Future[Outcome]) -> None:
        """Goes on with a segment that another executor started; its gang's words come by `said`."""
        if not is_known(record, profiles=self.roster.profiles[record.job]):
            self.roster.groups.restore(record.job)
        profiles = self.roster.profiles[record.job]
        fellows = record.what.get("fellows", {})
        beside = {self.roster.listed(name, beside=record.job): step for name, step in fellows.items()}
        segment = segment_of(record, profiles=profiles)
        names, first_step = tuple(record.what["devices"]), record.what["first_step"]
        profile = profiles[segment.option]
        self._starter.watch(number, segment, profile, names=names, first_step=first_step, beside=beside)
        future.add_done_callback(lambda ended: self._post(number, ended))

    def _dismiss(self, jobs: Sequence[str], *, why: str) -> None:
        self._stop_gangs(r for r in self._course.running.values() if r.segment.job in jobs)
        for job in jobs:
            self._take_out(job)
            self._verdicts.part_if_need_be(job)
        self._forethought.want(why)

    def _take_out(self, job: str) -> None:
        """A job that is trained by another one's gang leaves that; the others go on."""
        self.roster.groups.leave(job)
        if gangs := [r.folder for r in self._course.running.values() if job in r.fellows]:
            self._command((folder, leave(self.roster.entries[job].local_job.name)) for folder in gangs)

    def _stop_gangs(self, gangs: Iterable[RunningSegment]) -> None:
        for running in gangs:
            if not running.is_stopping:
                running.is_stopping = True
                self._command([(running.folder, STOP)])

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
            if not self._stopping:
                self._forethought.weigh(message)
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
        leader = running.segment.job
        job = self.roster.listed(event["job"], beside=leader) if "job" in event else leader
        if event["event"] == "ended":  # of a fellow: the gang goes on
            self._verdicts.follow(running, job, event["outcome"])
            return
        if job == leader:
            running.hear(event)
            if self._forethought.replanner is not None and event["event"] == "steps":
                self._forethought.replanner.hear(running)
        else:
            running.hear_of(job, event)
        # Of a checkpoint whose gang died before it could tell, the next gang tells, which begins there.
        is_newer = event["event"] in ("checkpoint", "ready") and event["step"] > self.roster.records[job].step
        if is_newer:
            self.roster.write(job, step=event["step"])
        if event["event"] == "metrics":
            self.roster.evaluated(job, event["step"], event["metrics"])
        self._tell(GangSaid(number=number, job=job, event=event))

    def _end(self, number: int, outcome: Outcome) -> None:
        running = self._course.running.pop(number)
        self._journal.end_segment(number, {"status": outcome.status, "message": outcome.message, **outcome.result})
        self._leases.give_back(running.names)
        decision = self._verdicts.decide(running, outcome)
        if self._forethought.drop_unusable():  # what is left of it was put back
            self._forethought.want(f"{running.segment.job} has lost its devices")
        self._tell(
            SegmentEnded(
                number=number,
                segment=running.segment,
                outcome=outcome,
                decision=decision,
                fellows=tuple(running.beside),
            )
        )

    def _tell(self, event: ExecutionEvent) -> None:
        for listener in self._listeners:
            listener(event)


def _outcome(future: Future[Outcome]) -> Outcome:
    """What a segment's task returned; a task that could not even start its gang counts as a crash."""
    try:
        return future.result()
    except Exception as error:  # noqa: BLE001 - whatever a task engine raises: this segment's crash, not the batch's
        return Outcome(status=CRASHED, message=f"{type(error).__name__}: {error}")
