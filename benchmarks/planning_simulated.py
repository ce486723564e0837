"""What plans are worth when runtimes are wrong: simulated by the executor's own rules, with re-planning and without."""

import statistics
import time

from tasks.execution.simulate import clairvoyant, simulate
from tasks.planning import solve
from tasks.planning.families import draw

FAMILIES = ("scale-30x32", "paper-img-12x16")
NOISE, GOAL, GOAL_SWITCHES = 0.25, 1.02, 2
KINDS = {"kept": "never", "anew when jobs end": "completions", "anew by the clock": "clock"}


def simulated(*, seeds: int) -> list[dict]:
    """A row a family and kind of re-planning: realised makespan over the clairvoyant one's, and switches a job."""
    rows = []
    for family in FAMILIES:
        for kind, replan in KINDS.items():
            ratios, switches, seconds = [], [], []
            for seed in range(seeds):
                problem = draw(family, seed=seed)
                ideal_s = clairvoyant(problem, noise=NOISE, seed=seed).makespan_s
                plan = solve(problem, seed=seed)
                began_s = time.perf_counter()
                came = simulate(problem, plan, noise=NOISE, seed=seed, replan=replan)
                seconds.append((time.perf_counter() - began_s) / max(1, came.num_plans))
                ratios.append(came.makespan_s / ideal_s)
                switches.append(came.num_switches / len(problem.jobs))
            row = {
                "family": family,
                "kind": kind,
                "num_problems": seeds,
                "ratio_mean": statistics.mean(ratios),
                "ratio_worst": max(ratios),
                "switches_mean": statistics.mean(switches),
                "seconds_a_plan": statistics.mean(seconds),
            }
            rows.append(row)
            print(line(row), flush=True)
    return rows


def line(row: dict) -> str:
    goal = f"<= {GOAL}" if row["kind"] == "anew by the clock" else ""
    return (
        f"| {row['family']} | {row['kind']} | {row['num_problems']} | {row['ratio_mean']:.3f} | "
        f"{row['ratio_worst']:.3f} | {goal} | {row['switches_mean']:.2f} | {row['seconds_a_plan']:.1f} |"
    )


def table(rows: list[dict]) -> list[str]:
    """The rows as lines of markdown."""
    return [
        "| problems | planned | drawn | realised / clairvoyant | worst | goal | switches a job | s a plan |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: |",
        *map(line, rows),
    ]
