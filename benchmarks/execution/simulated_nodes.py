"""A process that represents nodes of a pool: it takes their orders and reports what their gangs would report.

    python -m benchmarks.execution.simulated_nodes DATABASE NUM_NODES DEVICES_PER_NODE

A gang takes the seconds of its job's profile, on the real clock, and no processor. The messages are those of
real nodes; only their transactions are fewer, as one process writes the events of all gangs together.
"""

import sys
import threading
import time
from dataclasses import dataclass, field

from sqlalchemy import insert, select, update

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.pool.nodes import NodeRecord, NodeRegistry, NodeStatus, Timeouts
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.message_store import KILL, GangShare, MessageStore, OrderStatus
from ringmaster.tasks.storage.schema import GANG_EVENTS, NODES, ORDERS
from ringmaster.techniques.processes.gang_events import (
    CheckpointSaved,
    Event,
    JobReady,
    JobResult,
    Outcome,
    OutcomeStatus,
    Steps,
    event_to_json,
)
from ringmaster.techniques.processes.reporter import STOP, UNTIL

LOOK_EVERY_S = 0.1  # as real nodes do
REPORT_EVERY_S = 0.2  # as real gangs do, at most
STARTUP_S, SAVE_S, EVALUATE_S, EXPORT_S = 1.0, 0.1, 0.1, 0.1
STEP_S = "step_s"  # the key of a job's model with the seconds of a step, by the number of devices


@dataclass(kw_only=True)
class StubGang:
    """A gang on one node, which takes a step each `step_s`.

    began_s: when its first step begins. next_s: when it has something to report next.
    """

    segment: int
    node: str
    share: GangShare
    began_s: float
    next_s: float
    step_s: float
    first_step: int
    step: int
    last_step: int
    saved_s: float
    is_stopping: bool = False
    is_ready: bool = False
    is_saving: bool = False
    num_events: int = 0

    @classmethod
    def of(cls, segment: int, node: str, share: GangShare, *, now_s: float) -> "StubGang":
        """Starts a gang."""
        order, began_s = share.order, now_s + STARTUP_S
        step_s = order.job.model.kwargs[STEP_S][str(len(order.slots))]
        first = order.known_step
        return cls(
            segment=segment,
            node=node,
            share=share,
            began_s=began_s,
            next_s=began_s,
            step_s=step_s,
            first_step=first,
            step=first,
            last_step=order.last_step,
            saved_s=began_s,
        )

    def send_command(self, command: str) -> None:
        """Receives a command of the controller."""
        if command in (STOP, KILL):
            self.is_stopping = True
        elif command.startswith(UNTIL):
            self.last_step = max(self.last_step, int(command.removeprefix(UNTIL)))

    def advance(self, now_s: float) -> list[Event]:
        """Returns what the gang reports at `now_s`, the outcome at last."""
        if self.is_saving:
            return [self._outcome()]
        if not self.is_ready:
            self.is_ready = True
            self._schedule(now_s)
            return [JobReady(step=self.step, startup_s=STARTUP_S)]
        done = min(self.last_step, self.first_step + int((now_s - self.began_s) / self.step_s + 1e-6))
        events: list[Event] = []
        if done > self.step:
            seconds = (self.step_s,) * (done - self.step)
            losses = tuple(1.0 / (1 + step) for step in range(self.step, done))
            events.append(Steps(first_step=self.step, seconds=seconds, losses=losses, wall_s=time.time()))
            self.step = done
        if self.is_stopping or self.step >= self.last_step:
            self.is_saving = True
            is_end = self.step >= self.share.order.job.total_steps
            self.next_s = now_s + SAVE_S + (EVALUATE_S + EXPORT_S if is_end else 0.0)
            return events
        every_s = self.share.order.checkpoint_every_s
        if every_s is not None and now_s - self.saved_s >= every_s:
            self.saved_s = now_s
            events.append(CheckpointSaved(step=self.step, seconds=SAVE_S, stall_s=0.0))
        self._schedule(now_s)
        return events

    def _schedule(self, now_s: float) -> None:
        next_step_s = self.began_s + (self.step + 1 - self.first_step) * self.step_s
        self.next_s = max(next_step_s, now_s + REPORT_EVERY_S)

    def _outcome(self) -> Event:
        is_end = self.step >= self.share.order.job.total_steps
        status = OutcomeStatus.DONE if self.step >= self.last_step else OutcomeStatus.PREEMPTED
        metrics = {"loss": 0.5} if is_end else None
        result = JobResult(first_step=self.first_step, step=self.step, startup_s=STARTUP_S, metrics=metrics)
        return Outcome(status=status, result=result)


@dataclass(kw_only=True)
class SimulatedNodes:
    """Nodes, and their gangs. allocation: under which an engine lends the machine; empty for machines of one's own."""

    database: Database
    names: tuple[str, ...]
    devices_per_node: int
    beat_every_s: float
    allocation: str = ""
    gangs: dict[int, StubGang] = field(default_factory=dict)
    last_command: int = 0
    beaten_s: float = 0.0

    def register(self) -> None:
        """Registers all nodes."""
        self.messages, self.nodes = MessageStore(self.database), NodeRegistry(self.database)
        self.last_command = max((id for id, _, _ in self.messages.commands(after=0)), default=0)
        slots = tuple(
            Device(kind="cpu", index=i, name="stub", memory_bytes=1 << 34, cores=(i,))
            for i in range(self.devices_per_node)
        )
        for name in self.names:
            record = NodeRecord(
                name=name,
                incarnation=self._incarnation(name),
                address="127.0.0.1",
                devices=slots,
                allocation=self.allocation,
            )
            self.nodes.register(record)

    def serve(self, leaving: threading.Event) -> None:
        """Serves until `leaving` is set; then the gangs stop in order, and the nodes leave."""
        pause, is_leaving = threading.Event(), False
        while self.gangs or not is_leaving:
            began_s = time.monotonic()
            if leaving.is_set() and not is_leaving:
                is_leaving, self.beaten_s = True, 0.0
            self._beat(began_s, status=NodeStatus.LEAVING if is_leaving else NodeStatus.SERVING)
            if not is_leaving:
                self._take_orders()
            for gang in self.gangs.values():
                gang.is_stopping |= is_leaving
            for id, segment, command in self.messages.commands(after=self.last_command):
                self.last_command = id
                if segment in self.gangs:
                    self.gangs[segment].send_command(command)
            self._report(time.monotonic())
            pause.wait(max(0.0, began_s + LOOK_EVERY_S - time.monotonic()))
        for name in self.names:
            self.nodes.mark_left(name, incarnation=self._incarnation(name))

    def _incarnation(self, name: str) -> str:
        return f"{name}-{self.allocation or 1}"

    def _beat(self, now_s: float, *, status: NodeStatus) -> None:
        if now_s - self.beaten_s >= self.beat_every_s:
            self.beaten_s = now_s
            beaten = update(NODES).where(NODES.c.name.in_(self.names))
            self.database.write(
                lambda connection: connection.execute(beaten.values(beats=NODES.c.beats + 1, status=status))
            )

    def _take_orders(self) -> None:
        query = select(ORDERS.c.segment, ORDERS.c.node, ORDERS.c.incarnation).where(
            ORDERS.c.status == OrderStatus.GIVEN, ORDERS.c.node.in_(self.names)
        )
        for row in self.database.read(lambda connection: connection.execute(query).all()):
            share = self.messages.take(row.segment, row.node, incarnation=row.incarnation)
            if share is not None:
                self.gangs[row.segment] = StubGang.of(row.segment, row.node, share, now_s=time.monotonic())

    def _report(self, now_s: float) -> None:
        rows, ended = [], []
        for gang in [gang for gang in self.gangs.values() if gang.next_s <= now_s or gang.is_stopping]:
            if gang.is_saving and gang.next_s > now_s:
                continue
            for event in gang.advance(now_s) if gang.next_s <= now_s or gang.is_ready else ():
                where = {"segment": gang.segment, "node": gang.node, "number": gang.num_events}
                rows.append({**where, "content": event_to_json(event)})
                gang.num_events += 1
                if isinstance(event, Outcome):
                    ended.append(gang.segment)
        if not rows:
            return

        def act(connection) -> None:
            connection.execute(insert(GANG_EVENTS), rows)
            if ended:
                connection.execute(update(ORDERS).where(ORDERS.c.segment.in_(ended)).values(status=OrderStatus.ENDED))

        self.database.write(act)
        for segment in ended:
            del self.gangs[segment]


def main(url: str, num_nodes: str, devices_per_node: str) -> None:
    """Registers the nodes "n000" to "n127", and serves until the process is ended."""
    nodes = SimulatedNodes(
        database=Database(url),
        names=tuple(f"n{number:03d}" for number in range(int(num_nodes))),
        devices_per_node=int(devices_per_node),
        beat_every_s=Timeouts.of_environment().beat_every_s,
    )
    nodes.register()
    nodes.serve(threading.Event())


if __name__ == "__main__":
    main(*sys.argv[1:])
