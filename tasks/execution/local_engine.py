"""The engine of this machine, whose gangs end with the process that has started them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.device_monitor import Telemetry
from ringmaster.tasks.execution.engine import EngineContext, EngineNode, SegmentCall, SegmentTelemetry, completed
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.gang_events import Event, Outcome, OutcomeStatus

END_TIMEOUT_S = 30.0


@contextmanager
def watching(cluster: Cluster) -> Iterator[SegmentTelemetry | None]:
    """Samples the GPUs of this machine while the context is open. Yields None if it has none.

    CPU slots are not sampled, as their metrics add little to the time.
    """
    (node,) = cluster.nodes
    if not any(device.kind == "gpu" for device in node.devices):
        yield None
        return
    telemetry = Telemetry(node.name, node.devices)
    telemetry.start()
    try:
        yield SegmentTelemetry(telemetry)
    finally:
        telemetry.close()


class LocalEngine:
    """Runs segments on this machine; their gangs end with this process."""

    def __init__(self, context: EngineContext) -> None:
        if context.launcher is None:
            raise ValueError("engine 'local' runs segments where `ringmaster run` runs. To fix: name another engine")
        self._launcher, self._spawn, self._telemetry = context.launcher, context.spawn, context.telemetry
        self._nodes = tuple(EngineNode(name=node.name, devices=node.devices) for node in context.cluster.nodes)
        self._ended = threading.Condition()
        self._gangs: dict[int, Gang] = {}  # by segment
        self._early: dict[int, list[str]] = {}  # commands to gangs that have not started yet

    def nodes(self) -> Sequence[EngineNode]:
        """Returns this machine."""
        return self._nodes

    def request(self, num_nodes: int) -> None:
        """Does nothing: this machine is all there is."""

    def release(self, node: str) -> None:
        """Does nothing: this machine stays."""

    def catch_up(self) -> None:
        """Does nothing: events are passed on as they come."""

    def is_fenced(self, node: str) -> bool:
        """Returns True: this machine is never lost without this process."""
        return True

    def start(self, call: SegmentCall) -> Future[Outcome]:
        """Starts a segment; returns the future of its outcome."""
        return self._spawn(call.label, partial(self.run, call))

    def adopt(self, number: int, *, on_event: Callable[[Event], None]) -> Future[Outcome]:
        """Returns a lost outcome: gangs of this machine do not outlive the process that started them."""
        message = "its gang ended with the process that had started it"
        return completed(Outcome(status=OutcomeStatus.LOST, message=message))

    def run(self, call: SegmentCall) -> Outcome:
        """Runs a gang to its end; returns its outcome once its devices are free."""
        with nullcontext(call.on_event) if self._telemetry is None else self._telemetry.segment(call) as on_event:
            gang = Gang(self._launcher, call.order, num_ranks=call.num_ranks)
            with self._ended:
                self._gangs[call.number] = gang
                for command in self._early.pop(call.number, ()):
                    gang.send(command)
            try:
                return gang.wait(on_event)
            finally:
                with self._ended:
                    del self._gangs[call.number]
                    self._ended.notify_all()

    def send(self, number: int, command: str) -> None:
        """Sends a command to the gang of a segment, or stores it until the gang starts."""
        with self._ended:
            if number in self._gangs:
                self._gangs[number].send(command)
            else:
                self._early.setdefault(number, []).append(command)

    def close(self) -> None:
        """Kills every gang, and waits until all devices are free, for at most `END_TIMEOUT_S` seconds."""
        with self._ended:
            for gang in self._gangs.values():
                gang.kill()
            self._ended.wait_for(lambda: not self._gangs, timeout=END_TIMEOUT_S)
