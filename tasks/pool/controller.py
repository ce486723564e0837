"""The pool controller: connects one executor to the engine's nodes, the batches and the requests of a pool.

All of it runs in the executor's thread, between two of the executor's messages, so nothing here needs a lock. A timer
thread only requests the next `tick`. Decisions are written to the database before they are carried out. An executor
that takes over after a crash therefore adopts the running segments, makes the decisions that are missing, reports the
unreported events, and repeats nothing.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial

from sqlalchemy import ColumnElement, exists, select

from ringmaster.tasks.background_worker import keep_calling
from ringmaster.tasks.control.batch_terms import ActiveBatch, PoolTerms, combined_terms, past_use
from ringmaster.tasks.control.request_handler import OTHER_VERSION, RequestHandler
from ringmaster.tasks.control.requests import LOOK_EVERY_S, Requests, RequestStatus
from ringmaster.tasks.execution.engine import Engine, completed
from ringmaster.tasks.execution.execution_events import (
    ExecutionEvent,
    GangReport,
    JobEnded,
    PredictionUpdate,
    SegmentEnded,
)
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.known_nodes import KnownNodes
from ringmaster.tasks.execution.progress import RunningSegment
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.solve import checked_plan
from ringmaster.tasks.planning.two_objectives import plan_by_two
from ringmaster.tasks.pool.active_batches import (
    active_batch,
    as_logged,
    batch_of,
    entries_of,
    fault_of,
    pool_terms,
)
from ringmaster.tasks.pool.event_log import EventLog
from ringmaster.tasks.pool.failover import BatchState, nodes_of, read_batch_state, speeds_of
from ringmaster.tasks.pool.loans import DeviceLoans
from ringmaster.tasks.pool.node_scaler import ElasticityOptions, NodeScaler, empty_before_s, plan_before_ends
from ringmaster.tasks.pool.nodes import NodeRegistry, PoolLeases, Timeouts, is_loan
from ringmaster.tasks.pool.submissions import BatchStatus, Submissions, cancel_waiting
from ringmaster.tasks.storage.database import Database, DatabaseClosed, delete_in_chunks
from ringmaster.tasks.storage.fact_keys import IS_RECORDED
from ringmaster.tasks.storage.journal import ENDED, JobStatus, Journal
from ringmaster.tasks.storage.message_store import KILL, MessageStore
from ringmaster.tasks.storage.quarantine import Quarantine
from ringmaster.tasks.storage.schema import BATCHES, EVENT_LOG, FACTS, PLANS, REQUESTS, SEGMENTS
from ringmaster.techniques.processes.gang_events import JobResult, Outcome, OutcomeStatus

logger = logging.getLogger(__name__)

# The number of ended batches whose gangs' events are retained, for the analysis of failures.
MAX_MESSAGES = 20
KEPT_S = 90 * 86400.0
EVERY_S = 3600.0
POOLS_OWN = ""  # the batch of a pool's plans, each of which is for all batches together

HOLDER_OF_SEGMENTS = "pool"  # the holder of the leases that the executor takes
TICK_S = 0.25
IDLE_TICK_S = 1.0  # while no batch is active
NODES_EVERY_S = 1.0
PLANNING_WORK_S = 10.0  # seconds of a quiet machine; a busy one takes longer and plans the same


def tidy(database: Database, *, now_s: float) -> int:
    """Deletes rows that are older than `KEPT_S`; returns how many.

    Deleted are: answered requests; the event logs of batches that have ended and whose records MLflow has completely;
    the pool's plans except the newest one. Batches, jobs, segments and each batch's first plan are retained for good.
    now_s: seconds since the epoch.
    """
    until_s = now_s - KEPT_S
    # Facts are stored as lists of one value.
    is_done = (BATCHES.c.id == EVENT_LOG.c.batch) & (BATCHES.c.status == BatchStatus.ENDED)
    is_recorded = (FACTS.c.batch == EVENT_LOG.c.batch) & (FACTS.c.key == IS_RECORDED) & FACTS.c.value[0].as_boolean()
    newest = select(PLANS.c.id).where(PLANS.c.batch == POOLS_OWN).order_by(PLANS.c.id.desc()).limit(1).scalar_subquery()
    of_done_batches = exists().where(is_done).correlate(EVENT_LOG) & exists().where(is_recorded).correlate(EVENT_LOG)
    drops = {
        REQUESTS: (REQUESTS.c.made_s < until_s)
        & REQUESTS.c.status.in_((RequestStatus.DONE, RequestStatus.REFUSED, RequestStatus.WITHDRAWN)),
        EVENT_LOG: (EVENT_LOG.c.told_s < until_s) & of_done_batches,
        PLANS: (PLANS.c.made_s < until_s) & (PLANS.c.batch == POOLS_OWN) & (PLANS.c.id != newest),
    }
    return sum(delete_in_chunks(database, table, where) for table, where in drops.items())


def clear_messages(database: Database) -> None:
    """Deletes the messages of ended batches whose records MLflow has completely, except the newest `MAX_MESSAGES`.

    The recorder of a batch reads the events of its gangs from the messages, however late it is started again.
    """
    message_store = MessageStore(database)
    query = select(BATCHES.c.id).where(BATCHES.c.status != BatchStatus.SUBMITTED).order_by(BATCHES.c.submitted_s.desc())
    recorded = select(FACTS.c.batch).where(FACTS.c.key == IS_RECORDED, FACTS.c.value[0].as_boolean())
    ended, is_recorded = database.scalars(query), {*database.scalars(recorded)}
    for batch in message_store.batches() & set(ended[MAX_MESSAGES:]) & is_recorded:
        message_store.clear(batch)


class PoolController:
    """Serves one executor from `take_over` on. The executor calls `listen`, `add_terms` and `make_plan`.

    database: the database with the leader's guarded write access.
    elasticity: the limits of the nodes that the engine lends; None where it lends none.
    clock: monotonic seconds.
    wall_clock: seconds since the epoch, in which nodes say when they end.
    on_objective: a callback for changes of the objective of the plan; may be set by the owner.
    on_speed: a callback for the speeds that gangs reported to a former controller; may be set by the owner.
    """

    def __init__(
        self,
        database: Database,
        *,
        engine: Engine,
        timeouts: Timeouts,
        elasticity: ElasticityOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        seed: int = 0,
    ) -> None:
        self._database, self._engine, self._timeouts, self._clock = database, engine, timeouts, clock
        self._wall_clock, self._seed, self._elasticity = wall_clock, seed, elasticity
        self._scaler: NodeScaler | None = None
        self._ends_s: Mapping[str, float] = {}  # by node that ends, the seconds until it is emptied
        self.on_objective: Callable[[str], None] = lambda objective: None
        self.on_speed: Callable[[RunningSegment], None] = lambda running: None
        self._submissions, self._event_log = Submissions(database), EventLog(database)
        self._message_store = MessageStore(database)
        self._active_batches: dict[str, ActiveBatch] = {}
        self._pool_terms = PoolTerms()
        self._terms = combined_terms(())
        self._may_have_ended: set[str] = set()
        self._quarantine = Quarantine(database)
        self._unloggable: set[str] = set()  # batches that are about to be set aside
        self._looked_s = -NODES_EVERY_S
        self._tidied_s = -EVERY_S

    # -- what the executor needs -------------------------------------------------------------------------------------

    def add_terms(self, problem: Problem) -> Problem:
        """Returns the problem under the combined terms of all batches, as `combined_terms` defines them."""
        journal, active = self._executor.job_table.journal, [*self._active_batches.values()]
        return self._terms.on(
            problem, elapsed_s=journal.clock(), wall_clock=self._wall_clock, past=lambda: past_use(journal, active)
        )

    def make_plan(self, problem: Problem) -> Plan:
        """Returns a plan for the current objective, checked by the verifier. May be called from any thread."""
        objective, second, ends_s = self._terms.objective, self._terms.second, self._ends_s
        make_plan = partial(checked_plan, work_s=PLANNING_WORK_S, seed=self._seed, objective=objective)
        if second and problem.has_series:
            half = partial(checked_plan, work_s=PLANNING_WORK_S / 2, seed=self._seed)
            make_plan = partial(plan_by_two, first=objective, second=second, make_plan=half)
        return plan_before_ends(problem, ends_s=ends_s, objective=objective, make_plan=make_plan)

    def listen(self, event: ExecutionEvent) -> None:
        """Listens to the executor: stores each of its decisions in the event log of the batches that it concerns."""
        if isinstance(event, (GangReport, PredictionUpdate)):
            return  # followers read it where its node, or the forecaster, has stored it
        batch = batch_of(event)
        for one in [batch] if batch is not None else list(self._active_batches):
            self._quarantine.handle(
                f"an event of batch {one}",
                partial(self._log, event, one),
                set_aside=partial(self._set_aside_later, one),
                most_failures=1,
                is_marked=False,
            )
        if batch is not None and isinstance(event, (JobEnded, SegmentEnded)):
            self._may_have_ended.add(batch)

    def _log(self, event: ExecutionEvent, batch: str) -> None:
        if (logged := as_logged(event, batch)) is not None:
            self._event_log.append(batch, logged)

    # -- serving -----------------------------------------------------------------------------------------------------

    def take_over(self, executor: Executor) -> None:
        """Puts a new executor into the state of the former one, or into the initial state if there was none."""
        self._executor = executor
        executor.on_expelled = lambda node, why: NodeRegistry(self._database).expel(node, why=why)
        self._request_handler = RequestHandler(
            self._database,
            executor=executor,
            active_batches=self._active_batches,
            quarantine=self._quarantine,
            on_terms=self._on_terms,
            cancel_waiting=partial(cancel_waiting, self._database),
            has_ended=lambda id: self._submissions.status(id) is not None,
        )
        self._loans = DeviceLoans(
            self._database,
            executor=executor,
            is_busy=lambda: bool(self._active_batches),
            clock=self._clock,
            silent_s=self._timeouts.lost_after_s,
        )
        self._known_nodes = KnownNodes(
            self._engine,
            executor,
            empty_before_s=lambda: empty_before_s(executor.job_table),
            wall_clock=self._wall_clock,
        )
        if self._elasticity is not None:
            self._scaler = NodeScaler(
                self._elasticity,
                engine=self._engine,
                executor=executor,
                known_nodes=self._known_nodes,
                clock=self._clock,
            )
        self._pool_terms = pool_terms(self._database)
        states = self._new_batches()
        # Segments of batches that are not active: there are none unless the database was edited by hand.
        self._end_segments(SEGMENTS.c.batch.not_in(sorted(state.batch.id for state in states)))
        unsettled = [record for state in states for record in (*state.open, *state.undecided)]
        self._give_back_leases({name for record in unsettled for name in record.spec.devices})
        self._known_nodes.begin(lost_nodes=nodes_of(unsettled), why="an executor began")
        for state in states:
            self._take_on(state)

    def keep_ticking(self, until: threading.Event) -> None:
        """Has the executor's thread call `tick` periodically, and for each new request; returns once `until` is set."""
        requests, seen, ticked_s = Requests(self._database), 0, 0.0

        def is_due() -> bool:
            nonlocal seen, ticked_s
            every_s, newest = TICK_S if self._active_batches else IDLE_TICK_S, requests.newest()
            if newest <= seen and time.monotonic() - ticked_s < every_s:
                return False
            seen, ticked_s = newest, time.monotonic()
            return True

        with suppress(DatabaseClosed):
            keep_calling(self.tick, until, call=self._executor.call, every_s=LOOK_EVERY_S, is_due=is_due)

    def tick(self) -> None:
        """Checks nodes, batches and requests for changes, and acts on them."""
        self._look_at_nodes()
        for state in self._new_batches():
            self._take_on(state)
        current = Requests(self._database).current()
        if requests := self._request_handler.about_batches(current):
            # Answered after the executor has heard the events that their senders may have read.
            self._engine.catch_up()
            self._executor.call(partial(self._request_handler.answer, requests))
        self._loans.take_loans(current, there=self._known_nodes.there)
        self._loans.grant(self._known_nodes.there)
        for batch in list(self._may_have_ended):
            self._quarantine.handle(
                f"the end of batch {batch}",
                partial(self._end_batch, batch),
                set_aside=partial(self._drop, batch),
                is_marked=False,
            )
        self._tidy_up()

    def _look_at_nodes(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < NODES_EVERY_S:
            return
        self._looked_s = now_s
        before, self._pool_terms = self._pool_terms, pool_terms(self._database, known=self._pool_terms)
        if self._pool_terms != before:
            self._combine_terms()
            if self._active_batches:
                self._executor.replan_soon(why="a person has set what holds for all batches")
        self._known_nodes.poll()
        self._ends_s = self._known_nodes.seconds_left()
        self._known_nodes.release_empty(is_lent=self._loans.lends)
        if self._scaler is not None:
            is_awaited = self._loans.is_node_awaited()
            self._scaler.poll(is_node_awaited=is_awaited, lends=self._loans.lends)

    def _tidy_up(self) -> None:
        if self._clock() - self._tidied_s >= EVERY_S:
            self._tidied_s = self._clock()
            num_dropped = tidy(self._database, now_s=self._wall_clock())
            logger.info("%d rows that nobody needs any more were dropped", num_dropped)

    # -- batches -----------------------------------------------------------------------------------------------------

    def _take_on(self, state: BatchState) -> None:
        """Adds a batch to the executor; ends it where that fails."""
        id = state.batch.id
        self._quarantine.handle(
            f"batch {id}", partial(self._add_to_executor, state), set_aside=partial(self._drop, id), most_failures=1
        )

    def _new_batches(self) -> list[BatchState]:
        """Returns the batches that are not active yet; fails those that cannot be planned, without effect on others."""
        query = select(BATCHES.c.id).where(BATCHES.c.status == BatchStatus.SUBMITTED).order_by(BATCHES.c.submitted_s)
        new = [id for id in self._database.scalars(query) if id not in self._active_batches]
        states = [
            self._quarantine.handle(f"batch {id}", partial(self._read_state, id), set_aside=partial(self._drop, id))
            for id in new
        ]
        return [state for state in states if state is not None]

    def _read_state(self, id: str) -> BatchState | None:
        """Returns the state of a batch; refuses one that cannot be read or planned, and returns None."""
        try:
            batch = self._submissions.find(id)
            fault = None if batch is None else fault_of(batch)
        except ValueError as error:  # written by another version, or by hand
            batch, fault = None, f"the executor cannot read it: {error}. {OTHER_VERSION}"
        if fault is not None:
            self._refuse(id, fault)
        return None if batch is None or fault is not None else read_batch_state(self._database, batch)

    def _set_aside_later(self, id: str, message: str) -> None:
        """Sets a batch aside, once, after what the executor does now."""
        if id not in self._unloggable:
            self._unloggable.add(id)
            self._executor.call(partial(self._set_aside, id, message))

    def _set_aside(self, id: str, message: str) -> None:
        """Fails the jobs of an active batch that this controller fails on; their gangs are stopped."""
        if id in self._active_batches:
            self._executor.fail(self._executor.job_table.of_batch(id), message=message)

    def _drop(self, id: str, message: str) -> None:
        """Ends a batch that this controller cannot take on or end. Its gangs are killed."""
        self._may_have_ended.discard(id)
        self._active_batches.pop(id, None)
        self._executor.forget(id)
        self._combine_terms()
        self._refuse(id, message)
        self._executor.call(lambda: self._give_back_leases(self._executor.leased()))  # once all others are adopted

    def _refuse(self, id: str, message: str) -> None:
        """Fails all jobs of a batch that have not ended, and ends it."""
        logger.error("batch %s: %s", id, message)
        journal = Journal(self._database, batch=id)
        for name, record in journal.jobs().items():
            if record.status not in ENDED:
                self._fail(id, name, message)
        self._submissions.end(id, message=message)
        self._end_segments(SEGMENTS.c.batch == id)

    def _fail(self, id: str, job: str, message: str) -> None:
        record = Journal(self._database, batch=id).write_job(job, status=JobStatus.FAILED, message=message)
        self._event_log.append(id, JobEnded(record=record))

    def _add_to_executor(self, state: BatchState) -> None:
        """Adds the jobs of a batch: a new one, or one of a former controller with all that is open or undecided."""
        batch = state.batch
        self._active_batches[batch.id] = active_batch(batch, Journal(self._database, batch=batch.id))
        self._combine_terms()
        for name, job in state.jobs.items():
            if job.status not in ENDED and not batch.profiles.get(job.like or name):
                self._fail(batch.id, name, "it was submitted without a profile")
        for event in state.missing_events:
            self._event_log.append(batch.id, event)
        entries = entries_of(batch, struck_out=state.struck_out)
        self._executor.add_jobs(entries, why=f"batch {batch.name} has {len(entries)} jobs")
        self._recall_speeds(state)
        for record in state.open:
            future = self._engine.adopt(record.id, on_event=partial(self._executor.post, record.id))
            self._executor.adopt(record.id, state.qualified(record), future)
        for record in state.undecided:
            self._executor.adopt(record.id, state.qualified(record), completed(Outcome.of(record.result)))
        # The former controller may have died after it recorded the new status and before it stopped the gang.
        running = {record.job for record in state.open}
        paused, over = (
            [batch.qualified(job) for job in running if state.jobs[job].status in statuses]
            for statuses in ((JobStatus.PAUSED,), (JobStatus.CANCELLED, JobStatus.STOPPED))
        )
        if paused:
            self._executor.pause(paused)
        if over:
            self._executor.cancel(over, message="")
        self._may_have_ended.add(batch.id)

    def _recall_speeds(self, state: BatchState) -> None:
        """Passes on the speeds that the former controller received. Running segments report theirs again."""
        table = self._executor.job_table
        for job in dict.fromkeys(record.job for record in state.past):
            records = [state.qualified(record) for record in state.past if record.job == job]
            profiles, phases = table.profiles[records[0].job], table.entries[records[0].job].job.phases
            # Those before its last phase had another batch size.
            since = phases[-1].first_step if phases else 0
            records = [record for record in records if record.spec.first_step >= since]
            for running in speeds_of(self._message_store, records, profiles):
                self.on_speed(running)

    def _end_batch(self, id: str) -> None:
        """Ends a batch once all of its jobs and segments have ended; its last gangs may end a moment after its jobs."""
        self._may_have_ended.discard(id)
        table = self._executor.job_table
        if id not in self._active_batches or any(table.records[job].status not in ENDED for job in table.of_batch(id)):
            return
        if any(segment.outcome is None for segment in Journal(self._database, batch=id).segments()):
            return
        self._submissions.end(id)
        self._executor.forget(id)
        logger.info("batch %s (%s) has ended", self._active_batches.pop(id).name, id)
        self._combine_terms()
        clear_messages(self._database)

    def _on_terms(self, active: ActiveBatch, why: str) -> None:
        self._active_batches[active.id] = active
        self._combine_terms()
        if why:
            self._executor.replan_soon(why=why)

    def _combine_terms(self) -> None:
        before, active = self._terms.objective, self._active_batches.values()
        self._terms = combined_terms(active, of_pool=self._pool_terms)
        if self._terms.objective != before:
            self.on_objective(self._terms.objective)

    # -- taking over -------------------------------------------------------------------------------------------------

    def _end_segments(self, where: ColumnElement[bool]) -> None:
        rows = self._database.rows(select(SEGMENTS.c.id, SEGMENTS.c.batch).where(SEGMENTS.c.ended_s.is_(None), where))
        for row in rows:
            self._message_store.command(row.id, KILL)
            for order in self._message_store.shares(row.id):
                self._message_store.end(order.segment, order.node)
            result = JobResult(status=OutcomeStatus.LOST, message="its batch had ended")
            Journal(self._database, batch=row.batch).end_segment(row.id, result)

    def _give_back_leases(self, serving: Collection[str]) -> None:
        """Ends the leases of segments that have ended or never began, and of loans that are no longer granted.

        serving: the names of the devices of all other segments.
        """
        leases = PoolLeases(self._database)
        stale = [d for d, who in leases.held().items() if d not in serving and not is_loan(who)]
        if stale:
            leases.give_back(stale)
        self._loans.release_unneeded_devices()
