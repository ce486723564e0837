"""A node's part of a pool: takes its orders, runs their gangs, and passes on what is said in both directions.

Knows nothing of Prefect: `flows/pool/worker.py` says which orders are to be taken.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from sqlalchemy.exc import SQLAlchemyError

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.execution.orders import LOST
from ringmaster.tasks.pool.database import Database, DatabaseClosed
from ringmaster.tasks.pool.gangs import Gangs, StartGang, start_gang
from ringmaster.tasks.pool.mail import GIVEN, OUTCOME, TAKEN, Mail, OrderRecord, Share
from ringmaster.tasks.pool.nodes import LEAVING, SERVING, NodeRecord, Nodes
from ringmaster.tasks.pool.outbox import Outbox
from ringmaster.tasks.pool.patience import Patience
from ringmaster.tasks.pool.pulse import Pulse
from ringmaster.techniques.engine.gang import CRASHED, Event, Outcome
from ringmaster.techniques.engine.processes import ForkServer
from ringmaster.techniques.values import to_json

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
DRAIN_S = 25.0  # of the 30 s that a spot notice gives
HEED_S = 1.5  # the executor looks at its nodes every second
KILLED_S = 15.0  # for killed gangs to be gone; a gang gives up after 10 s
FAREWELL_S = 3.0  # for the last words, and for the database to take the node out of its list
UNHEARD = ("beat",)  # events that tell the supervisor alone that a rank lives


class Gauges(Protocol):
    """What watches a node's devices: `telemetry.Telemetry`."""

    def begin(self, segment: int, numbers: Sequence[int], *, is_part: bool = False) -> None:
        """A segment has those devices from now on."""

    def words(self) -> Mapping[int, Mapping[str, Any]]:
        """By segment, what is to be said of it now."""

    def end(self, segment: int) -> Mapping[str, Any] | None:
        """A segment has its devices no longer; its last word."""

    def health(self) -> Mapping[str, str]:
        """By device number (as text), why it must not be used."""


class NoGauges:
    """For devices that nobody watches."""

    def begin(self, segment: int, numbers: Sequence[int], *, is_part: bool = False) -> None:  # noqa: D102
        pass

    def words(self) -> Mapping[int, Mapping[str, Any]]:  # noqa: D102
        return {}

    def end(self, segment: int) -> Mapping[str, Any] | None:  # noqa: D102
        return None

    def health(self) -> Mapping[str, str]:  # noqa: D102
        return {}


class GangHost:
    """Serves one node, from `start` to `drain` or until `ended` is set: another worker has taken the node over.

    name: of the node in the pool. address: by which other nodes reach it. devices: that it registers, in their order.
    server: the node's fork server, made with the fence of `patience`; the host owns it. gauges: of its devices.
    on_orders: called, in a thread of the host's, while orders wait.
    """

    def __init__(
        self,
        *,
        name: str,
        address: str,
        devices: Sequence[Device],
        database: Database,
        server: ForkServer,
        gauges: Gauges | None = None,
        on_orders: Callable[[], None] = lambda: None,
        patience: Patience | None = None,
        start_gang: StartGang = start_gang,
    ) -> None:
        self.name = name
        self.ended = threading.Event()
        self.was_replaced = False
        self._address, self._devices, self._server = address, tuple(devices), server
        self._gauges: Gauges = gauges or NoGauges()
        self.on_orders = on_orders
        self._gangs = Gangs(server, start_gang=start_gang)
        self._mail, self._nodes = Mail(database), Nodes(database)
        self._hasty = Database(database.url, patience_s=0.0)  # for what must not wait until the database is back
        self._outbox = Outbox(self._mail, name)
        patience = patience or Patience()
        self._pulse = Pulse(
            beat=self._beat, tick=server.tick, on_replaced=self._on_replaced, every_s=patience.beat_every_s
        )
        self._looking = threading.Thread(target=self._look, name="look", daemon=True)
        self._lock = threading.Lock()
        self._incarnation = ""
        self._ever_taken: set[int] = set()
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
    def is_leaving(self) -> bool:
        """Whether it takes no more orders, since `drain` or `close` was called."""
        return self._is_leaving

    @property
    def waiting(self) -> Sequence[OrderRecord]:
        """The orders that were given to this node and not taken yet, as they were seen last."""
        return self._waiting

    @property
    def running(self) -> Mapping[int, Share]:
        """The shares under way, by segment."""
        return self._gangs.shares

    def take(self, segment: int) -> Future[Outcome] | None:
        """Takes an order and starts its gang, once however often it is called; None where it is not to be taken.

        The future has the share's outcome, which is also mailed. Waits while the database is away.
        """
        with self._lock:
            if self._is_leaving or segment in self._ever_taken:
                return None
            self._ever_taken.add(segment)
            incarnation = self._incarnation
        share = self._mail.take(segment, self.name, incarnation=incarnation) or self._taken_before(segment, incarnation)
        with self._lock:
            # Withdrawn, or not given yet; or the node was given up meanwhile.
            if share is None or self._is_leaving or incarnation != self._incarnation:
                self._ever_taken.discard(segment)
                return None
            self._gangs.admit(segment, share)
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()  # whoever waits for it may give up; it comes all the same
        run = threading.Thread(target=self._run, args=(segment, share, future), name=f"segment-{segment}", daemon=True)
        run.start()
        return future

    def cancel(self, segment: int) -> None:
        """Tells a gang to stop at a checkpoint; its outcome is "cancelled", unless it was done before."""
        self._gangs.cancel(segment)

    def drain(self, *, within_s: float = DRAIN_S, heed_s: float = HEED_S) -> None:
        """Ends in order: gangs checkpoint and stop, their outcomes are mailed, and the node leaves the pool.

        Gangs that take longer than `within_s` are ended; their segments are "lost" and go on from their checkpoints.
        heed_s: that the executor has to see that the node leaves, before jobs stop that it would start here again.
        """
        with self._lock:
            self._is_leaving = True
        self._pulse.hurry()
        self._gangs.join(within_s=min(heed_s, within_s))
        self._gangs.stop_all()
        if not self._gangs.join(within_s=max(within_s - heed_s, 0.0)):
            self._end_all(f"node {self.name} had to leave before the gang had stopped")
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
                health=self._gauges.health(),
            )
        )

    def _beat(self) -> bool:
        is_whole = self._outbox.is_alive() and self._looking.is_alive()
        if not is_whole:
            self.ended.set()  # so that the worker ends, and another one may be started
        assert is_whole, "a node that is half dead must not seem to live"
        status = LEAVING if self._is_leaving else SERVING
        return Nodes(self._hasty).beat(
            self.name, incarnation=self._incarnation, health=self._gauges.health(), status=status
        )

    def _on_replaced(self) -> bool:
        """The pool has given this worker up, or another one serves the node: what runs here is nobody's any more."""
        with self._lock:
            self._incarnation = ""  # so that nothing more is taken
        self._end_all(f"the pool had given node {self.name} up")
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
            self.was_replaced = True
            self.ended.set()
        return False

    # -- gangs -------------------------------------------------------------------------------------------------------

    def _taken_before(self, segment: int, incarnation: str) -> Share | None:
        """The order where it was taken by this very process, and the database's answer was lost on its way."""
        orders = self._mail.orders(incarnation=incarnation)
        return next((o.share for o in orders if (o.segment, o.node, o.status) == (segment, self.name, TAKEN)), None)

    def _run(self, segment: int, share: Share, future: Future[Outcome]) -> None:
        slots = {(slot.kind, slot.index) for slot in share.order.slots}
        numbers = [number for number, device in enumerate(self._devices) if (device.kind, device.index) in slots]
        outcome = Outcome(status=CRASHED, message="its supervisor failed; the worker's log says why")
        try:
            self._gauges.begin(segment, numbers, is_part=bool(share.meeting))
            outcome = self._gangs.run(segment, lambda event: self._hear(segment, event))
        finally:
            if (word := self._gauges.end(segment)) is not None:
                self._outbox.say(segment, word)
            self._outbox.say(segment, {"event": OUTCOME, **to_json(outcome)})
            self._gangs.dismiss(segment)
            future.set_result(outcome)

    def _hear(self, segment: int, event: Event) -> None:
        if event["event"] not in UNHEARD:
            self._outbox.say(segment, event)

    def _end_all(self, why: str) -> None:
        """Kills what runs, and waits until it is gone."""
        self._gangs.end_all(Outcome(status=LOST, message=why))
        if not self._gangs.join(within_s=KILLED_S):
            logger.error("gangs of node %s did not end when they were killed", self.name)

    # -- what the executor says --------------------------------------------------------------------------------------

    def _look(self) -> None:
        with suppress(DatabaseClosed):
            while not self.ended.wait(LOOK_EVERY_S):
                for id, segment, command in self._mail.commands(after=self._last_command):
                    self._last_command = id
                    self._gangs.tell(segment, command)
                orders = self._mail.orders(incarnation=self._incarnation)
                self._waiting = tuple(o for o in orders if o.status == GIVEN and o.segment not in self._ever_taken)
                if self._waiting and not self._is_leaving:
                    self.on_orders()
                for segment, word in self._gauges.words().items():
                    self._outbox.say(segment, word)
