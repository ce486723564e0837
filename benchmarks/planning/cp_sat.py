"""OR-Tools' CP-SAT on a planning problem: JSON on stdin, the choices in the order of their starts on stdout.

It imports OR-Tools alone, so that its environment needs nothing else. `others.cp_sat` writes its input:

    {"horizon": seconds, "jobs": [{"id", "release", "after": [id],
     "starts": [{"option", "node", "length", "devices", "gigabytes"}]}],
     "nodes": {id: {"devices", "gigabytes", "until"}}}
"""

import json
import sys

from ortools.sat.python import cp_model


def choices(problem: dict, *, time_limit_s: float) -> list[tuple[str, int]]:
    """Returns (job, option) by start, or nothing.

    The model has an optional interval for each (job, option, node), and a cumulative resource for the devices and the
    host memory of each node. Jobs begin after their release and the jobs that they wait for, and end while their node
    is there. Durations are whole seconds; exact times come from list scheduling in this order.
    """
    horizon, model = problem["horizon"], cp_model.CpModel()
    makespan = model.new_int_var(0, horizon, "makespan")
    on_node = {node: ([], [], []) for node in problem["nodes"]}  # intervals, devices, gigabytes
    begin = {job["id"]: model.new_int_var(job["release"], horizon, "") for job in problem["jobs"]}
    end = {job["id"]: model.new_int_var(0, horizon, "") for job in problem["jobs"]}
    starts = {}
    for job in problem["jobs"]:
        taken = []
        for way in job["starts"]:
            latest = min(horizon, problem["nodes"][way["node"]]["until"] or horizon) - way["length"]
            if latest < 0:
                continue
            is_taken = model.new_bool_var("")
            start = model.new_int_var(0, latest, "")
            interval = model.new_optional_fixed_size_interval_var(start, way["length"], is_taken, "")
            model.add(begin[job["id"]] == start).only_enforce_if(is_taken)
            model.add(end[job["id"]] == start + way["length"]).only_enforce_if(is_taken)
            for row, value in zip(on_node[way["node"]], (interval, way["devices"], way["gigabytes"]), strict=True):
                row.append(value)
            taken.append(is_taken)
            starts[job["id"], way["option"], way["node"]] = (start, is_taken)
        model.add_exactly_one(taken)
        model.add(end[job["id"]] <= makespan)
        for other in job["after"]:
            model.add(begin[job["id"]] >= end[other])
    for name, node in problem["nodes"].items():
        intervals, devices, gigabytes = on_node[name]
        model.add_cumulative(intervals, devices, node["devices"])
        if node["gigabytes"] is not None:
            model.add_cumulative(intervals, gigabytes, node["gigabytes"])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = time_limit_s, 2
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return []
    chosen = [(solver.value(start), job, k) for (job, k, _), (start, taken) in starts.items() if solver.value(taken)]
    return [(job, k) for _, job, k in sorted(chosen)]


if __name__ == "__main__":
    json.dump(choices(json.load(sys.stdin), time_limit_s=float(sys.argv[1])), sys.stdout)
