"""Device metrics for gangs on this machine: adds telemetry events to their own events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.devices.monitor import Telemetry
from ringmaster.tasks.execution.engine import SegmentCall
from ringmaster.techniques.processes.events import Event

Say = Callable[[Event], None]


class SegmentTelemetry:
    """Adds telemetry events to the events of segments. Safe to use from several threads."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._says: dict[int, Say] = {}

    @contextmanager
    def segment(self, call: SegmentCall) -> Iterator[Say]:
        """While a segment's gang runs: yields the callback that receives the gang's events."""
        with self._lock:
            self._says[call.number] = call.on_event
        self._telemetry.begin(call.number, [number for _, number in call.devices])

        def say(event: Event) -> None:
            call.on_event(event)
            self._pass_on()

        try:
            yield say
        finally:
            with self._lock:
                del self._says[call.number]
            if (last := self._telemetry.end(call.number)) is not None:
                call.on_event(last)

    def _pass_on(self) -> None:
        """Sends the due telemetry events of all segments. Gangs send events far more often than telemetry is due."""
        events = self._telemetry.due_events()
        with self._lock:
            due = [(self._says[number], event) for number, event in events.items() if number in self._says]
        for say, event in due:
            say(event)


@contextmanager
def watching(cluster: Cluster) -> Iterator[SegmentTelemetry | None]:
    """Samples the GPUs of this machine while the context is open. Yields None if it has none.

    CPU slots are not sampled, as their metrics say little more than the time.
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
