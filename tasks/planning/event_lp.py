"""A linear program for the lengths of the periods between events in a given order.

Events are releases, the last seconds of nodes and of deadlines, and the ends of jobs. Between two events, the set of
jobs that may run and the set of nodes stay the same, so each period is a plain problem: only the seconds of each (job,
option) in it matter, not when they occur.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ringmaster.tasks.planning.bounds.job_costs import useful_options, whole_of
from ringmaster.tasks.planning.bounds.linear_program import LinearProgram
from ringmaster.tasks.planning.objectives import Coefficients
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import PlanningJob, PlanningNode


class EventKind(StrEnum):
    """What happens at an event."""

    RELEASE = "release"
    LEAVE = "leave"
    DUE = "due"
    END = "end"


@dataclass(frozen=True)
class ScheduleEvent:
    """Something that happens to `names`: jobs that are released, due or end, or nodes that leave.

    at_s: when, exactly; for ends of jobs None.
    """

    kind: EventKind
    names: frozenset[str]
    at_s: float | None = None


@dataclass(frozen=True)
class Periods:
    """A solution of the program.

    lengths_s: the length of each period.
    shares: for each period, the share of each job that runs in it, by job id.
    value: of the objective.
    """

    lengths_s: tuple[float, ...]
    shares: tuple[dict[str, float], ...]
    value: float


def has_due_dates(of: Coefficients) -> bool:
    """Whether the ends of jobs have different factors in the maximum: each value of it is a due date for each job."""
    return len(set(of.latest.values())) > 1


class EventLp:
    """Minimises the objective over L[p], the length of period p, and x[j,o,p], the seconds of (j, o) in it:

        work    sum_{o,p} x[j,o,p] / whole[o]  >= 1
        time    sum_o x[j,o,p]                 <= L[p]
        slots   as in the pattern LP, for each period and the nodes that are there in it
        events  sum_{q <= p} L[q]  >= the release, or <= the last second of the nodes or deadlines, that ends period p

    x[j,o,p] exists for periods after the release of j and the ends of all jobs that it waits for, and until its own.
    """

    def __init__(self, problem: Problem, order: Sequence[ScheduleEvent], of: Coefficients, *, unit_s: float) -> None:
        self.problem, self.order, self.unit_s = problem, order, unit_s
        self.num = len(order) + 1
        self.lp = LinearProgram()
        self.at = {(event.kind, name): p for p, event in enumerate(order) for name in event.names}
        self.scale = of.per_second or 1.0
        self.lengths = [self.lp.column(cost=self._cost(p, of)) for p in range(self.num)]
        self.seconds: list[tuple[int, str, int, float]] = []  # (column, job, period, whole)
        for job in problem.jobs:
            self._add_job(job)
        self._add_nodes()
        self._add_events()
        self._add_latest(of)

    def solved(self) -> Periods | None:
        """Returns an optimum; None where the order of events is impossible."""
        import highspy

        highs = self.lp.loaded()
        highs.run()
        if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        values = highs.getSolution().col_value
        shares: list[dict[str, float]] = [{} for _ in range(self.num)]
        for column, job, p, whole in self.seconds:
            if values[column] > 1e-9:
                shares[p][job] = shares[p].get(job, 0.0) + values[column] / whole
        lengths = tuple(max(0.0, float(values[column])) * self.unit_s for column in self.lengths)
        value = float(highs.getInfo().objective_function_value) * self.unit_s * self.scale
        return Periods(lengths, tuple(shares), value)

    def nodes_in(self, p: int) -> list[PlanningNode]:
        """Returns the nodes that are there in a period."""
        return [node for node in self.problem.nodes if p <= self.at.get((EventKind.LEAVE, node.id), self.num)]

    def _cost(self, p: int, of: Coefficients) -> float:
        """Returns what a second of period p adds to the value, apart from different factors of ends in the maximum."""
        ends = (weight for job, weight in of.ends.items() if p <= self.at.get((EventKind.END, job), self.num))
        return ((0.0 if has_due_dates(of) else of.largest) + math.fsum(ends)) / self.scale

    def _periods_of(self, job: PlanningJob) -> range:
        first = self.at.get((EventKind.RELEASE, job.id), -1) + 1
        first = max([first, *(self.at[EventKind.END, other] + 1 for other in job.after)])
        last = min(self.at.get((kind, job.id), self.num - 1) for kind in (EventKind.END, EventKind.DUE))
        return range(first, last + 1)

    def _add_job(self, job: PlanningJob) -> None:
        work = self.lp.row(1.0, math.inf)
        options = [(job.options[k], whole_of(job, k, self.problem.switch_cost_s)) for k in useful_options(job)]
        for p in self._periods_of(job):
            time = self.lp.row(-math.inf, 0.0)
            self.lp.columns[self.lengths[p]].append((time, -1.0))
            for option, whole_s in options:
                whole = whole_s / self.unit_s
                for kind in self.problem.device_types:
                    if option.device_type in ("", kind):
                        slot = self.lp.slot_row(p, kind, option.slot)
                        entries = [(work, 1.0 / whole), (time, 1.0), (slot, float(option.num_nodes))]
                        self.seconds.append((self.lp.column(entries), job.id, p, whole))

    def _add_nodes(self) -> None:
        for p in range(self.num):
            groups = Counter((node.device_type, node.num_devices) for node in self.nodes_in(p))
            for (kind, size), count in groups.items():
                rows = [self.lp.row(0.0, 0.0) for _ in range(size)]
                self.lp.columns[self.lengths[p]].append((rows[0], -float(count)))
                self.lp.add_walks(rows, p, kind)

    def _add_latest(self, of: Coefficients) -> None:
        """Adds the maximum of factor x end as a column, and a row for each period in which jobs of a factor end."""
        if not has_due_dates(of):
            return
        factors: dict[int, float] = {}
        for job, factor in of.latest.items():
            p = self.at.get((EventKind.END, job), self.num - 1)
            factors[p] = max(factor, factors.get(p, 0.0))
        value = self.lp.column(cost=of.largest / self.scale)
        for p, factor in factors.items():
            row = self.lp.row(0.0, math.inf)
            self.lp.columns[value].append((row, 1.0))
            for q in range(p + 1):
                self.lp.columns[self.lengths[q]].append((row, -factor / of.largest))

    def _add_events(self) -> None:
        for p, event in enumerate(self.order):
            if event.at_s is None:
                continue
            at = event.at_s / self.unit_s
            is_release = event.kind is EventKind.RELEASE
            row = self.lp.row(at if is_release else -math.inf, math.inf if is_release else at)
            for q in range(p + 1):
                self.lp.columns[self.lengths[q]].append((row, 1.0))
