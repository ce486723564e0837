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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from benchmarks.page import write_section
from benchmarks.planning.families import draw
from benchmarks.simulation.simulated_runs import simulate
from ringmaster.codec import from_json
from ringmaster.tasks.execution.execution_events import PredictedEnd, Prediction
from ringmaster.tasks.execution.forecast import EndScores, calibrated
from ringmaster.tasks.planning import Plan, Problem, solve
from ringmaster.tasks.planning.bounds.job_costs import only
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES, schedule
from ringmaster.tasks.profiling.speed_beliefs import SpeedErrors

SHARES = (0.0, 0.1, 0.25, 0.5)
ERRORS = SpeedErrors(machine=0.0, technique=0.0, job=0.25, option=0.1)
UNKNOWN = 0.08  # what no profile contains: the deviation of the factor of all that is left
FAILURES, DAY_S = 1.0, 86_400.0  # failures in a makespan, on all devices
MAX_LONGER = 0.05  # by which a plan may be longer that keeps what runs, as a search weighs switches, too


def rule_plan(problem: Problem) -> Plan:
    """Returns the shortest plan of some rules, or one in which all that runs continues under its option."""
    best = min((baseline(problem) for baseline in BASELINES), key=lambda plan: plan.makespan_s)
    running = {job.id: job.running.option for job in problem.jobs if job.running is not None}
    choices = {segment.job: running.get(segment.job, segment.option) for segment in best.segments}
    kept = replace(best, segments=schedule(problem, list(choices.items())))
    return kept if kept.makespan_s <= best.makespan_s * (1 + MAX_LONGER) else best


PLANNERS: dict[str, Callable[[Problem], Plan]] = {
    "rules": rule_plan,
    "search": lambda problem: solve(problem, work_s=0.3),
}


Pool = list[tuple[Prediction, dict[str, float]]]
"""The predictions on a pool as the draws give them, each with the actual ends of its jobs."""


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
    parser.add_argument("--save", type=Path, help="a file for what the pools show")
    parser.add_argument("--load", type=Path, nargs="*", default=[], help="such files, of parts of the pools")
    chosen = parser.parse_args()
    pools: dict[int, Pool] = {}
    for file in chosen.load:
        for seed, pool in json.loads(file.read_text()).items():
            pools[int(seed)] = [(from_json(Prediction, prediction), ends_s) for prediction, ends_s in pool]
    for seed in range(chosen.first, chosen.first + chosen.pools):
        if seed not in pools:
            pools[seed] = simulated(draw(chosen.family, seed=seed), seed=seed, planner=PLANNERS[chosen.planner])
        if chosen.save and seed % 10 == 9:  # what an interrupted run has found is kept
            rows = {each: [(prediction.to_json(), ends) for prediction, ends in pool] for each, pool in pools.items()}
            chosen.save.write_text(json.dumps(rows))
    ends = compared(dict(sorted(pools.items())))
    lines = [
        "| ends, predicted after | ends | by the latest | before the earliest | in the 90 % interval | off by | width "
        "of the interval | from the earliest to the latest |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(found.line(f"{of}, {share:.0%}") for (share, of), found in ends.items()),
    ]
    print("\n".join(lines))
    if chosen.table:
        about = f"{date.today().isoformat()}, {os.cpu_count()} cores, {len(pools)} pools of `{chosen.family}`."
        write_section("forecasts", [about, "", *lines])


def simulated(problem: Problem, *, seed: int, planner: Callable[[Problem], Plan]) -> Pool:
    """Returns what one pool shows."""
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
    )
    stretch = math.exp(numbers.gauss(0.0, UNKNOWN))
    return [
        (raw, {job: raw.made_s + (came.ended_s[job] - raw.made_s) * stretch for job in raw.jobs})
        for raw in came.predictions
    ]


def compared(pools: Mapping[int, Pool]) -> dict[tuple[float, str], PredictionErrors]:
    """Compares predictions, corrected by the pools before, with actual ends."""
    found = {(share, of): PredictionErrors() for share in SHARES for of in ("the last job", "jobs")}
    of_jobs, of_pools = EndScores(), EndScores()
    for seed, pool in pools.items():
        for share, (raw, ends_s) in zip(SHARES, pool, strict=False):
            shown = calibrated(raw, of_jobs=of_jobs, of_batches=of_pools)
            found[share, "the last job"].add(shown.end, max(ends_s.values()))
            for job, ended_s in ends_s.items():
                found[share, "jobs"].add(shown.jobs[job], ended_s)
        for raw, ends_s in pool:  # all ends of a pool are later than most of its predictions
            of_pools.note("", raw.end, raw, batch=str(seed))
            of_pools.close("", max(ends_s.values()))
            for job, ended_s in ends_s.items():
                of_jobs.note(job, raw.jobs[job], raw, batch=str(seed))
                of_jobs.close(job, ended_s)
    return found


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
