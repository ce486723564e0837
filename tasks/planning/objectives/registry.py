"""Registry of objectives: the built-in ones, and others from entry points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from ringmaster.tasks.planning.objectives.cost import Cost
from ringmaster.tasks.planning.objectives.fairness import Fairness
from ringmaster.tasks.planning.objectives.makespan import MAKESPAN
from ringmaster.tasks.planning.objectives.mean_completion import MeanCompletion
from ringmaster.tasks.planning.objectives.objective import Objective
from ringmaster.tasks.planning.objectives.weighted_completion import WeightedCompletion

ENTRY_POINT_GROUP = "ringmaster.objectives"
BUILTIN: Mapping[str, Objective] = {
    each.name: each for each in (MAKESPAN, WeightedCompletion(), MeanCompletion(), Fairness(), Cost())
}


def names() -> tuple[str, ...]:
    """Returns the names of all objectives, built-in ones first."""
    return tuple(dict.fromkeys([*BUILTIN, *_installed()]))


@cache
def objective(name: str) -> Objective:
    """Returns the objective `name`. Built-in objectives cannot be replaced.

    Raises ValueError on an unknown name, with the known ones, and where an entry point leads to no such objective.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    if name not in _installed():
        *others, last = names()
        raise ValueError(f"objective is {', '.join(others)} or {last}, not {name!r}")
    entry = _installed()[name]
    found = entry.load()
    if not (isinstance(found, type) and issubclass(found, Objective) and found.name == name):
        raise ValueError(
            f"entry point {name!r} of {ENTRY_POINT_GROUP}: {entry.value} is no objective of that name. "
            f'To fix: let it name a subclass of Objective with `name = "{name}"`'
        )
    return found()


@cache
def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
