"""Variants of a job near known good values, for a retraining run to try beside the champion's own values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ringmaster.tasks.sweeping.sampling import RANDOM, Tried, propose
from ringmaster.tasks.sweeping.space import Range, Values, with_values
from ringmaster.techniques import Job
from ringmaster.techniques.interface.values import from_json, to_json


def around(
    job: Job, *, keys: Sequence[str] = ("optimizer.lr",), factor: float = 3.0, num_jobs: int = 4, seed: int = 0
) -> list[Job]:
    """Returns the job and variants near it, `num_jobs` in all, named NAME, NAME-1, NAME-2, ...

    keys: dotted keys of numbers in the job. Each is drawn between its value divided by `factor` and its value times
    `factor`, with equal probability above and below; integers stay integers. The same seed draws the same jobs. Raises
    ValueError if a key names no positive number, or if the factor is not above 1.
    """
    if not factor > 1:
        raise ValueError(f"a factor of {factor:g} leaves no range around a value. To fix: give one above 1, such as 3")
    raw = to_json(job)
    space = [_range(raw, key, factor=factor) for key in keys]
    drawn: list[Values] = [{each.key: _at(raw, each.key) for each in space}]
    while len(drawn) < num_jobs:
        earlier = [Tried(values=values) for values in drawn]
        drawn.append(propose(space, sampler=RANDOM, number=len(drawn), earlier=earlier, seed=seed, num_trials=num_jobs))
    others = [from_json(Job, with_values(raw, values)) for values in drawn[1:]]
    return [job, *(replace(other, name=f"{job.name}-{i}") for i, other in enumerate(others, start=1))]


def _range(raw: dict[str, Any], key: str, *, factor: float) -> Range:
    value = _at(raw, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{key} is {value!r}, and only a positive number has values around it. To fix: leave it out")
    is_integer = isinstance(value, int)
    low, high = value / factor, value * factor
    if is_integer:
        low, high = max(1, round(low)), max(2, round(high))
    return Range(key=key, low=low, high=high, is_log=True, is_integer=is_integer)


def _at(raw: dict[str, Any], key: str) -> Any:
    value: Any = raw
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
