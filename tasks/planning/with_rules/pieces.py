"""Preemptive planning under constraints: annealing over lists of pieces of jobs, made exact by retiming.

A list models what the configuration LP does not: release times, deadlines, `after`, nodes with limited availability or
host memory, weights and cost. Its pieces are placed one after another where they can start first, subject to all rules.
A job in one piece is not preempted. A job in several pieces continues under other options on other devices.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ringmaster.tasks.planning.bounds.dominance import useful_options
from ringmaster.tasks.planning.kernels.pieces import anneal_pieces
from ringmaster.tasks.planning.plans.list_scheduling import NoRoomError, Piece, schedule_pieces
from ringmaster.tasks.planning.plans.plan import Segment
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.with_rules.piece_listing import MAX_PIECES, NEVER, Jobs, List, Nodes, Options, Rules

OBJECTIVES = ("makespan", "weighted", "cost")
COOL = 1e-3
HEATS = (0.02, 0.005)  # initial temperatures of the parallel searches, as shares of the objective
PER_END = 0.05  # weight of early ends beside the makespan, which values free device time at the end
PER_SWITCH = 5e-4  # minimum gain of a further piece on one node, as a share of the objective
PLACEMENTS = 24_000_000  # placements of pieces on nodes by one search: about two seconds
TRIALS_PER_JOB = 12_000  # upper limit: small problems need no more
SLICE = 2_000_000  # placements between checks of the time limit


@dataclass(frozen=True)
class PieceSearch:
    """A problem as the arrays of `piece_listing`; rows[o] is the (job, index of its option) of option o."""

    problem: Problem
    unit_s: float
    rows: tuple[tuple[int, int], ...]
    options: Options
    jobs: Jobs
    nodes: Nodes

    @classmethod
    def of(cls, problem: Problem, unit_s: float) -> "PieceSearch":
        """Builds the arrays of a problem, in units of `unit_s` seconds."""
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
        return cls(problem, unit_s, tuple(rows), options, _jobs(problem, unit_s, rows), _nodes(problem, unit_s))

    def searched(
        self,
        start: Sequence[Segment],
        *,
        objective: str,
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
            rules = self._rules(objective, least_s, preemptive, cheaply=objective == "cost" and index == 0)
            own_seed = 4 * seed + 2 * preemptive + index
            found = self._annealed(self._list_of(start), rules, HEATS[index], placements, enough, own_seed, is_over)
            try:
                return schedule_pieces(self.problem, self._pieces_of(found), cheaply=rules.cheaply)
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

    def _rules(self, objective: str, least_s: float, preemptive: bool, *, cheaply: bool) -> Rules:
        return Rules(
            objective=OBJECTIVES.index(objective),
            switch=self.problem.switch_cost_s / self.unit_s,
            least=least_s / self.unit_s,
            per_switch=PER_SWITCH / len(self.problem.nodes),
            per_end=PER_END,
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


def _jobs(problem: Problem, unit_s: float, rows: Sequence[tuple[int, int]]) -> Jobs:
    jobs, flat = problem.jobs, {row: o for o, row in enumerate(rows)}
    index = {job.id: j for j, job in enumerate(jobs)}
    at = [set() if job.running is None else {node for node, _ in job.running.devices} for job in jobs]
    due = [NEVER if job.deadline_s is None else job.deadline_s / unit_s for job in jobs]
    return Jobs(
        release=np.array([job.release_s for job in jobs]) / unit_s,
        due=np.array(due),
        weight=np.array([float(job.weight) for job in jobs]),
        started=np.array([job.started for job in jobs]),
        running=np.array([-1 if job.running is None else flat[j, job.running.option] for j, job in enumerate(jobs)]),
        runs_at=np.array([[node.id in names for node in problem.nodes] for names in at]),
        pinned=np.array([0.0 if job.running is None else job.running.pinned_until_s for job in jobs]) / unit_s,
        waits_from=np.cumsum([0, *(len(job.after) for job in jobs)]),
        waits=np.array([index[other] for job in jobs for other in job.after], np.int64),
    )


def _nodes(problem: Problem, unit_s: float) -> Nodes:
    nodes = problem.nodes
    untils = [NEVER if node.available_until_s is None else node.available_until_s / unit_s for node in nodes]
    top = max(node.price for node in nodes) or 1.0
    return Nodes(
        size=np.array([node.num_devices for node in nodes]),
        until=np.array(untils),
        price=np.array([node.price for node in nodes]) / top / problem.num_devices,
        memory=np.array([NEVER if n.host_memory_bytes is None else float(n.host_memory_bytes) for n in nodes]),
    )
