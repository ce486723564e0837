"""Jobs of which a gang trains only so many at a time: who is there at which of its steps.

The first ones begin. The others wait, and one joins whenever another is through, in their order. `at_once` says how
many are trained at a time, None for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

AT_ONCE = "at_once"
"""The key of a config that says how many."""


def first_steps(num_steps: Sequence[int], *, at_once: int | None) -> list[int]:
    """Before which step of the gang each job joins; num_steps: what each has left, in their order."""
    ends = [0] * (at_once or len(num_steps))  # of those on each seat
    return [heapreplace(ends, ends[0] + steps) for steps in num_steps]


def num_steps_of_gang(num_steps: Sequence[int], *, at_once: int | None) -> int:
    """The steps of the gang until all are through."""
    firsts = first_steps(num_steps, at_once=at_once)
    return max((first + steps for first, steps in zip(firsts, num_steps, strict=True)), default=0)


def steps_taken(num_steps: Sequence[int], *, at_once: int | None, after: int) -> list[int]:
    """How many of its steps each job has taken after so many of the gang's."""
    firsts = first_steps(num_steps, at_once=at_once)
    return [min(steps, max(0, after - first)) for first, steps in zip(firsts, num_steps, strict=True)]
