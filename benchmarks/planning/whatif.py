"""What-if measured: seconds, widths of the certain intervals, and whether the gain of re-planning is inside.

`python -m benchmarks.planning --only whatif`: draws of several kinds of problems, a change each: a device more, a node
more, or a job less.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from benchmarks.planning.problems import Maker, drawn, ruled
from ringmaster.features.what_if.answers import section
from ringmaster.features.what_if.gains import FewerJobs, MoreDevices, MoreNodes, WhatIf, dependents
from ringmaster.tasks.planning import Problem, solve, verify
from ringmaster.tasks.planning.problem_changes import ProblemChange

WORK_S = 1.0  # of each plan: small, so that a hundred draws take minutes
TOLERANCE = 1e-6  # share of the makespan


@dataclass(frozen=True)
class Kind:
    """A kind of problems, and how many of them are drawn."""

    name: str
    make: Maker
    draws: int


KINDS = (
    Kind("tiny 6 x 4", drawn("tiny"), 20),
    Kind("paper-txt 12 x 8", drawn("paper-txt"), 20),
    Kind("paper-img 12 x 16", drawn("paper-img"), 8),
    Kind("gavel 24 x 8", drawn("gavel-24x8"), 16),
    Kind("scale 30 x 32", drawn("scale-30x32"), 12),
    Kind("types 30 x 32", drawn("types-30x32"), 6),
    Kind("nodes of 2, 2, 4, 8", drawn("paper-txt-12xhet"), 8),
    Kind("adapters 32 x 4", drawn("adapters-32x4"), 2),
    Kind("scale 100 x 128", drawn("scale-100x128"), 4),
    Kind("all rules, 12 x 16", ruled("paper-img"), 4),
)


@dataclass
class Measured:
    """Measurements of one kind: seconds, and widths as shares of the makespan."""

    by_prices_s: list[float] = field(default_factory=list)
    interval_s: list[float] = field(default_factory=list)
    section_s: list[float] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)
    widths_anew: list[float] = field(default_factory=list)
    is_inside: list[bool] = field(default_factory=list)


def main() -> None:
    """Prints a table with a row for each kind of problems, and one for all of them."""
    print("| problems | drawn | by prices, s | interval, s | report, s | width | after planning anew | inside |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    every = Measured()
    for kind in KINDS:
        found = Measured()
        for seed in range(kind.draws):
            _measure(kind.make(seed, 60.0), seed, found)
        print(_row(kind.name, found), flush=True)
        for name, values in vars(found).items():
            getattr(every, name).extend(values)
    print(_row("all", every))


def _measure(problem: Problem, seed: int, found: Measured) -> None:
    plan = solve(problem, work_s=WORK_S, seed=seed)
    what_if = WhatIf(problem, plan)
    possible = list(_changes(problem, Random(f"whatif/{problem.name}")))
    change = possible[seed % len(possible)]
    began_s = time.perf_counter()
    first = what_if.gain(change)
    found.interval_s.append(time.perf_counter() - began_s)
    after = change.on(problem, node=first.on)
    began_s = time.perf_counter()
    what_if.bound_by_prices_s(after)
    found.by_prices_s.append(time.perf_counter() - began_s)
    began_s = time.perf_counter()
    section(plan, problem)
    found.section_s.append(time.perf_counter() - began_s)
    anew = what_if.planned(first, work_s=WORK_S, seed=seed + 1)
    independent = solve(after, work_s=WORK_S, seed=seed + 2)
    if faults := verify(independent, after):
        raise SystemExit(f"{problem.name}: {faults[:3]}")
    makespan_s = what_if.makespan_s
    least, most = first.least_s - TOLERANCE * makespan_s, first.most_s + TOLERANCE * makespan_s
    # A plan that the interval knows nothing of gains no more than it allows either.
    is_inside = least <= anew.planned_s <= most and makespan_s - independent.makespan_s <= most
    found.is_inside.append(is_inside)
    found.widths.append((first.most_s - first.least_s) / makespan_s)
    found.widths_anew.append((anew.most_s - anew.least_s) / makespan_s)


def _changes(problem: Problem, random: Random) -> Iterator[ProblemChange]:
    kind = random.choice(problem.device_types)
    yield MoreDevices(num_devices=random.choice((1, 2)), device_type=kind)
    yield MoreNodes(num_devices=random.choice((2, 4, 8)), device_type=kind)
    job = random.choice(problem.jobs).id
    yield FewerJobs(jobs=(job, *dependents(problem, (job,))))


def _row(name: str, found: Measured) -> str:
    seconds = (statistics.median(values) for values in (found.by_prices_s, found.interval_s, found.section_s))
    widths = (statistics.median(values) for values in (found.widths, found.widths_anew))
    return (
        f"| {name} | {len(found.is_inside)} | {' | '.join(f'{value:.3f}' for value in seconds)} | "
        f"{' | '.join(f'{value:.1%}' for value in widths)} | {sum(found.is_inside)} |"
    )
