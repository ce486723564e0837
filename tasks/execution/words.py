"""Keeps what gangs on this machine tell of their steps where others can look: in the batch's own database."""

from __future__ import annotations

import time
from collections.abc import Callable

from tasks.execution.events import ExecutionEvent, GangSaid
from tasks.pool.database import Database
from tasks.pool.mail import Mail

EVERY_S = 2.0  # of each segment: a write costs milliseconds, and people look no closer
MOST_STEPS = 20  # whose seconds are kept


class Words:
    """Writes now and then how far each gang is, as a pool's nodes do with all that gangs say."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._mail, self._clock = Mail(database), clock
        self._said: dict[int, tuple[int, float]] = {}  # by segment: how many words, and when the last one was

    def listen(self, event: ExecutionEvent) -> None:
        """An executor's listener."""
        if not isinstance(event, GangSaid) or event.event["event"] != "steps":
            return
        num_words, said_s = self._said.get(event.number, (0, -EVERY_S))
        if self._clock() - said_s < EVERY_S:
            return
        seconds = list(event.event["seconds"])
        step, kept = event.event["first_step"] + len(seconds), seconds[-MOST_STEPS:]
        word = {"event": "steps", "first_step": step - len(kept), "seconds": kept}
        self._mail.say(event.number, "", words=[(num_words, word)])
        self._said[event.number] = num_words + 1, self._clock()
