"""Has something done in a thread of its own, over and over: nobody waits for a server that is away."""

from __future__ import annotations

import atexit
import contextvars
import threading
from collections.abc import Callable

PATIENCE_S = 10.0  # at the end, for what was asked last


class Behind:
    """Calls `act` whenever it was asked for: once, however often that was, while it is still at it.

    The thread has the context in which this was made, such as Prefect's of a flow run. What was asked for is still done
    where the process ends without a `close`.
    """

    def __init__(self, act: Callable[[], None], *, name: str) -> None:
        self._act = act
        self._changed = threading.Condition()
        self._is_asked = self._is_closing = False
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._work), name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def ask(self) -> None:
        """Has it done soon."""
        with self._changed:
            self._is_asked = True
            self._changed.notify()

    def close(self, *, patience_s: float = PATIENCE_S) -> None:
        """Does what was asked for and ends; does not wait any longer than that for it."""
        atexit.unregister(self.close)
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout=patience_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_asked or self._is_closing)
                if not self._is_asked:
                    return
                self._is_asked = False
            self._act()
