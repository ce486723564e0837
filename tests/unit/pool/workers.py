"""Fake nodes of a pool without processes: a test takes their orders and sends the events of their gangs."""

from ringmaster.tasks.execution.engine import SegmentCall
from ringmaster.tasks.pool.nodes import NodeRecord, NodeRegistry
from ringmaster.tasks.storage.message_store import KILL, MessageStore, OrderStatus
from ringmaster.techniques.processes.gang_events import event_from_json
from ringmaster.techniques.processes.order import GangOrder, Slot
from tests.fake_engine import cpu_devices
from tests.unit.execution.fakes import job


class Worker:
    """A node whose gangs send the events that a test sets. A second one of the same name is another incarnation."""

    def __init__(self, database, name="n", *, incarnation=None, num_devices=2, allocation=""):
        incarnation = incarnation or f"{name}-one"
        self.message_store, self.nodes, self.numbers = MessageStore(database), NodeRegistry(database), {}
        self.record = NodeRecord(
            name=name,
            incarnation=incarnation,
            address=f"10.0.0.{name}",
            devices=cpu_devices(num_devices),
            allocation=allocation,
        )
        self.name, self.incarnation = name, incarnation
        self.nodes.register(self.record)

    def beat(self, **changes):
        return self.nodes.beat(self.name, incarnation=self.incarnation, **{"health": {}, **changes})

    def take_all(self):
        """Takes all its orders. Returns the shares by segment."""
        orders = self.message_store.orders(incarnation=self.incarnation)
        taken = {
            order.segment: self.message_store.take(order.segment, self.name, incarnation=self.incarnation)
            for order in orders
        }
        return {segment: share for segment, share in taken.items() if share is not None}

    def running(self):
        """The segments whose shares it has taken."""
        return [
            o.segment for o in self.message_store.orders(incarnation=self.incarnation) if o.status == OrderStatus.TAKEN
        ]

    def say(self, segment, event, **details):
        number = self.numbers[segment] = self.numbers.get(segment, -1) + 1
        self.message_store.store(segment, self.name, events=[(number, event_from_json({"event": event, **details}))])

    def end(self, segment, status="done", message="", **result):
        self.say(segment, "outcome", status=status, message=message, result=result)

    def told(self, segment):
        return [command for _, number, command in self.message_store.commands(after=0) if number == segment]

    def is_killed(self, segment):
        return KILL in self.told(segment)


def call(number, *, on_event=lambda event: None, devices=(("n", 0),), num_ranks=None, name="a", batch="b"):
    """A segment that an executor submits."""
    order = GangOrder(
        purpose="train",
        job=job(name),
        technique="t:T",
        config={},
        slots=tuple(Slot(kind="cpu", index=index) for _, index in devices),
        folder=f"/gangs/{number:04d}-{name}",
        cache_dir="/cache",
        last_step=10,
    )
    return SegmentCall(
        label=name,
        order=order,
        num_ranks=num_ranks or len(devices),
        on_event=on_event,
        number=number,
        job=f"{batch}/{name}",
        batch=batch,
        devices=tuple(devices),
    )
