"""Other planners on the same problems: simple rules, a time-indexed MILP, OR-Tools' CP-SAT, and Saturn's MILP.

The verifier of Ringmaster's plans checks each answer: a plan that breaks a rule is "invalid".
"""

import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.planning.families import draw
from benchmarks.planning.problems import ruled
from benchmarks.planning.saturn import saturn
from benchmarks.planning.time_indexed import solve_time_indexed
from ringmaster.errors import NoRoomError
from ringmaster.tasks.planning import Plan, PlanningJob, Problem, solve, verify
from ringmaster.tasks.planning.bounds.job_costs import is_foldable, useful_options, whole_of
from ringmaster.tasks.planning.plans.list_scheduling import current_practice, even_split, optimus_greedy, schedule

ROOT = Path(__file__).resolve().parents[2]
CP_SAT_PYTHON = ROOT / ".venv-bench" / "bin" / "python"  # made by `make bench-planning`
CP_SAT_S, MILP_S, SATURN_S = 40.0, 40.0, 60.0
SWITCH_COST_S, GIGABYTE = 60.0, 10**9
FAMILIES = ("tiny", "paper-txt", "paper-img", "paper-mixed", "scale-30x32")  # as in the table; the first draw of each
RULED = ("paper-img", "scale-30x32")  # families that are also compared with all rules
SMALL = 20  # jobs up to which Saturn's published model is tried; beyond, even the tightened one finds no plan
RULES = (current_practice, even_split, optimus_greedy)


def time_indexed(problem: Problem) -> Plan | None:
    """Plans by the joint MILP on a time grid, within 40 seconds."""
    horizon_s = min(rule(problem).makespan_s for rule in RULES)
    choices = solve_time_indexed(problem, horizon_s=horizon_s, time_limit_s=MILP_S)
    return Plan(problem.name, schedule(problem, choices)) if choices else None


def cp_sat(problem: Problem) -> Plan | None:
    """Plans by OR-Tools' CP-SAT within 40 seconds, in a process and an environment of its own.

    OR-Tools brings a build of HiGHS whose symbols clash with highspy's, and pins an older protobuf than MLflow's.
    """
    command = [str(CP_SAT_PYTHON), "-m", "benchmarks.planning.cp_sat", str(CP_SAT_S)]
    asked = json.dumps(_in_whole_seconds(problem))
    said = subprocess.run(command, cwd=ROOT, input=asked, stdout=subprocess.PIPE, text=True, check=True)
    choices = json.loads(said.stdout)
    return Plan(problem.name, schedule(problem, [(job, k) for job, k in choices])) if choices else None


def _in_whole_seconds(problem: Problem) -> dict[str, Any]:
    """Returns the input of `cp_sat.py`: durations are rounded up, and include start-up, save and evaluation."""

    def starts(job: PlanningJob) -> Iterator[dict[str, Any]]:
        for k in useful_options(job):
            option, length = job.options[k], math.ceil(whole_of(job, k, problem.switch_cost_s))
            for node in problem.nodes if option.num_nodes == 1 else ():
                if option.runs_on(node):
                    gigabytes = math.ceil(option.host_memory_bytes / GIGABYTE)
                    way = {"option": k, "node": node.id, "length": length, "gigabytes": gigabytes}
                    yield {**way, "devices": option.num_devices}

    memory = {node.id: node.host_memory_bytes for node in problem.nodes}
    return {
        "horizon": math.ceil(solve(problem, work_s=0.1).makespan_s * 1.5) + len(problem.jobs),
        "jobs": [
            {"id": job.id, "release": math.ceil(job.release_s), "after": list(job.after), "starts": list(starts(job))}
            for job in problem.jobs
        ],
        "nodes": {
            node.id: {
                "devices": node.num_devices,
                "gigabytes": None if (own := memory[node.id]) is None else own // GIGABYTE,
                "until": None if node.available_until_s is None else math.floor(node.available_until_s),
            }
            for node in problem.nodes
        },
    }


def saturn_as_published(problem: Problem) -> Plan | None:
    """Plans by Saturn's MILP with its M = 1e10."""
    return saturn(problem, time_limit_s=SATURN_S, published=True)


OTHERS: dict[str, Callable[[Problem], Plan | None]] = {
    "current practice": current_practice,
    "even split": even_split,
    "Optimus-style greedy": optimus_greedy,
    f"time-indexed MILP, {MILP_S:.0f} s": time_indexed,
    f"CP-SAT, {CP_SAT_S:.0f} s": cp_sat,
    f"Saturn's MILP, {SATURN_S:.0f} s": partial(saturn, time_limit_s=SATURN_S),
    f"the same, M = 1e10, {SATURN_S:.0f} s": saturn_as_published,
}


SATURN = [planner for name, planner in OTHERS.items() if f"{SATURN_S:.0f} s" in name]


def is_plain(problem: Problem) -> bool:
    """Whether jobs may run at any time, in any order, on any node, with no seconds in addition to their runtimes."""
    return (
        is_foldable(problem)
        and not any(job.started for job in problem.jobs)
        and not any(o.startup_s or o.save_s or o.evaluate_s for job in problem.jobs for o in job.options)
    )


def compare() -> list[dict]:
    """Returns a row a problem: makespan, bound and seconds; others' makespans over the own, or why they have none."""
    rows = []
    problems = {family: draw(family) for family in FAMILIES}
    problems |= {f"{family}, all rules": ruled(family)(0, SWITCH_COST_S) for family in RULED}
    for family, problem in problems.items():
        began_s = time.perf_counter()
        ours = solve(problem)
        row = {"family": family, "seconds": time.perf_counter() - began_s, "makespan_s": ours.makespan_s}
        row["lower bound"] = _said(ours.lower_bound_s / ours.makespan_s)
        row["ours, no preemption"] = _judged(partial(solve, preemption="never"), problem, ours)
        for name, planner in OTHERS.items():
            if planner is cp_sat and not CP_SAT_PYTHON.exists():
                row[name] = "not installed"
            elif planner is saturn_as_published and len(problem.jobs) > SMALL:
                row[name] = "not tried"
            elif planner in SATURN and not is_plain(problem):
                row[name] = "does not know the rules"
            else:
                row[name] = _judged(planner, problem, ours)
        rows.append(row)
        print(row, flush=True)
    return rows


def table(rows: list[dict]) -> list[str]:
    """Returns the comparison as lines of markdown."""
    names = [name for name in rows[0] if name not in ("family", "seconds", "makespan_s")]
    lines = ["| problem | ours, s | " + " | ".join(names) + " |", "| --- | ---: |" + " ---: |" * len(names)]
    for row in rows:
        cells = [row["family"], f"{row['seconds']:.1f}", *(row[name] for name in names)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _judged(planner: Callable[[Problem], Plan | None], problem: Problem, ours: Plan) -> str:
    try:
        plan = planner(problem)
    except NoRoomError:
        plan = None
    if plan is None:
        return "no plan"
    faults = verify(plan, problem)
    return f"invalid ({plan.makespan_s / ours.makespan_s:.2f})" if faults else _said(plan.makespan_s / ours.makespan_s)


def _said(ratio: float) -> str:
    return f"{ratio:.3f}"
