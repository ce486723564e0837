"""Preemptive planning under constraints: annealing over lists of pieces of jobs, made exact by retiming.

A list models what the configuration LP does not: release times, deadlines, `after`, nodes with limited availability or
host memory, weights and cost. Its pieces are placed one after another where they can start first, subject to all rules.
A job in one piece is not preempted. A job in several pieces continues under other options on other devices.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ringmaster.errors import NoRoomError
from ringmaster.tasks.planning.bounds.job_costs import useful_options
from ringmaster.tasks.planning.kernels.pieces import MAX_PIECES, NEVER, Jobs, List, Nodes, Options, Rules, anneal_pieces
from ringmaster.tasks.planning.objectives import Coefficients, Objective
from ringmaster.tasks.planning.plans.list_scheduling import Piece, schedule_pieces
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.plans.retiming import exactly
from ringmaster.tasks.planning.problems.problem import Problem

COOL = 1e-3
HEATS = (0.02, 0.005)  # initial temperatures of the parallel searches, as shares of the objective
PER_END = 0.05  # weight of early ends beside the makespan, which values free device time at the end
PER_LAST = 1e-3  # weight of the last end beside the other objectives
PER_SWITCH = 5e-4  # minimum gain of a further piece on one node, as a share of the objective
PLACEMENTS = 24_000_000  # placements of pieces on nodes by one search: about two seconds
TRIALS_PER_JOB = 12_000  # upper limit: small problems need no more
SLICE = 2_000_000  # placements between checks of the time limit


def plan_constrained(
    problem: Problem,
    best: Plan,
    *,
    bound_s: float,
    objective: Objective,
    preemptive: bool,
    least_s: float,
    seed: int,
    is_over: Callable[[], bool],
    placements: int,
) -> Plan:
    """Returns the best of a plan and those that list searches find from it.

    The lists first have one piece per job, then several if `preemptive`.

    least_s: minimum length of a segment of a job that has several.
    placements: limit of the placements of pieces on nodes, in each search.
    """
    search = PieceSearch.of(problem, objective, bound_s)
    enough = 1.0 + 1e-6 if objective.only_last_end else 0.0
    for pieces in (False, True) if preemptive else (False,):
        if is_over():
            break
        found = search.searched(
            best.segments,
            least_s=least_s,
            enough=enough,
            preemptive=pieces,
            seed=seed,
            is_over=is_over,
            placements=placements,
        )
        method = "pieces" if pieces else "list annealing"
        plans = [exactly(problem, segments, objective=objective, least_s=least_s) for segments in found]
        best = min(
            [best, *(replace(best, segments=s, method=method) for s in plans if s)],
            key=lambda p: objective.rank(p, problem),
        )
    return best


@dataclass(frozen=True)
class PieceSearch:
    """A problem as the arrays of `kernels.pieces`; rows[o] is the (job, index of its option) of option o.

    coefficients: those of the objective.
    """

    problem: Problem
    objective: Objective
    coefficients: Coefficients
    unit_s: float
    rows: tuple[tuple[int, int], ...]
    options: Options
    jobs: Jobs
    nodes: Nodes

    @classmethod
    def of(cls, problem: Problem, objective: Objective, unit_s: float) -> "PieceSearch":
        """Builds the arrays of a problem, in units of `unit_s` seconds."""
        coefficients = objective.coefficients(problem)
        rows = [(j, k) for j, job in enumerate(problem.jobs) for k in _choices(problem, j)]
        chosen = [problem.jobs[j].options[k] for j, k in rows]
        counts = np.bincount([j for j, _ in rows], minlength=len(problem.jobs))
        last = np.cumsum(counts)
        options = Options(
            first=last - counts,
            last=last,
            slot=np.array([o.slot for o in chosen]),
            spread=np.array([o.num_nodes for o in chosen]),
            runtime=np.array([o.runtime_s for o in chosen]) / unit_s,
            startup=np.array([o.startup_s for o in chosen]) / unit_s,
            save=np.array([o.save_s for o in chosen]) / unit_s,
            evaluate=np.array([o.evaluate_s for o in chosen]) / unit_s,
            memory=np.array([float(o.host_memory_bytes) for o in chosen]),
            runs_on=np.array([[o.runs_on(node) for node in problem.nodes] for o in chosen]),
        )
        jobs, nodes = _jobs(problem, coefficients, unit_s, rows), _nodes(problem, coefficients, unit_s)
        return cls(problem, objective, coefficients, unit_s, tuple(rows), options, jobs, nodes)

    def searched(
        self,
        start: Sequence[Segment],
        *,
        least_s: float,
        enough: float,
        preemptive: bool,
        seed: int,
        is_over: Callable[[], bool],
        placements: int = PLACEMENTS,
    ) -> list[tuple[Segment, ...]]:
        """Returns the plans of two searches that start from a plan and run in parallel.

        A search that finds no plan is left out.

        least_s: minimum length of a segment of a job that has several.
        enough: the objective at which a search stops, in units.
        """

        def search(index: int) -> tuple[Segment, ...] | None:
            prices = self.coefficients.prices if index == 0 else None
            rules = self._rules(least_s, preemptive, cheaply=bool(prices))
            own_seed = 4 * seed + 2 * preemptive + index
            found = self._annealed(self._list_of(start), rules, HEATS[index], placements, enough, own_seed, is_over)
            try:
                return schedule_pieces(self.problem, self._pieces_of(found), prices=prices)
            except NoRoomError:
                return None

        with ThreadPoolExecutor(2) as pool:
            return [plan for plan in pool.map(search, range(len(HEATS))) if plan is not None]

    def _annealed(
        self,
        now: List,
        rules: Rules,
        heat: float,
        placements: int,
        enough: float,
        seed: int,
        is_over: Callable[[], bool],
    ) -> List:
        best = List(*(array.copy() for array in now))
        clock, energies = np.zeros(1, np.int64), np.zeros(2)
        per_trial = len(self.problem.jobs) * (4 + len(self.problem.nodes))
        most = TRIALS_PER_JOB * len(self.problem.jobs)
        steps, in_slice = min(most, max(200, placements // per_trial)), max(50, SLICE // per_trial)
        for k, begin in enumerate(range(0, steps, in_slice)):
            until = min(steps, begin + in_slice)
            is_done = anneal_pieces(
                now, best, clock, energies, self.options, self.jobs, self.nodes, rules,
                heat, COOL, steps, until, enough, 1_000_003 * seed + k,
            )  # fmt: skip
            if is_done or is_over():
                break
        return best

    def _rules(self, least_s: float, preemptive: bool, *, cheaply: bool) -> Rules:
        of, scale = self.coefficients, _scale(self.problem, self.coefficients)
        return Rules(
            scale=scale,
            per_last=of.largest / scale or PER_LAST,
            per_end=PER_END if self.objective.only_last_end else 0.0,
            switch=self.problem.switch_cost_s / self.unit_s,
            least=least_s / self.unit_s,
            per_switch=PER_SWITCH / len(self.problem.nodes),
            cheaply=cheaply,
            most_pieces=MAX_PIECES if preemptive else 1,
        )

    def _list_of(self, segments: Sequence[Segment]) -> List:
        """Returns the list that corresponds to a plan, by the starts of its segments."""
        num_jobs = len(self.problem.jobs)
        index = {job.id: j for j, job in enumerate(self.problem.jobs)}
        flat = {row: o for o, row in enumerate(self.rows)}
        now = List(
            order=np.zeros(num_jobs * MAX_PIECES, np.int64),
            length=np.zeros(1, np.int64),
            count=np.zeros(num_jobs, np.int64),
            option=np.zeros((num_jobs, MAX_PIECES), np.int64),
            share=np.zeros((num_jobs, MAX_PIECES)),
        )
        for segment in sorted(segments, key=lambda s: (s.start_s, s.job)):
            j = index[segment.job]
            o = flat.get((j, segment.option), -1)
            i = int(now.count[j])
            if i and (o < 0 or i == MAX_PIECES or now.option[j, i - 1] == o):
                now.share[j, i - 1] += segment.work
                continue
            now.option[j, i], now.share[j, i] = o if o >= 0 else self.options.first[j], segment.work
            now.order[now.length[0]] = j
            now.count[j] += 1
            now.length[0] += 1
        return now

    def _pieces_of(self, found: List) -> list[Piece]:
        placed, pieces = [0] * len(self.problem.jobs), []
        for j in map(int, found.order[: found.length[0]]):
            i = placed[j]
            placed[j] += 1
            pieces.append((self.problem.jobs[j].id, self.rows[found.option[j, i]][1], float(found.share[j, i])))
        return pieces


def _choices(problem: Problem, j: int) -> list[int]:
    """Returns the options that a job's pieces may have: its useful ones without fused groups, and the one that runs."""
    job = problem.jobs[j]
    running = () if job.running is None else (job.running.option,)
    return sorted({k for k in (*useful_options(job), *running) if not job.options[k].jobs})


def _scale(problem: Problem, of: Coefficients) -> float:
    """Returns the value of a unit of time in which all jobs wait and all devices are held, to divide values by."""
    return of.per_second + max(of.prices.values(), default=0.0) * problem.num_devices or 1.0


def _jobs(problem: Problem, of: Coefficients, unit_s: float, rows: Sequence[tuple[int, int]]) -> Jobs:
    jobs, flat = problem.jobs, {row: o for o, row in enumerate(rows)}
    index = {job.id: j for j, job in enumerate(jobs)}
    at = [set() if job.running is None else {node for node, _ in job.running.devices} for job in jobs]
    due = [NEVER if job.deadline_s is None else job.deadline_s / unit_s for job in jobs]
    return Jobs(
        release=np.array([job.release_s for job in jobs]) / unit_s,
        due=np.array(due),
        weight=np.array([float(of.ends.get(job.id, 0.0)) for job in jobs]),
        latest=np.array([of.latest.get(job.id, 0.0) / of.largest if of.largest else 1.0 for job in jobs]),
        started=np.array([job.started for job in jobs]),
        running=np.array([-1 if job.running is None else flat[j, job.running.option] for j, job in enumerate(jobs)]),
        runs_at=np.array([[node.id in names for node in problem.nodes] for names in at]),
        pinned=np.array([0.0 if job.running is None else job.running.pinned_until_s for job in jobs]) / unit_s,
        waits_from=np.cumsum([0, *(len(job.after) for job in jobs)]),
        waits=np.array([index[other] for job in jobs for other in job.after], np.int64),
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
