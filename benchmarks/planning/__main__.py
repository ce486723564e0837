"""Benchmarks of the planner: gaps, seconds and switches by kind of problem, and other planners on the same problems.

usage: python -m benchmarks.planning [--seeds N] [--quick] [--others] [--no-table] [--only WORD ...]

`--only whatif` measures what-if instead (`benchmarks/planning/whatif.py`), and prints its table; `--only tariffs`
plans by the hour's prices and carbon (`benchmarks/planning/tariffs.py`).

Writes benchmarks/results/planning.json and the tables between the markers in docs/benchmarks.md; --quick and --only
print instead. The independent verifier checks every plan, which must not be longer than that of the best simple rule.
`--others` adds simple rules, a time-indexed MILP, OR-Tools' CP-SAT and Saturn's MILP, one problem each.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from benchmarks.page import write_section
from benchmarks.planning import others, tariffs, whatif
from benchmarks.planning.families import draw
from benchmarks.planning.problems import Maker, drawn, fused, replanned, ruled, short, sweep, switches, weighted
from ringmaster.errors import NoRoomError
from ringmaster.tasks.planning import Objective, Plan, Problem, Segment, solve, verify
from ringmaster.tasks.planning.objectives import MAKESPAN, objective_by_name
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "planning.json"
DEAR_SWITCHES = 3  # largest allowed factor of the gap at a switch cost of 5 % of a job


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: kinds of problems, planner options, draws of each kind, and the goals (gaps in per cent).

    busy_loops: processes that keep the cores busy meanwhile. The plans must be those of a quiet machine.
    """

    name: str
    makers: tuple[Maker, ...]
    preemption: str = "auto"
    objective: str = "makespan"
    goal_mean: float | None = None
    goal_worst: float | None = None
    goal_s: float | None = None
    seeds: int = 10
    with_dear_switches: bool = True
    busy_loops: int = 0


ROWS = (
    Row(
        name="preemptive, up to 30 x 32",
        makers=tuple(map(drawn, ("tiny", "paper-txt", "paper-img", "paper-mixed", "scale-30x32"))),
        goal_mean=0.2,
        goal_worst=0.5,
        goal_s=2,
    ),
    Row(
        name="the same with 8 busy loops running",
        makers=tuple(map(drawn, ("tiny", "paper-txt", "paper-img", "paper-mixed", "scale-30x32"))),
        goal_mean=0.2,
        goal_worst=0.5,
        seeds=2,
        with_dear_switches=False,
        busy_loops=8,
    ),
    Row(name="preemptive, nodes of 2, 2, 4, 8", makers=(drawn("paper-txt-12xhet"),), goal_mean=0.4, goal_s=2),
    Row(
        name="preemptive, many small jobs 24 x 8",
        makers=(drawn("gavel-24x8"),),
        goal_mean=0.4,
        goal_worst=0.8,
        goal_s=2,
    ),
    Row(
        name="preemptive, short jobs, up to 24 x 16",
        makers=tuple(short(family, num_switches=n) for family in ("paper-img", "gavel-24x8") for n in (12, 40)),
        with_dear_switches=False,
    ),
    Row(name="preemptive, 100 x 128", makers=(drawn("scale-100x128"),), goal_mean=0.7, goal_s=5),
    Row(
        name="preemptive, gangs over nodes 100 x 256",
        makers=(drawn("multi-100x256"),),
        goal_mean=1.0,
        goal_s=10,
        seeds=5,
    ),
    Row(name="preemptive, 1,000 x 512", makers=(drawn("scale-1000x512"),), goal_mean=0.4, goal_s=10, seeds=3),
    Row(name="preemptive, 1,000 x 4,096", makers=(drawn("scale-1000x4096"),), goal_mean=0.5, goal_s=5),
    Row(
        name="a sweep, 1,000 jobs of 50 kinds x 512",
        makers=(sweep("scale-50x512", copies=20),),
        goal_mean=0.2,
        goal_s=8,
        seeds=3,
    ),
    Row(name="two types of devices, 30 x 32", makers=(drawn("types-30x32"),), goal_mean=0.7, goal_s=1),
    Row(
        name="two types of devices, 100 x 128",
        makers=(drawn("types-100x128"),),
        goal_mean=0.7,
        goal_worst=1.0,
        goal_s=7,
        seeds=5,
    ),
    Row(
        name="re-planned after one event, 30 x 32",
        makers=(replanned("scale-30x32"),),
        goal_mean=0.4,
        goal_worst=0.8,
        goal_s=0.5,
        with_dear_switches=False,
    ),
    Row(
        name="re-planned after one event, 100 x 128",
        makers=(replanned("scale-100x128"),),
        goal_mean=0.7,
        goal_s=3,
        seeds=5,
        with_dear_switches=False,
    ),
    Row(name="fused groups, 12 x 8", makers=(fused("paper-txt"),), with_dear_switches=False, seeds=5),
    Row(
        name="sweeps of adapters that may be fused, 16 x 2, 32 x 4",
        makers=(drawn("adapters-16x2"), drawn("adapters-32x4")),
        with_dear_switches=False,
        seeds=5,
    ),
    Row(
        name="the same with other jobs, 100 x 16",
        makers=(drawn("adapters-100x16"),),
        with_dear_switches=False,
        seeds=2,
    ),
    Row(
        name="order, releases, start-up, memory, a node that ends, 12 x 16",
        makers=(ruled("paper-img"),),
        goal_mean=2.5,
        goal_s=5,
        with_dear_switches=False,
    ),
    Row(
        name="the same, 30 x 32",
        makers=(ruled("scale-30x32"),),
        goal_mean=2.0,
        goal_s=15,
        with_dear_switches=False,
    ),
    Row(
        name="weighted completion, 12 x 16, 30 x 32",
        makers=(weighted(drawn("paper-img")), weighted(drawn("scale-30x32"))),
        objective="weighted",
        goal_mean=2.0,
        goal_s=15,
        with_dear_switches=False,
    ),
    Row(
        name="weighted completion with order, releases, start-up, memory, a node that ends, 12 x 16",
        makers=(weighted(ruled("paper-img")),),
        objective="weighted",
        goal_mean=4.0,
        goal_s=15,
        with_dear_switches=False,
    ),
    Row(
        name="the same by weight, 30 x 32",
        makers=(weighted(ruled("scale-30x32")),),
        objective="weighted",
        goal_mean=4.0,
        goal_s=15,
        with_dear_switches=False,
        seeds=5,
    ),
    Row(
        name="without preemption, up to 12 jobs",
        makers=tuple(map(drawn, ("tiny", "paper-txt", "paper-img"))),
        preemption="never",
        goal_mean=0.0,
        goal_s=10,
        with_dear_switches=False,
    ),
    Row(
        name="without preemption, 30 x 32",
        makers=(drawn("scale-30x32"),),
        preemption="never",
        goal_mean=2.5,
        goal_s=10,
        with_dear_switches=False,
    ),
    Row(
        name="without preemption, 100 x 128",
        makers=(drawn("scale-100x128"),),
        preemption="never",
        goal_mean=3.0,
        goal_s=20,
        seeds=3,
        with_dear_switches=False,
    ),
)
LARGE = ("256", "512", "4,096")  # excluded by --quick


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", type=int, help="draws of each kind, at most: 10 unless given, 20 of tariffs; dear rows have fewer"
    )
    parser.add_argument("--quick", action="store_true", help="two draws, nothing above 128 devices")
    parser.add_argument("--others", action="store_true", help="also measure other planners")
    parser.add_argument("--no-table", action="store_true", help="the other planners alone")
    parser.add_argument("--only", nargs="*", default=[], help="only rows whose name has one of these words")
    arguments = parser.parse_args()
    for preemption in ("auto", "never"):  # compile the kernels, or load them, before timing
        solve(draw("scale-12x16"), preemption=preemption)
    if arguments.only == ["whatif"]:
        whatif.main()
        return
    if arguments.only == ["tariffs"]:
        tariffs.main(num_draws=arguments.seeds or tariffs.NUM_DRAWS)
        return
    is_whole = not (arguments.quick or arguments.only or arguments.no_table)
    rows: list[dict] = []
    for row in () if arguments.no_table else ROWS:
        is_large = arguments.quick and any(size in row.name for size in LARGE)
        if is_large or (arguments.only and not any(word in row.name for word in arguments.only)):
            continue
        for switch_cost_s in (60.0, None) if row.with_dear_switches else (60.0,):
            seeds = min(2 if arguments.quick else arguments.seeds or 10, row.seeds)
            rows.append(measure(row, seeds=seeds, switch_cost_s=switch_cost_s))
            print(line(rows[-1]), flush=True)
            if is_whole:
                record(rows)
    compared = others.compare() if arguments.others and not arguments.only else []
    if is_whole:
        record(rows, compared)
    elif compared:
        print("\n".join(others.table(compared)))


def measure(row: Row, *, seeds: int, switch_cost_s: float | None) -> dict:
    """Measures one row: gaps in per cent, wall and CPU seconds, switches a job, ratios to the best rule."""
    gaps, walls, processors, moves, ratios = [], [], [], [], []
    for make in row.makers:
        for seed in range(seeds):
            problem = make(seed, switch_cost_s)
            with busy(row.busy_loops):
                wall_s, processor_s = time.perf_counter(), time.process_time()
                plan = solve(problem, preemption=row.preemption, objective=row.objective, seed=seed)
                walls.append(time.perf_counter() - wall_s)
                processors.append(time.process_time() - processor_s)
            if row.busy_loops and _segments(row, problem, seed) != plan.segments:
                raise SystemExit(f"{problem.name}: the plan depends on the load of the machine")
            ratios += check(plan, problem, objective=objective_by_name(row.objective))
            gaps.append(100 * plan.gap)
            moves.append(switches(plan, problem) / len(problem.jobs))
    goals = {key: value for key, value in asdict(row).items() if key.startswith("goal_")}
    return goals | {
        "name": row.name,
        "switch_cost": "60 s" if switch_cost_s else "5 % of a job",
        "num_problems": len(gaps),
        "gap_mean": statistics.mean(gaps),
        "gap_worst": max(gaps),
        "seconds_mean": statistics.mean(walls),
        "seconds_worst": max(walls),
        "processor_mean": statistics.mean(processors),
        "switches_mean": statistics.mean(moves),
        "switches_worst": max(moves),
        "best_rule_mean": statistics.mean(ratios) if ratios else None,
        "best_rule_least": min(ratios, default=None),
    }


def _segments(row: Row, problem: Problem, seed: int) -> tuple[Segment, ...]:
    return solve(problem, preemption=row.preemption, objective=row.objective, seed=seed).segments


@contextmanager
def busy(num_loops: int) -> Iterator[None]:
    """Runs processes that do nothing but keep cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def check(plan: Plan, problem: Problem, *, objective: Objective = MAKESPAN) -> list[float]:
    """Returns the best simple rule's value over the plan's, if any rule has one. A wrong plan ends the benchmark."""
    if faults := verify(plan, problem):
        raise SystemExit(f"{problem.name}: {faults[:3]}")
    if any(job.running for job in problem.jobs):
        return []  # the rules do not support running jobs
    found = [value for rule in BASELINES if (value := _value(rule, problem, objective))]
    reached = objective.value(plan, problem)
    if found and min(found) < reached * (1 - 1e-9):
        raise SystemExit(f"{problem.name}: a simple rule has a {objective.name} of {min(found)}, the plan {reached}")
    return [min(found) / reached] if found else []


def _value(rule: Callable[[Problem], Plan], problem: Problem, objective: Objective) -> float | None:
    try:
        return objective.value(rule(problem), problem)
    except NoRoomError:
        return None


def record(rows: list[dict], compared: Sequence[dict] = ()) -> None:
    """Writes the measurements so far, so that an interrupted run keeps its rows."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 1)}
    tables = {"rows": rows, "compared": list(compared)}
    RESULTS.write_text(json.dumps({"date": date.today().isoformat(), "machine": machine, **tables}, indent=1) + "\n")
    write_page(machine, **tables)


def line(row: dict) -> str:
    best = "" if row["best_rule_mean"] is None else f"{row['best_rule_mean']:.2f}"
    return (
        f"| {row['name']} | {row['switch_cost']} | {row['num_problems']} | {row['gap_mean']:.2f} % | "
        f"{row['gap_worst']:.2f} % | {_goal(row)} | {row['seconds_mean']:.1f} | {row['seconds_worst']:.1f} | "
        f"{row['goal_s'] or ''} | {row['processor_mean']:.1f} | "
        f"{row['switches_mean']:.2f} | {row['switches_worst']:.2f} | {best} |"
    )


def _goal(row: dict) -> str:
    if row["goal_mean"] is None:
        return ""
    times = 1 if row["switch_cost"] == "60 s" else DEAR_SWITCHES
    worst = f", worst {times * row['goal_worst']:.1f} %" if row["goal_worst"] else ""
    return f"<= {times * row['goal_mean']:.1f} %{worst}"


def write_page(machine: dict, *, rows: list[dict], compared: list[dict]) -> None:
    """Writes the tables between the markers, and leaves the rest of the page unchanged."""
    body = [
        f"{date.today().isoformat()}, {machine['cores']} cores, {machine['processor']}, a load of "
        f"{machine['load_1min']} by whatever else ran. Random problems of each kind (jobs x devices):",
        "certified gap between the plan and its lower bound, seconds of the wall, and switches a job, each mean and",
        "worst, and seconds of the processors (*CPU s*), of which two work at a time for the most part. Gaps do not",
        "depend on the load. Every plan was checked by the verifier. *Rule*: the value of the best simple rule over",
        "the plan's.",
        "",
        "| problems | switch cost | drawn | gap | worst | goal | s | worst | goal | CPU s | switches | worst | rule |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *map(line, rows),
    ]
    if compared:
        body += [
            "",
            "Other planners on the same problems in the same run: their makespans over ours (preemptive, certified;",
            "its seconds in the second column). Only ours switches between options, so ours without preemption",
            "is listed too. *Invalid*: the plan breaks a rule, such as two jobs on one device at a time.",
            "",
            *others.table(compared),
        ]
    write_section("planning", body)


if __name__ == "__main__":
    main()
