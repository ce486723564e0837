"""Adds what devices do to what gangs say, where a runner on this machine does not measure by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.orders import SegmentCall
from ringmaster.tasks.pool.telemetry import Telemetry
from ringmaster.techniques.engine.gang import Event

Say = Callable[[Event], None]


class Measured:
    """Says telemetry words among a segment's own events; from several threads, as gangs speak."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._says: dict[int, Say] = {}

    @contextmanager
    def segment(self, call: SegmentCall) -> Iterator[Say]:
        """While a segment's gang runs: where it is to say its events."""
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
        """Whoever speaks passes on what is due of all: gangs speak far more often than words come."""
        words = self._telemetry.words()
        with self._lock:
            due = [(self._says[number], word) for number, word in words.items() if number in self._says]
        for say, word in due:
            say(word)


@contextmanager
def watching(cluster: Cluster) -> Iterator[Measured | None]:
    """What watches the GPUs of this machine; None where it has none: what CPU slots do says little more than time."""
    (node,) = cluster.nodes
    if not any(device.kind == "gpu" for device in node.devices):
        yield None
        return
    telemetry = Telemetry(node.name, node.devices)
    telemetry.start()
    try:
        yield Measured(telemetry)
    finally:
        telemetry.close()
