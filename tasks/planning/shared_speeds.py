"""Plans that share the devices among all jobs, for objectives that count every end: a second for a thousand jobs.

A linear program chooses for each job j an option o, or none, so that the sum of

    weight_j sqrt(seconds_jo / seconds of its fastest option)          `WAITS` instead of the root for a job that waits

is least on the devices of each type. With the root, each further device of a gang gains less, so that devices go to the
jobs that use them best, and few are wasted that jobs yet to come would need. It is the fitness of Sia (Jayaram
Subramanya et al., SOSP 2023) with p = -1/2, by the fastest option. Jobs that wait follow by the least seconds x
(1 + jobs / devices x devices of the option): what a job costs itself and, by its devices, the others. Options that cost
more than `MAX_COST` times the least are left out.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ringmaster.tasks.planning.bounds.job_costs import useful_options, whole_of
from ringmaster.tasks.planning.bounds.linear_program import LinearProgram
from ringmaster.tasks.planning.plans.list_scheduling import Choice, schedule
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.problems.problem import Problem

WAITS = math.sqrt(30.0)
MAX_COST = 2.0  # of an option, over that of the job's cheapest one on devices of that type
MIN_VALUE = 1e-6  # of a column that is not zero
METHOD = "shared speeds"


def plan_by_speeds(problem: Problem, weights: Mapping[str, float]) -> Plan:
    """Returns a plan in which as many jobs as possible run from the begin. Raises NoRoomError where there is none.

    weights: what each second adds by which a job ends later; jobs without one run last.
    """
    jobs, crowd = {job.id: job for job in problem.jobs}, len(problem.jobs) / problem.num_devices
    seconds, costs = dict[Choice, float](), dict[Choice, float]()
    options: dict[str, list[int]] = {}
    for job in problem.jobs:
        own = {k: whole_of(job, k, problem.switch_cost_s) for k in useful_options(job)}
        cost = {k: whole_s * (1.0 + crowd * job.options[k].num_devices) for k, whole_s in own.items()}
        least: dict[str, float] = {}  # by type of devices, of which slow ones are not to stay idle
        for k, each in cost.items():
            kind = job.options[k].device_type
            least[kind] = min(each, least.get(kind, math.inf))
        kept = {k for k, each in cost.items() if each <= MAX_COST * least[job.options[k].device_type]}
        options[job.id] = sorted(kept | ({job.running.option} & own.keys() if job.running is not None else set()))
        seconds |= {(job.id, k): own[k] for k in options[job.id]}
        costs |= {(job.id, k): cost[k] for k in options[job.id]}
    chosen = _chosen_now(problem, weights, options, seconds)
    later = [min((costs[id, k], id, k) for k in own) for id, own in options.items() if id not in chosen]
    now = sorted(chosen.items(), key=lambda row: (-jobs[row[0]].options[row[1]].num_devices, row[0]))
    later.sort(key=lambda row: (row[0] / max(weights.get(row[1], 0.0), MIN_VALUE), row[1]))
    return Plan(problem.name, schedule(problem, [*now, *((id, k) for _, id, k in later)]), method=METHOD)


def _chosen_now(
    problem: Problem,
    weights: Mapping[str, float],
    options: Mapping[str, Sequence[int]],
    seconds: Mapping[Choice, float],
) -> dict[str, int]:
    """Returns the options under which jobs run from the begin; of few jobs, the program's values are fractions."""
    lp, free = LinearProgram(), Counter[str]()
    for node in problem.nodes:
        free[node.device_type] += node.num_devices
    devices = {kind: lp.row(-math.inf, float(count)) for kind, count in free.items()}
    columns: list[tuple[float, str, int, str]] = []
    heaviest = max(weights.values(), default=1.0) or 1.0
    for job in problem.jobs:
        if job.after or job.release_s or not weights.get(job.id):
            continue
        own, fastest_s = lp.row(-math.inf, 1.0), min(seconds[job.id, k] for k in options[job.id])
        for k in options[job.id]:
            option = job.options[k]
            gain = weights[job.id] / heaviest * (WAITS - math.sqrt(seconds[job.id, k] / fastest_s))
            for kind in problem.types_of(option):
                lp.column([(own, 1.0), (devices[kind], float(option.num_devices))], cost=-gain)
                columns.append((gain, job.id, k, kind))
    values = lp.values() if columns else []
    ranked = sorted(zip(values, columns, strict=True), key=lambda row: -row[0])
    chosen: dict[str, tuple[float, int, str, int]] = {}

    def take(gain: float, id: str, k: int, kind: str, *, may_grow: bool) -> None:
        before_gain, _, before_kind, held = chosen.get(id, (0.0, k, kind, 0))
        size = problem.job(id).options[k].num_devices
        room = free[kind] + (held if kind == before_kind else 0)
        if gain > before_gain and size <= room and (may_grow or id not in chosen):
            free[before_kind] += held
            free[kind] -= size
            chosen[id] = gain, k, kind, size

    for value, column in ranked:
        if value > MIN_VALUE:
            take(*column, may_grow=False)
    for column in sorted(columns, key=lambda column: -column[0]):  # what the program's fractions leave idle
        take(*column, may_grow=True)
    return {id: k for id, (_, k, _, _) in chosen.items()}
