"""Series of a node over time: prices, prices of energy and carbon intensities, constant between their steps.

A series is a list of [start in seconds, value]. The first step starts at 0, and the last one lasts for ever. Budgets
and factors of money, emissions and the end are validated here too, as they read these series.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ringmaster.tasks.planning.problems.problem_parts import (
    MAX_AMOUNT,
    MIN_FACTOR,
    Option,
    PlanningJob,
    PlanningNode,
    Steps,
    is_amount,
    shown,
)

J_PER_KWH = 3.6e6
MAX_STEPS = 10_000  # of one series: a year of hours

SERIES = {"prices": "price_steps", "energy_prices": "energy_price_steps", "carbon": "carbon_steps"}
"""JSON key of a node's series -> attribute."""
MEASURES = ("cost", "emissions")
"""What budgets limit: money, and grams of CO2 equivalents."""
FACTORS = ("end", *MEASURES)
"""What the objective `trade-off` adds up."""


def value_at(steps: Steps, at_s: float) -> float:
    """Returns the value of a series at a time; 0 where there is no series."""
    return next((value for start_s, value in reversed(steps) if start_s <= at_s), 0.0)


def integral(steps: Steps, start_s: float, end_s: float) -> float:
    """Returns the integral of a series between two times, in its unit times seconds."""
    ends_s = [*(start for start, _ in steps[1:]), math.inf]
    parts = (
        value * (min(end_s, until_s) - max(start_s, from_s))
        for (from_s, value), until_s in zip(steps, ends_s, strict=False)
        if until_s > start_s and from_s < end_s
    )
    return math.fsum(parts)


def steps_from(steps: Steps, elapsed_s: float) -> Steps:
    """Returns a series whose time 0 is `elapsed_s` seconds later."""
    if not steps:
        return ()
    later = ((start_s - elapsed_s, value) for start_s, value in steps if start_s > elapsed_s)
    return ((0.0, value_at(steps, elapsed_s)), *later)


def as_steps(data: Any) -> Any:
    """Returns a series of a JSON file as tuples; what is no list of lists stays as it is, for its fault."""
    if not isinstance(data, (list, tuple)):
        return data
    return tuple(tuple(step) if isinstance(step, (list, tuple)) else step for step in data)


def step_faults(place: str, steps: Any) -> Iterator[str]:
    """Yields what is wrong with a series, a message for each of its steps.

    place: where the series is, such as "node n0: prices".
    """
    if not isinstance(steps, tuple):
        yield f"{place}: must be a list of [start in seconds, value], not {shown(steps)}"
        return
    if len(steps) > MAX_STEPS:
        yield f"{place}: has {len(steps)} steps; give at most {MAX_STEPS}"
        return
    starts: list[tuple[int, float]] = []
    for i, step in enumerate(steps):
        if not (isinstance(step, tuple) and len(step) == 2):
            yield f"{place}, step {i}: must be [start in seconds, value], not {shown(step)}"
            continue
        start_s, value = step
        if not is_amount(start_s):
            yield f"{place}, step {i}: start must be a number of seconds >= 0, not {shown(start_s)}"
        else:
            starts.append((i, start_s))
        if not is_amount(value):
            yield f"{place}, step {i}: value must be a number >= 0 (and at most {MAX_AMOUNT:g}), not {shown(value)}"
        elif 0 < value < MIN_FACTOR:
            yield f"{place}, step {i}: value must be 0 or at least {MIN_FACTOR:g}, not {shown(value)}"
    if starts and starts[0] != (0, 0) and starts[0][0] == 0:
        yield f"{place}, step 0: starts at {shown(starts[0][1])}; the first step must start at 0"
    for (_, before_s), (i, start_s) in pairwise(starts):
        if start_s <= before_s:
            yield f"{place}, step {i}: starts at {shown(start_s)}, not after {shown(before_s)}, the one before"


def series_faults(
    nodes: Sequence[PlanningNode], jobs: Sequence[PlanningJob], *, budgets: Any, factors: Any
) -> Iterator[str]:
    """Yields a message for everything that is wrong with the series, powers, budgets and factors of a problem."""
    for i, node in enumerate(nodes):
        place = f"node {node.id if isinstance(node.id, str) else i}"
        for key, attribute in SERIES.items():
            yield from step_faults(f"{place}: {key}", getattr(node, attribute))
        if node.price_steps and node.price:
            yield f"{place}: has both price and prices; remove one of them"
        if (node.carbon_steps or node.energy_price_steps) and node.power_w == 0:
            yield from _power_faults(place, node, jobs)
    yield from _amount_faults("budgets", budgets, MEASURES)
    yield from _amount_faults("factors", factors, FACTORS)
    if isinstance(factors, Mapping) and factors and not any(factors.values()):
        yield "problem: factors are all 0; give one that is larger"


def _power_faults(place: str, node: PlanningNode, jobs: Sequence[PlanningJob]) -> Iterator[str]:
    """Yields a fault for each job with an option without power that may run on a node that needs one."""
    for job in jobs:
        for k, option in enumerate(job.options):
            if option.power_w is None and _may_run(option, node):
                key = "carbon" if node.carbon_steps else "energy_prices"
                yield f"{place}: has {key}, but neither it nor option {k} of job {shown(job.id)} gives its power"
                break


def _may_run(option: Option, node: PlanningNode) -> bool:
    return option.device_type in ("", node.device_type)


def _amount_faults(name: str, amounts: Any, keys: tuple[str, ...]) -> Iterator[str]:
    if not isinstance(amounts, Mapping):
        yield f"problem: {name} must be an object with any of {', '.join(keys)}, not {shown(amounts)}"
        return
    for key, amount in amounts.items():
        if key not in keys:
            yield f"problem: {name} has the unknown key {shown(key)}; there are {', '.join(keys)}"
        elif not is_amount(amount) or 0 < amount < MIN_FACTOR:
            limits = f"{MIN_FACTOR:g} to {MAX_AMOUNT:g}"
            yield f"problem: {name}: {key} must be 0 or a number from {limits}, not {shown(amount)}"
