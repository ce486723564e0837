"""Plans on predictions that are corrected while training, compared with trying every option first: simulated makespans.

usage: python -m benchmarks.learning [--draws N] [--families FAMILY ...] [--errors JOB,OPTION ...] [--lengths ...]

A job's true runtimes are the predicted ones times a factor of the job and a factor of each option. Measures the
makespan over that of a clairvoyant, which plans with the true runtimes, of runs that begin with a plan by the
predictions, learn from what runs, try options in short segments where that pays, and re-plan. Trying first adds the
time of a trial of every option on its gang, with the devices always full, to the clairvoyant's makespan. Two processes
share the draws. A whole run writes benchmarks/results/learning.json and the table between the markers in
docs/benchmarks.md; a partial run prints.
"""

import argparse
import json
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

from benchmarks.page import write_section
from benchmarks.planning.families import draw
from benchmarks.simulation.simulated_runs import clairvoyant, simulate
from ringmaster.tasks.planning import Plan, Problem, solve

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "learning.json"
FAMILIES = ("paper-txt-12x8", "paper-img-12x16", "scale-16x16")
ERRORS = ("0.25,0.1", "0.5,0.25")
# The factor for all runtimes, the seconds of a switch, and those of the shortest and the longest trials. A gang's
# median runtime is ten minutes where jobs are of minutes.
LENGTHS = {"hours": (1.0, 60.0, (60.0, 60.0)), "minutes": (1 / 60, 1.0, (0.02, 20.0))}
GOALS = {("hours", "0.25,0.1"): 1.04, ("hours", "0.5,0.25"): 1.10}
DRAWS = 20
PROCESSES = 2
# Less than the executor plans with: 240 batches are planned twenty times each.
WORK_S, ENOUGH = 0.1, 0.003


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=DRAWS, help="of each family")
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--errors", nargs="*", default=ERRORS)
    parser.add_argument("--lengths", nargs="*", default=tuple(LENGTHS), choices=tuple(LENGTHS))
    chosen = parser.parse_args()
    is_whole = chosen == parser.parse_args([])
    make_plan(draw("scale-12x16"))  # compile the kernels, or load them
    rows: list[dict] = []
    print("\n".join(table([])))
    with ProcessPoolExecutor(PROCESSES) as processes:
        for length in chosen.lengths:
            for errors in chosen.errors:
                for family in chosen.families:
                    measured = partial(measure, family, errors=errors, length=length)
                    rows.append(row_of(list(processes.map(measured, range(chosen.draws))), family, errors, length))
                    print(line(rows[-1]), flush=True)
                rows.append(mean_of(rows[-len(chosen.families) :]))
                print(line(rows[-1]), flush=True)
                if is_whole:
                    record(rows)


def problem_of(family: str, *, length: str, seed: int) -> Problem:
    """Returns a problem with runtimes of hours or minutes."""
    factor, switch_cost_s, _ = LENGTHS[length]
    drawn = draw(family, seed=seed)
    jobs = tuple(
        replace(job, options=tuple(replace(o, runtime_s=o.runtime_s * factor) for o in job.options))
        for job in drawn.jobs
    )
    return replace(drawn, jobs=jobs, switch_cost_s=switch_cost_s)


def make_plan(problem: Problem, *, seed: int = 0) -> Plan:
    return solve(problem, work_s=WORK_S, enough=ENOUGH, seed=seed)


def measure(family: str, seed: int, *, errors: str, length: str) -> dict[str, float]:
    """Returns the figures of one draw: makespans over the clairvoyant's, and switches a job."""
    of_job, of_option = map(float, errors.split(","))
    true = {"noise": of_job, "option_noise": of_option}
    problem = problem_of(family, length=length, seed=seed)
    planner = partial(make_plan, seed=seed)
    ideal_s = clairvoyant(problem, seed=seed, make_plan=planner, **true).makespan_s
    came = simulate(problem, planner(problem), seed=seed, replan="clock", make_plan=planner, **true)
    shortest_s, longest_s = LENGTHS[length][2]
    return {
        "learnt": came.makespan_s / ideal_s,
        "trying_shortly": 1 + trials_s(problem, shortest_s) / ideal_s,
        "trying": 1 + trials_s(problem, longest_s) / ideal_s,
        "switches": came.num_switches / len(problem.jobs),
    }


def row_of(draws: list[dict[str, float]], family: str, errors: str, length: str) -> dict:
    """Returns the row of all draws: means, and the worst ones."""
    ratios = {
        name: [each["learnt"] / each[key] for each in draws]
        for name, key in (("over_trying_shortly", "trying_shortly"), ("over_trying", "trying"))
    }
    return {
        "family": family,
        "errors": errors,
        "length": length,
        "num_problems": len(draws),
        "learnt_mean": statistics.mean(each["learnt"] for each in draws),
        "learnt_worst": max(each["learnt"] for each in draws),
        "trying_mean": statistics.mean(each["trying"] for each in draws),
        "over_trying_shortly_mean": statistics.mean(ratios["over_trying_shortly"]),
        "over_trying_mean": statistics.mean(ratios["over_trying"]),
        "over_trying_worst": max(ratios["over_trying"]),
        "switches_mean": statistics.mean(each["switches"] for each in draws),
    }


def trials_s(problem: Problem, trial_s: float) -> float:
    """Returns the seconds in which every option of every job is tried, with all devices busy all the time."""
    num_devices = sum(node.num_devices for node in problem.nodes)
    return sum(trial_s * option.num_devices for job in problem.jobs for option in job.options) / num_devices


def mean_of(rows: list[dict]) -> dict:
    """Returns the mean of the rows of all families, with the worst of what is a worst value."""
    keys = [key for key, value in rows[0].items() if isinstance(value, float)]
    found = {k: (max if k.endswith("worst") else statistics.mean)(row[k] for row in rows) for k in keys}
    num_problems = sum(row["num_problems"] for row in rows)
    return rows[0] | found | {"family": "all", "num_problems": num_problems}


def line(row: dict) -> str:
    """Returns a row of the table."""
    of_job, of_option = map(float, row["errors"].split(","))
    goal = GOALS.get((row["length"], row["errors"])) if row["family"] == "all" else None
    names = ("trying_mean", "over_trying_shortly_mean", "over_trying_mean", "over_trying_worst")
    compared = " | ".join(f"{row[name]:.3f}" for name in names)
    return (
        f"| {row['length']} | {of_job:.0%}, {of_option:.0%} | {row['family']} | {row['num_problems']} | "
        f"{row['learnt_mean']:.3f} | {row['learnt_worst']:.3f} | {f'<= {goal}' if goal else ''} | {compared} | "
        f"{row['switches_mean']:.2f} |"
    )


def table(rows: list[dict]) -> list[str]:
    """Returns the rows as lines of markdown."""
    return [
        "| jobs of | off by | problems | drawn | learnt | worst | goal | tried first | ratio, shortest trials | ratio "
        "| worst | switches |",
        "| --- | --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
        *map(line, rows),
    ]


def record(rows: list[dict]) -> None:
    """Writes the measurements so far, so that an interrupted run keeps its rows."""
    machine = {"cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 1)}
    RESULTS.write_text(
        json.dumps({"date": date.today().isoformat(), "machine": machine, "rows": rows}, indent=1) + "\n"
    )
    body = [
        f"{date.today().isoformat()}. Makespans over a clairvoyant's; switches a job. Trials take 60 s where jobs take "
        "hours, and .02 to 20 s where they take minutes.",
        "",
        *table(rows),
    ]
    write_section("learning", body)


if __name__ == "__main__":
    main()
