"""Which type of devices each job is for, and which few jobs are divided between two types.

On several types of devices, the pattern LP runs some jobs on two types: those that need all the time there is, and are
too slow on the one type alone, but need not be on the other all the time. Plans in which every job keeps to one type
can be more than a per cent above the bound. At most one such job per group of nodes is therefore done in two parts: one
part until a given moment on the first type, the other from then on, on the second.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringmaster.tasks.planning.bounds.bounds import Bound
from ringmaster.tasks.planning.bounds.pattern_model import PatternModel
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.work import WorkBudget

WHOLE = 1e-6  # shares of a job that are smaller than this are none
STAYS = 1e-4  # price of the time of a running job on another type than its own, in the LP
FEW, TRIED = 16, 4  # jobs too many, from which on several are tried to be rounded, and how many
ROUND = 3  # a third of the jobs that are not to be divided are rounded between two solutions of the LP
COLUMN_S = 1.5e-5  # work of the first solution of the LP, per column
AGAIN_S = 1.5e-6  # work of every other solution, per column


@dataclass(frozen=True)
class Split:
    """A job that does `share` of its work on the first type of devices, and the rest on the second.

    first, second: indices into the problem's device types.
    until: when it changes from one to the other, as a share of the plan's length.
    """

    job: int
    first: int
    second: int
    share: float
    until: float


@dataclass(frozen=True)
class TypeDivision:
    """The index of each whole job's device type, the jobs that are done on two types, and the LP's value.

    kinds: by job; for a split job, its first type.
    length: in units of the bound.
    """

    kinds: tuple[int, ...]
    splits: tuple[Split, ...]
    length: float


@dataclass(frozen=True)
class _DividedJob:
    """A job of a class that the LP divides: by type, the share of the job and the time that it takes."""

    row: int
    share: Mapping[int, float]
    time: Mapping[int, float]
    whole: Mapping[int, int]  # further jobs of the class, by type

    @property
    def left(self) -> float:
        """The jobs of the class that `rarest` does without this one."""
        return float(self.whole.get(self.rarest, 0))

    @property
    def rarest(self) -> int:
        """The type that does least of the job."""
        return min(self.share, key=lambda kind: (self.share[kind], kind))


def divided(
    problem: Problem,
    bound: Bound,
    *,
    costs: Sequence[float],
    most: Sequence[int],
    homes: Mapping[int, tuple[int, int]],
    least_s: float,
    work: WorkBudget,
) -> TypeDivision | None:
    """Returns the types of devices for all jobs by the pattern LP, with few jobs on two types; None without a solution.

    The LP is solved again and again: each time, some of the jobs that it runs on several types are kept off the type
    that does least of them, those first whose share there is the least work. Of the last few, each time the one is
    chosen that lengthens the LP least.

    costs: of the jobs, at the prices of the bound.
    most: the number of jobs that may be divided, by type; at most one in each group of nodes.
    homes: the group of each running job, and the type of its devices. These jobs begin where they run.
    least_s: minimum length of a part.
    """
    model = PatternModel(problem, unit_s=bound.seconds)
    types = {kind: k for k, kind in enumerate(problem.device_types)}
    for row, jobs in enumerate(model.classes):
        if jobs[0] in homes:
            model.charge_elsewhere(row, problem.device_types[homes[jobs[0]][1]], STAYS)
    work.charge(COLUMN_S * len(model.lp.columns))
    while model.solve(time_limit_s=work.time_left_s):
        done = model.work_by_kind()
        mixed = [m for row, by in enumerate(done) if (m := _mixed(row, {types[k]: x for k, x in by.items()}))]
        at_home = {row: homes[jobs[0]] for row, jobs in enumerate(model.classes) if jobs[0] in homes}
        size = {each.row: costs[model.classes[each.row][0]] * each.share[each.rarest] for each in mixed}
        excess, unwanted = _unwanted(mixed, size, most, at_home, least_s=least_s / bound.seconds, length=model.length)
        if not unwanted:
            return _division(mixed, [{types[k]: x for k, x in by.items()} for by in done], model, homes)
        if excess <= FEW:
            lengths = [_length_without(model, each, problem.device_types) for each in unwanted]
            unwanted = [unwanted[lengths.index(min(lengths))]]
            work.charge(AGAIN_S * len(model.lp.columns) * len(lengths))
        for each in unwanted:
            model.limit_work(each.row, problem.device_types[each.rarest], each.left)
        work.charge(AGAIN_S * len(model.lp.columns))
    return None


def _mixed(row: int, done: Mapping[int, tuple[float, float]]) -> _DividedJob | None:
    """Returns the job of a class that is divided, from the (work, time) of the class by type; None if all are whole."""
    whole = {kind: int(work + WHOLE) for kind, (work, _) in done.items()}
    share = {kind: work - whole[kind] for kind, (work, _) in done.items() if work - whole[kind] > WHOLE}
    if len(share) < 2:
        return None
    return _DividedJob(row, share, {kind: share[kind] * done[kind][1] / done[kind][0] for kind in share}, whole)


def _length_without(model: PatternModel, mixed: _DividedJob, types: Sequence[str]) -> float:
    """Returns the LP's value if a job is kept off the type that does least of it."""
    model.limit_work(mixed.row, types[mixed.rarest], mixed.left)
    length = round(model.length, 9) if model.solve() else math.inf
    model.drop_limit()
    return length


def _unwanted(
    mixed: Sequence[_DividedJob],
    size: Mapping[int, float],
    most: Sequence[int],
    at_home: Mapping[int, tuple[int, int]],
    *,
    least_s: float,
    length: float,
) -> tuple[float, list[_DividedJob]]:
    """Returns how many jobs are too many, and those that are to be rounded next: all at once, or one of the last few.

    It is infinitely many where some jobs must not be divided as they are. A class of jobs may take longer than the LP
    if only one of them is divided, since the LP averages over the class.

    size, at_home: by class, the cost of the least part, and the group and type of a running job.
    least_s, length: the minimum length of a part, and the LP's value.
    """
    never: list[_DividedJob] = []
    left: list[_DividedJob] = []
    taken: set[int] = set()
    for each in sorted(mixed, key=lambda m: -min(m.time.values())):
        is_bad = len(each.share) > 2 or min(each.time.values()) < least_s
        is_bad = is_bad or sum(each.time.values()) > length * (1 + WHOLE)
        if (home := at_home.get(each.row)) is not None:
            is_bad = is_bad or home[1] not in each.share or home[0] in taken
            taken.add(home[0])
        (never if is_bad else left).append(each)
    if never:
        return math.inf, never
    used = Counter(kind for each in left for kind in each.share)
    over = {kind for kind, count in used.items() if count > most[kind]}
    excess = max((used[kind] - most[kind] for kind in over), default=0)
    crowded = sorted((e for e in left if over & set(e.share)), key=lambda m: (size[m.row], m.row))
    return excess, crowded[: TRIED if excess <= FEW else -(-excess // ROUND)]


def _division(
    mixed: Sequence[_DividedJob],
    done: Sequence[Mapping[int, tuple[float, float]]],
    model: PatternModel,
    homes: Mapping[int, tuple[int, int]],
) -> TypeDivision:
    """Returns the types of all jobs in a solution of the LP, by class the work and time on each type."""
    kinds, splits = [0] * len(model.problem.jobs), []
    by_row = {each.row: each for each in mixed}
    for row, jobs in enumerate(model.classes):
        left, works = list(jobs), {kind: work for kind, (work, _) in done[row].items()}
        if (each := by_row.get(row)) is not None:
            j = left.pop(0)
            first, second = sorted(each.share, key=lambda k: (j in homes and homes[j][1] != k, k))
            until = each.time[first] / (each.time[first] + each.time[second])
            splits.append(Split(j, first, second, each.share[first], until))
            kinds[j], works = first, {kind: float(count) for kind, count in each.whole.items()}
        for j in left:
            kind = max(works, key=lambda k: (works[k], -k))
            kinds[j], works[kind] = kind, works[kind] - 1.0
    return TypeDivision(tuple(kinds), tuple(splits), model.length)
