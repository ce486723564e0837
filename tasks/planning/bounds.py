"""What no plan can beat: the pattern LP with the prices that prove it, and its MILP for plans without
preemption.

A *pattern* is a way to divide one node into slots, such as 5 + 3 of 8 devices. Any plan, seen over its whole
length, gives each (job, option) some seconds and uses each pattern for some seconds of each node: the
pattern LP asks only that these seconds agree, and forgets when they are. It is small, and within a percent
of what plans reach. Patterns are not
listed but walked: a node of G devices is a line of places 0..G, a slot of s devices a step from v to v + s,
and a pattern a walk from 0 to G, so that nodes of any size cost G steps a slot size instead of one column a
pattern.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from tasks.planning.certificates import certified_bound, shortest_s, whole_of
from tasks.planning.plan import Certificate
from tasks.planning.problem import Option, PlanningJob, Problem


@dataclass(frozen=True)
class Bound:
    """Seconds that no plan beats; `certificate` proves it, or else `proof` names what does."""

    seconds: float
    certificate: Certificate | None
    proof: str


def useful_options(job: PlanningJob) -> tuple[int, ...]:
    """Indices of the options that no other beats: none as fast with as few devices, spread in the same
    way."""
    best: dict[tuple[object, ...], int] = {}
    for k, option in enumerate(job.options):
        key = (option.num_nodes, option.slot, *_besides(option))
        if key not in best or option.runtime_s < job.options[best[key]].runtime_s:
            best[key] = k
    return tuple(k for k in sorted(best.values()) if not _is_beaten(job.options[k], job, best))


def _besides(option: Option) -> tuple[object, ...]:
    """What must be equal for two options to differ in speed alone."""
    return (option.device_type, option.startup_s, option.save_s, option.evaluate_s, option.host_memory_bytes)


def _is_beaten(option: Option, job: PlanningJob, best: dict[tuple[object, ...], int]) -> bool:
    """Whether a smaller gang on as many nodes, or one of like slots on fewer nodes, is at least as fast."""
    return any(
        (other.num_nodes, other.slot) != (option.num_nodes, option.slot)
        and other.num_nodes <= option.num_nodes
        and other.slot <= option.slot
        and other.runtime_s <= option.runtime_s
        and _besides(other) == _besides(option)
        for other in (job.options[k] for k in best.values())
    )


def preemptive_bound(problem: Problem) -> Bound:
    """The best bound on any plan: the pattern LP's with its certificate, or the longest chain of `after`."""
    candidates = [_simple_certificate(problem)]
    model = _PatternModel(problem)
    if model.solve() and (certificate := model.certificate()):
        candidates.append(certificate)
    # The prices prove the bound by themselves, whatever the solver said of them.
    seconds, best = max(((certified_bound(c, problem), i) for i, c in enumerate(candidates)))
    chain_s = critical_path_s(problem)
    if chain_s > seconds:
        return Bound(chain_s, None, "critical path")
    return Bound(seconds, candidates[best], "dual prices")


def rigid_bound(problem: Problem, *, time_limit_s: float) -> tuple[float, dict[str, int] | None]:
    """Seconds that no plan *without preemption* beats, and the options that the relaxation chose, if it
    found any."""
    model = _PatternModel(problem, integral=True)
    model.solve(time_limit_s=time_limit_s)
    return max(0.0, model.bound()), model.chosen_options()


def critical_path_s(problem: Problem) -> float:
    """The longest chain of jobs that wait for each other, each under its fastest option."""
    return max(earliest_ends_s(problem).values())


def earliest_ends_s(problem: Problem) -> dict[str, float]:
    """When each job could end if it had all devices for itself: its release, the jobs that it waits for, its time."""
    ends: dict[str, float] = {}
    for job in in_order(problem):
        start_s = max([job.release_s, *(ends[other] for other in job.after)])
        ends[job.id] = start_s + shortest_s(job, problem.switch_cost_s)
    return ends


def in_order(problem: Problem) -> Iterator[PlanningJob]:
    """The jobs, each behind those that it waits for."""
    done: set[str] = set()
    left = list(problem.jobs)
    while left:
        ready = [job for job in left if all(other in done for other in job.after)]
        yield from ready
        done |= {job.id for job in ready}
        left = [job for job in left if job.id not in done]


def by_area(problem: Problem) -> Certificate:
    """Prices that need no solver: a device is worth 1 a second, a job's own time nothing."""
    slots = {option.slot for job in problem.jobs for option in job.options}
    return Certificate({slot: float(slot) for slot in sorted(slots)})


def _simple_certificate(problem: Problem) -> Certificate:
    """Prices by area, or all on the longest job."""
    longest = max(problem.jobs, key=lambda job: shortest_s(job, problem.switch_cost_s))
    by_length = Certificate(job_prices={longest.id: 1.0})
    return max(by_area(problem), by_length, key=lambda certificate: certified_bound(certificate, problem))


class _PatternModel:
    """The pattern LP in HiGHS; times are in units of `unit_s`, so that its tolerances mean the same for all
    problems.

    Columns: T; y[j,o] the time of job j under option o; f[g,v,s] the time that nodes of size g step from
    place v by s devices (a slot, or 1 for a device left idle). Rows:

        work   sum_o y[j,o] / whole[j,o]  >= 1                                           for each job j
        time   sum_o y[j,o] - T             <= 0                                         for each job j
        slots  sum_{j,o of slot s} nodes[o] y[j,o] - sum_{g,v} f[g,v,s]  <= 0            for each slot size s
        walk   sum_s f[g,v,s] - sum_s f[g,v-s,s] = (nodes[g] T if v = 0 else 0)          for each size g,
        place v < g

    whole[j,o] are the seconds of all of job j under option o in one segment: what the prices prove where segments are
    several, `certified_bound` says. With `integral`, y[j,o] is whole[j,o] times a yes or no: the relaxation of every
    plan without preemption.
    """

    def __init__(self, problem: Problem, *, integral: bool = False) -> None:
        import highspy
        import numpy as np

        self.problem = problem
        self.options = [
            (j, k, kind)
            for j, job in enumerate(problem.jobs)
            for k in useful_options(job)
            for kind in problem.device_types
            if job.options[k].device_type in ("", kind)
        ]
        self.slots = tuple(sorted({(kind, problem.jobs[j].options[k].slot) for j, k, kind in self.options}))
        sizes = Counter((node.device_type, node.num_devices) for node in problem.nodes)
        self.unit_s = certified_bound(_simple_certificate(problem), problem)
        num_jobs, row_of = len(problem.jobs), {slot: i for i, slot in enumerate(self.slots)}
        first_slot, first_walk = 2 * num_jobs, 2 * num_jobs + len(self.slots)
        walk_of = dict(zip(sizes, accumulate((size for _, size in sizes), initial=first_walk), strict=False))
        num_places = sum(size for _, size in sizes)

        columns: list[list[tuple[int, float]]] = [
            [(num_jobs + j, -1.0) for j in range(num_jobs)]
            + [(walk_of[size], -float(count)) for size, count in sizes.items()]
        ]
        for j, k, kind in self.options:
            option = problem.jobs[j].options[k]
            runtime = whole_of(problem.jobs[j], k, problem.switch_cost_s) / self.unit_s
            scale = runtime if integral else 1.0
            slot_row = first_slot + row_of[kind, option.slot]
            columns.append([(j, scale / runtime), (num_jobs + j, scale), (slot_row, scale * option.num_nodes)])
        for kind, size in sizes:
            slots = tuple(slot for own, slot in self.slots if own == kind)
            for place, slot in _steps(size, slots):
                column = [(first_slot + row_of[kind, slot], -1.0)] if slot else []
                column.append((walk_of[kind, size] + place, 1.0))
                if (reached := place + max(1, slot)) < size:
                    column.append((walk_of[kind, size] + reached, -1.0))
                columns.append(column)

        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(columns), first_walk + num_places
        lp.col_cost_ = np.array([1.0] + [0.0] * (len(columns) - 1))
        lp.col_lower_ = np.zeros(len(columns))
        upper = np.full(len(columns), highspy.kHighsInf)
        if integral:
            upper[1 : 1 + len(self.options)] = 1.0
            integer = [highspy.HighsVarType.kInteger] * len(self.options)
            continuous = highspy.HighsVarType.kContinuous
            lp.integrality_ = [continuous, *integer, *[continuous] * (len(columns) - 1 - len(integer))]
        lp.col_upper_ = upper
        free = [-highspy.kHighsInf] * (first_walk - num_jobs)
        lp.row_lower_ = np.array([1.0] * num_jobs + free + [0.0] * num_places)
        lp.row_upper_ = np.array([highspy.kHighsInf] * num_jobs + [0.0] * (lp.num_row_ - num_jobs))
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(column) for column in columns)], dtype=np.int32)
        lp.a_matrix_.index_ = np.array([row for column in columns for row, _ in column], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([value for column in columns for _, value in column])
        self.highs = highspy.Highs()
        for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
            self.highs.setOptionValue(name, value)
        self.highs.passModel(lp)
        self.first_slot, self.integral = first_slot, integral

    def solve(self, *, time_limit_s: float = 60.0) -> bool:
        """Whether the solver ended with an optimum."""
        import highspy

        self.highs.setOptionValue("time_limit", max(0.01, time_limit_s))
        if self.integral:
            self.highs.setOptionValue("mip_rel_gap", 1e-5)
            self.highs.setOptionValue("mip_max_nodes", 3000)
        self.highs.run()
        return bool(self.highs.getModelStatus() == highspy.HighsModelStatus.kOptimal)

    def certificate(self) -> Certificate | None:
        """The LP's dual prices; small negative ones, from rounding, become 0."""
        duals = self.highs.getSolution().row_dual
        num_jobs = len(self.problem.jobs)
        if len(duals) == 0 or not all(math.isfinite(value) for value in duals):
            return None
        slot_duals = duals[self.first_slot : self.first_slot + len(self.slots)]
        typed: dict[str, dict[int, float]] = {kind: {} for kind in self.problem.device_types}
        for (kind, slot), value in zip(self.slots, slot_duals, strict=True):
            typed[kind][slot] = max(0.0, -float(value))
        duals_of_jobs = zip(self.problem.jobs, duals[num_jobs : 2 * num_jobs], strict=True)
        own = {job.id: -float(value) for job, value in duals_of_jobs if value < -1e-12}
        if len(typed) == 1:
            return Certificate(next(iter(typed.values())), own)
        return Certificate(job_prices=own, typed_prices=typed)

    def bound(self) -> float:
        """The MILP's own dual bound in seconds, less the solver's tolerance; 0 where it proved nothing."""
        value = self.highs.getInfo().mip_dual_bound * (1 - 2e-6) * self.unit_s
        return value if math.isfinite(value) else 0.0

    def chosen_options(self) -> dict[str, int] | None:
        """The option of each job in the incumbent, or None without one that chooses exactly one each."""
        values = self.highs.getSolution().col_value
        if len(values) == 0:
            return None
        picked = [pair for i, pair in enumerate(self.options) if values[1 + i] > 0.5]
        if sorted(j for j, _, _ in picked) != list(range(len(self.problem.jobs))):
            return None
        return {self.problem.jobs[j].id: k for j, k, _ in picked}


def _steps(size: int, slots: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The (place, slot) steps of walks over a node; slot 0 leaves one device idle. Larger slots come first
    in a walk."""
    reachable = [True] + [False] * size
    for slot in sorted(slots, reverse=True):
        for place in range(size - slot + 1):
            if reachable[place]:
                reachable[place + slot] = True
                yield place, slot
    yield from ((place, 0) for place in range(size))
