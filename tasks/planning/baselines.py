"""What people do without a planner; every plan is compared with these, and none may be worse than the best
of them."""

import heapq
from collections.abc import Callable

from ringmaster.tasks.planning.bounds import useful_options
from ringmaster.tasks.planning.listing import Choice, schedule
from ringmaster.tasks.planning.plan import Plan
from ringmaster.tasks.planning.problem import PlanningJob, Problem


def current_practice(problem: Problem) -> Plan:
    """Each job on all devices of a node, one after another: every job under its largest gang, the fastest of
    those.

    Jobs go to whichever node is free first, in the order of the problem.
    """
    choices = [(job.id, _largest(job)) for job in problem.jobs]
    return Plan(problem.name, schedule(problem, choices), method="current practice")


def even_split(problem: Problem) -> Plan:
    """All devices divided evenly among the jobs: each gets its largest gang of at most its share, at least
    one device."""
    share = max(1, problem.num_devices // len(problem.jobs))
    choices = [(job.id, _within(job, share)) for job in problem.jobs]
    return Plan(problem.name, schedule(problem, choices), method="even split")


def optimus_greedy(problem: Problem) -> Plan:
    """Optimus' rule (Peng et al., EuroSys 2018): the next devices go to the job whose runtime they shorten
    most.

    Every job starts at its smallest gang; while devices are left, the step to a larger gang with the largest
    gain a device is taken. The gangs are then list-scheduled, longest first.
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
    """Each job under the option with the fewest device-seconds, longest first."""
    return _by(problem, lambda job, k: job.options[k].runtime_s * job.options[k].num_devices, "least area")


def longest_first_by_speed(problem: Problem) -> Plan:
    """Each job under its fastest option, longest first."""
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
    """The fastest of a job's options with the most devices on one node, or on the fewest nodes that any
    has."""
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
    """(seconds gained a device, option) of the step from option `k` that gains most, or nothing where none
    gains."""
    now = job.options[k]
    gains = [
        ((now.runtime_s - job.options[i].runtime_s) / (job.options[i].num_devices - now.num_devices), i)
        for i in useful_options(job)
        if job.options[i].num_devices > now.num_devices and job.options[i].runtime_s < now.runtime_s
    ]
    return [max(gains, key=lambda gain: (gain[0], -gain[1]))] if gains else []
