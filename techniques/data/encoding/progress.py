"""Progress of a long preparation, reported every few seconds to whoever listens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

INTERVAL_S = 5.0
MEGABYTE = 1_000_000

Listener = Callable[[str], object]

_listener: ContextVar[Listener] = ContextVar("_listener", default=logging.getLogger(__name__).info)


@contextmanager
def progress_to(listener: Listener) -> Iterator[None]:
    """Sends lines of progress to `listener` inside the context; outside of one, they go to the log."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Progress:
    """Counts texts and their characters. doing, what: what is done, and with what, for people."""

    def __init__(self, doing: str, *, what: str = "texts", clock: Callable[[], float] = time.monotonic) -> None:
        self._doing, self._what, self._clock = doing, what, clock
        self._num_texts = self._num_characters = 0
        self._start_s = self._last_s = clock()
        self._listener = _listener.get()  # now: a tokenizer is trained in another thread, which has no context

    def add(self, num_characters: int, *, ends: bool) -> None:
        """Adds a piece of a text, and reports if the last report is long ago. ends: whether the text ends with it."""
        self._num_texts += ends
        self._num_characters += num_characters
        now_s = self._clock()
        if now_s - self._last_s < INTERVAL_S:
            return
        self._last_s = now_s
        said = f"{self._doing}: {self._num_texts:,} {self._what}"
        if self._num_characters:  # images have none
            size = self._num_characters / MEGABYTE
            said += f", {size:,.0f} MB, {size / max(now_s - self._start_s, 1e-9):.1f} MB/s"
        self._listener(said)
