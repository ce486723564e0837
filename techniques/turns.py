"""Order in which a gang trains a group of jobs, where only some of them are trained at a time.

The first jobs of the group start. The others wait in their order; one joins whenever another ends. `at_once` is the
number of jobs trained at a time, None for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

AT_ONCE = "at_once"
"""The config key with the number of jobs trained at a time."""


def first_steps(num_steps: Sequence[int], *, at_once: int | None) -> list[int]:
    """Returns the step of the gang before which each job joins; `num_steps` are the jobs' remaining steps, in order."""
    ends = [0] * (at_once or len(num_steps))  # the last step of the newest job at each position
    return [heapreplace(ends, ends[0] + steps) for steps in num_steps]


def num_steps_of_gang(num_steps: Sequence[int], *, at_once: int | None) -> int:
    """Returns the number of the gang's steps until all jobs have ended."""
    firsts = first_steps(num_steps, at_once=at_once)
    return max((first + steps for first, steps in zip(firsts, num_steps, strict=True)), default=0)


def steps_taken(num_steps: Sequence[int], *, at_once: int | None, after: int) -> list[int]:
    """Returns how many of its steps each job has taken after `after` steps of the gang."""
    firsts = first_steps(num_steps, at_once=at_once)
    return [min(steps, max(0, after - first)) for first, steps in zip(firsts, num_steps, strict=True)]
