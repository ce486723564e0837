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
    """Counts texts and their characters. doing: what is done with them, for people."""

    def __init__(self, doing: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._doing, self._clock = doing, clock
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
        size = self._num_characters / MEGABYTE
        rate = size / max(now_s - self._start_s, 1e-9)
        self._listener(f"{self._doing}: {self._num_texts:,} texts, {size:,.0f} MB, {rate:.1f} MB/s")
