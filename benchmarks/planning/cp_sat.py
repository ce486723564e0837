"""OR-Tools' CP-SAT on a planning problem: JSON on stdin, the choices in the order of their starts on stdout."""

import json
import math
import sys

from ortools.sat.python import cp_model

from ringmaster.tasks.planning import Problem
from ringmaster.tasks.planning.bounds.dominance import useful_options
from ringmaster.tasks.planning.plans.baselines import current_practice, even_split, optimus_greedy


def choices(problem: Problem, *, time_limit_s: float) -> list[tuple[str, int]]:
    """Returns (job, option) by start, or nothing.

    The model has an optional interval for each (job, option, node), and a cumulative resource for each node. Durations
    are rounded up to whole seconds; exact times come from list scheduling in this order.
    """
    shortest_s = min(rule(problem).makespan_s for rule in (current_practice, even_split, optimus_greedy))
    horizon = math.ceil(shortest_s) + len(problem.jobs)
    model = cp_model.CpModel()
    makespan = model.new_int_var(0, horizon, "makespan")
    on_node = {node.id: ([], []) for node in problem.nodes}
    starts = {}
    for job in problem.jobs:
        taken = []
        for k in useful_options(job):
            option = job.options[k]
            length = math.ceil(option.runtime_s)
            for node in problem.nodes:
                if option.num_nodes > 1 or not option.runs_on(node) or length > horizon:
                    continue
                is_taken = model.new_bool_var("")
                start = model.new_int_var(0, horizon - length, "")
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
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = time_limit_s, 2
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return []
    chosen = [(solver.value(start), job, k) for (job, k, _), (start, taken) in starts.items() if solver.value(taken)]
    return [(job, k) for _, job, k in sorted(chosen)]


if __name__ == "__main__":
    json.dump(choices(Problem.from_json(json.load(sys.stdin)), time_limit_s=float(sys.argv[1])), sys.stdout)
