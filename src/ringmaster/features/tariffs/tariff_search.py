"""Plans by prices that change over time: jobs are taken out and placed again at the least cost beside the others.

The dual prices of the bound's linear program say how scarce devices are in each window. A first plan places one job
after another at prices and scarcity; then a random few jobs at a time are placed again (ruin and recreate, Schrimpf et
al., 2000), and a plan that is worse is kept with a probability that falls (simulated annealing). Each job is placed by
a dynamic program (`tariff_kernels`), in one run or with pauses, which pay what they cost.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np

from ringmaster.features.tariffs.tariff_arrays import TariffArrays
from ringmaster.features.tariffs.tariff_kernels import MAX_RUNS, Runs, insert, paid_by, work_of_run, worth_of_job
from ringmaster.features.tariffs.tariff_values import Factors
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.problems.series import MEASURES
from ringmaster.tasks.planning.work import WorkBudget

STEP_S = 2.5e-9  # work of a step of the kernel's loops
MOVE_S = 1.5e-4  # work of a move besides its kernels
MAX_TRIED = 8  # nodes that a job is placed on at random, where there are more
ROUNDING = 1e-9  # share of a time by which runs of a given plan may overlap
MAX_RELATED = 60  # jobs of which those are chosen that are placed again with one
HEAT, COLD = 7e-4, 2e-5  # first and last temperature of annealing, as shares of the value
NUM_TRIED, SHARE_OF_TRY = 3, 0.1  # searches from one plan, of which the best goes on, and the share of the work of each
REHEAT = HEAT / 3  # first temperature of the one that goes on
MAX_STALE = 4_000  # trials without a better plan after which the search ends
STRICTER = (2.0, 4.0, 16.0, 64.0, 1024.0)  # multiples of the worth of budgets that first plans try
NEAR_BUDGET = 0.2  # share of a budget's multiplier by which annealing is drawn to where the budget is just used up
STRICT_BUDGET = 4.0  # further multiple of it that what exceeds the budget is worth at the end of annealing
LEARNING_RATE = 2e-3  # by which a budget's multiplier grows or falls in each trial
GUIDED_MOVES = 100  # after which jobs are placed by the present multipliers
EARLY_ROUNDS = 6  # searches of plans that end by a given time
MAX_ROUNDS = 20  # of them, where nothing but the end counts
CLOSE_ENDS = 5e-4  # relative difference of two given times at which these searches end
SHARE_OF_ROUND = 0.12  # of the work that is left before them
LATER = 0.02  # share of the bound's end by which the first of these times is later


@dataclass(frozen=True)
class Score:
    """The value of a plan, and by how much it exceeds its budgets, as a share of them.

    over: by budget, what the plan takes less the budget.
    rest: the value without the part of the last end.
    """

    value: float
    excess: float
    over: Mapping[str, float]
    rest: float

    def __lt__(self, other: "Score") -> bool:
        return (self.excess, self.value) < (other.excess, other.value)

    def energy(self, multipliers: Mapping[str, float], *, has_end: bool = True, strictness: float = 0.0) -> float:
        """Returns what annealing minimises: the Lagrangian, and a part that draws plans to where budgets are used up.

        multipliers: by budget, what a unit of it is worth.
        has_end: whether the last end counts.
        strictness: a further multiple of it that what exceeds a budget is worth.
        """
        terms = (
            multipliers[name] * (over + NEAR_BUDGET * abs(over) + strictness * max(0.0, over))
            for name, over in self.over.items()
        )
        return (self.value if has_end else self.rest) + math.fsum(terms)


class TariffSearch:
    """Searches plans of a problem.

    arrays: the problem, with the places of a plan from which the search may begin.
    end_s: when plans of about the value of the bound end.
    """

    def __init__(
        self,
        arrays: TariffArrays,
        factors: Factors,
        *,
        end_s: float,
        least_s: float,
        is_split: bool,
        seed: int,
        work: WorkBudget,
    ) -> None:
        self.arrays, self.rules, self.problem = arrays, arrays.rules, arrays.problem
        self.factors, self.least_s, self.is_split = factors, least_s, is_split
        self.random, self.work, self.end_s = Random(seed), work, end_s
        self.latest_s = math.inf  # by which all jobs end
        problem, self.index = arrays.problem, arrays.index
        self.nexts: dict[str, list[str]] = {job.id: [] for job in problem.jobs}
        for job in problem.jobs:
            for other in job.after:
                self.nexts[other].append(job.id)
        self.budgets = {name: problem.budgets[name] for name in MEASURES if name in problem.budgets}
        self.runs = Runs(
            np.zeros(len(problem.jobs), np.int64),
            np.zeros((len(problem.jobs), MAX_RUNS), np.int64),
            np.zeros((len(problem.jobs), MAX_RUNS)),
            np.zeros((len(problem.jobs), MAX_RUNS)),
        )
        self.worth, self.every = np.zeros(len(problem.jobs)), np.arange(len(problem.jobs))
        self.taken = {name: np.zeros(len(problem.jobs)) for name in self.budgets}
        self.multipliers = dict.fromkeys(self.budgets, 0.0)
        self.guess = np.zeros(len(problem.jobs))
        self.pins = np.array([job.running.pinned_until_s if job.running else 0.0 for job in problem.jobs])

    # -- plans

    def take(self, segments: Sequence[Segment]) -> bool:
        """Makes a plan the present one; returns False where it has too many segments."""
        self.runs.counts[:] = 0
        for segment in sorted(segments, key=lambda s: (s.start_s, s.end_s)):
            j = self.index[segment.job]
            i = self.runs.counts[j]
            if i == MAX_RUNS:
                return False
            self.runs.places[j, i] = self.arrays.place(segment)
            self.runs.starts[j, i], self.runs.ends[j, i] = segment.start_s, segment.end_s
            self.runs.counts[j] += 1
        for j in range(len(self.problem.jobs)):
            self._measure(j)
        return all(map(self._is_whole, range(len(self.problem.jobs))))

    def _is_whole(self, j: int) -> bool:
        """Whether the runs of a job do its work, with all that they pay."""
        runs, count = self.runs, self.runs.counts[j]
        works = (work_of_run(self.rules, i, count, runs.places[j], runs.starts[j], runs.ends[j]) for i in range(count))
        return bool(abs(sum(works) - 1.0) <= 1e-7)

    def construct(self, order: Sequence[int], *, scarcity: float) -> bool:
        """Places jobs one after another; those that fit nowhere are placed first, in another try."""
        order = self._after_others(order)
        for _ in range(len(order)):
            self.runs.counts[:] = 0
            failed = next((j for j in order if not self._place(j, scarcity=scarcity)), None)
            if failed is None:
                return True
            if order[0] == failed or self.work.is_over():
                return False
            order = self._after_others([failed, *(j for j in order if j != failed)])
        return False

    def _after_others(self, order: Sequence[int]) -> list[int]:
        """Returns an order in which jobs come after those of them that they wait for, pinned ones first."""
        every = set(order)
        done: dict[int, None] = dict.fromkeys(j for j in order if self.pins[j] > 0)

        def add(j: int) -> None:
            for other in self.problem.jobs[j].after:
                if self.index[other] in every - done.keys():
                    add(self.index[other])
            done[j] = None

        for j in order:
            if j not in done:
                add(j)
        return list(done)

    def _place(self, j: int, *, scarcity: float) -> bool:
        """Places a job beside all others; returns False where it fits nowhere."""
        job, runs = self.problem.jobs[j], self.runs
        runs.counts[j] = 0
        ends = runs.ends[self.every, np.maximum(runs.counts - 1, 0)]
        last = float(max(ends[runs.counts > 0], default=0.0))
        low = max([job.release_s, *(self._end(self.index[other]) for other in job.after)])
        longest = 1.05 * max(o.whole_s for o in job.options) + self.problem.switch_cost_s
        high = max(low, last, float(self.rules.points[-1])) + longest
        befores = [float(runs.starts[i, 0]) for i in map(self.index.__getitem__, self.nexts[job.id]) if runs.counts[i]]
        high = min([high, self.latest_s, *befores, *([job.deadline_s] if job.deadline_s is not None else [])])
        end_rate = self.factors.end if math.isinf(self.latest_s) else 0.0
        steps = np.zeros(1)
        cost, guess = insert(
            self.rules, runs, j, low, high, last, end_rate, self.least_s, self.pins[j], self.is_split,
            scarcity, self.guess[j], self._tried(j), steps,
        )  # fmt: skip
        self.work.charge(STEP_S * float(steps[0]))
        if not cost < math.inf:
            return False
        self.guess[j] = guess
        self._measure(j)
        return True

    def _end(self, j: int) -> float:
        count = self.runs.counts[j]
        return float(self.runs.ends[j, count - 1]) if count else 0.0

    def _tried(self, j: int) -> Any:
        num = len(self.problem.nodes)
        tried = np.ones(num, np.bool_)
        if num > MAX_TRIED:
            tried[:] = False
            first = self.random.randrange(num)
            tried[[(first + v) % num for v in range(MAX_TRIED)]] = True
            for place in range(self.rules.first_place[j], self.rules.first_place[j + 1]):
                if self.rules.held[place]:
                    tried[[v for v in self.rules.place_nodes[place] if v >= 0]] = True
        return tried

    def _measure(self, j: int) -> None:
        self.worth[j] = worth_of_job(self.rules, self.runs, j, self.arrays.plain, self.arrays.energy)
        for name, (plain, energy) in self.arrays.by_measure.items():
            self.taken[name][j] = worth_of_job(self.rules, self.runs, j, plain, energy)

    def score(self) -> Score:
        """Returns the score of the present plan."""
        ends = self.runs.ends[self.every, np.maximum(self.runs.counts - 1, 0)]
        end = float(ends[self.runs.counts > 0].max(initial=0.0))
        over = {name: float(self.taken[name].sum()) - budget for name, budget in self.budgets.items()}
        excess = (max(0.0, over[name]) / (budget or 1.0) for name, budget in self.budgets.items())
        rest = float(self.worth.sum())
        return Score(self.factors.end * end + rest, math.fsum(excess), over, rest)

    def guide_by(self, multipliers: Mapping[str, float]) -> None:
        """Lets jobs be placed as if a unit of each budget were worth so much in addition."""
        self.multipliers = dict(multipliers)
        factors = replace(
            self.factors,
            cost=self.factors.cost + multipliers.get("cost", 0.0),
            emissions=self.factors.emissions + multipliers.get("emissions", 0.0),
        )
        self.rules = self.arrays.rules_at(factors)

    def improve(self, *, enough: float, share: float = 1.0, first_heat: float = HEAT) -> Score:
        """Takes jobs out of the present plan and places them again, and leaves the best plan as the present one.

        enough: the search ends at a plan of that value.
        share: of the work that is left, to be done.
        first_heat: the first temperature, as a share of the value.
        """
        now = best = self.score()
        has_end = math.isinf(self.latest_s)
        worth = math.fsum(self.multipliers[name] * budget for name, budget in self.budgets.items())
        kept, unit = self._copy(), max((now.value if has_end else now.rest) or worth, 1e-300)
        stale, trials, began, limit = 0, 0, self.work.spent_s, share * self.work.left_s
        while stale < MAX_STALE and (best.excess > 0 or (best.value > enough and (has_end or best.rest > 0))):
            done = (self.work.spent_s - began) / max(1e-9, limit)
            if done >= 1 or self.work.is_over():
                break
            heat = unit * first_heat * (COLD / first_heat) ** min(1.0, max(done, stale / MAX_STALE))
            trials += 1
            if has_end or now.rest > 0:  # else only the budgets matter
                self._learn(now, trials)
            chosen = self._related()
            before = self._copy(chosen)
            self.work.charge(MOVE_S)
            stale += 1
            scarcity = self.random.choice((0.0, 0.0, 0.5, 1.0))
            self.runs.counts[chosen] = 0
            if not all(self._place(j, scarcity=scarcity) for j in self._after_others(chosen)):
                self._restore(before)
                continue
            score = self.score()
            energy = partial(
                Score.energy, multipliers=self.multipliers, has_end=has_end, strictness=STRICT_BUDGET * done
            )
            if energy(score) > energy(now) - heat * math.log(1.0 - self.random.random()):
                self._restore(before)
                continue
            now = score
            if now < best:
                stale = 0 if now.value < best.value * (1 - 1e-5) or now.excess < best.excess else stale
                best, kept = now, self._copy()
        self._restore(kept)
        return best

    def _learn(self, now: Score, trials: int) -> None:
        """Raises the multipliers of budgets that the present plan exceeds, and lowers the others."""
        for name, over in now.over.items():
            self.multipliers[name] *= math.exp(math.copysign(LEARNING_RATE, over))
        if self.budgets and trials % GUIDED_MOVES == 0:
            self.guide_by(self.multipliers)

    def _related(self) -> list[int]:
        """Returns one to three jobs, of which the others mostly run on nodes and at times near the first one's."""
        num = len(self.problem.jobs)
        first, count = self.random.randrange(num), self.random.choice((1, 1, 1, 2, 2, 3))
        if count == 1 or num == 1:
            return [first]
        others = [j for j in self.random.sample(range(num), min(num, MAX_RELATED)) if j != first]
        if self.random.random() < 0.5:
            others = [j for j in others if self._overlaps(first, j)] or others
        return [first, *self.random.sample(others, min(count - 1, len(others)))]

    def _overlaps(self, a: int, b: int) -> bool:
        starts = self.runs.starts
        nodes = {v for i in range(self.runs.counts[a]) for v in self.rules.place_nodes[self.runs.places[a, i]]}
        on = {v for i in range(self.runs.counts[b]) for v in self.rules.place_nodes[self.runs.places[b, i]]}
        return bool((nodes & on) - {-1}) and starts[a, 0] < self._end(b) and starts[b, 0] < self._end(a)

    def _copy(self, jobs: Sequence[int] | None = None) -> tuple[Any, ...]:
        at = list(range(len(self.problem.jobs))) if jobs is None else list(jobs)
        taken = {name: each[at].copy() for name, each in self.taken.items()}
        return at, [each[at].copy() for each in self.runs], self.worth[at].copy(), taken

    def _restore(self, copy: tuple[Any, ...]) -> None:
        at, runs, worth, taken = copy
        for each, old in zip(self.runs, runs, strict=True):
            each[at] = old
        self.worth[at] = worth
        for name, old in taken.items():
            self.taken[name][at] = old

    def run(self, constant: Plan | None, *, enough: float) -> tuple[Segment, ...]:
        """Returns the segments of the best plan found; () without any.

        constant: a plan at constant prices.
        enough: the search ends at a plan of that value.
        """
        sizes = [min(o.num_devices * o.whole_s for o in job.options) for job in self.problem.jobs]
        order, known = sorted(range(len(sizes)), key=lambda j: -sizes[j]), self._budget_worth(enough)
        starts = [] if constant is None or not self.take(constant.segments) else [self._copy()]
        if not self._start(order, known, starts):
            return ()
        if self.factors.end:
            self._search_early(order, known, enough=enough)
        self._improve_several(enough=enough)
        return self.segments()

    def _improve_several(self, *, enough: float) -> None:
        """Improves the present plan by short searches, and the best of their plans by a long one.

        Where prices are low for a few hours, all devices are busy then, and a search that has packed the jobs there
        seldom finds another packing.
        """
        first, improved = self._copy(), []
        for i in range(NUM_TRIED):
            self._restore(first)
            score = self.improve(enough=enough, share=SHARE_OF_TRY / (1 - i * SHARE_OF_TRY))
            improved.append((score, self._copy()))
        self._restore(min(improved, key=lambda pair: pair[0])[1])
        self.improve(enough=enough, first_heat=REHEAT)

    def _start(self, order: Sequence[int], known: Mapping[str, float], copies: Iterable[tuple[Any, ...]]) -> bool:
        """Makes the best of given and of constructed plans the present one; returns False where there is none.

        known: by budget, what a unit of it is worth.
        copies: of plans.
        """
        starts: list[tuple[Score, tuple[Any, ...]]] = []
        for copy in copies:
            self._restore(copy)
            starts.append((self.score(), copy))
        for multiple in (1.0, *STRICTER) if self.budgets else (1.0,):
            self.guide_by({name: multiple * worth for name, worth in known.items()})
            for scarcity in (1.0, 0.5, 0.0):
                if self.construct(order, scarcity=scarcity):
                    starts.append((self.score(), self._copy()))
            if any(score.excess <= 0 for score, _ in starts):
                break
        self.guide_by(known)
        energy = partial(Score.energy, multipliers=known, has_end=math.isinf(self.latest_s))
        if starts:
            self._restore(min(starts, key=lambda pair: (pair[0].excess > 0, energy(pair[0])))[1])
        return bool(starts)

    def _search_early(self, order: Sequence[int], known: Mapping[str, float], *, enough: float) -> None:
        """Improves the present plan by searches of plans that end by given times, near the end of the bound.

        No job alone makes the last end earlier where several end then. So the end is given, and the rest is minimised.
        """
        best, kept = self.score(), self._copy()
        each_s = self.work.left_s * (SHARE_OF_ROUND if best.rest > 0 else 1 / EARLY_ROUNDS)
        early_s, late_s = self.end_s, max(map(self._end, range(len(self.problem.jobs))))
        late_s = late_s if best.excess <= 0 and late_s > early_s else math.inf
        self.latest_s = min(early_s * (1 + LATER), (early_s + late_s) / 2)
        for _ in range(EARLY_ROUNDS if best.rest > 0 else MAX_ROUNDS):
            is_done = best.excess <= 0 and (best.value <= enough or late_s - early_s < CLOSE_ENDS * late_s)
            if is_done or self.work.is_over():
                break
            start, score = [self._copy()] if self._shorten(order) else [], None
            if self._start(order, known, start):
                score = self.improve(enough=enough, share=each_s / max(each_s, self.work.left_s))
            if score is not None and score < best:
                best, kept = score, self._copy()
            if score is not None and score.excess <= 0 and score == best:
                late_s, self.latest_s = self.latest_s, (early_s + self.latest_s) / 2
            else:
                step_s = 2 * (self.latest_s - self.end_s)
                early_s, self.latest_s = self.latest_s, min((self.latest_s + late_s) / 2, self.latest_s + step_s)
        self.latest_s = math.inf
        self._restore(kept)

    def _shorten(self, order: Sequence[int]) -> bool:
        """Places the jobs anew that end after `latest_s`; returns False where some fit nowhere."""
        late = [j for j in order if not 0 < self._end(j) <= self.latest_s]
        self.runs.counts[late] = 0
        return all(self._place(j, scarcity=1.0) for j in self._after_others(late))

    def _budget_worth(self, value: float) -> dict[str, float]:
        """Returns what a unit of each budget is worth by the bound, and at least a little."""
        known = self.arrays.prices.budgets
        return {
            name: max(known.get(name, 0.0), 0.01 * value / budget) if budget else value
            for name, budget in self.budgets.items()
        }

    # -- segments

    def segments(self) -> tuple[Segment, ...]:
        """Returns the segments of the present plan, on devices that are free then."""
        rows = []
        for j in range(len(self.problem.jobs)):
            for i in range(self.runs.counts[j]):
                place = int(self.runs.places[j, i])
                held = i == 0 and self.runs.starts[j, 0] == 0.0 and bool(self.rules.held[place])
                rows.append((float(self.runs.starts[j, i]), not held, j, i, place))
        free_from = {(v, d): 0.0 for v, node in enumerate(self.problem.nodes) for d in range(node.num_devices)}
        segments = []
        for start_s, is_new, j, i, place in sorted(rows):
            job, (k, nodes) = self.problem.jobs[j], self.arrays.places[place][1]
            end_s = float(self.runs.ends[j, i])
            slot, devices = job.options[k].slot, []
            held = (
                {}
                if is_new or job.running is None
                else {self.arrays.node_index[n]: ids for n, ids in job.running.devices}
            )
            for v in nodes:
                free = [
                    d for d in range(self.problem.nodes[v].num_devices) if free_from[v, d] <= start_s * (1 + ROUNDING)
                ]
                ids = tuple(held.get(v, tuple(free[:slot])))
                assert len(ids) == slot, "the runs of a plan fit the devices"
                free_from.update({(v, d): end_s for d in ids})
                devices.append((self.problem.nodes[v].id, ids))
            is_last = i == self.runs.counts[j] - 1
            paid_s = float(paid_by(self.rules, place, i == 0, is_last, start_s == 0.0))
            work = (end_s - start_s - paid_s) / job.options[k].runtime_s
            segments.append(Segment(job.id, k, start_s, end_s, work, paid_s, tuple(devices)))
        return tuple(segments)
