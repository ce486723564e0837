"""The realised makespan of plans under wrong runtimes, simulated by the executor's own rules and re-planning policy.

usage: python -m benchmarks.simulation [--draws N] [--families FAMILY ...] [--noises SHARE ...] [--kinds KIND ...]

Measures the realised makespan over that of a clairvoyant, which plans with the true runtimes, and switches a job. A
whole run writes benchmarks/results/simulate.json and the table between the markers in docs/benchmarks.md; a partial run
prints.
"""

import argparse
import json
import os
import statistics
import time
from datetime import date
from pathlib import Path

from benchmarks.page import write_section
from benchmarks.planning.families import draw
from benchmarks.simulation.simulated_runs import clairvoyant, simulate
from ringmaster.tasks.planning import solve

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "simulate.json"
FAMILIES = ("scale-30x32", "paper-img-12x16", "paper-mixed-24x32", "gavel-24x16")
NOISES = (0.1, 0.25)
KINDS = {"never": "kept", "completions": "anew when a job ends", "clock": "anew by the clock"}
GOAL, GOAL_SWITCHES = 1.02, 2  # for re-planning by the clock, where runtimes are off by 25 %


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=3, help="of each family")
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--noises", nargs="*", type=float, default=NOISES)
    parser.add_argument("--kinds", nargs="*", default=tuple(KINDS), choices=tuple(KINDS))
    chosen = parser.parse_args()
    is_whole = (tuple(chosen.families), tuple(chosen.noises), tuple(chosen.kinds)) == (FAMILIES, NOISES, tuple(KINDS))
    solve(draw("scale-12x16"))  # compile the kernels, or load them, before timing
    rows: list[dict] = []
    print("\n".join(table([])))
    for family in chosen.families:
        for noise in chosen.noises:
            for row in measure(family, noise, kinds=chosen.kinds, draws=chosen.draws):
                rows.append(row)
                print(line(row), flush=True)
            if is_whole:
                record(rows)


def measure(family: str, noise: float, *, kinds: list[str], draws: int) -> list[dict]:
    """Returns a row for each kind of re-planning, all with the same problems, plans and true runtimes."""
    found: dict[str, list[tuple[float, float, float, int]]] = {kind: [] for kind in kinds}
    for seed in range(draws):
        problem = draw(family, seed=seed)
        plan, ideal_s = solve(problem, seed=seed), clairvoyant(problem, noise=noise, seed=seed).makespan_s
        for kind in kinds:
            began_s = time.process_time()
            came = simulate(problem, plan, noise=noise, seed=seed, replan=kind)
            a_plan_s = (time.process_time() - began_s) / max(1, came.num_plans - 1)
            num_jobs = len(problem.jobs)
            found[kind].append((came.makespan_s / ideal_s, came.num_switches / num_jobs, a_plan_s, came.num_plans))
    rows = []
    for kind, values in found.items():
        ratios, switches, seconds, plans = zip(*values, strict=True)
        rows.append(
            {
                "family": family,
                "noise": noise,
                "kind": kind,
                "num_problems": draws,
                "ratio_mean": statistics.mean(ratios),
                "ratio_worst": max(ratios),
                "switches_mean": statistics.mean(switches),
                "switches_worst": max(switches),
                "plans_mean": statistics.mean(plans),
                "processor_s_a_plan": statistics.mean(seconds),
            }
        )
    return rows


def line(row: dict) -> str:
    """Returns a row of the table."""
    has_goal = row["kind"] == "clock" and row["noise"] == 0.25
    a_plan = "" if row["kind"] == "never" else f"{row['processor_s_a_plan']:.1f}"
    return (
        f"| {row['family']} | {row['noise']:.0%} | {KINDS[row['kind']]} | {row['num_problems']} | "
        f"{row['ratio_mean']:.3f} | {row['ratio_worst']:.3f} | {f'<= {GOAL}' if has_goal else ''} | "
        f"{row['switches_mean']:.2f} | {row['switches_worst']:.2f} | {f'<= {GOAL_SWITCHES}' if has_goal else ''} | "
        f"{row['plans_mean']:.0f} | {a_plan} |"
    )


def table(rows: list[dict]) -> list[str]:
    """Returns the rows as lines of markdown."""
    return [
        "| problems | off by | planned | drawn | realised | worst | goal | switches a job | worst | goal | plans | s |",
        "| --- | ---: | --- | ---: | ---: | ---: | --- | ---: | ---: | --- | ---: | ---: |",
        *map(line, rows),
    ]


def record(rows: list[dict]) -> None:
    """Writes the measurements so far, so that an interrupted run keeps its rows."""
    machine = {"cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 1)}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    content = {"date": date.today().isoformat(), "machine": machine, "rows": rows}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    body = [
        f"{date.today().isoformat()}, {machine['cores']} cores. Realised over a clairvoyant's makespan, ",
        "switches a job, each mean and worst; plans that were made, and a plan's seconds of processors.",
        "",
        *table(rows),
    ]
    write_section("simulate", body)


if __name__ == "__main__":
    main()
