"""Plans under constraints by annealing over lists of jobs, made exact by retiming.

A list models what the configuration LP does not: release times, deadlines, `after`, nodes with limited availability or
host memory, quotas, weights and cost. Its jobs are placed one after another where they can start first, subject to all
rules, each in one piece. Lists of several pieces per job improved no plan that is measured by more than 1 %.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ringmaster.errors import NoRoomError
from ringmaster.tasks.planning.bounds.job_costs import useful_options
from ringmaster.tasks.planning.kernels.lists import NEVER, Jobs, Nodes, Options, Rules, anneal_lists
from ringmaster.tasks.planning.objectives import Coefficients, Objective
from ringmaster.tasks.planning.plans.list_scheduling import schedule
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.plans.retiming import exactly
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.work import CORES, WorkBudget

IntArray = NDArray[np.int64]
COOL = 1e-3
HEATS = (0.02, 0.005)  # initial temperatures of the parallel searches, as shares of the objective
PER_END = 0.05  # weight of early ends relative to that of the makespan, which values free device time at the end
PER_LAST = 1e-3  # weight of the last end relative to that of the other objectives
PLACEMENTS = 24_000_000  # placements of jobs on nodes by one search: about two seconds
PER_PLACEMENT_S = 8e-8  # work of a placement
MOVES_PER_JOB = 12_000  # upper limit: small problems need no more
SLICE = 2_000_000  # placements between checks of the time limit


def plan_by_lists(
    problem: Problem,
    best: Plan,
    *,
    bound_s: float,
    objective: Objective,
    least_s: float,
    seed: int,
    work: WorkBudget,
) -> Plan:
    """Returns the best of a plan and those that list searches find from it.

    bound_s: a lower bound on the last end, the unit of all times.
    least_s: minimum length of a segment of a job that has several.
    work: limits the searches.
    """
    search = ListSearch(problem, objective, bound_s)
    enough = 1.0 + 1e-6 if objective.only_last_end else 0.0
    placements = int(min(PLACEMENTS, work.left_s / PER_PLACEMENT_S))

    def annealed(index: int) -> tuple[Segment, ...]:
        try:
            segments = search.annealed(
                best.segments, index, enough=enough, seed=4 * seed + index, work=work, placements=placements
            )
        except NoRoomError:
            return ()
        return exactly(problem, segments, objective=objective, least_s=least_s)

    with ThreadPoolExecutor(len(HEATS)) as pool:
        plans = [replace(best, segments=s, method="list annealing") for s in pool.map(annealed, range(len(HEATS))) if s]
    work.charge(placements * PER_PLACEMENT_S * len(HEATS) / CORES)
    return min([best, *plans], key=lambda plan: objective.rank(plan, problem))


class ListSearch:
    """A problem as the arrays of `kernels.lists`, in units of `unit_s`; rows[o] is the (job, option) of option o."""

    def __init__(self, problem: Problem, objective: Objective, unit_s: float) -> None:
        self.problem, self.objective, self.unit_s = problem, objective, unit_s
        self.coefficients = objective.coefficients(problem)
        self.rows = [(j, k) for j in range(len(problem.jobs)) for k in _choices(problem, j)]
        chosen = [problem.jobs[j].options[k] for j, k in self.rows]
        counts = np.bincount([j for j, _ in self.rows], minlength=len(problem.jobs))
        last = np.cumsum(counts)
        alike = {(n.device_type, n.num_devices, n.host_memory_bytes): n for n in problem.nodes}  # nodes of one kind
        kinds = {key: i for i, key in enumerate(alike)}
        kind_of = [kinds[n.device_type, n.num_devices, n.host_memory_bytes] for n in problem.nodes]
        fits = np.array([[o.runs_on(node) for node in alike.values()] for o in chosen])
        self.options = Options(
            first=last - counts,
            last=last,
            slot=np.array([o.slot for o in chosen]),
            spread=np.array([o.num_nodes for o in chosen]),
            runtime=np.array([o.runtime_s for o in chosen]) / unit_s,
            startup=np.array([o.startup_s for o in chosen]) / unit_s,
            save=np.array([o.save_s for o in chosen]) / unit_s,
            evaluate=np.array([o.evaluate_s for o in chosen]) / unit_s,
            memory=np.array([float(o.host_memory_bytes) for o in chosen]),
            runs_on=np.ascontiguousarray(fits[:, kind_of]),
        )
        self.jobs = _jobs(problem, self.coefficients, unit_s, self.rows)
        self.nodes = _nodes(problem, self.coefficients, unit_s)

    def annealed(
        self,
        start: Sequence[Segment],
        index: int,
        *,
        enough: float,
        seed: int,
        work: WorkBudget,
        placements: int,
    ) -> tuple[Segment, ...]:
        """Returns the plan of the search with that index, from a plan. Raises NoRoomError where it is infeasible.

        enough: the objective at which the search stops, in units.
        work: ends the search when it is late.
        placements: limit of the placements of jobs on nodes.
        """
        of, scale = self.coefficients, _scale(self.problem, self.coefficients)
        prices = of.prices if index == 0 else {}
        rules = Rules(
            scale=scale,
            per_last=of.largest / scale or PER_LAST,
            per_end=PER_END if self.objective.only_last_end else 0.0,
            switch=self.problem.switch_cost_s / self.unit_s,
            cheaply=bool(prices),
            quotas=np.array([*self.problem.limits.values()], np.int64),
        )
        order, option = self._list_of(start)
        best_order, best_option = order.copy(), option.copy()
        clock, energies = np.zeros(1, np.int64), np.zeros(2)
        per_trial = len(self.problem.jobs) * (4 + len(self.problem.nodes))
        most = MOVES_PER_JOB * len(self.problem.jobs)
        steps, in_slice = min(most, max(200, placements // per_trial)), max(50, SLICE // per_trial)
        for k, begin in enumerate(range(0, steps, in_slice)):
            is_done = anneal_lists(
                order, option, best_order, best_option, clock, energies, self.options, self.jobs, self.nodes, rules,
                HEATS[index], COOL, steps, min(steps, begin + in_slice), enough, 1_000_003 * seed + k,
            )  # fmt: skip
            if is_done or work.is_late():
                break
        choices = [(self.problem.jobs[j].id, self.rows[best_option[j]][1]) for j in best_order]
        return schedule(self.problem, choices, prices=prices or None)

    def _list_of(self, segments: Sequence[Segment]) -> tuple[IntArray, IntArray]:
        """Returns the list that corresponds to a plan: by the starts of jobs, each under the option of most work."""
        index = {job.id: j for j, job in enumerate(self.problem.jobs)}
        flat = {row: o for o, row in enumerate(self.rows)}
        starts = sorted(segments, key=lambda s: (s.start_s, s.job))
        order = np.array([index[job] for job in dict.fromkeys(s.job for s in starts)])
        option = self.options.first.copy()
        for segment in sorted(segments, key=lambda s: s.work):
            j = index[segment.job]
            option[j] = flat.get((j, segment.option), option[j])
        return order, option


def _choices(problem: Problem, j: int) -> list[int]:
    """Returns the options that a job may have: its useful ones within its quota, without groups.

    A pinned job has the one that runs alone.
    """
    job = problem.jobs[j]
    if job.running is not None and job.running.pinned_until_s > 0.0:
        return [job.running.option]
    most = problem.limits.get(job.user, problem.num_devices)
    return [k for k in useful_options(job) if job.options[k].num_devices <= most]


def _scale(problem: Problem, of: Coefficients) -> float:
    """Returns the value of a unit of time in which all jobs wait and all devices are held, to divide values by."""
    return of.per_second + max(of.prices.values(), default=0.0) * problem.num_devices or 1.0


def _jobs(problem: Problem, of: Coefficients, unit_s: float, rows: Sequence[tuple[int, int]]) -> Jobs:
    jobs, flat = problem.jobs, {row: o for o, row in enumerate(rows)}
    index = {job.id: j for j, job in enumerate(jobs)}
    at = [set() if job.running is None else {node for node, _ in job.running.devices} for job in jobs]
    due = [NEVER if job.deadline_s is None else job.deadline_s / unit_s for job in jobs]
    quotas = {user: u for u, user in enumerate(problem.limits)}
    return Jobs(
        release=np.array([job.release_s for job in jobs]) / unit_s,
        due=np.array(due),
        weight=np.array([float(of.ends.get(job.id, 0.0)) for job in jobs]),
        latest=np.array([of.latest.get(job.id, 0.0) / of.largest if of.largest else 1.0 for job in jobs]),
        started=np.array([job.started for job in jobs]),
        running=np.array(
            [-1 if job.running is None else flat.get((j, job.running.option), -1) for j, job in enumerate(jobs)]
        ),
        runs_at=np.array([[node.id in names for node in problem.nodes] for names in at]),
        waits_from=np.cumsum([0, *(len(job.after) for job in jobs)]),
        waits=np.array([index[other] for job in jobs for other in job.after], np.int64),
        quota=np.array([quotas.get(job.user, -1) for job in jobs]),
    )


def _nodes(problem: Problem, of: Coefficients, unit_s: float) -> Nodes:
    nodes = problem.nodes
    untils = [NEVER if node.available_until_s is None else node.available_until_s / unit_s for node in nodes]
    return Nodes(
        size=np.array([node.num_devices for node in nodes]),
        until=np.array(untils),
        price=np.array([of.prices.get(node.id, 0.0) for node in nodes]) / _scale(problem, of),
        memory=np.array([NEVER if n.host_memory_bytes is None else float(n.host_memory_bytes) for n in nodes]),
    )
