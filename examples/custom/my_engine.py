"""A user's own engine: it divides this machine's devices into two nodes, as if they were two machines.

[project.entry-points."ringmaster.engines"]
two-nodes = "mypackage.my_engine:TwoNodes"

ringmaster run batch.yaml --engine two-nodes
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ringmaster.tasks.execution.engine import EngineContext, EngineNode, SegmentCall
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.gang_events import Event, Outcome, OutcomeStatus


class TwoNodes:
    """Runs gangs through the fork server of the run. Each gang has one of its threads."""

    def __init__(self, context: EngineContext) -> None:
        if context.launcher is None or len(context.cluster.devices) < 2:
            raise ValueError("engine 'two-nodes' needs a machine with two devices. To fix: write `devices: {cpu: 2}`")
        devices = context.cluster.devices
        self._launcher, half = context.launcher, len(devices) // 2
        parts = {"left": devices[:half], "right": devices[half:]}
        self._nodes = [EngineNode(name=name, devices=part) for name, part in parts.items()]
        self._threads = ThreadPoolExecutor(max_workers=len(devices))  # a gang has a device at least
        self._lock = threading.Lock()
        self._gangs: dict[int, Gang] = {}
        self._early: dict[int, list[str]] = {}

    def nodes(self) -> Sequence[EngineNode]:
        """Returns both nodes."""
        return self._nodes

    def request(self, num_nodes: int) -> None:
        """Does nothing: there are always two nodes."""

    def release(self, node: str) -> None:
        """Does nothing: both nodes stay."""

    def catch_up(self) -> None:
        """Does nothing: events are passed on as they come."""

    def is_fenced(self, node: str) -> bool:
        """Returns True: no node is ever lost."""
        return True

    def start(self, call: SegmentCall) -> Future[Outcome]:
        """Starts a segment; returns the future of its outcome."""
        return self._threads.submit(self._run, call)

    def adopt(self, number: int, *, on_event: Callable[[Event], None]) -> Future[Outcome]:
        """Returns a lost outcome: no gang outlives the process that started it."""
        future: Future[Outcome] = Future()
        future.set_result(Outcome(status=OutcomeStatus.LOST))
        return future

    def send(self, number: int, command: str) -> None:
        """Sends a command to a gang, or stores it until the gang starts."""
        with self._lock:
            if number in self._gangs:
                self._gangs[number].send(command)
            else:
                self._early.setdefault(number, []).append(command)

    def close(self) -> None:
        """Kills all gangs, and waits until their devices are free."""
        with self._lock:
            for gang in self._gangs.values():
                gang.kill()
        self._threads.shutdown()

    def _run(self, call: SegmentCall) -> Outcome:
        with self._lock:
            gang = self._gangs[call.number] = Gang(self._launcher, call.order, num_ranks=call.num_ranks)
            for command in self._early.pop(call.number, ()):
                gang.send(command)
        try:
            return gang.wait(call.on_event)
        finally:
            with self._lock:
                del self._gangs[call.number]
