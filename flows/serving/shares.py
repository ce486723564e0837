"""Which waiting requests are computed together: fair shares of device time between clients, in the order of each.

Of the clients that wait, the one that has used the least device time is always served. Others join its computation
unless they have used more than twice as much since they wait together. So while two clients wait, none gets more than
twice the device time of the other, and slow clients delay others by one computation at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_RATIO = 2.0


@dataclass
class RequestStream(Generic[T]):
    """The waiting requests of a client, by their numbers.

    next_seq: the number of the next request; None where the order does not matter.
    refused: numbers whose messages were refused, so that nothing waits for them.
    """

    next_seq: int | None = None
    waiting: dict[int, T] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)

    def head(self) -> int | None:
        """Returns the number of the request whose turn it is; None where it has not come yet."""
        if not self.waiting:
            return None
        first = min(self.waiting)
        if self.next_seq is None or first <= self.next_seq:
            return first
        return first if all(seq in self.refused for seq in range(self.next_seq, first)) else None

    def take(self) -> T:
        """Removes the request whose turn it is."""
        seq = self.head()
        assert seq is not None, "nothing waits"
        if self.next_seq is not None:
            self.next_seq = max(self.next_seq, seq + 1)
        return self.waiting.pop(seq)


class FairShares:
    """The device time that clients have used while they waited together. Its unit does not matter."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def eligible(self, waiting: Mapping[str, T]) -> Iterator[str]:
        """Yields the clients that may be served now, the one with the least device time first.

        A client that did not wait before starts with the least time of those that did.
        """
        before = [used for client, used in self._since.items() if client in waiting]
        least = min(before, default=0.0)
        self._since = {client: self._since.get(client, least) for client in waiting}
        order = sorted(waiting, key=lambda client: self._since[client])
        base = min(self._since.values(), default=0.0)
        for client in order:
            if self._since[client] <= MAX_RATIO * base:
                yield client

    def add(self, client: str, used: float) -> None:
        """Adds device time that a client has used."""
        if client in self._since:
            self._since[client] += used


def within_budget(order: Iterator[str], *, cost: Callable[[str], int], budget: int) -> list[str]:
    """Returns the first clients whose costs are within a budget together, at least one."""
    result: list[str] = []
    total = 0
    for client in order:
        total += cost(client)
        if result and total > budget:
            break
        result.append(client)
    return result
