"""The local runner: gangs on this machine, from its fork server."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ringmaster.techniques.engine.gang import Event, Gang, Outcome
from ringmaster.techniques.engine.order import GangOrder
from ringmaster.techniques.engine.processes import ForkServer
from ringmaster.techniques.engine.reporter import STOP

END_TIMEOUT_S = 30.0


class LocalRunner:
    """Runs gang orders; each `run` blocks its thread until the gang has ended. `stop_all` may come from any thread."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._ended = threading.Condition()
        self._gangs: dict[str, Gang] = {}  # by the folder of its order
        self._early: dict[str, list[str]] = {}  # commands to gangs that are about to start
        self._stopping = False

    def run(self, order: GangOrder, *, num_ranks: int, on_event: Callable[[Event], None]) -> Outcome:
        """Starts a gang and returns how it ended; its devices are free then."""
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
        """Gives a command to the gang of the order with that folder, also where it is still to be started."""
        with self._ended:
            if folder in self._gangs:
                self._gangs[folder].send(command)
            else:
                self._early.setdefault(folder, []).append(command)

    def stop_all(self) -> None:
        """Tells every gang, and those still to come, to checkpoint and end."""
        with self._ended:
            self._stopping = True
            for gang in self._gangs.values():
                gang.send(STOP)

    def kill_all(self) -> None:
        """Ends every gang at once."""
        with self._ended:
            for gang in self._gangs.values():
                gang.kill()

    def join(self) -> None:
        """Waits until no gang runs any more: their devices are free."""
        with self._ended:
            self._ended.wait_for(lambda: not self._gangs, timeout=END_TIMEOUT_S)
