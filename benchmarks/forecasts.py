"""Predicted ends on simulated pools: how many latest ends hold, whether a job ends before its earliest, and widths.

usage: python -m benchmarks.forecasts [--pools N] [--family NAME] [--planner rules | search] [--table] [--first N]
           [--save FILE] [--load FILE ...]

On each pool half of the jobs arrive later, unknown before; true runtimes are the predicted ones times factors of each
job (25 %) and option (10 %); devices fail about once in a run and are back after ten minutes; and what no profile
contains stretches all that is left by a factor (8 %). Latest ends learn from the pools before (`EndScores`). Ends are
predicted at the start and after 10, 25 and 50 % of the first plan's makespan. `--table` writes the table between the
markers in docs/benchmarks.md.
"""

import argparse
import json
import math
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from benchmarks.planning.families import draw
from benchmarks.simulation.simulated_runs import simulate
from ringmaster.tasks.execution.events import PredictedEnd
from ringmaster.tasks.execution.forecast import EndScores
from ringmaster.tasks.planning import Plan, Problem, solve
from ringmaster.tasks.planning.bounds.job_costs import only
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES
from ringmaster.tasks.profiling.speed_beliefs import SpeedErrors

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- forecasts -->", "<!-- /forecasts -->"
SHARES = (0.0, 0.1, 0.25, 0.5)
ERRORS = SpeedErrors(machine=0.0, technique=0.0, job=0.25, option=0.1)
UNKNOWN = 0.08  # what no profile contains: the deviation of the factor of all that is left
FAILURES, DAY_S = 1.0, 86_400.0  # failures in a makespan, on all devices
PLANNERS: dict[str, Callable[[Problem], Plan]] = {
    "rules": lambda problem: min((baseline(problem) for baseline in BASELINES), key=lambda plan: plan.makespan_s),
    "search": lambda problem: solve(problem, work_s=0.3),
}


@dataclass
class PredictionErrors:
    """Ends of one kind, of the pool or of its jobs, predicted at one time."""

    is_met: list[bool] = field(default_factory=list)
    num_early: int = 0
    inside: list[bool] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)
    certified_widths: list[float] = field(default_factory=list)

    def add(self, predicted: PredictedEnd, actual_s: float) -> None:
        earliest_s, latest_s = predicted.bounds_s
        self.is_met.append(actual_s <= latest_s)
        self.num_early += actual_s < earliest_s
        self.inside.append(predicted.low_s <= actual_s <= predicted.high_s)
        self.errors.append(abs(predicted.end_s / actual_s - 1))
        self.widths.append((predicted.high_s - predicted.low_s) / predicted.end_s)
        self.certified_widths.append((latest_s - earliest_s) / predicted.end_s)

    def join(self, other: dict) -> None:
        """Adds what another process has found."""
        self.num_early += other.pop("num_early")
        for name, values in other.items():
            getattr(self, name).extend(values)

    def line(self, name: str) -> str:
        shares = (statistics.mean(self.is_met), statistics.mean(self.inside))
        medians = map(statistics.median, (self.errors, self.widths, self.certified_widths))
        cells = [name, str(len(self.is_met)), f"{shares[0]:.1%}", str(self.num_early), f"{shares[1]:.1%}"]
        return "| " + " | ".join([*cells, *(f"{median:.0%}" for median in medians)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, default=200)
    parser.add_argument("--family", default="scale-20x16")
    parser.add_argument("--planner", choices=PLANNERS, default="rules")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first pool")
    parser.add_argument("--save", type=Path, help="a file for what is found, of a part of the pools")
    parser.add_argument("--load", type=Path, nargs="*", default=[], help="files of the other parts")
    chosen = parser.parse_args()
    seeds, scores = range(chosen.first, chosen.first + chosen.pools), (EndScores(), EndScores())
    ends = {(share, of): PredictionErrors() for share in SHARES for of in ("the last job", "jobs")}
    for seed in seeds:
        measure(draw(chosen.family, seed=seed), seed=seed, planner=PLANNERS[chosen.planner], ends=ends, scores=scores)
        if chosen.save:  # what an interrupted run has found is kept
            chosen.save.write_text(json.dumps([vars(found) for found in ends.values()]))
    for file in chosen.load:
        for found, more in zip(ends.values(), json.loads(file.read_text()), strict=True):
            found.join(more)
    lines = [
        "| ends, predicted after | ends | by the latest | before the earliest | in the 90 % interval | off by | width "
        "of the interval | from the earliest to the latest |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(found.line(f"{of}, {share:.0%}") for (share, of), found in ends.items()),
    ]
    print("\n".join(lines))
    if chosen.table:
        num_pools = len(ends[SHARES[0], "the last job"].is_met)
        about = f"{date.today().isoformat()}, {os.cpu_count()} cores, {num_pools} pools of `{chosen.family}`."
        before, rest = PAGE.read_text().split(BEGIN, 1)
        PAGE.write_text("\n".join([before + BEGIN, about, "", *lines, END]) + rest.split(END, 1)[1])


def measure(
    problem: Problem,
    *,
    seed: int,
    planner: Callable[[Problem], Plan],
    ends: dict[tuple[float, str], PredictionErrors],
    scores: tuple[EndScores, EndScores],
) -> None:
    """Adds the ends of one simulated pool."""
    numbers = random.Random(seed)
    makespan_s = planner(problem).makespan_s
    jobs = [
        replace(job, release_s=numbers.uniform(0.0, makespan_s / 2)) if i % 2 else job
        for i, job in enumerate(problem.jobs)
    ]
    problem = replace(problem, jobs=tuple(jobs))
    first = planner(only(problem, [job.id for job in jobs if not job.release_s]))
    came = simulate(
        problem,
        first,
        seed=seed,
        replan="clock",
        factors=true_factors(problem, numbers),
        errors=ERRORS,
        make_plan=planner,
        failures_per_day=FAILURES * DAY_S / makespan_s / problem.num_devices,
        predict_at_s=[share * makespan_s for share in SHARES],
        arrivals=True,
        z_latest=(scores[0].z_latest, scores[1].z_latest),
    )
    stretch = math.exp(numbers.gauss(0.0, UNKNOWN))
    for share, prediction in zip(SHARES, came.predictions, strict=False):
        made_s = prediction.made_s
        last_s = max(came.ended_s[job] for job in prediction.jobs)
        rows = [("the last job", prediction.end, last_s, scores[1])]
        rows += [("jobs", end, came.ended_s[job], scores[0]) for job, end in prediction.jobs.items()]
        for name, end, ended_s, known in rows:
            actual_s = made_s + (ended_s - made_s) * stretch
            ends[share, name].add(end, actual_s)
            known.note(name, end, made_s=made_s)
            known.close(name, actual_s)


def true_factors(problem: Problem, numbers: random.Random) -> dict[tuple[str, int], float]:
    """Returns the true over the predicted runtime of each option of each job."""
    found = {}
    for job in problem.jobs:
        of_job = numbers.gauss(0, ERRORS.job)
        for number in range(len(job.options)):
            found[job.id, number] = math.exp(of_job + numbers.gauss(0, ERRORS.option))
    return found


if __name__ == "__main__":
    main()
