"""Runs a pool's life around one executor: nodes come and go, batches are submitted and end, people ask for things.

All of it happens in the executor's thread, between two of its messages, so nothing here is locked; a pacemaker only
asks for the next `tick`. What is decided lies in the database before it is acted on: an executor that comes after a
crash takes over what runs, decides what was left undecided, tells what nobody was told, and doubles nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from sqlalchemy import select

from ringmaster.tasks.cluster import Device, Node
from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.tasks.execution.events import ExecutionEvent, GangSaid, JobEnded, SegmentEnded
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.journal import CANCELLED, ENDED, FAILED, PAUSED, STOPPED, Journal, SegmentRecord
from ringmaster.tasks.execution.orders import LOST
from ringmaster.tasks.execution.progress import RunningSegment
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.checked import checked_plan
from ringmaster.tasks.planning.search import Objective
from ringmaster.tasks.pool import housekeeping
from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.pool.desk import HOLDER, OTHER_VERSION, Desk
from ringmaster.tasks.pool.leases import PoolLeases
from ringmaster.tasks.pool.mail import KILL, Mail
from ringmaster.tasks.pool.nodes import LEAVING, Nodes
from ringmaster.tasks.pool.patience import Patience
from ringmaster.tasks.pool.runner import PoolRunner
from ringmaster.tasks.pool.schema import BATCHES, SEGMENTS
from ringmaster.tasks.pool.standing import PRIORITIES, Standing, as_told, batch_of, combined_terms, entries_of, fault_of
from ringmaster.tasks.pool.submissions import SUBMITTED, Submission, Submissions
from ringmaster.tasks.pool.succession import Estate, nodes_of, num_told, outcome_of, read_estate, speeds_of
from ringmaster.tasks.pool.told import Told
from ringmaster.tasks.pool.watch import NodeWatch, cluster_of
from ringmaster.techniques.engine.gang import Outcome

logger = logging.getLogger(__name__)

HOLDER_OF_SEGMENTS = "pool"  # of the leases that the executor takes
TICK_S = 0.25
NODES_EVERY_S = 1.0
PLANNING_TIME_LIMIT_S = 10.0


class Steward:
    """Serves one executor from `take_over` on. What an executor needs of it: `listen`, `on_terms`, `make_plan`.

    database: as only the leader may write to it. clock: monotonic seconds; wall_clock: seconds since the epoch, from
    which batches count their deadlines. on_objective, on_speed: set by whoever must know what the standing plan
    minimises now, and what gangs have told of their speeds to a former executor.
    """

    def __init__(
        self,
        database: Database,
        *,
        runner: PoolRunner,
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        seed: int = 0,
    ) -> None:
        self._database, self._runner, self._patience, self._clock = database, runner, patience, clock
        self._wall_clock, self._seed = wall_clock, seed
        self.on_objective: Callable[[Objective], None] = lambda objective: None
        self.on_speed: Callable[[RunningSegment], None] = lambda running: None
        self._submissions, self._told, self._mail = Submissions(database), Told(database), Mail(database)
        self._watch = NodeWatch(
            Nodes(database),
            clock=clock,
            lost_after_s=patience.lost_after_s,
            blind_after_s=patience.blind_after_s,
        )
        self._standing: dict[str, Standing] = {}
        self._terms = combined_terms(())
        self._ghosts: dict[str, Node] = {}
        self._usable: Mapping[DeviceId, Device] = {}
        self._leaving: set[str] = set()
        self._heard_before: dict[int, int] = {}  # by adopted segment, its words that were told already
        self._may_have_ended: set[str] = set()
        self._looked_s = -NODES_EVERY_S
        self._tidied_s = -housekeeping.EVERY_S
        self._is_due = threading.Event()

    # -- what the executor needs -------------------------------------------------------------------------------------

    def on_terms(self, problem: Problem) -> Problem:
        """What all batches together ask of a plan; `combined_terms` has the rule."""
        return self._terms.on(problem, elapsed_s=self._wall_clock())

    def make_plan(self, problem: Problem) -> Plan:
        """A plan for the objective that stands, checked by the verifier. From any thread."""
        objective = self._terms.objective
        return checked_plan(problem, time_limit_s=PLANNING_TIME_LIMIT_S, seed=self._seed, objective=objective)

    def listen(self, event: ExecutionEvent) -> None:
        """An executor's listener: tells each batch what happens to its jobs, by the names that it knows."""
        if isinstance(event, GangSaid) and self._heard_before.get(event.number):
            self._heard_before[event.number] -= 1  # an adopted gang's words are heard again, and told once
            return
        batch = batch_of(event)
        for one in [batch] if batch is not None else list(self._standing):
            if (told := as_told(event, one)) is not None:
                self._told.tell(one, told)
        if batch is not None and isinstance(event, (JobEnded, SegmentEnded)):
            self._may_have_ended.add(batch)

    # -- serving -----------------------------------------------------------------------------------------------------

    def take_over(self, executor: Executor) -> None:
        """Puts an executor that does not serve yet where the former one was, or at the beginning."""
        self._executor = executor
        self._desk = Desk(
            self._database,
            executor=executor,
            standing=self._standing,
            on_priority=self._on_priority,
            clock=self._clock,
            silent_s=self._patience.lost_after_s,
        )
        self._watch.look()
        for record in self._watch.there.values():
            self._runner.meet(record)
        estates = [read_estate(self._database, batch) for batch in self._new_batches()]
        self._end_strays({estate.batch.id for estate in estates})
        unsettled = [record for estate in estates for record in (*estate.open, *estate.undecided)]
        self._ghosts = nodes_of(unsettled)
        self._give_back_leases(unsettled)
        self._move(why="an executor began", is_first=True)
        for estate in estates:
            self._inherit(estate)
        self._is_due.set()

    def keep_ticking(self, until: threading.Event) -> None:
        """Has the executor's thread call `tick` again and again; returns once `until` is set."""
        while not until.wait(TICK_S):
            if self._is_due.is_set():  # else the last one is not done yet
                self._is_due.clear()
                self._executor.call(self.tick)

    def tick(self) -> None:
        """Looks at all that may have changed, and acts on it."""
        self._look_at_nodes()
        self._look_at_batches()
        self._desk.answer_all()
        self._desk.read_loans(self._watch.there)
        self._desk.grant(self._watch.there)
        for batch in list(self._may_have_ended):
            self._end_batch(batch)
        self._tidy_up()
        self._is_due.set()

    def _tidy_up(self) -> None:
        if self._clock() - self._tidied_s >= housekeeping.EVERY_S:
            self._tidied_s = self._clock()
            num_dropped = housekeeping.tidy(self._database, now_s=self._wall_clock())
            logger.info("%d rows that nobody needs any more were dropped", num_dropped)

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _look_at_nodes(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < NODES_EVERY_S:
            return
        self._looked_s = now_s
        before = dict(self._watch.there)
        gone = self._watch.look()
        for each in gone:
            logger.warning("node %s is gone: %s", each.node, each.why)
            self._ghosts[each.node] = Node(name=each.node, devices=before[each.node].devices)
            self._runner.lose(each.node, each.incarnation)
        there = self._watch.there
        came = [name for name, record in there.items() if _incarnation(before.get(name)) != record.incarnation]
        for name in came:
            self._runner.meet(there[name])
        self._hold_leaving()
        why = [f"node {each.node} is gone ({each.why})" for each in gone] + [f"node {name} came" for name in came]
        self._move(why=", ".join(why) or "the health of devices has changed")

    def _move(self, *, why: str, is_first: bool = False) -> None:
        """Tells the executor which devices there are, where those that can be used have changed."""
        there = self._watch.there
        self._ghosts = {n: g for n, g in self._ghosts.items() if n not in there and (is_first or self._is_haunted(n))}
        cluster, out = cluster_of(there, ghosts=self._ghosts)
        usable = {device: cluster.device(*device) for device in cluster.lease_names() if device not in out}
        if is_first or usable != self._usable:
            self._usable = usable
            logger.info("%s: %d devices of %d can be used", why, len(usable), len(cluster.devices))
            self._executor.move_to(cluster, why=why, out=out)

    def _is_haunted(self, node: str) -> bool:
        """Whether a segment that ran on a node that is gone is still to be ended by the executor."""
        return self._runner.is_busy(node) or not self._executor.is_free(node)

    def _hold_leaving(self) -> None:
        """Nothing starts on nodes that leave."""
        leaving = {name for name, record in self._watch.there.items() if record.status == LEAVING}
        for name in sorted(leaving - self._leaving):
            self._executor.hold(name)
        for name in sorted(self._leaving - leaving):
            self._executor.release(name)
        self._leaving = leaving

    # -- batches -----------------------------------------------------------------------------------------------------

    def _look_at_batches(self) -> None:
        for batch in self._new_batches():
            self._inherit(read_estate(self._database, batch))

    def _new_batches(self) -> list[Submission]:
        """The batches that stand and are not known yet; one that cannot be planned fails, and disturbs nobody."""
        query = select(BATCHES.c.id).where(BATCHES.c.status == SUBMITTED).order_by(BATCHES.c.submitted_s)
        found = []
        for id in self._database.read(lambda connection: connection.execute(query).scalars().all()):
            if id in self._standing:
                continue
            try:
                batch = self._submissions.find(id)
            except ValueError as error:  # of another version, or by hand
                self._refuse(id, f"the executor cannot read it: {error}. {OTHER_VERSION}")
                continue
            if batch is not None and (fault := fault_of(batch)) is None:
                found.append(batch)
            elif batch is not None:
                self._refuse(id, fault or "")
        return found

    def _refuse(self, id: str, message: str) -> None:
        """Fails all that is left of a batch."""
        logger.error("batch %s: %s", id, message)
        journal = Journal(self._database, batch=id)
        for name, record in journal.jobs().items():
            if record.status not in ENDED:
                self._fail(id, name, message)
        self._submissions.end(id)

    def _fail(self, id: str, job: str, message: str) -> None:
        Journal(self._database, batch=id).write_job(job, status=FAILED, message=message)
        self._told.tell(id, JobEnded(job=job, status=FAILED, message=message, details={}))

    def _inherit(self, estate: Estate) -> None:
        """Takes on a batch: a new one, or one that another executor had, with all that it left open."""
        batch = estate.batch
        priorities = Journal(self._database, batch=batch.id).get(PRIORITIES, {})
        self._standing[batch.id] = Standing(submission=batch, priorities=priorities)
        self._ask_anew()
        for name, job in estate.jobs.items():
            if job.status not in ENDED and not batch.profiles.get(name):
                self._fail(batch.id, name, "it was submitted without a profile")
        self._heard_before |= num_told(self._database, batch.id)
        for event in estate.untold:
            self._told.tell(batch.id, event)
        entries = entries_of(batch, struck_out=estate.struck_out)
        self._executor.enlist(entries, why=f"batch {batch.name} has {len(entries)} jobs")
        self._recall_speeds(estate)
        for record in estate.open:
            future = self._runner.adopt(record.id, on_event=partial(self._executor.said, record.id))
            self._executor.adopt(record.id, estate.qualified(record), future)
        for record in estate.undecided:
            self._executor.adopt(record.id, estate.qualified(record), _at_once(outcome_of(record)))
        # Whoever asked for an end may have died before the gang was told.
        running = {record.job for record in estate.open}
        paused, over = (
            [batch.qualified(job) for job in running if estate.jobs[job].status in statuses]
            for statuses in ((PAUSED,), (CANCELLED, STOPPED))
        )
        if paused:
            self._executor.pause(paused)
        if over:
            self._executor.cancel(over, message="")
        self._may_have_ended.add(batch.id)

    def _recall_speeds(self, estate: Estate) -> None:
        """What the former executor had heard of speeds; that of segments which still run is heard anew."""
        for job in dict.fromkeys(record.job for record in estate.past):
            records = [estate.qualified(record) for record in estate.past if record.job == job]
            profiles = self._executor.roster.profiles[records[0].job]
            for running in speeds_of(self._mail, records, profiles):
                self.on_speed(running)

    def _end_batch(self, id: str) -> None:
        """Ends a batch whose jobs have all ended; the last of its gangs may take a moment longer."""
        self._may_have_ended.discard(id)
        roster = self._executor.roster
        if id not in self._standing or any(roster.records[job].status not in ENDED for job in roster.of_batch(id)):
            return
        if any(segment.outcome is None for segment in Journal(self._database, batch=id).segments()):
            return
        self._submissions.end(id)
        self._executor.forget(id)
        logger.info("batch %s (%s) has ended", self._standing.pop(id).submission.name, id)
        self._ask_anew()
        housekeeping.clear_mail(self._database)

    def _on_priority(self, standing: Standing, priorities: Mapping[str, float]) -> None:
        self._standing[standing.submission.id] = replace(standing, priorities=priorities)
        self._ask_anew()
        self._executor.replan_soon(why=f"the priorities of batch {standing.submission.name} changed")

    def _ask_anew(self) -> None:
        before, self._terms = self._terms.objective, combined_terms(self._standing.values())
        if self._terms.objective != before:
            self.on_objective(self._terms.objective)

    # -- taking over -------------------------------------------------------------------------------------------------

    def _end_strays(self, standing: set[str]) -> None:
        """Ends segments of batches that do not stand any more; there are none unless somebody wrote by hand."""
        query = select(SEGMENTS.c.id, SEGMENTS.c.batch).where(SEGMENTS.c.ended_s.is_(None))
        rows = self._database.read(lambda connection: connection.execute(query).all())
        for row in rows:
            if row.batch not in standing:
                self._mail.command(row.id, KILL)
                for order in self._mail.shares(row.id):
                    self._mail.end(order.segment, order.node)
                outcome = {"status": LOST, "message": "its batch had ended"}
                Journal(self._database, batch=row.batch).end_segment(row.id, outcome)

    def _give_back_leases(self, unsettled: Sequence[SegmentRecord]) -> None:
        """Devices serve again that were leased for segments which have ended, or which never began."""
        leases = PoolLeases(self._database)
        serving = {name for record in unsettled for name in record.what["devices"]}
        of_loans = HOLDER.format("")
        stale = [d for d, who in leases.held().items() if d not in serving and not who.startswith(of_loans)]
        if stale:
            leases.give_back(stale)
        self._desk.give_back_what_nobody_needs()


def _incarnation(record: object) -> str | None:
    return getattr(record, "incarnation", None)


def _at_once(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future
