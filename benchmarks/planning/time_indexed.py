"""The joint MILP: option, node and start of every job at once, on a grid of time steps.

Time-indexed models have tight relaxations. Models with "big M" ordering constraints do not: HiGHS was seen to report
overlapping jobs as optimal under them. The grid only decides options and order. List scheduling in that order gives
exact times, so rounding to the grid costs nothing in the plan.
"""

from collections import defaultdict
from math import ceil
from typing import Any

import pulp

from ringmaster.tasks.planning.bounds.job_costs import useful_options
from ringmaster.tasks.planning.plans.list_scheduling import Choice
from ringmaster.tasks.planning.problems.problem import Problem

MAX_STARTS = 2_500  # limit of binaries, above which HiGHS finds nothing useful in a second
MAX_NODES = 20  # of the branch-and-bound tree; a limit in nodes is reproducible, one in seconds is not
MAX_STEPS = 40  # of the time axis


def solve_time_indexed(problem: Problem, *, horizon_s: float, time_limit_s: float = 10.0) -> list[Choice] | None:
    """Returns the options of all jobs in the order of their starts, or None.

    x[j,o,n,t] is 1 where job j starts under option o on node n at grid step t, and length[j,o] the steps that it takes:

        min T   with   sum_{o,n,t} x[j,o,n,t] = 1                                           for each job j
                       sum_{o,n,t} (t + length[j,o]) x[j,o,n,t] <= T                        for each job j
                       sum_{j,o} devices[o] sum_{t - length < t' <= t} x[j,o,n,t'] <= G_n   for each node n and step t
                       sum t x[b,..] >= sum (t + length) x[a,..]                            where job b waits for a

    The result is None where the solver found nothing, where the model would be too large, or where the problem has
    gangs over several nodes, which are not modelled.

    horizon_s: the makespan of a known plan.
    """
    if any(option.num_nodes > 1 for job in problem.jobs for option in job.options):
        return None
    places = [(job, k, node) for job in problem.jobs for node in problem.nodes for k in useful_options(job)]
    num_steps = min(MAX_STEPS, MAX_STARTS // len(places))
    if num_steps < 10:
        return None
    step_s = horizon_s / num_steps
    model = pulp.LpProblem("plan", pulp.LpMinimize)
    last_end = model.add_variable("T", 0)
    model += last_end
    starts: list[tuple[int, int, str, int, Any]] = []  # step, length, job, option, binary
    running = defaultdict(list)  # by node and step, the devices in use
    for job, k, node in places:
        option = job.options[k]
        length = max(1, ceil(option.runtime_s / step_s - 0.5))
        if option.num_devices > node.num_devices:
            continue
        for step in range(num_steps - length + 1):
            variable = model.add_variable(f"x{len(starts)}", cat="Binary")
            starts.append((step, length, job.id, k, variable))
            for during in range(step, step + length):
                running[node, during].append(option.num_devices * variable)
    by_job = defaultdict(list)
    for start in starts:
        by_job[start[2]].append(start)
    if len(by_job) < len(problem.jobs):
        return None
    begins = {job: pulp.lpSum(step * x for step, _, _, _, x in own) for job, own in by_job.items()}
    ends = {job: pulp.lpSum((step + length) * x for step, length, _, _, x in own) for job, own in by_job.items()}
    for own in by_job.values():
        model += pulp.lpSum(x for *_, x in own) == 1
    for (node, _), terms in running.items():
        model += pulp.lpSum(terms) <= node.num_devices
    for end in ends.values():
        model += end <= last_end
    for job in problem.jobs:
        for other in job.after:
            model += begins[job.id] >= ends[other]
    solver = pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit_s, mip_max_nodes=MAX_NODES, gapRel=2e-3)
    solver.createAndConfigureSolver(model)
    solver.buildSolverModel(model)
    highs = model.solverModel
    highs.run()
    values = list(highs.getSolution().col_value)
    chosen = [start for start in starts if values and values[start[-1].index] > 0.5]
    if sorted(job for _, _, job, _, _ in chosen) != sorted(by_job):
        return None
    chosen.sort(key=lambda start: (start[0], -start[1], start[2]))
    return [(job, k) for _, _, job, k, _ in chosen]
