"""The engine of this machine: runs gangs through a fork server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext

from ringmaster.tasks.execution.engine import SegmentCall
from ringmaster.tasks.execution.local.device_metrics import SegmentTelemetry
from ringmaster.techniques.runtime.processes.events import Event, OutcomeStatus
from ringmaster.techniques.runtime.processes.forkserver_client import ForkServer
from ringmaster.techniques.runtime.processes.gang import Gang, Outcome
from ringmaster.techniques.runtime.processes.reporter import STOP

END_TIMEOUT_S = 30.0

Spawn = Callable[[str, Callable[[], Outcome]], "Future[Outcome]"]
"""Runs a function in the background, under a label that a person sees."""


def in_a_thread(label: str, run: Callable[[], Outcome]) -> Future[Outcome]:
    """Runs a function on a thread of its own."""
    future: Future[Outcome] = Future()

    def work() -> None:
        try:
            future.set_result(run())
        except BaseException as error:  # noqa: BLE001 - the caller of `result` gets it
            future.set_exception(error)

    threading.Thread(target=work, name=label, daemon=True).start()
    return future


class LocalEngine:
    """Runs segments on this machine; their gangs end with this process.

    spawn: runs what waits for a gang.
    telemetry: adds device metrics to the events of each segment, or None.
    """

    def __init__(
        self, server: ForkServer, *, spawn: Spawn = in_a_thread, telemetry: SegmentTelemetry | None = None
    ) -> None:
        self._server, self._spawn, self._telemetry = server, spawn, telemetry
        self._ended = threading.Condition()
        self._gangs: dict[int, Gang] = {}  # by segment
        self._early: dict[int, list[str]] = {}  # commands to gangs that have not started yet
        self._stopping = False

    def start(self, call: SegmentCall) -> Future[Outcome]:
        """Starts a segment; returns the future of its outcome."""
        return self._spawn(call.label, lambda: self.run(call))

    def adopt(self, number: int, *, on_event: Callable[[Event], None]) -> Future[Outcome]:
        """Returns a lost outcome: gangs of this machine do not outlive the process that started them."""
        future: Future[Outcome] = Future()
        future.set_result(
            Outcome(status=OutcomeStatus.LOST, message="its gang ended with the process that had started it")
        )
        return future

    def run(self, call: SegmentCall) -> Outcome:
        """Runs a gang to its end; returns its outcome once its devices are free."""
        with nullcontext(call.on_event) if self._telemetry is None else self._telemetry.segment(call) as on_event:
            gang = Gang(self._server, call.order, num_ranks=call.num_ranks)
            with self._ended:
                self._gangs[call.number] = gang
                for command in self._early.pop(call.number, ()):
                    gang.send(command)
                if self._stopping:
                    gang.send(STOP)
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

    def stop_all(self) -> None:
        """Commands every gang, including those started later, to checkpoint and end."""
        with self._ended:
            self._stopping = True
            for gang in self._gangs.values():
                gang.send(STOP)

    def close(self) -> None:
        """Kills every gang, and waits until all devices are free, for at most `END_TIMEOUT_S` seconds."""
        with self._ended:
            for gang in self._gangs.values():
                gang.kill()
            self._ended.wait_for(lambda: not self._gangs, timeout=END_TIMEOUT_S)
