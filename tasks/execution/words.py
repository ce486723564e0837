"""Keeps what gangs on this machine tell of their steps where others can look: in the batch's own database."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ringmaster.tasks.execution.events import ExecutionEvent, GangSaid
from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.pool.mail import Mail

EVERY_S = 2.0  # of each segment: a write costs milliseconds, and people look no closer
MOST_STEPS = 20  # whose seconds are kept


class Words:
    """Writes now and then how far each gang is, as a pool's nodes do with all that gangs say."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._mail, self._clock = Mail(database), clock
        self._said: dict[int, tuple[int, float]] = {}  # by segment: how many words, and when the last one was
        self._untold: dict[int, dict[str, Mapping[str, Any]]] = {}  # by segment: the newest word of each of its jobs

    def listen(self, event: ExecutionEvent) -> None:
        """An executor's listener."""
        if not isinstance(event, GangSaid) or event.event["event"] != "steps":
            return
        seconds = list(event.event["seconds"])
        step, kept = event.event["first_step"] + len(seconds), seconds[-MOST_STEPS:]
        named = {"job": event.event["job"]} if "job" in event.event else {}  # a gang may train several
        word = {"event": "steps", "first_step": step - len(kept), "seconds": kept, **named}
        self._untold.setdefault(event.number, {})[event.job] = word
        num_words, said_s = self._said.get(event.number, (0, -EVERY_S))
        if self._clock() - said_s < EVERY_S:
            return
        words = self._untold.pop(event.number).values()
        self._mail.say(event.number, "", words=list(enumerate(words, num_words)))
        self._said[event.number] = num_words + len(words), self._clock()
