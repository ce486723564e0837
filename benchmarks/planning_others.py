"""Other planners, for comparison on the same problems: simple rules, a time-indexed MILP, and CP-SAT if installed."""

import importlib.util
import math

from tasks.planning import Plan, Problem
from tasks.planning.baselines import current_practice, even_split, optimus_greedy
from tasks.planning.bounds import useful_options
from tasks.planning.listing import schedule
from tasks.planning.time_indexed import solve_time_indexed

CP_SAT_S, MILP_S = 40.0, 40.0


def time_indexed(problem: Problem) -> Plan | None:
    """The joint MILP on a grid of time, within 40 seconds."""
    horizon_s = min(rule(problem).makespan_s for rule in (current_practice, even_split, optimus_greedy))
    choices = solve_time_indexed(problem, horizon_s=horizon_s, time_limit_s=MILP_S)
    return Plan(problem.name, schedule(problem, choices)) if choices else None


def cp_sat(problem: Problem) -> Plan | None:
    """OR-Tools' CP-SAT: an optional interval for each (job, option, node), a cumulative resource a node."""
    if importlib.util.find_spec("ortools") is None:
        return None
    from ortools.sat.python import cp_model

    model, horizon = cp_model.CpModel(), math.ceil(current_practice(problem).makespan_s)
    makespan = model.new_int_var(0, horizon, "makespan")
    on_node = {node.id: ([], []) for node in problem.nodes}
    starts = {}
    for job in problem.jobs:
        taken = []
        for k in useful_options(job):
            option = job.options[k]
            for node in problem.nodes:
                if option.num_nodes > 1 or not option.runs_on(node):
                    continue
                is_taken = model.new_bool_var("")
                start = model.new_int_var(0, horizon, "")
                length = math.ceil(option.runtime_s)
                interval = model.new_optional_fixed_size_interval_var(start, length, is_taken, "")
                model.add(start + length <= makespan).only_enforce_if(is_taken)
                on_node[node.id][0].append(interval)
                on_node[node.id][1].append(option.num_devices)
                taken.append(is_taken)
                starts[job.id, k, node.id] = (start, is_taken)
        model.add_exactly_one(taken)
    for node in problem.nodes:
        model.add_cumulative(*on_node[node.id], node.num_devices)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = CP_SAT_S, 2
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    chosen = [(solver.value(start), job, k) for (job, k, _), (start, taken) in starts.items() if solver.value(taken)]
    return Plan(problem.name, schedule(problem, [(job, k) for _, job, k in sorted(chosen)]))


OTHERS = {
    "current practice": current_practice,
    "even split": even_split,
    "Optimus-style greedy": optimus_greedy,
    "time-indexed MILP, 40 s": time_indexed,
    "CP-SAT, 40 s": cp_sat,
}
