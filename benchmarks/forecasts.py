"""Predicted ends of simulated batches: how many ends lie in their 90 % interval, and how far predictions are off.

usage: python -m benchmarks.forecasts [--draws N] [--sizes FACTOR ...] [--family NAME]

True runtimes are the predicted ones times factors of the machine, the technique, the job and the option, whose errors
are those that are believed in times FACTOR. What no profile contains stretches all that is left by a factor, too. Ends
are predicted at the start and after 10 % and 50 % of the planned makespan.
"""

import argparse
import math
import random
import statistics
from dataclasses import dataclass, field

from benchmarks.planning.families import draw
from benchmarks.simulation.simulated_runs import simulate
from ringmaster.tasks.execution.events import PredictedEnd
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES
from ringmaster.tasks.profiling.speed_beliefs import OF_MEASUREMENTS, OF_PREDICTIONS, SpeedErrors

SHARES = (0.0, 0.1, 0.5)
UNKNOWN = 0.08  # what no profile contains: the deviation of the factor of all that is left


@dataclass
class IntervalCoverage:
    """Ends of one kind, of the batch or of jobs, at one time: which lie in their interval, and errors."""

    inside: list[bool] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    half_widths: list[float] = field(default_factory=list)

    def add(self, predicted: PredictedEnd, actual_s: float, *, made_s: float) -> None:
        self.inside.append(predicted.low_s <= actual_s <= predicted.high_s)
        self.errors.append(abs(predicted.end_s / actual_s - 1))
        self.half_widths.append((predicted.high_s - predicted.low_s) / 2 / predicted.end_s)

    def line(self, name: str) -> str:
        return (
            f"| {name} | {len(self.inside)} | {statistics.mean(self.inside):.0%} | "
            f"{statistics.median(self.errors):.1%} | {statistics.median(self.half_widths):.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--sizes", nargs="*", type=float, default=[0.5, 1.0, 1.5])
    parser.add_argument("--family", default="scale-10x8")
    chosen = parser.parse_args()
    print("| errors, ends | ends | in their interval | median error | median half-width |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, errors in (("predicted", OF_PREDICTIONS), ("measured", OF_MEASUREMENTS)):
        for size in chosen.sizes:
            ends = {(share, of): IntervalCoverage() for share in SHARES for of in ("batch", "jobs")}
            for seed in range(chosen.draws):
                measure(draw(chosen.family, seed=seed), errors, size, seed=seed, ends=ends)
            for (share, of), found in ends.items():
                print(found.line(f"{name}, {size:g} times, {of} at {share:.0%}"), flush=True)


def measure(
    problem: Problem, errors: SpeedErrors, size: float, *, seed: int, ends: dict[tuple[float, str], IntervalCoverage]
) -> None:
    """Adds the ends of one simulated batch."""
    numbers = random.Random(seed)
    plan = by_rules(problem)
    came = simulate(
        problem,
        plan,
        seed=seed,
        replan="clock",
        factors=true_factors(problem, errors, size, numbers),
        errors=errors,
        make_plan=by_rules,
        predict_at_s=[share * plan.makespan_s for share in SHARES],
    )
    stretch = math.exp(numbers.gauss(0.0, size * UNKNOWN))
    for share, prediction in zip(SHARES, came.predictions, strict=False):
        made_s = prediction.made_s
        ends[share, "batch"].add(prediction.end, made_s + (came.makespan_s - made_s) * stretch, made_s=made_s)
        for job, end in prediction.jobs.items():
            ends[share, "jobs"].add(end, made_s + (came.ended_s[job] - made_s) * stretch, made_s=made_s)


def by_rules(problem: Problem) -> Plan:
    """Returns the best plan of simple rules, in milliseconds: forecasts do not depend on how good a plan is."""
    return min((baseline(problem) for baseline in BASELINES), key=lambda plan: plan.makespan_s)


def true_factors(
    problem: Problem, errors: SpeedErrors, size: float, numbers: random.Random
) -> dict[tuple[str, int], float]:
    """Returns the true over the predicted runtime of each option of each job."""
    techniques = sorted({option.technique for job in problem.jobs for option in job.options})
    of_machine = numbers.gauss(0, errors.machine)
    of_technique = {technique: numbers.gauss(0, errors.technique) for technique in techniques}
    found = {}
    for job in problem.jobs:
        of_job = numbers.gauss(0, errors.job)
        for number, option in enumerate(job.options):
            own = numbers.gauss(0, errors.option)
            found[job.id, number] = math.exp(size * (of_machine + of_technique[option.technique] + of_job + own))
    return found


if __name__ == "__main__":
    main()
