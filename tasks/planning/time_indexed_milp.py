"""The joint MILP: option, node and start of every job at once, on a grid of time steps.

Time-indexed models have tight relaxations. Models with "big M" ordering constraints do not: HiGHS was seen to report
overlapping jobs as optimal under them. The grid only decides options and order. List scheduling in that order gives
exact times, so rounding to the grid costs nothing in the plan.
"""

from collections import defaultdict
from dataclasses import dataclass
from math import ceil
from typing import Any

import pulp

from ringmaster.tasks.planning.bounds.job_costs import useful_options
from ringmaster.tasks.planning.plans.list_scheduling import Choice
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import PlanningJob, PlanningNode

MAX_STARTS = 2_500  # limit of binaries, above which HiGHS finds nothing useful in a second
MAX_NODES = 20  # of the branch-and-bound tree; a limit in nodes is reproducible, one in seconds is not


@dataclass(frozen=True)
class _StartVariable:
    """A binary: job `job` starts under option `option` at grid step `step` on node `node` for `length` steps."""

    job: str
    option: int
    node: str
    step: int
    length: int
    variable: Any


MAX_STEPS = 40  # of the time axis


def solve_time_indexed(
    problem: Problem, *, horizon_s: float, time_limit_s: float = 10.0, seed: int = 0
) -> list[Choice] | None:
    """Returns the options of all jobs in the order of their starts, or None.

    The result is None where the solver found nothing, where the model would be too large, or where the problem has
    gangs over several nodes, which are not modelled.

    horizon_s: the makespan of a known plan.
    """
    if any(option.num_nodes > 1 for job in problem.jobs for option in job.options):
        return None
    per_step = len(problem.nodes) * sum(len(useful_options(job)) for job in problem.jobs)
    num_steps = min(MAX_STEPS, MAX_STARTS // per_step)
    if num_steps < 10:
        return None
    step_s = horizon_s / num_steps
    model = pulp.LpProblem("plan", pulp.LpMinimize)
    last_end = model.add_variable("T", 0)
    model += last_end
    starts: list[_StartVariable] = []
    for job in problem.jobs:
        for node in problem.nodes:
            starts += _starts(model, job, node, step_s, num_steps, first=len(starts))
    by_job = defaultdict(list)
    for start in starts:
        by_job[start.job].append(start)
    if any(not by_job[job.id] for job in problem.jobs):
        return None
    _start_once(model, by_job)
    _fit_on_nodes(model, problem, starts)
    _end_before(model, by_job, last_end)
    _wait_for_others(model, problem, by_job)
    chosen = [start for start, value in zip(starts, _values(model, starts, time_limit_s, seed), strict=True) if value]
    if sorted(start.job for start in chosen) != sorted(by_job):
        return None
    chosen.sort(key=lambda start: (start.step, -start.length, start.job))
    return [(start.job, start.option) for start in chosen]


def _values(model: Any, starts: list[_StartVariable], time_limit_s: float, seed: int) -> list[bool]:
    """Returns the binaries that HiGHS sets, read from its own model, since PuLP has no status for a node limit."""
    solver = pulp.HiGHS(
        msg=False, threads=1, timeLimit=time_limit_s, random_seed=seed, mip_max_nodes=MAX_NODES, gapRel=2e-3
    )
    solver.createAndConfigureSolver(model)
    solver.buildSolverModel(model)
    solver.callSolver(model)
    values = model.solverModel.getSolution().col_value
    if len(values) == 0:
        return [False] * len(starts)
    return [values[start.variable.index] > 0.5 for start in starts]


def _starts(
    model: Any, job: PlanningJob, node: PlanningNode, step_s: float, num_steps: int, *, first: int
) -> list[_StartVariable]:
    starts: list[_StartVariable] = []
    for k in useful_options(job):
        option = job.options[k]
        length = max(1, ceil(option.runtime_s / step_s - 0.5))
        if option.num_devices <= node.num_devices:
            for step in range(num_steps - length + 1):
                variable = model.add_variable(f"x{first + len(starts)}", cat="Binary")
                starts.append(_StartVariable(job.id, k, node.id, step, length, variable))
    return starts


def _start_once(model: Any, by_job: dict[str, list[_StartVariable]]) -> None:
    """sum_{o,n,t} x[j,o,n,t] = 1 for each job j."""
    for starts in by_job.values():
        model += pulp.lpSum(start.variable for start in starts) == 1


def _fit_on_nodes(model: Any, problem: Problem, starts: list[_StartVariable]) -> None:
    """sum_{j,o} gpus[o] sum_{t - length < t' <= t} x[j,o,n,t'] <= G_n for each node n and grid step t."""
    gpus = {(job.id, k): option.num_devices for job in problem.jobs for k, option in enumerate(job.options)}
    running = defaultdict(list)
    for start in starts:
        for step in range(start.step, start.step + start.length):
            running[start.node, step].append(gpus[start.job, start.option] * start.variable)
    size_of = {node.id: node.num_devices for node in problem.nodes}
    for (node, _), terms in running.items():
        model += pulp.lpSum(terms) <= size_of[node]


def _end_before(model: Any, by_job: dict[str, list[_StartVariable]], last_end: Any) -> None:
    """sum_{o,n,t} (t + length[o]) x[j,o,n,t] <= T for each job j."""
    for starts in by_job.values():
        model += pulp.lpSum((start.step + start.length) * start.variable for start in starts) <= last_end


def _wait_for_others(model: Any, problem: Problem, by_job: dict[str, list[_StartVariable]]) -> None:
    """Sum t x[b] >= sum (t + length) x[a] for each job b that waits for a."""
    for job in problem.jobs:
        for other in job.after:
            begins = pulp.lpSum(start.step * start.variable for start in by_job[job.id])
            ends = pulp.lpSum((start.step + start.length) * start.variable for start in by_job[other])
            model += begins >= ends
