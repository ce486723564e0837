"""A worker's heartbeat: a row update in the pool's database, and a tick of the fork server after each success.

The fork server ends its ranks if no tick arrives for long. So a node that the pool no longer hears has no ranks left by
the time its jobs are given to other nodes. The cause of a failed heartbeat makes no difference: a refused connection
looks the same whether the database is down for all nodes, or a firewall or a tunnel cuts off this node alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sqlalchemy.exc import DBAPIError

from ringmaster.tasks.storage.database import DatabaseClosed
from ringmaster.techniques.processes.fence import seconds_since_boot

logger = logging.getLogger(__name__)

AGAIN_S = 1.0  # between attempts of a heartbeat that failed


class Heartbeat:
    """Sends heartbeats from a thread of its own until it is stopped, or until the node belongs to another worker.

    beat: one attempt. It returns False if the node does not belong to this worker any more, and raises while the
        database is unreachable.
    tick: called after each heartbeat that succeeded, with the time at which that heartbeat was begun.
    on_replaced: called after `beat` returned False; returns whether to continue.
    """

    def __init__(
        self,
        *,
        beat: Callable[[], bool],
        tick: Callable[[float], None],
        on_replaced: Callable[[], bool],
        every_s: float,
    ) -> None:
        self._beat, self._tick, self._on_replaced, self._every_s = beat, tick, on_replaced, every_s
        self._hurry, self._stopped = threading.Event(), threading.Event()
        self._is_away = False
        self._thread = threading.Thread(target=self._work, name="pulse", daemon=True)

    def start(self) -> None:
        """Starts to send heartbeats."""
        self._thread.start()

    def hurry(self) -> None:
        """Has the next heartbeat sent at once, because there is news."""
        self._hurry.set()

    def stop(self, *, within_s: float) -> None:
        """Ends the heartbeats; waits at most `within_s` for one that is being sent."""
        self._stopped.set()
        self._hurry.set()
        self._thread.join(within_s)

    def _work(self) -> None:
        while not self._stopped.is_set():
            try:
                wait_s = self._once()
            except DatabaseClosed:
                return
            if wait_s is None:
                return
            self._hurry.wait(wait_s)
            self._hurry.clear()

    def _once(self) -> float | None:
        """Sends one heartbeat; returns the seconds until the next attempt, None for the end."""
        asked_s = seconds_since_boot()
        try:
            is_mine = self._beat()
        except DBAPIError as error:
            if not self._is_away:
                logger.warning("the pool's database does not answer, trying again: %s", error.orig)
            self._is_away = True
            return min(AGAIN_S, self._every_s)
        self._is_away = False
        if is_mine:
            self._tick(asked_s)
            return self._every_s
        return 0.0 if self._on_replaced() else None
