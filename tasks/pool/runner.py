"""The work-pool runner: segments become orders to nodes, and what their gangs say comes back, all by the database.

It never decides anything. Every order and every word outlives it: the runner of the next executor `adopt`s a segment
and hears all that its gang has said so far, once and in order, and then what it says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from ringmaster.tasks.execution.orders import LOST, SegmentCall
from ringmaster.tasks.pool.database import Database, DatabaseClosed
from ringmaster.tasks.pool.launching import Launch, Launcher
from ringmaster.tasks.pool.mail import GIVEN, KILL, OUTCOME, TAKEN, Mail, OrderRecord, Word
from ringmaster.tasks.pool.nodes import NodeRecord
from ringmaster.tasks.pool.shares import FAILURES, merged, shares_of
from ringmaster.techniques.engine.gang import CRASHED, Event, Outcome
from ringmaster.techniques.engine.reporter import STOP

LOOK_EVERY_S = 0.1
END_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0  # where the database is away


@dataclass(kw_only=True)
class _Flight:
    """A segment on its way. nodes: the incarnation that has each share, by node, that of rank 0 first."""

    number: int
    folder: str
    nodes: Mapping[str, str]
    on_event: Callable[[Event], None]
    future: Future[Outcome] = field(default_factory=Future)
    heard: dict[str, int] = field(default_factory=dict)  # by node, the number of its last word
    outcomes: dict[str, Outcome] = field(default_factory=dict)


class PoolRunner:
    """Runs segments on the nodes of a pool. All methods may be called from any thread; none waits for a gang or for the
    task engine, but for `join`. They wait while the database is away.

    launch: makes the child run of an order. `start` reads what gangs say every `LOOK_EVERY_S`, until `close`. on_deaf:
    to be set by whoever must know that it is not read any more, for another reason.
    """

    def __init__(self, database: Database, *, launch: Launch) -> None:
        self.on_deaf: Callable[[], None] = lambda: None
        self._mail = Mail(database)
        self._launcher = Launcher(launch, self._mail, on_over=self._on_over)
        self._changed = threading.Condition(threading.RLock())
        self._flights: dict[int, _Flight] = {}
        self._nodes: dict[str, NodeRecord] = {}
        self._cursor = self._mail.newest_word()
        self._closing = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="words", daemon=True)

    def start(self) -> None:
        """Begins to listen."""
        self._poller.start()

    def close(self) -> None:
        """Listens no more; what runs goes on."""
        self._closing.set()
        self._launcher.close()
        if self._poller.is_alive():
            self._poller.join(timeout=CLOSE_TIMEOUT_S)

    # -- nodes -------------------------------------------------------------------------------------------------------

    def meet(self, node: NodeRecord) -> None:
        """From now on segments may be ordered from this incarnation of a node."""
        with self._changed:
            self._nodes[node.name] = node

    def lose(self, node: str, incarnation: str) -> None:
        """A worker is gone for good, and all that it ran: its shares are lost, unless they had ended before."""
        with self._changed:
            known = self._nodes.get(node)
            if known is not None and known.incarnation == incarnation:
                del self._nodes[node]
            self.look()
            for flight in list(self._flights.values()):
                if flight.nodes.get(node) == incarnation and node not in flight.outcomes:
                    self._lose_share(flight, node)

    def is_busy(self, node: str) -> bool:
        """Whether a segment that has not ended has a share on a node."""
        with self._changed:
            return any(node in flight.nodes for flight in self._flights.values())

    # -- segments ----------------------------------------------------------------------------------------------------

    def submit(self, call: SegmentCall) -> Future[Outcome]:
        """Orders a segment; the future has its outcome. Where a node is gone by now, that is "lost"."""
        with self._changed:
            names = list(dict.fromkeys(node for node, _ in call.devices))
            gone = [name for name in names if name not in self._nodes]
            if gone:
                return _at_once(Outcome(status=LOST, message=f"node {', '.join(gone)} was gone before it began"))
            shares = shares_of(call, addresses={name: self._nodes[name].address for name in names})
            given = {name: (self._nodes[name].incarnation, share) for name, share in shares.items()}
            self._mail.give(call.number, batch=call.batch, shares=given)
            flight = _Flight(
                number=call.number,
                folder=call.order.folder,
                nodes={name: incarnation for name, (incarnation, _) in given.items()},
                on_event=call.on_event,
            )
            self._flights[call.number] = flight
            for order in self._mail.shares(call.number):
                self._launcher.start(order)
            return flight.future

    def adopt(self, number: int, *, on_event: Callable[[Event], None]) -> Future[Outcome]:
        """Goes on with a segment that another executor ordered: its words so far are heard again, from the first.

        The nodes that are there must have been met before. A segment that was never ordered is lost.
        """
        with self._changed:
            orders = self._mail.shares(number)
            if not orders:
                return _at_once(Outcome(status=LOST, message="the executor ended before it had ordered it"))
            flight = _Flight(
                number=number,
                folder=orders[0].share.order.folder,
                nodes={order.node: order.incarnation for order in orders},
                on_event=on_event,
            )
            self._flights[number] = flight
            for word in self._mail.words(after=0, segments=[number]):
                self._hear(word)
            for order in orders:
                if order.node not in flight.outcomes:
                    self._take_over(flight, order)
            return flight.future

    def steer(self, folder: str, command: str) -> None:
        """Gives a command to the gang of the order with that folder, also where it is still to be started."""
        with self._changed:
            for flight in self._flights.values():
                if flight.folder == folder:
                    self._mail.command(flight.number, command)

    def stop_all(self) -> None:
        """Tells every gang to checkpoint and end."""
        self._tell_all(STOP)

    def kill_all(self) -> None:
        """Ends every gang at once."""
        self._tell_all(KILL)

    def join(self, *, timeout_s: float = END_TIMEOUT_S) -> bool:
        """Waits until no segment is on its way any more; returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._flights, timeout=timeout_s)

    def look(self) -> None:
        """Takes in what gangs have said since."""
        with self._changed:
            for word in self._mail.words(after=self._cursor):
                self._cursor = word.id
                self._hear(word)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        try:
            while not self._closing.wait(LOOK_EVERY_S):
                self.look()
        except DatabaseClosed:  # this process ends
            self._closing.set()
        finally:
            if not self._closing.is_set():
                self.on_deaf()

    def _hear(self, word: Word) -> None:
        """Acts on a word, once: an adopted segment's words come from two sides."""
        flight = self._flights.get(word.segment)
        if flight is None or word.number <= flight.heard.get(word.node, -1):
            return
        flight.heard[word.node] = word.number
        content = word.content
        if content["event"] == OUTCOME:
            outcome = Outcome(status=content["status"], message=content["message"], result=content["result"])
            self._end_share(flight, word.node, outcome)
        else:
            flight.on_event(content)

    def _take_over(self, flight: _Flight, order: OrderRecord) -> None:
        """Goes on with a share that has not said how it ended: its node is there, or it is lost."""
        known = self._nodes.get(order.node)
        is_there = known is not None and known.incarnation == order.incarnation
        if not is_there or order.status not in (GIVEN, TAKEN):
            self._lose_share(flight, order.node)
        elif order.status == GIVEN:
            self._launcher.start(order)

    def _lose_share(self, flight: _Flight, node: str) -> None:
        self._mail.end(flight.number, node)
        self._end_share(flight, node, Outcome(status=LOST, message=f"node {node} is lost"))

    def _on_over(self, order: OrderRecord, outcome: Outcome) -> None:
        with self._changed:
            if flight := self._flights.get(order.segment):
                self._end_share(flight, order.node, outcome)

    def _end_share(self, flight: _Flight, node: str, outcome: Outcome) -> None:
        """Takes in how a share ended; the segment has ended when all of them have."""
        if node in flight.outcomes:
            return
        flight.outcomes[node] = outcome
        if outcome.status in FAILURES:
            self._end_peers(flight)
        if len(flight.outcomes) == len(flight.nodes) and flight.number in self._flights:
            del self._flights[flight.number]
            self._changed.notify_all()
            flight.future.set_result(merged(flight.outcomes, speaker=next(iter(flight.nodes))))

    def _end_peers(self, flight: _Flight) -> None:
        """Without one of its shares a gang cannot go on: those that run are killed, those to come are withdrawn."""
        for node in flight.nodes:
            if node not in flight.outcomes and self._mail.withdraw(flight.number, node):
                flight.outcomes[node] = Outcome(status=CRASHED, message="a peer failed before it began")
        if len(flight.outcomes) < len(flight.nodes):
            self._mail.command(flight.number, KILL)

    def _tell_all(self, command: str) -> None:
        with self._changed:
            for flight in self._flights.values():
                self._mail.command(flight.number, command)


def _at_once(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future
