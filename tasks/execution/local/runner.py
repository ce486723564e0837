"""The local runner: runs gangs on this machine through its fork server."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ringmaster.techniques.runtime.processes.forkserver_client import ForkServer
from ringmaster.techniques.runtime.processes.gang import Event, Gang, Outcome
from ringmaster.techniques.runtime.processes.order import GangOrder
from ringmaster.techniques.runtime.processes.reporter import STOP

END_TIMEOUT_S = 30.0


class LocalRunner:
    """Runs gang orders. Each `run` blocks its thread until the gang has ended. Other methods may be called from any
    thread.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._ended = threading.Condition()
        self._gangs: dict[str, Gang] = {}  # by the folder of the gang's order
        self._early: dict[str, list[str]] = {}  # commands to gangs that have not started yet
        self._stopping = False

    def run(self, order: GangOrder, *, num_ranks: int, on_event: Callable[[Event], None]) -> Outcome:
        """Starts a gang and returns its outcome once its devices are free."""
        gang = Gang(self._server, order, num_ranks=num_ranks)
        with self._ended:
            self._gangs[order.folder] = gang
            for command in self._early.pop(order.folder, ()):
                gang.send(command)
            if self._stopping:
                gang.send(STOP)
        try:
            return gang.wait(on_event)
        finally:
            with self._ended:
                del self._gangs[order.folder]
                self._ended.notify_all()

    def steer(self, folder: str, command: str) -> None:
        """Sends a command to the gang of the order with that folder, or stores it until the gang starts."""
        with self._ended:
            if folder in self._gangs:
                self._gangs[folder].send(command)
            else:
                self._early.setdefault(folder, []).append(command)

    def stop_all(self) -> None:
        """Commands every gang, including those started later, to checkpoint and end."""
        with self._ended:
            self._stopping = True
            for gang in self._gangs.values():
                gang.send(STOP)

    def kill_all(self) -> None:
        """Kills every gang at once."""
        with self._ended:
            for gang in self._gangs.values():
                gang.kill()

    def join(self) -> None:
        """Waits until no gang runs and all devices are free, for at most `END_TIMEOUT_S` seconds."""
        with self._ended:
            self._ended.wait_for(lambda: not self._gangs, timeout=END_TIMEOUT_S)
