"""The interface of an engine: what provides machines and runs the gangs of segments on them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from ringmaster.tasks.execution.dispatch import DeviceId
from ringmaster.techniques.runtime.processes.events import Event
from ringmaster.techniques.runtime.processes.gang import Outcome
from ringmaster.techniques.runtime.processes.order import GangOrder


@dataclass(frozen=True, kw_only=True)
class SegmentCall:
    """A segment to start: the order of its gang, its number of ranks, and the callback for its events.

    number: the segment's number in the journal, which identifies it.
    job: the executor's name of the job, in a pool "BATCH/JOB".
    batch: the batch of a pool; empty without a pool.
    devices: the devices of the order's slots, in the same order.
    """

    label: str
    order: GangOrder
    num_ranks: int
    on_event: Callable[[Event], None]
    number: int
    job: str
    batch: str
    devices: tuple[DeviceId, ...]


class Engine(Protocol):
    """Runs segments. All methods are thread-safe, and none waits for a gang.

    The executor sees nothing else of what runs underneath: this machine, or the nodes of a pool.
    """

    def start(self, call: SegmentCall) -> Future[Outcome]:
        """Starts a segment; returns the future of its outcome, which is set once its devices are free.

        The executor uses the future's `add_done_callback` and `result`. Events are passed to `call.on_event` before.
        """

    def adopt(self, number: int, *, on_event: Callable[[Event], None]) -> Future[Outcome]:
        """Takes over a segment that another process has started; its events are passed on again, from the first."""

    def send(self, number: int, command: str) -> None:
        """Sends a command to the gang of a segment, even if the gang has not started: `STOP`, or one that `until` or
        `leave` returns.
        """
