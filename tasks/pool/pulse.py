"""A worker's sign of life: a beat in the pool's database, and after each that went through a tick of the fork server.

The fork server ends its ranks when no tick has come for long. So a node that nobody hears any more has none by the time
its jobs are given to others. Why a beat did not go through makes no difference: a refused connection looks alike where
the database is down for all and where a firewall or a tunnel keeps this node alone from it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sqlalchemy.exc import DBAPIError

from ringmaster.tasks.pool.database import DatabaseClosed
from ringmaster.techniques.engine.fence import seconds_since_boot

logger = logging.getLogger(__name__)

AGAIN_S = 1.0  # between tries of a beat that did not go through


class Pulse:
    """Beats in a thread of its own until it is stopped, or `beat` says that the node is another's.

    beat: one try; returns False where the node is not this worker's any more, and raises where the database is away.
    tick: what follows a beat that went through, called with the moment at which the beat was begun. on_replaced: what
    follows one that says False; returns whether to go on.
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
        """Begins to beat."""
        self._thread.start()

    def hurry(self) -> None:
        """Has the next beat come at once: there is news."""
        self._hurry.set()

    def stop(self, *, within_s: float) -> None:
        """Ends it; a beat that is under way is waited for that long."""
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
        """Seconds until the next try, None for the end."""
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
