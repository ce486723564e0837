"""Measures the planner: gaps, seconds and switches by family, and other planners on the same problems in the same run.

usage: planning.py [--seeds N] [--quick] [--others] [--families FAMILY ...]

Writes benchmarks/results/planning.json and the table between the markers in docs/benchmarks.md. Every plan is verified.
`--others` adds the baselines, a time-indexed MILP, and OR-Tools' CP-SAT where that package is installed.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

from tasks.planning import Plan, solve, verify
from tasks.planning.families import draw

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "planning.json", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- planning -->", "<!-- /planning -->"
# Row of the table, families, preemption, and the goals: mean gap, worst gap, seconds.
ROWS = [
    (
        "preemptive, up to 30 x 32",
        ["tiny", "paper-txt", "paper-img", "paper-mixed", "scale-30x32"],
        "auto",
        0.4,
        0.8,
        2,
    ),
    ("preemptive, nodes of 2, 2, 4, 8", ["paper-txt-12xhet"], "auto", 0.4, 0.8, 2),
    ("preemptive, many small jobs 24 x 8", ["gavel-24x8"], "auto", 0.4, 0.8, 2),
    ("preemptive, 100 x 128", ["scale-100x128"], "auto", 0.7, None, 5),
    ("preemptive, gangs over nodes 100 x 256", ["multi-100x256"], "auto", 1.0, None, 10),
    ("preemptive, 1,000 x 512", ["scale-1000x512"], "auto", 0.5, None, 10),
    ("preemptive, 1,000 x 4,096", ["scale-1000x4096"], "auto", 0.5, None, 5),
    ("two types of devices, 30 x 32", ["types-30x32"], "auto", 0.7, None, 1),
    ("two types of devices, 100 x 128", ["types-100x128"], "auto", 0.7, None, 7),
    ("without preemption, 12 x 8", ["paper-txt"], "never", 0.0, None, 10),
    ("without preemption, 30 x 32", ["scale-30x32"], "never", 2.5, None, 10),
    ("without preemption, 100 x 128", ["scale-100x128"], "never", 3.0, None, 20),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="two seeds, nothing above 100 jobs")
    parser.add_argument("--others", action="store_true", help="other planners beside ours")
    parser.add_argument("--families", nargs="*", help="only rows with these families")
    arguments = parser.parse_args()
    seeds = 2 if arguments.quick else arguments.seeds
    solve(draw("scale-12x16"))  # compile the kernels before the first clock
    rows = []
    for name, families, preemption, *goals in ROWS:
        too_large = arguments.quick and any("1000x" in family or "256" in family for family in families)
        if too_large or (arguments.families and not set(families) & set(arguments.families)):
            continue
        for switch_cost_s in (60.0, None):
            if switch_cost_s is None and preemption == "never":
                continue
            row = measure(name, families, preemption, seeds=seeds, switch_cost_s=switch_cost_s)
            rows.append(row | {"goal_mean": goals[0], "goal_worst": goals[1], "goal_s": goals[2]})
            print(line(rows[-1]), flush=True)
            record(rows, [])
    if arguments.others:
        record(rows, compare(seeds))


def record(rows: list[dict], compared: list[dict]) -> None:
    """Writes what was measured so far, so that a run that is stopped leaves its rows."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 1)}
    RESULTS.write_text(json.dumps({"machine": machine, "rows": rows, "compared": compared}, indent=1) + "\n")
    write_page(rows, compared, machine)


def measure(name: str, families: list[str], preemption: str, *, seeds: int, switch_cost_s: float | None) -> dict:
    """One row: gaps in per cent, seconds by the wall and of processors, switches a job."""
    gaps, walls, processors, switches = [], [], [], []
    for family in families:
        for seed in range(seeds):
            problem = draw(family, seed=seed, switch_cost_s=switch_cost_s)
            wall, processor = time.perf_counter(), time.process_time()
            plan = solve(problem, preemption=preemption, seed=seed)
            walls.append(time.perf_counter() - wall)
            processors.append(time.process_time() - processor)
            check(plan, problem)
            gaps.append(100 * plan.gap)
            switches.append(plan.num_switches / len(problem.jobs))
    return {
        "name": name,
        "switch_cost": "60 s" if switch_cost_s else "5 % of a job",
        "num_problems": len(gaps),
        "gap_mean": statistics.mean(gaps),
        "gap_worst": max(gaps),
        "seconds_mean": statistics.mean(walls),
        "seconds_worst": max(walls),
        "processor_mean": statistics.mean(processors),
        "switches_mean": statistics.mean(switches),
        "switches_worst": max(switches),
    }


def check(plan: Plan, problem) -> None:
    faults = verify(plan, problem)
    if faults:
        raise SystemExit(f"{problem.name}: {faults[:3]}")


def compare(seeds: int) -> list[dict]:
    """Makespans of other planners over ours, on the same problems."""
    from benchmarks.planning_others import OTHERS

    rows = []
    for family in ("paper-txt", "paper-img", "scale-30x32"):
        ratios: dict[str, list[float]] = {name: [] for name in OTHERS}
        for seed in range(min(3, seeds)):
            problem = draw(family, seed=seed)
            ours = solve(problem, seed=seed)
            for name, planner in OTHERS.items():
                plan = planner(problem)
                if plan is not None:
                    check(plan, problem)
                    ratios[name].append(plan.makespan_s / ours.makespan_s)
        rows.append({"family": family} | {name: statistics.mean(r) if r else None for name, r in ratios.items()})
        print(rows[-1], flush=True)
    return rows


def line(row: dict) -> str:
    times = 1 if row["switch_cost"] == "60 s" else 3  # dear switches may cost three times the gap
    goal = f"<= {times * row['goal_mean']:.1f} %" + (
        f", worst {times * row['goal_worst']:.1f} %" if row["goal_worst"] else ""
    )
    return (
        f"| {row['name']} | {row['switch_cost']} | {row['num_problems']} | {row['gap_mean']:.2f} % | "
        f"{row['gap_worst']:.2f} % | {goal} | {row['seconds_mean']:.1f} | {row['seconds_worst']:.1f} | "
        f"{row['goal_s']} | {row['switches_mean']:.2f} | {row['switches_worst']:.2f} |"
    )


def write_page(rows: list[dict], compared: list[dict], machine: dict) -> None:
    """The tables, between the markers; what else is on the page stays."""
    head = [
        BEGIN,
        "Certified gap between the plan and its lower bound, over random problems of each family (jobs x devices);",
        "every plan was checked by the verifier. Goals stand beside what was reached; seconds are those of the wall,",
        f"with {machine['cores']} cores and a load of {machine['load_1min']} by whatever else ran on the machine.",
        "",
        "| problems | switch cost | drawn | gap | worst | goal | seconds | worst | goal | switches a job | worst |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    body = [line(row) for row in rows]
    if compared:
        names = [name for name in compared[0] if name != "family"]
        body += ["", "Makespans of other planners, as multiples of ours on the same problems:", ""]
        body += ["| problems | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
        for row in compared:
            cells = [f"{row[name]:.2f}" if row[name] else "no plan" for name in names]
            body.append(f"| {row['family']} | " + " | ".join(cells) + " |")
    section = "\n".join([*head, *body, END])
    page = PAGE.read_text() if PAGE.exists() else "# Benchmarks\n\n" + BEGIN + END + "\n"
    if BEGIN not in page:
        page = page.rstrip() + "\n\n" + BEGIN + END + "\n"
    before, rest = page.split(BEGIN, 1)
    PAGE.write_text(before + section + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
