"""The outbox of a node: queues and numbers the events of its gangs until they are in the pool's database."""

from __future__ import annotations

import threading
from collections import deque

from ringmaster.tasks.storage.database import DatabaseClosed
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.techniques.processes.events import Event, ShareEnded

GATHER_S = 0.1


class Outbox:
    """Sends events from a thread of its own, so that `say` never waits for the database. Safe between threads."""

    def __init__(self, message_store: MessageStore, node: str) -> None:
        self._message_store, self._node = message_store, node
        self._changed = threading.Condition()
        self._left: dict[int, deque[tuple[int, Event]]] = {}  # by segment, the events that are not sent yet
        self._said: dict[int, int] = {}  # by segment, how many events it has reported
        self._is_urgent = self._closing = False
        self._thread = threading.Thread(target=self._work, name="outbox", daemon=True)
        self._thread.start()

    def put(self, segment: int, event: Event) -> None:
        """Queues an event of a segment's share; a `ShareEnded` is sent at once, others within a tenth of a second."""
        with self._changed:
            number = self._said.get(segment, 0)
            self._said[segment] = number + 1
            self._left.setdefault(segment, deque()).append((number, event))
            self._is_urgent |= isinstance(event, ShareEnded)
            self._changed.notify_all()

    def flush(self, *, within_s: float) -> bool:
        """Waits at most `within_s` until all events are sent; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._left, timeout=within_s)

    def close(self) -> None:
        """Ends the thread; unsent events are lost, except those of a write that already waits for the database."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def is_alive(self) -> bool:
        """Returns whether events are still sent, at once or when the database is back."""
        return self._thread.is_alive()

    def _work(self) -> None:
        while self._wait_for_words():
            with self._changed:
                self._is_urgent = False
                batches = {segment: list(events) for segment, events in self._left.items()}
            for segment, events in batches.items():
                try:
                    self._message_store.store(segment, self._node, events=events)
                except DatabaseClosed:
                    return
                self._forget(segment, len(events))

    def _wait_for_words(self) -> bool:
        """Waits until there are events to send; returns False after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or self._closing)
            self._changed.wait_for(lambda: self._is_urgent or self._closing, timeout=GATHER_S)
            return not self._closing

    def _forget(self, segment: int, num_words: int) -> None:
        with self._changed:
            events = self._left[segment]
            for _ in range(num_words):
                events.popleft()
            if not events:
                del self._left[segment]
            self._changed.notify_all()
