"""A node's part of a pool: takes its orders, runs their gangs, and passes on what is said in both directions.

Knows nothing of Prefect: `flows/worker.py` says which orders are to be taken.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from sqlalchemy.exc import SQLAlchemyError

from tasks.cluster import Device
from tasks.execution.orders import CANCELLED, LOST
from tasks.pool.database import Database, DatabaseClosed
from tasks.pool.mail import GIVEN, OUTCOME, TAKEN, Mail, OrderRecord, Share
from tasks.pool.nodes import LEAVING, SERVING, NodeRecord, Nodes
from tasks.pool.outbox import Outbox
from tasks.pool.patience import Patience
from tasks.pool.pulse import Pulse
from techniques.engine.gang import CRASHED, PREEMPTED, Event, Gang, Outcome
from techniques.engine.order import GangOrder
from techniques.engine.processes import ForkServer
from techniques.engine.reporter import STOP

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2
DRAIN_S = 25.0  # of the 30 s that a spot notice gives
KILLED_S = 15.0  # for killed gangs to be gone; a gang gives up after 10 s
FAREWELL_S = 3.0  # for the last words, and for the database to take the node out of its list
MOST_REMEMBERED = 1000  # segments whose commands are kept for the case that the gang is still to start
KILL = "kill"
UNHEARD = ("beat",)  # events that tell the supervisor alone that a rank lives


class RunningGang(Protocol):
    """What a host needs of a gang."""

    def send(self, command: str) -> None:
        """Tells every rank something."""

    def kill(self) -> None:
        """Ends every rank at once."""

    def wait(self, on_event: Callable[[Event], None]) -> Outcome:
        """Passes on what rank 0 says until all ranks have ended, and says how."""


def start_gang(server: ForkServer, order: GangOrder, num_ranks: int) -> RunningGang:
    """A real gang."""
    return Gang(server, order, num_ranks=num_ranks)


@dataclass(kw_only=True)
class _Run:
    """A share under way. gang: None before it has started. overruled: how it ended for reasons outside the gang."""

    segment: int
    share: Share
    future: Future[Outcome] = field(default_factory=Future)
    gang: RunningGang | None = None
    is_cancelled: bool = False
    overruled: Outcome | None = None


class GangHost:
    """Serves one node, from `start` to `drain` or until `ended` is set: another worker has taken the node over.

    name: of the node in the pool. address: by which other nodes reach it. devices: that it registers, in their order.
    server: the node's fork server, made with the fence of `patience`; the host owns it. health: by device number (as
    text), why that device must not be used. on_orders: called, in a thread of the host's, while orders wait.
    """

    def __init__(
        self,
        *,
        name: str,
        address: str,
        devices: Sequence[Device],
        database: Database,
        server: ForkServer,
        health: Callable[[], Mapping[str, str]] = dict,
        on_orders: Callable[[], None] = lambda: None,
        patience: Patience | None = None,
        start_gang: Callable[[ForkServer, GangOrder, int], RunningGang] = start_gang,
    ) -> None:
        self.name = name
        self.ended = threading.Event()
        self._address, self._devices, self._server, self._health = address, tuple(devices), server, health
        self._on_orders, self._start_gang = on_orders, start_gang
        self._mail, self._nodes = Mail(database), Nodes(database)
        self._hasty = Database(database.url, patience_s=0.0)  # for what must not wait until the database is back
        self._outbox = Outbox(self._mail, name)
        patience = patience or Patience()
        self._pulse = Pulse(
            beat=self._beat, tick=server.tick, on_replaced=self._on_replaced, every_s=patience.beat_every_s
        )
        self._looking = threading.Thread(target=self._look, name="look", daemon=True)
        self._changed = threading.Condition()
        self._incarnation = ""
        self._runs: dict[int, _Run] = {}
        self._ever_taken: set[int] = set()
        self._told: dict[int, list[str]] = {}  # by segment, the commands so far
        self._waiting: tuple[OrderRecord, ...] = ()
        self._last_command = 0
        self._is_leaving = False

    # -- serving -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the fork server and registers the node; returns once it can take orders."""
        self._server.start()
        self._last_command = max((id for id, _, _ in self._mail.commands(after=0)), default=0)
        self._register()
        self._looking.start()
        self._pulse.start()

    @property
    def incarnation(self) -> str:
        """Names this worker process in the pool; another one after the node was given up meanwhile."""
        return self._incarnation

    @property
    def waiting(self) -> Sequence[OrderRecord]:
        """The orders that were given to this node and not taken yet, as they were seen last."""
        return self._waiting

    @property
    def running(self) -> Mapping[int, Share]:
        """The shares under way, by segment."""
        with self._changed:
            return {segment: run.share for segment, run in self._runs.items()}

    def take(self, segment: int) -> Future[Outcome] | None:
        """Takes an order and starts its gang, once however often it is called; None where it is not to be taken.

        The future has the share's outcome, which is also mailed. Waits while the database is away.
        """
        with self._changed:
            if self._is_leaving or segment in self._ever_taken:
                return None
            self._ever_taken.add(segment)
            incarnation = self._incarnation
        share = self._mail.take(segment, self.name, incarnation=incarnation) or self._taken_before(segment, incarnation)
        with self._changed:
            # Withdrawn, or not given yet; or the node was given up meanwhile.
            if share is None or self._is_leaving or incarnation != self._incarnation:
                self._ever_taken.discard(segment)
                return None
            run = self._runs[segment] = _Run(segment=segment, share=share)
        threading.Thread(target=self._run, args=(run,), name=f"segment-{segment}", daemon=True).start()
        return run.future

    def say(self, segment: int, event: Event) -> None:
        """Mails a word about a segment, besides what its gang says."""
        self._outbox.say(segment, event)

    def cancel(self, segment: int) -> None:
        """Tells a gang to stop at a checkpoint; its outcome is "cancelled", unless it was done before."""
        with self._changed:
            run = self._runs.get(segment)
            if run is not None:
                run.is_cancelled = True
                self._told.setdefault(segment, []).append(STOP)
                _tell(run, STOP)

    def refuse(self, segment: int, outcome: Outcome) -> None:
        """Takes an order only to say how it ended: its run came to an end before it began."""
        if self._mail.take(segment, self.name, incarnation=self._incarnation) is not None:
            self._say_outcome(segment, outcome)

    def drain(self, *, within_s: float = DRAIN_S) -> None:
        """Ends in order: gangs checkpoint and stop, their outcomes are mailed, and the node leaves the pool.

        Gangs that take longer than `within_s` are ended; their segments are "lost" and go on from their checkpoints.
        """
        with self._changed:
            self._is_leaving = True
            for run in self._runs.values():
                _tell(run, STOP)
        self._pulse.hurry()
        if not self._wait_until_idle(within_s):
            self._end_all(Outcome(status=LOST, message=f"node {self.name} had to leave before the gang had stopped"))
        self._outbox.flush(within_s=FAREWELL_S)
        self._pulse.stop(within_s=FAREWELL_S)
        with suppress(SQLAlchemyError):  # away: the executor will find the node silent
            Nodes(self._hasty).remove(self.name, incarnation=self._incarnation)
        self.close()

    def close(self) -> None:
        """Ends at once whatever runs; `drain` does it in order."""
        self._is_leaving = True
        self.ended.set()
        self._pulse.stop(within_s=0.0)
        self._outbox.close()
        self._server.close()
        self._hasty.close()

    # -- the node in the registry ------------------------------------------------------------------------------------

    def _register(self) -> None:
        self._incarnation = uuid.uuid4().hex
        self._nodes.register(
            NodeRecord(
                name=self.name,
                incarnation=self._incarnation,
                address=self._address,
                devices=self._devices,
                health=self._health(),
            )
        )

    def _beat(self) -> bool:
        assert self._outbox.is_alive() and self._looking.is_alive(), "a node that is half dead must not seem to live"
        status = LEAVING if self._is_leaving else SERVING
        return Nodes(self._hasty).beat(self.name, incarnation=self._incarnation, health=self._health(), status=status)

    def _on_replaced(self) -> bool:
        """The pool has given this worker up, or another one serves the node: what runs here is nobody's any more."""
        self._end_all(Outcome(status=LOST, message=f"the pool had given node {self.name} up"))
        try:
            other = next((node for node in self._nodes.all() if node.name == self.name), None)
            if other is None and not self._is_leaving:
                logger.warning("the pool had given node %s up: it begins anew", self.name)
                self._register()
                return True
        except DatabaseClosed:
            return False
        if other is not None:
            logger.error("another worker serves node %s by now: this one ends", self.name)
            self.ended.set()
        return False

    # -- gangs -------------------------------------------------------------------------------------------------------

    def _taken_before(self, segment: int, incarnation: str) -> Share | None:
        """The order where it was taken by this very process, and the database's answer was lost on its way."""
        orders = self._mail.orders(incarnation=incarnation)
        return next((o.share for o in orders if (o.segment, o.node, o.status) == (segment, self.name, TAKEN)), None)

    def _run(self, run: _Run) -> None:
        outcome = Outcome(status=CRASHED, message="its supervisor failed; the worker's log says why")
        try:
            outcome = self._outcome(run)
        finally:
            self._say_outcome(run.segment, outcome)
            with self._changed:
                del self._runs[run.segment]
                self._changed.notify_all()
            run.future.set_result(outcome)

    def _outcome(self, run: _Run) -> Outcome:
        share = run.share
        order = replace(
            share.order,
            first_rank=share.first_rank,
            num_ranks_in_all=share.num_ranks_in_all,
            meeting=share.meeting,
            ordered_at_s=time.monotonic(),  # of this machine's clock
        )
        try:
            gang = self._start_gang(self._server, order, share.num_ranks)
        except (OSError, RuntimeError) as error:
            return Outcome(status=CRASHED, message=f"the gang could not be started on node {self.name}: {error}")
        with self._changed:
            run.gang = gang
            for command in self._told.get(run.segment, ()):
                _tell(run, command)
            if self._is_leaving:
                _tell(run, STOP)
            if run.overruled is not None:
                gang.kill()
        outcome = gang.wait(lambda event: self._hear(run.segment, event))
        if run.overruled is not None and outcome.status == CRASHED:
            return run.overruled
        if run.is_cancelled and outcome.status == PREEMPTED:
            return replace(outcome, status=CANCELLED, message="its run was cancelled")
        return outcome

    def _hear(self, segment: int, event: Event) -> None:
        if event["event"] not in UNHEARD:
            self._outbox.say(segment, event)

    def _say_outcome(self, segment: int, outcome: Outcome) -> None:
        word = {"status": outcome.status, "message": outcome.message, "result": outcome.result}
        self._outbox.say(segment, {"event": OUTCOME, **word})

    def _end_all(self, outcome: Outcome) -> None:
        """Kills what runs, and waits until it is gone."""
        with self._changed:
            for run in self._runs.values():
                run.overruled = outcome
                if run.gang is not None:
                    run.gang.kill()
        if not self._wait_until_idle(KILLED_S):
            logger.error("gangs of node %s did not end when they were killed", self.name)

    def _wait_until_idle(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._runs, timeout=seconds)

    # -- what the executor says --------------------------------------------------------------------------------------

    def _look(self) -> None:
        with suppress(DatabaseClosed):
            while not self.ended.wait(LOOK_EVERY_S):
                self._obey()
                orders = self._mail.orders(incarnation=self._incarnation)
                self._waiting = tuple(o for o in orders if o.status == GIVEN and o.segment not in self._ever_taken)
                if self._waiting and not self._is_leaving:
                    self._on_orders()

    def _obey(self) -> None:
        for id, segment, command in self._mail.commands(after=self._last_command):
            self._last_command = id
            with self._changed:
                self._told.setdefault(segment, []).append(command)
                if len(self._told) > MOST_REMEMBERED:
                    del self._told[next(iter(self._told))]
                if run := self._runs.get(segment):
                    _tell(run, command)


def _tell(run: _Run, command: str) -> None:
    """Gives a command to a gang that has started; one that has not gets it when it does."""
    if run.gang is None:
        return
    if command == KILL:
        run.gang.kill()
    else:
        run.gang.send(command)
