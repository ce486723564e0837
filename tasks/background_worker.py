"""A background thread that repeats an action on request, so that callers never wait for an unavailable server."""

from __future__ import annotations

import atexit
import contextvars
import threading
from collections.abc import Callable

PATIENCE_S = 10.0  # how long `close` waits for a pending request


class Behind:
    """Calls `act` on a thread of its own after each request. Requests that arrive during a call share the next one.

    The thread runs in the context (`contextvars`) in which this object was made, such as that of a Prefect flow run. At
    the end of the process an `atexit` handler completes a pending request if `close` was not called.
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
        """Requests a call of `act` and returns at once."""
        with self._changed:
            self._is_asked = True
            self._changed.notify()

    def close(self, *, patience_s: float = PATIENCE_S) -> None:
        """Completes a pending request and ends the thread. Waits for at most `patience_s` seconds."""
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
