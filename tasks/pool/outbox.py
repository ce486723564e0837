"""What a node's gangs say, on its way into the pool's database: gathered, numbered, and kept while that is away."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from ringmaster.tasks.pool.database import DatabaseClosed
from ringmaster.tasks.pool.mail import OUTCOME, Mail

GATHER_S = 0.1


class Outbox:
    """Mails in a thread of its own; `say` never waits for the database. Safe between threads."""

    def __init__(self, mail: Mail, node: str) -> None:
        self._mail, self._node = mail, node
        self._changed = threading.Condition()
        self._left: dict[int, deque[tuple[int, Mapping[str, Any]]]] = {}  # by segment, what is not mailed yet
        self._said: dict[int, int] = {}  # by segment, how many words it has said
        self._is_urgent = self._closing = False
        self._thread = threading.Thread(target=self._work, name="outbox", daemon=True)
        self._thread.start()

    def say(self, segment: int, word: Mapping[str, Any]) -> None:
        """Passes on a word of a segment's share; an `OUTCOME` goes at once, others within a tenth of a second."""
        with self._changed:
            number = self._said.get(segment, 0)
            self._said[segment] = number + 1
            self._left.setdefault(segment, deque()).append((number, _storable(word)))
            self._is_urgent |= word["event"] == OUTCOME
            self._changed.notify_all()

    def flush(self, *, within_s: float) -> bool:
        """Waits until all is mailed, that long at most; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._left, timeout=within_s)

    def close(self) -> None:
        """Ends the thread; what is not mailed yet is lost. A write that waits for the database goes on by itself."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def is_alive(self) -> bool:
        """Whether words still get on, or wait for the database to come back."""
        return self._thread.is_alive()

    def _work(self) -> None:
        while self._wait_for_words():
            with self._changed:
                self._is_urgent = False
                batches = {segment: list(words) for segment, words in self._left.items()}
            for segment, words in batches.items():
                try:
                    self._mail.say(segment, self._node, words=words)
                except DatabaseClosed:
                    return
                self._forget(segment, len(words))

    def _wait_for_words(self) -> bool:
        """Until there is something to mail; False where this is the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or self._closing)
            self._changed.wait_for(lambda: self._is_urgent or self._closing, timeout=GATHER_S)
            return not self._closing

    def _forget(self, segment: int, num_words: int) -> None:
        with self._changed:
            words = self._left[segment]
            for _ in range(num_words):
                words.popleft()
            if not words:
                del self._left[segment]
            self._changed.notify_all()


def _storable(word: Any) -> Any:
    """Without numbers that JSON does not know, which PostgreSQL refuses: a metric that is no number is left out."""
    if isinstance(word, Mapping):
        return {key: _storable(value) for key, value in word.items() if not _is_no_number(value)}
    if isinstance(word, (list, tuple)):
        return [None if _is_no_number(value) else _storable(value) for value in word]
    return word


def _is_no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
