"""Plans on predictions that are corrected while training, beside trying every option first: simulated makespans.

usage: python -m benchmarks.learning [--draws N] [--families FAMILY ...] [--errors JOB,OPTION ...] [--lengths ...]

A job's true runtimes are the predicted ones times a factor of the job and a factor of each option. Measures the
makespan over that of a clairvoyant, which plans with the true runtimes, of runs that begin with a plan by the
predictions, learn from what runs, try options in short segments where that pays, and plan anew. Trying first adds the
time of a trial of 60 s of every option on its gang, with the devices always full, to the clairvoyant's makespan. A
whole run writes benchmarks/results/learning.json and the table between the markers in docs/benchmarks.md; a partial run
prints.
"""

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

from ringmaster.tasks.execution.simulation.simulate import clairvoyant, simulate
from ringmaster.tasks.planning import Problem, solve
from ringmaster.tasks.planning.problems.families import draw

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "learning.json", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- learning -->", "<!-- /learning -->"
FAMILIES = ("paper-txt-12x8", "paper-img-12x16", "scale-30x32")
ERRORS = ("0.25,0.1", "0.5,0.25")
# The factor for all runtimes, and the seconds of a switch.
LENGTHS = {"hours": (1.0, None), "minutes": (1 / 60, 1.0)}
GOALS = {("hours", "0.25,0.1"): 1.04, ("hours", "0.5,0.25"): 1.10}
TRIAL_S = 60.0
DRAWS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=DRAWS, help="of each family")
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--errors", nargs="*", default=ERRORS)
    parser.add_argument("--lengths", nargs="*", default=tuple(LENGTHS), choices=tuple(LENGTHS))
    chosen = parser.parse_args()
    is_whole = chosen == parser.parse_args([])
    solve(draw("scale-12x16"))  # compile the kernels, or load them
    rows: list[dict] = []
    print("\n".join(table([])))
    for length in chosen.lengths:
        for errors in chosen.errors:
            for family in chosen.families:
                rows.append(measure(family, errors=errors, length=length, draws=chosen.draws))
                print(line(rows[-1]), flush=True)
            rows.append(mean_of(rows[-len(chosen.families) :]))
            print(line(rows[-1]), flush=True)
            if is_whole:
                record(rows)


def problems(family: str, *, length: str, draws: int) -> Iterator[tuple[int, Problem]]:
    """Yields seeds and problems with runtimes of hours or minutes."""
    factor, switch_cost_s = LENGTHS[length]
    for seed in range(draws):
        drawn = draw(family, seed=seed)
        jobs = tuple(
            replace(job, options=tuple(replace(o, runtime_s=o.runtime_s * factor) for o in job.options))
            for job in drawn.jobs
        )
        yield seed, replace(drawn, jobs=jobs, switch_cost_s=drawn.switch_cost_s if switch_cost_s is None else 1.0)


def measure(family: str, *, errors: str, length: str, draws: int) -> dict:
    """Returns a row: makespans over the clairvoyant's, mean and worst, and switches a job."""
    of_job, of_option = map(float, errors.split(","))
    true = {"noise": of_job, "option_noise": of_option}
    learnt, trying, switches = [], [], []
    for seed, problem in problems(family, length=length, draws=draws):
        ideal_s = clairvoyant(problem, seed=seed, **true).makespan_s
        came = simulate(problem, solve(problem, seed=seed), seed=seed, replan="clock", **true)
        learnt.append(came.makespan_s / ideal_s)
        trying.append(1 + trials_s(problem) / ideal_s)
        switches.append(came.num_switches / len(problem.jobs))
    return {
        "family": family,
        "errors": errors,
        "length": length,
        "num_problems": draws,
        "learnt_mean": statistics.mean(learnt),
        "learnt_worst": max(learnt),
        "trying_mean": statistics.mean(trying),
        "over_trying_mean": statistics.mean(a / b for a, b in zip(learnt, trying, strict=True)),
        "over_trying_worst": max(a / b for a, b in zip(learnt, trying, strict=True)),
        "switches_mean": statistics.mean(switches),
    }


def trials_s(problem: Problem) -> float:
    """Returns the seconds in which every option of every job is tried, with all devices busy all the time."""
    num_devices = sum(node.num_devices for node in problem.nodes)
    return sum(TRIAL_S * option.num_devices for job in problem.jobs for option in job.options) / num_devices


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
    return (
        f"| {row['length']} | {of_job:.0%}, {of_option:.0%} | {row['family']} | {row['num_problems']} | "
        f"{row['learnt_mean']:.3f} | {row['learnt_worst']:.3f} | {f'<= {goal}' if goal else ''} | "
        f"{row['trying_mean']:.3f} | {row['over_trying_mean']:.3f} | {row['over_trying_worst']:.3f} | "
        f"{row['switches_mean']:.2f} |"
    )


def table(rows: list[dict]) -> list[str]:
    """Returns the rows as lines of markdown."""
    return [
        "| jobs of | off by | problems | drawn | learnt | worst | goal | tried first | ratio | worst | switches |",
        "| --- | --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
        *map(line, rows),
    ]


def record(rows: list[dict]) -> None:
    """Writes the measurements so far, so that an interrupted run keeps its rows."""
    machine = {"cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 1)}
    RESULTS.write_text(
        json.dumps({"date": date.today().isoformat(), "machine": machine, "rows": rows}, indent=1) + "\n"
    )
    body = [
        BEGIN,
        f"{date.today().isoformat()}. Makespans over a clairvoyant's; switches a job.",
        "",
        *table(rows),
    ]
    page = PAGE.read_text()
    before, rest = page.split(BEGIN, 1)
    PAGE.write_text(before + "\n".join([*body, END]) + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
