"""Which waiting requests are computed together: fair shares of device time between clients, in the order of each.

Of the clients that wait, the one that has used the least device time is always served. Others join its computation
unless they have used more than twice as much since they wait together. So while two clients wait, none gets more than
twice the device time of the other, and slow clients delay others by one computation at most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
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

    def ready(self) -> list[int]:
        """Returns the numbers of the requests whose turn it is: one at most, or all where the order does not matter."""
        if self.next_seq is None or not self.waiting:
            return sorted(self.waiting)
        first = min(self.waiting)
        is_next = all(seq in self.refused for seq in range(self.next_seq, first))
        return [first] if is_next else []


class FairShares:
    """The device time that clients have used while they waited together. Its unit does not matter."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def eligible(self, waiting: Collection[str]) -> Iterator[str]:
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


def within_budget(order: Iterable[T], *, cost: Callable[[T], int], budget: int) -> list[T]:
    """Returns the first requests whose costs are within a budget together, at least one."""
    result: list[T] = []
    total = 0
    for each in order:
        total += cost(each)
        if result and total > budget:
            break
        result.append(each)
    return result
