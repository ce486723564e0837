"""The node agent: takes the orders for one node, runs their gangs, and passes on commands and events.

It needs only the pool's database. Prefect shows the segments, and takes no part in starting or ending them.

A worker's heartbeat: a row update in the pool's database, and a tick of the fork server after each success.

The fork server ends its ranks if no tick arrives for long. So a node that the pool no longer hears has no ranks left by
the time its jobs are given to other nodes. The cause of a failed heartbeat makes no difference: a refused connection
looks the same whether the database is down for all nodes, or a firewall or a tunnel cuts off this node alone.
"""

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.device_monitor import Telemetry
from ringmaster.tasks.pool.node_hooks import prepare_node
from ringmaster.tasks.pool.nodes import NodeRecord, NodeRegistry, NodeStatus, Timeouts
from ringmaster.tasks.storage.database import Database, DatabaseClosed
from ringmaster.tasks.storage.message_store import KILL, GangShare, MessageStore, OrderStatus
from ringmaster.techniques.processes.forkserver import seconds_since_boot
from ringmaster.techniques.processes.forkserver_client import ForkServer, ForkServerClient
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.gang_events import Beat, Event, Outcome, OutcomeStatus
from ringmaster.techniques.processes.reporter import STOP

logger = logging.getLogger(__name__)

GATHER_S = 0.1

AGAIN_S = 1.0  # between attempts of a heartbeat that failed
LOOK_EVERY_S = 0.1
IDLE_S, IDLE_LOOK_EVERY_S = 30.0, 0.5  # after so long without a gang, orders are looked for less often
DRAIN_S = 25.0  # out of the 30 s that a spot notice gives
HEED_S = 1.5  # the executor checks its nodes every second
KILLED_S = 15.0  # the time for killed gangs to end; a gang gives up after 10 s
FAREWELL_S = 3.0  # the time to store the last events, and to remove the node from the registry
UNHEARD = (Beat,)  # events for the supervisor only: signs that a rank is alive

MAX_REMEMBERED = 1000  # segments whose commands are stored for gangs that have not started yet
StartGang = Callable[..., Gang]  # with the arguments of `Gang`


class Outbox:
    """Sends events from a thread of its own, so that `put` never waits for the database. Safe between threads."""

    def __init__(self, message_store: MessageStore, node: str) -> None:
        self._message_store, self._node = message_store, node
        self._changed = threading.Condition()
        self._left: list[tuple[int, int, Event]] = []  # the events that are not sent yet: segment, number, event
        self._num_events = Counter[int]()  # by segment, how many events it has reported
        self._is_urgent = self._closing = False
        self._thread = threading.Thread(target=self._work, name="outbox", daemon=True)
        self._thread.start()

    def put(self, segment: int, event: Event) -> None:
        """Queues an event of a segment's share; a `Outcome` is sent at once, others within a tenth of a second."""
        with self._changed:
            self._left.append((segment, self._num_events[segment], event))
            self._num_events[segment] += 1
            self._is_urgent |= isinstance(event, Outcome)
            self._changed.notify_all()

    def flush(self, *, within_s: float) -> bool:
        """Waits at most `within_s` until all events are sent; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._left, timeout=within_s)

    def close(self) -> None:
        """Ends the thread; unsent events are lost, except those of a write that already waits for the database."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def is_alive(self) -> bool:
        """Returns whether events are still sent, at once or when the database is back."""
        return self._thread.is_alive()

    def _work(self) -> None:
        with suppress(DatabaseClosed):
            while due := self._wait_for_events():
                for segment in dict.fromkeys(segment for segment, _, _ in due):
                    events = [(number, event) for of, number, event in due if of == segment]
                    self._message_store.store(segment, self._node, events=events)
                with self._changed:
                    del self._left[: len(due)]
                    self._changed.notify_all()

    def _wait_for_events(self) -> Sequence[tuple[int, int, Event]]:
        """Waits until there are events to send, and returns them; none after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or self._closing)
            self._changed.wait_for(lambda: self._is_urgent or self._closing, timeout=GATHER_S)
            self._is_urgent = False
            return () if self._closing else tuple(self._left)


class Heartbeat:
    """Sends heartbeats from a thread of its own until it is stopped, or until the node belongs to another worker.

    beat: one attempt. It returns False if the node does not belong to this worker any more, and raises while the
        database is unreachable.
    tick: called after each heartbeat that succeeded, with the time at which that heartbeat was begun.
    on_replaced: called after `beat` returned False; returns whether to continue.
    """

    def __init__(
        self,
        *,
        beat: Callable[[], bool],
        tick: Callable[[float], None],
        on_replaced: Callable[[], bool],
        every_s: float,
    ) -> None:
        self._beat, self._tick, self._on_replaced, self._every_s = beat, tick, on_replaced, every_s
        self._hurry, self._stopped = threading.Event(), threading.Event()
        self._is_away = False
        self._thread = threading.Thread(target=self._work, name="pulse", daemon=True)

    def start(self) -> None:
        """Starts to send heartbeats."""
        self._thread.start()

    def hurry(self) -> None:
        """Has the next heartbeat sent at once, because there is news."""
        self._hurry.set()

    def stop(self, *, within_s: float) -> None:
        """Ends the heartbeats; waits at most `within_s` for one that is being sent."""
        self._stopped.set()
        self._hurry.set()
        self._thread.join(within_s)

    def _work(self) -> None:
        with suppress(DatabaseClosed):
            while not self._stopped.is_set() and (wait_s := self._once()) is not None:
                self._hurry.wait(wait_s)
                self._hurry.clear()

    def _once(self) -> float | None:
        """Sends one heartbeat; returns the seconds until the next attempt, None for the end."""
        begun_s = seconds_since_boot()
        try:
            is_own = self._beat()
        except DBAPIError as error:
            if not self._is_away:
                logger.warning("the pool's database does not answer, trying again: %s", error.orig)
            self._is_away = True
            return min(AGAIN_S, self._every_s)
        self._is_away = False
        if is_own:
            self._tick(begun_s)
            return self._every_s
        return 0.0 if self._on_replaced() else None


@dataclass(kw_only=True)
class _ShareRun:
    """A share that was taken and has not ended.

    gang: None before it has started.
    overruled: the outcome that replaces the gang's own if the gang is killed by a decision of the pool.
    """

    share: GangShare
    gang: Gang | None = None
    overruled: Outcome | None = None

    def send(self, command: str) -> None:
        """Sends a command to the gang. A gang that has not started receives the stored commands at its start."""
        if self.gang is None:
            return
        if command == KILL:
            self.gang.kill()
        else:
            self.gang.send(command)


class Gangs:
    """The shares that run from one launcher, by segment. Safe between threads."""

    def __init__(self, launcher: ForkServerClient, *, start_gang: StartGang = Gang) -> None:
        self._launcher, self._start_gang = launcher, start_gang
        self._changed = threading.Condition()
        self._runs: dict[int, _ShareRun] = {}
        self._commands: dict[int, list[str]] = {}  # by segment, the commands so far
        self._is_stopping = False

    @property
    def shares(self) -> Mapping[int, GangShare]:
        """The shares that were admitted and not dismissed."""
        with self._changed:
            return {segment: run.share for segment, run in self._runs.items()}

    def admit(self, segment: int, share: GangShare) -> None:
        """Adds a share; a call of `run` follows."""
        with self._changed:
            self._runs[segment] = _ShareRun(share=share)

    def dismiss(self, segment: int) -> None:
        """Removes a share that has ended and whose outcome has been handled."""
        with self._changed:
            del self._runs[segment]
            self._changed.notify_all()

    def run(self, segment: int, on_event: Callable[[Event], None]) -> Outcome:
        """Runs the gang of an admitted share until it ends, after which its devices are free."""
        with self._changed:
            run = self._runs[segment]
        share = run.share
        order = replace(share.order, ordered_at_s=time.monotonic())  # by this machine's clock
        try:
            gang = self._start_gang(self._launcher, order, num_ranks=share.num_ranks)
        except (OSError, RuntimeError) as error:
            return run.overruled or Outcome(
                status=OutcomeStatus.CRASHED, message=f"the gang could not be started: {error}"
            )
        with self._changed:
            run.gang = gang
            for command in [*self._commands.get(segment, ()), *[STOP] * self._is_stopping]:
                run.send(command)
            if run.overruled is not None:
                gang.kill()
        outcome = gang.wait(on_event)
        if run.overruled is not None and outcome.status == OutcomeStatus.CRASHED:
            return run.overruled
        return outcome

    def send(self, segment: int, command: str) -> None:
        """Sends a command to the gang of a segment, even if it has not started, or runs only on other nodes."""
        with self._changed:
            self._commands.setdefault(segment, []).append(command)
            if len(self._commands) > MAX_REMEMBERED:
                del self._commands[next(iter(self._commands))]
            if run := self._runs.get(segment):
                run.send(command)

    def stop_all(self) -> None:
        """Commands every gang, including those that have not started, to write a checkpoint and end."""
        with self._changed:
            self._is_stopping = True
            for run in self._runs.values():
                run.send(STOP)

    def end_all(self, outcome: Outcome) -> None:
        """Kills all gangs; `outcome` becomes the outcome of each."""
        with self._changed:
            for run in self._runs.values():
                run.overruled = outcome
                run.send(KILL)

    def join(self, *, within_s: float) -> bool:
        """Waits at most `within_s` until all shares are dismissed; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._runs, timeout=within_s)


class NodeAgent:
    """Serves one node, from `start` until `drain`, or until `ended` is set because another worker serves the node.

    name: the node's name in the pool.
    address: the address at which other nodes reach it.
    devices: the devices that it registers, in their order.
    server: the node's fork server, made with the fence of `timeouts`. The agent owns it.
    device_monitor: the monitor of its devices.
    allocation: the id under which an engine lends the machine; empty for a machine of one's own.
    """

    def __init__(
        self,
        *,
        name: str,
        address: str,
        devices: Sequence[Device],
        database: Database,
        server: ForkServer,
        device_monitor: Telemetry,
        timeouts: Timeouts | None = None,
        allocation: str = "",
        start_gang: StartGang = Gang,
    ) -> None:
        self.name = name
        self._allocation = allocation
        self.ended = threading.Event()
        self.was_replaced = False
        self._address, self._devices, self._server = address, tuple(devices), server
        self._device_monitor = device_monitor
        self._gangs = Gangs(server, start_gang=start_gang)
        self._message_store, self._nodes, self._database = MessageStore(database), NodeRegistry(database), database
        self._quick_database = Database(
            database.url, timeout_s=0.0
        )  # for calls that must not wait until the database is back
        self._outbox = Outbox(self._message_store, name)
        timeouts = timeouts or Timeouts()
        self._pulse = Heartbeat(
            beat=self._beat, tick=server.tick, on_replaced=self._on_replaced, every_s=timeouts.beat_every_s
        )
        self._poller = threading.Thread(target=self._poll, name="look", daemon=True)
        self._lock = threading.Lock()
        self.incarnation = ""
        self._ever_taken: set[int] = set()
        self._last_command = 0
        self.is_leaving = False

    # -- serving -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Registers the node; returns once the agent can take orders."""
        self._last_command = max((id for id, _, _ in self._message_store.commands(after=0)), default=0)
        self._register()
        self._poller.start()
        self._pulse.start()

    @property
    def running(self) -> Mapping[int, GangShare]:
        """The shares that have been taken and have not ended, by segment."""
        return self._gangs.shares

    def drain(self, *, within_s: float = DRAIN_S, heed_s: float = HEED_S) -> None:
        """Ends in order: gangs write checkpoints and stop, their outcomes are sent, and the node leaves the pool.

        Gangs that take longer than `within_s` are ended. Their segments are "lost" and continue from their checkpoints.
        heed_s: the time for the executor to notice that the node leaves, before jobs stop that it would start here
        again.
        """
        with self._lock:
            self.is_leaving = True
        self._pulse.hurry()
        self._gangs.join(within_s=min(heed_s, within_s))
        self._gangs.stop_all()
        if not self._gangs.join(within_s=max(within_s - heed_s, 0.0)):
            self._end_all(f"node {self.name} had to leave before the gang had stopped")
        self._outbox.flush(within_s=FAREWELL_S)
        self._pulse.stop(within_s=FAREWELL_S)
        with suppress(SQLAlchemyError):  # unreachable: the executor will find the node silent
            NodeRegistry(self._quick_database).mark_left(self.name, incarnation=self.incarnation)
        self.close()

    def close(self) -> None:
        """Ends all gangs at once; `drain` ends them in order."""
        self.is_leaving = True
        self.ended.set()
        self._pulse.stop(within_s=0.0)
        self._outbox.close()
        self._server.close()
        self._quick_database.close()

    # -- the node in the registry ------------------------------------------------------------------------------------

    def _register(self) -> None:
        self.incarnation = uuid.uuid4().hex
        self._nodes.register(
            NodeRecord(
                name=self.name,
                incarnation=self.incarnation,
                address=self._address,
                devices=self._devices,
                health=self._device_monitor.health(),
                allocation=self._allocation,
            )
        )

    def _beat(self) -> bool:
        is_whole = self._outbox.is_alive() and self._poller.is_alive()
        if not is_whole:
            self.ended.set()  # so that the worker ends, and another one can be started
        assert is_whole, "a node without its outbox or its order thread must send no heartbeats"
        status = NodeStatus.LEAVING if self.is_leaving else NodeStatus.SERVING
        return NodeRegistry(self._quick_database).beat(
            self.name, incarnation=self.incarnation, health=self._device_monitor.health(), status=status
        )

    def _on_replaced(self) -> bool:
        """Ends all gangs after the node was declared lost, or served by another worker; returns whether to continue."""
        with self._lock:
            self.incarnation = ""  # so that no more orders are taken
        self._end_all(f"the pool had given node {self.name} up")
        try:
            other = next((node for node in self._nodes.all() if node.name == self.name), None)
            if other is None and not self.is_leaving:
                logger.warning("the pool had given node %s up: it begins again", self.name)
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

    def _take(self, segment: int) -> None:
        """Takes an order and starts its gang, once however often it is called.

        It does nothing for an order that was withdrawn, that another incarnation is to take, or while the node leaves.
        It waits while the database is unreachable.
        """
        with self._lock:
            if self.is_leaving or segment in self._ever_taken:
                return
            self._ever_taken.add(segment)
            incarnation = self.incarnation
        try:
            share = self._message_store.take(segment, self.name, incarnation=incarnation) or self._taken_before(
                segment, incarnation
            )
        except ValueError as error:  # damaged, or of another release: it would be read in vain again and again
            logger.exception("the order of segment %d cannot be read", segment)
            message = f"node {self.name} cannot read its order: {error}"
            self._outbox.put(segment, Outcome(status=OutcomeStatus.INVALID, message=message))
            return
        with self._lock:
            # The order was withdrawn or is not given yet, or the node was declared lost meanwhile.
            if share is None or self.is_leaving or incarnation != self.incarnation:
                self._ever_taken.discard(segment)
                return
            self._gangs.admit(segment, share)
        logger.info("segment %d begins", segment)
        threading.Thread(target=self._run, args=(segment, share), name=f"segment-{segment}", daemon=True).start()

    def _taken_before(self, segment: int, incarnation: str) -> GangShare | None:
        """Returns the share of an order that this process took in a transaction whose result was lost."""
        orders = self._message_store.orders(incarnation=incarnation)
        return next(
            (o.share for o in orders if (o.segment, o.node, o.status) == (segment, self.name, OrderStatus.TAKEN)), None
        )

    def _run(self, segment: int, share: GangShare) -> None:
        slots = {(slot.kind, slot.index) for slot in share.order.slots}
        numbers = [number for number, device in enumerate(self._devices) if (device.kind, device.index) in slots]
        outcome = Outcome(
            status=OutcomeStatus.CRASHED, message="its supervisor failed; the worker's log has the reason"
        )
        try:
            prepare_node(share.order.job, cache_dir=share.order.cache_dir, database=self._database)
            self._device_monitor.begin(segment, numbers, is_part=bool(share.order.meeting))
            outcome = self._gangs.run(
                segment, lambda event: None if isinstance(event, UNHEARD) else self._outbox.put(segment, event)
            )
        finally:
            if (event := self._device_monitor.end(segment)) is not None:
                self._outbox.put(segment, event)
            self._outbox.put(segment, outcome)
            logger.info("segment %d ended: %s %s", segment, outcome.status, outcome.message)
            self._gangs.dismiss(segment)

    def _end_all(self, why: str) -> None:
        """Kills all gangs, and waits until they are gone."""
        self._gangs.end_all(Outcome(status=OutcomeStatus.LOST, message=why))
        if not self._gangs.join(within_s=KILLED_S):
            logger.error("gangs of node %s did not end when they were killed", self.name)

    # -- commands and orders -----------------------------------------------------------------------------------------

    def _poll(self) -> None:
        with suppress(DatabaseClosed):
            idle_since_s = time.monotonic()
            while not self.ended.wait(LOOK_EVERY_S if time.monotonic() - idle_since_s < IDLE_S else IDLE_LOOK_EVERY_S):
                if self._gangs.shares:
                    idle_since_s = time.monotonic()
                for id, segment, command in self._message_store.commands(after=self._last_command):
                    self._last_command = id
                    self._gangs.send(segment, command)
                for order in self._message_store.orders(incarnation=self.incarnation):
                    if order.status == OrderStatus.GIVEN:
                        self._take(order.segment)
                for segment, event in self._device_monitor.due_events().items():
                    self._outbox.put(segment, event)
