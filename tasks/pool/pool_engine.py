"""The engine of a pool: orders segments from the nodes of a pool, and passes on the events of their gangs.

Orders, events and the registry of nodes are in the pool's database. Nodes are machines of one's own, or are lent by a
provider (`ringmaster.tasks.pool.provider`). The engine makes no decisions. Orders and events outlive it: the engine of
the next controller `adopt`s a segment, receives all of its gang's events so far, once and in order, and then the new
ones.

Which nodes have joined and left follows from their rows in the registry and the silence of their workers. No clocks
are compared: a worker counts its heartbeats, and the observer measures the silence between two of them by its
own clock. Time in which the observer could not see heartbeats does not count as silence. After a while in which the
database was unreachable, all nodes get time again.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from ringmaster.tasks.execution.engine import EngineContext, EngineNode, SegmentCall, completed
from ringmaster.tasks.pool.nodes import BLIND_S, NodeRecord, NodeRegistry, NodeStatus, SilenceClock, Timeouts
from ringmaster.tasks.pool.provider import GONE, MAX_REMEMBERED, Allocation, AllocationStatus, NodeProvider
from ringmaster.tasks.storage.database import Database, DatabaseClosed
from ringmaster.tasks.storage.message_store import KILL, GangEvent, GangShare, MessageStore, OrderRecord, OrderStatus
from ringmaster.techniques.processes.gang_events import Event, JobResult, Outcome, OutcomeStatus, RefusedEvent

logger = logging.getLogger(__name__)

PRECEDENCE = (
    OutcomeStatus.OUT_OF_MEMORY,
    OutcomeStatus.INVALID,
    OutcomeStatus.LOST,
    OutcomeStatus.CRASHED,
    OutcomeStatus.PREEMPTED,
    OutcomeStatus.DONE,
)
"""The first of these outcomes among a gang's shares explains the others: ranks whose peers vanish crash too."""
FAILURES = (OutcomeStatus.OUT_OF_MEMORY, OutcomeStatus.INVALID, OutcomeStatus.LOST, OutcomeStatus.CRASHED)
"""The outcomes after which the other shares of a gang cannot succeed."""
PORTS = range(20_000, 32_000)  # below the ports that Linux assigns to connections
LOOK_EVERY_S = 0.1
IDLE_LOOK_EVERY_S = 1.0  # while no gang runs
CLOSE_TIMEOUT_S = 5.0  # in case the database is unreachable


class NodeWatch:
    """Watches the registry of nodes.

    clock: monotonic seconds.
    lost_after_s: the time without a heartbeat after which a node is lost.
    blind_after_s: the time between two checks after which all silences are measured again.
    there: the nodes that were present at the last check, by name.
    """

    def __init__(
        self, nodes: NodeRegistry, *, clock: Callable[[], float], lost_after_s: float, blind_after_s: float = BLIND_S
    ) -> None:
        self._nodes, self._lost_after_s = nodes, lost_after_s
        self._silences = SilenceClock(clock, blind_s=blind_after_s)
        self.there: Mapping[str, NodeRecord] = {}

    def poll(self, *, ended: Mapping[str, str] | None = None) -> Sequence[tuple[NodeRecord, str]]:
        """Checks the registry; returns the workers that are gone since the last check for good, with all that they ran.

        Each comes with the cause in words, to follow the node's name.

        A node that was silent for too long is removed from the registry. If its worker lives, it notices that and
        registers again. So is a node whose allocation has ended; one that registers again under that allocation is not
        there: the engine may lend its devices to others.

        ended: by id of an allocation whose processes have all ended, why.
        """
        ended, gone, lost = ended or {}, list[tuple[NodeRecord, str]](), set[str]()
        registered = {record.name: record for record in self._nodes.all()}
        silences_s = self._silences.silences_s({n: (each.incarnation, each.beats) for n, each in registered.items()})
        for name, was in self.there.items():
            record = registered.get(name)
            if record is None or record.incarnation != was.incarnation:
                gone.append((was, "its worker has ended" if record is None else "its worker was started again"))
            elif was.allocation in ended or silences_s[name] >= self._lost_after_s:
                gone.append((was, ended.get(was.allocation, f"silent for {silences_s[name]:.0f} s")))
                self._nodes.remove(name, incarnation=was.incarnation)
                lost.add(name)
        there = {name: record for name, record in registered.items() if name not in lost}
        self.there = {name: there[name] for name in sorted(there) if there[name].allocation not in ended}
        return gone


def shares_of(call: SegmentCall, *, addresses: Mapping[str, str]) -> dict[str, GangShare]:
    """Returns each node's share of a segment, by node; the share with rank 0 comes first.

    On several nodes, each node has the ranks of its devices. The ranks meet at the first node, at a random port. If
    another process uses that port, the gang crashes, and its next attempt uses another port.

    addresses: by node, the address at which other nodes reach it.
    """
    slots = list(zip(call.devices, call.order.slots, strict=True))
    nodes = list(dict.fromkeys(node for (node, _), _ in slots))
    meeting = "" if len(nodes) == 1 else f"{addresses[nodes[0]]}:{random.choice(PORTS)}"
    shares: dict[str, GangShare] = {}
    first_rank = 0
    for node in nodes:
        own = tuple(slot for (name, _), slot in slots if name == node)
        num_ranks = call.num_ranks * len(own) // len(slots)
        shares[node] = GangShare(
            order=replace(
                call.order, slots=own, first_rank=first_rank, num_ranks_in_all=call.num_ranks, meeting=meeting
            ),
            num_ranks=num_ranks,
        )
        first_rank += num_ranks
    assert first_rank == call.num_ranks, f"{call.num_ranks} ranks cannot be shared by the devices of {nodes}"
    return shares


def merged(outcomes: Mapping[str, Outcome], *, speaker: str) -> Outcome:
    """Returns the outcome of a gang from the outcomes of its shares, by node. speaker: the node of rank 0."""
    first = min(outcomes.values(), key=lambda outcome: PRECEDENCE.index(outcome.status))
    of_speaker = outcomes[speaker].result
    return replace(first, result=first.result if of_speaker == JobResult() else of_speaker)


@dataclass(kw_only=True)
class _SegmentInFlight:
    """A segment that has been ordered and has not ended.

    nodes: by node, the incarnation that has its share; the node of rank 0 comes first.
    refusal: why it fails however its shares end: what is wrong with an event of its gang.
    """

    number: int
    nodes: Mapping[str, str]
    on_event: Callable[[Event], None]
    future: Future[Outcome] = field(default_factory=Future)
    last_events: dict[str, int] = field(default_factory=dict)  # by node, the number of its last event
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    refusal: str = ""


class PoolEngine:
    """Runs segments on the nodes of a pool.

    All methods are thread-safe. All of them wait while the database is unreachable. From `listen` to `close`, a thread
    reads the gangs' events every `LOOK_EVERY_S`.

    provider: lends nodes to the pool. The engine owns it.
    clock: monotonic seconds, by which the silence of workers is measured.
    on_failure: a callback for the unexpected end of the thread that reads events.
    """

    def __init__(
        self,
        database: Database,
        *,
        timeouts: Timeouts,
        provider: NodeProvider | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_failure = on_failure
        self._provider = provider or NodeProvider()
        self._message_store = MessageStore(database)
        self._changed = threading.RLock()
        self._flights: dict[int, _SegmentInFlight] = {}
        self._watch = NodeWatch(
            NodeRegistry(database),
            clock=clock,
            lost_after_s=timeouts.lost_after_s,
            blind_after_s=timeouts.blind_after_s,
        )
        self._nodes: Mapping[str, NodeRecord] = {}
        self._gone_allocations: dict[str, Allocation] = {}
        self._cursor = self._message_store.newest_event()
        self._closing = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="gang-events", daemon=True)

    def listen(self) -> None:
        """Starts to read events."""
        self._poller.start()

    def close(self) -> None:
        """Stops reading events; running gangs continue."""
        self._closing.set()
        self._provider.close()
        if self._poller.is_alive():
            self._poller.join(timeout=CLOSE_TIMEOUT_S)

    # -- nodes -------------------------------------------------------------------------------------------------------

    def nodes(self) -> Sequence[EngineNode]:
        """Checks the registry; returns the nodes that are there.

        The shares of workers that are gone are lost, unless they had ended before.
        """
        allocations = self._allocations()
        ended = {each.id: each.why for each in allocations.values() if each.status == AllocationStatus.ENDED}
        with self._changed:
            gone = self._watch.poll(ended=ended)
            self._nodes = self._watch.there
            self._provider.served({record.allocation for record in self._nodes.values() if record.allocation})
            if gone:
                self.catch_up()
            for was, why in gone:
                logger.warning("node %s is gone: %s", was.name, why)
                for flight in list(self._flights.values()):
                    if flight.nodes.get(was.name) == was.incarnation and was.name not in flight.outcomes:
                        self._lose_share(flight, was.name)
            return [_as_node(record, allocations.get(record.allocation)) for record in self._nodes.values()]

    def _allocations(self) -> Mapping[str, Allocation]:
        """Returns what the provider reported last of each allocation.

        An engine forgets an allocation some time after its end, while its node may still send heartbeats.
        """
        reported = self._provider.allocations()
        kept = {**self._gone_allocations, **reported}
        gone = [each for each in kept.values() if each.status in GONE]
        self._gone_allocations = {each.id: each for each in gone[-MAX_REMEMBERED:]}
        return {**self._gone_allocations, **reported}

    def request(self, num_nodes: int) -> None:
        """Requests nodes from the provider."""
        self._provider.request(num_nodes)

    def release(self, node: str) -> None:
        """Gives a node back to the provider; a machine of one's own serves until its worker ends.

        Does nothing for one that is gone already, as its engine sees it.
        """
        record = self._nodes.get(node)
        if record is not None and record.allocation and record.allocation not in self._gone_allocations:
            self._provider.release(record.allocation)

    def is_fenced(self, node: str) -> bool:
        """Returns True: a node ends its own ranks some time before it counts as gone, by `Timeouts`, and a worker
        that ends or is started again leaves none.
        """
        return True

    # -- segments ----------------------------------------------------------------------------------------------------

    def start(self, call: SegmentCall) -> Future[Outcome]:
        """Orders a segment; returns the future of its outcome, which is "lost" if a node is gone by now."""
        with self._changed:
            names = list(dict.fromkeys(node for node, _ in call.devices))
            gone = [name for name in names if name not in self._nodes]
            if gone:
                return completed(
                    Outcome(status=OutcomeStatus.LOST, message=f"node {', '.join(gone)} was gone before it began")
                )
            shares = shares_of(call, addresses={name: self._nodes[name].address for name in names})
            given = {name: (self._nodes[name].incarnation, share) for name, share in shares.items()}
            self._message_store.give(call.number, batch=call.batch, shares=given)
            flight = _SegmentInFlight(
                number=call.number,
                nodes={name: incarnation for name, (incarnation, _) in given.items()},
                on_event=call.on_event,
            )
            self._flights[call.number] = flight
            return flight.future

    def adopt(self, number: int, *, on_event: Callable[[Event], None]) -> Future[Outcome]:
        """Adopts a segment that another controller ordered; all of its events are passed on again, from the first.

        A segment that was never ordered is lost.
        """
        with self._changed:
            orders = self._message_store.shares(number)
            if not orders:
                return completed(
                    Outcome(status=OutcomeStatus.LOST, message="the executor ended before it had ordered it")
                )
            flight = _SegmentInFlight(
                number=number,
                nodes={order.node: order.incarnation for order in orders},
                on_event=on_event,
            )
            self._flights[number] = flight
            for event in self._message_store.events(after=0, segments=[number]):
                self._handle_event(event)
            for order in orders:
                if order.node not in flight.outcomes:
                    self._take_over(flight, order)
            return flight.future

    def send(self, number: int, command: str) -> None:
        """Sends a command to the gang of a segment, even if the gang has not started."""
        with self._changed:
            if number in self._flights:
                self._message_store.command(number, command)

    def catch_up(self) -> None:
        """Passes on the events that gangs have reported since the last call."""
        with self._changed:
            for event in self._message_store.events(after=self._cursor):
                self._cursor = event.id
                self._handle_event(event)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        try:
            while not self._closing.wait(LOOK_EVERY_S if self._flights else IDLE_LOOK_EVERY_S):
                self.catch_up()
        except DatabaseClosed:  # this process is ending
            self._closing.set()
        finally:
            if not self._closing.is_set():
                self._on_failure()

    def _handle_event(self, event: GangEvent) -> None:
        """Acts on an event once: an adopted segment's events arrive through both `adopt` and `catch_up`."""
        flight = self._flights.get(event.segment)
        if flight is None or event.number <= flight.last_events.get(event.node, -1):
            return
        flight.last_events[event.node] = event.number
        if isinstance(event.content, Outcome):
            # What killed the gang matters only on the node that saw it.
            self._end_share(flight, event.node, replace(event.content, was_killed=False))
        elif isinstance(event.content, RefusedEvent):
            self._refuse(flight, event.node, event.content)
        else:
            flight.on_event(event.content)

    def _refuse(self, flight: _SegmentInFlight, node: str, event: RefusedEvent) -> None:
        """Ends a gang of which an event cannot be read. Another try would end the same way."""
        logger.error("segment %d on %s: %s", flight.number, node, event.message)
        flight.refusal = flight.refusal or event.message
        ended = [order.node for order in self._message_store.shares(flight.number) if order.status == OrderStatus.ENDED]
        if node in ended:  # the event was the outcome
            self._end_share(flight, node, Outcome(status=OutcomeStatus.INVALID, message=flight.refusal))
        else:
            self._message_store.command(flight.number, KILL)

    def _take_over(self, flight: _SegmentInFlight, order: OrderRecord) -> None:
        """Adopts a share without an outcome, which is lost if its node's incarnation is gone."""
        known = self._nodes.get(order.node)
        is_there = known is not None and known.incarnation == order.incarnation
        if not is_there or order.status not in (OrderStatus.GIVEN, OrderStatus.TAKEN):
            self._lose_share(flight, order.node)

    def _lose_share(self, flight: _SegmentInFlight, node: str) -> None:
        self._message_store.end(flight.number, node)
        self._end_share(flight, node, Outcome(status=OutcomeStatus.LOST, message=f"node {node} is lost"))

    def _end_share(self, flight: _SegmentInFlight, node: str, outcome: Outcome) -> None:
        """Stores the outcome of a share; the segment ends when all of its shares have ended."""
        if node in flight.outcomes:
            return
        flight.outcomes[node] = outcome
        if outcome.status in FAILURES:
            self._end_peers(flight)
        if len(flight.outcomes) == len(flight.nodes) and flight.number in self._flights:
            del self._flights[flight.number]
            outcome = merged(flight.outcomes, speaker=next(iter(flight.nodes)))
            if flight.refusal:
                outcome = Outcome(status=OutcomeStatus.INVALID, message=flight.refusal)
            flight.future.set_result(outcome)

    def _end_peers(self, flight: _SegmentInFlight) -> None:
        """Ends a gang's other shares after a failure: waiting shares are withdrawn, and running ones are killed."""
        for node in flight.nodes:
            if node not in flight.outcomes and self._message_store.withdraw(flight.number, node):
                flight.outcomes[node] = Outcome(status=OutcomeStatus.CRASHED, message="a peer failed before it began")
        if len(flight.outcomes) < len(flight.nodes):
            self._message_store.command(flight.number, KILL)


def pool_engine(context: EngineContext, *, name: str, provider: NodeProvider | None = None) -> PoolEngine:
    """Builds an engine, which reads events from now on. name: for messages. Raises ValueError outside of a pool."""
    if context.database is None:
        raise ValueError(f"engine {name!r} runs segments on the nodes of a pool. To fix: start it by `ringmaster up`")
    engine = PoolEngine(
        context.database, timeouts=Timeouts.of_environment(), provider=provider, on_failure=context.on_failure
    )
    engine.listen()
    return engine


def _as_node(record: NodeRecord, allocation: Allocation | None) -> EngineNode:
    # Of a lost allocation, too: its engine ends what runs there as soon as it reaches the machine again.
    is_taken_back = allocation is not None and allocation.status in (AllocationStatus.LEAVING, *GONE)
    return EngineNode(
        name=record.name,
        devices=record.devices,
        incarnation=record.incarnation,
        until_s=allocation.until_s if allocation is not None else None,
        is_lent=bool(record.allocation),
        is_leaving=is_taken_back or record.status == NodeStatus.LEAVING,
        faults={int(number): why for number, why in record.health.items()},
    )
