"""Plans by simple rules, used as baselines: no plan of the planner may be worse than the best of them."""

import heapq
from collections.abc import Callable

from ringmaster.tasks.planning.bounds.job_costs import useful_options
from ringmaster.tasks.planning.plans.list_scheduling import Choice, schedule
from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import PlanningJob


def current_practice(problem: Problem) -> Plan:
    """Runs one job after another on each node, every job with its largest gang on one node.

    Of the options of that size, the fastest is taken. A job that cannot use all devices of its node leaves the others
    idle: a script that trains one model after another starts none beside it. Jobs are placed in the order of the
    problem, each on the node that is free first.
    """
    choices = [(job.id, _largest(job)) for job in problem.jobs]
    return Plan(problem.name, schedule(problem, choices, one_a_node=True), method="current practice")


def even_split(problem: Problem) -> Plan:
    """Divides the devices evenly: each job gets its largest gang of at most its share, at least one device."""
    share = max(1, problem.num_devices // len(problem.jobs))
    choices = [(job.id, _within(job, share)) for job in problem.jobs]
    return Plan(problem.name, schedule(problem, choices), method="even split")


def optimus_greedy(problem: Problem) -> Plan:
    """Gives the next devices to the job whose runtime they shorten most, as Optimus does (Peng et al., EuroSys 2018).

    Every job starts with its smallest gang. While devices are left, the step to a larger gang with the largest gain per
    device is taken. The gangs are then list-scheduled, longest first.
    """
    size_of = {job.id: _smallest(job) for job in problem.jobs}
    left = problem.num_devices - sum(job.options[size_of[job.id]].num_devices for job in problem.jobs)
    steps = [(-gain, i, k) for i, job in enumerate(problem.jobs) for gain, k in _best_step(job, size_of[job.id])]
    heapq.heapify(steps)
    while steps and left > 0:
        _, i, k = heapq.heappop(steps)
        job = problem.jobs[i]
        more = job.options[k].num_devices - job.options[size_of[job.id]].num_devices
        if more <= left:
            size_of[job.id], left = k, left - more
            for gain, following in _best_step(job, k):
                heapq.heappush(steps, (-gain, i, following))
    longest_first = sorted(problem.jobs, key=lambda job: (-job.options[size_of[job.id]].runtime_s, job.id))
    choices = [(job.id, size_of[job.id]) for job in longest_first]
    return Plan(problem.name, schedule(problem, choices), method="optimus-style greedy")


def longest_first_by_area(problem: Problem) -> Plan:
    """Schedules each job under the option with the fewest device-seconds, longest first."""
    return _by(problem, lambda job, k: job.options[k].runtime_s * job.options[k].num_devices, "least area")


def longest_first_by_speed(problem: Problem) -> Plan:
    """Schedules each job under its fastest option, longest first."""
    return _by(problem, lambda job, k: job.options[k].runtime_s, "fastest option")


BASELINES: tuple[Callable[[Problem], Plan], ...] = (
    current_practice,
    even_split,
    optimus_greedy,
    longest_first_by_area,
    longest_first_by_speed,
)


def _by(problem: Problem, cost: Callable[[PlanningJob, int], float], method: str) -> Plan:
    best = {job.id: min(useful_options(job), key=lambda k, job=job: cost(job, k)) for job in problem.jobs}  # type: ignore[misc]
    jobs = sorted(problem.jobs, key=lambda job: (-job.options[best[job.id]].runtime_s, job.id))
    choices: list[Choice] = [(job.id, best[job.id]) for job in jobs]
    return Plan(problem.name, schedule(problem, choices), method=method)


def _largest(job: PlanningJob) -> int:
    """Returns the fastest of a job's largest options on one node.

    Where no option fits one node, these are the options on the fewest nodes.
    """
    alone = [k for k, option in enumerate(job.options) if not option.jobs]
    fewest = min(job.options[k].num_nodes for k in alone)
    return max(
        (k for k in alone if job.options[k].num_nodes == fewest),
        key=lambda k: (job.options[k].num_devices, -job.options[k].runtime_s),
    )


def _smallest(job: PlanningJob) -> int:
    return min(useful_options(job), key=lambda k: (job.options[k].num_devices, job.options[k].runtime_s))


def _within(job: PlanningJob, share: int) -> int:
    fits = [k for k, option in enumerate(job.options) if option.num_devices <= share and not option.jobs]
    if not fits:
        return _smallest(job)
    return max(fits, key=lambda k: (job.options[k].num_devices, -job.options[k].runtime_s))


def _best_step(job: PlanningJob, k: int) -> list[tuple[float, int]]:
    """Returns the step from option `k` to the larger gang that gains most, as [(seconds gained per device, option)].

    The list is empty where no step gains.
    """
    now = job.options[k]
    gains = [
        ((now.runtime_s - job.options[i].runtime_s) / (job.options[i].num_devices - now.num_devices), i)
        for i in useful_options(job)
        if job.options[i].num_devices > now.num_devices and job.options[i].runtime_s < now.runtime_s
    ]
    return [max(gains, key=lambda gain: (gain[0], -gain[1]))] if gains else []
