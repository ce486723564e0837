"""Lower bounds on money, emissions and their sum with the last end, by prices that change over time.

Windows of time begin where a price or an intensity changes, at releases, deadlines and heads of jobs (the earliest
second at which each could start), and where nodes go away. In any plan whose last job ends at T, job j spends
x(j,o,i,n) seconds under option o in window i on nodes of kind n. A *kind* of nodes has one type, power, and series.
With r(o,i,n) what a second of a device is worth by the factors of money and grams, no plan has a value below

    minimize  end T + sum devices(o) r(o,i,n) x(j,o,i,n)   such that
        sum_(o,i,n) x(j,o,i,n) / whole(o)  >=  1                          each job's work is done
        sum_(o,n) x(j,o,i,n)  <=  part of window i in which j may run     it runs once at a time
        slots and patterns of nodes in each window, as in the pattern LP, and quotas
        sum m(o,i,n) x(j,o,i,n)  <=  budget(m)                            for each budget, of money or grams

whose windows end at T. Dual prices prove the bound by arithmetic alone. Let slots of s devices be worth w(i,n,s), a
job's own time l(i,j), a device of a group with a quota q(i,g), each per second, and a unit of a budget mu(m), all at
least 0. A job's seconds cost at least `least_of` at the cheapest prices nodes(o) w + l + devices(o) (r + q), where r
includes mu. So every plan that ends at T has a value of at least

    D(T)  =  end T + sum_j least(j) - sum_i (what nodes, jobs and quotas earn in window i until T)
             - sum_m mu(m) budget(m)

Where options train several jobs, least(j) is a worth of the job's whole work, such that the jobs of no option are worth
more together than the seconds cost that they take under it, at the cheapest prices of a window in which all may run.

D is linear between the points at which a rate of earning changes. A certificate divides the possible ends into
intervals, and names for each the prices for which min D over it is to be computed. The least of these minima is the
bound. Where `end` is 0, one interval suffices.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from ringmaster.features.tariffs.tariff_values import Factors, change_points, price_steps, watts
from ringmaster.tasks.planning.bounds import job_costs
from ringmaster.tasks.planning.bounds.windows import Rate, evenly
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Option, PlanningJob, PlanningNode, Steps
from ringmaster.tasks.planning.problems.series import J_PER_KWH

MAX_WINDOWS = 400
MAX_COLUMNS = 40_000  # of a linear program, from which the limit of windows follows


@dataclass(frozen=True, kw_only=True)
class TariffPrices:
    """Dual prices, all of them at least 0, per second and by window; those that are left out are 0.

    slots: for each window, the worth of a slot, by the first node of a kind and by size in devices.
    jobs: by job, the worth of its own time in each window.
    quotas: by group, the worth of a device that it holds in each window.
    budgets: by measure, the worth of a unit of its budget, at any time.
    covers: by job, what its whole work is worth, where options train several jobs.
    """

    slots: tuple[Mapping[str, Mapping[int, float]], ...]
    jobs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    quotas: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    budgets: Mapping[str, float] = field(default_factory=dict)
    covers: Mapping[str, float] = field(default_factory=dict)

    def slot_price(self, window: int, kind: str, slot: int) -> float:
        """Returns the worth of a slot, which is at least that of any smaller one: that would fit it, too."""
        of_kind = self.slots[window].get(kind, {})
        return max((price for size, price in of_kind.items() if size <= slot), default=0.0)

    def every(self) -> Iterator[float]:
        """Yields all prices."""
        yield from self.budgets.values()
        yield from self.covers.values()
        for by_kind in self.slots:
            for prices in by_kind.values():
                yield from prices.values()
        for row in (*self.jobs.values(), *self.quotas.values()):
            yield from row

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `prices_from_json` reads."""
        return {
            "slots": [{kind: {str(s): w for s, w in of.items()} for kind, of in each.items()} for each in self.slots],
            "jobs": {job: list(row) for job, row in self.jobs.items()},
            "quotas": {group: list(row) for group, row in self.quotas.items()},
            "budgets": dict(self.budgets),
            **({"covers": dict(self.covers)} if self.covers else {}),
        }


def prices_from_json(data: Any, num_windows: int) -> TariffPrices:
    """Reads prices of a certificate. Raises ValueError where they are not such prices."""
    if not isinstance(data, Mapping):
        raise ValueError("prices must be an object")
    slots = data.get("slots", [])
    if not isinstance(slots, list) or len(slots) != num_windows or not all(isinstance(row, Mapping) for row in slots):
        raise ValueError(f"slots must be a list of {num_windows} objects, one a window")
    prices = TariffPrices(
        slots=tuple({kind: _numbers_by_size(of) for kind, of in row.items()} for row in slots),
        jobs={job: _row(row, num_windows) for job, row in _object(data, "jobs").items()},
        quotas={group: _row(row, num_windows) for group, row in _object(data, "quotas").items()},
        budgets={name: _number(price) for name, price in _object(data, "budgets").items()},
        covers={job: _number(price) for job, price in _object(data, "covers").items()},
    )
    if any(not math.isfinite(price) or price < 0 for price in prices.every()):
        raise ValueError("a price is negative or not finite")
    return prices


def _object(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be an object")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError("a price is not a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a number is too large") from None


def _row(row: Any, num_windows: int) -> tuple[float, ...]:
    if not isinstance(row, list) or len(row) != num_windows:
        raise ValueError(f"prices by window must be lists of {num_windows} numbers")
    return tuple(map(_number, row))


def _numbers_by_size(prices: Any) -> dict[int, float]:
    if not isinstance(prices, Mapping) or not all(str(size).isdecimal() and len(str(size)) < 10 for size in prices):
        raise ValueError("prices of slots must be objects by their size in devices")
    by_size = {int(size): _number(price) for size, price in prices.items()}
    if 0 in by_size:  # larger slots would be worth as much, and nodes would earn nothing by it
        raise ValueError("slots have at least one device")
    return by_size


@dataclass(frozen=True, kw_only=True)
class TariffCertificate:
    """Prices that prove a bound on the value of every plan.

    points_s: where windows begin, from 0; the last one has no end.
    prices: sets of dual prices.
    intervals: of the last end, each as its latest end in seconds and the index of its prices; the last is unlimited.
    """

    points_s: tuple[float, ...]
    prices: tuple[TariffPrices, ...]
    intervals: tuple[tuple[float, int], ...]

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads."""
        return {
            "points": list(self.points_s),
            "prices": [each.to_json() for each in self.prices],
            "intervals": [[None if math.isinf(end_s) else end_s, index] for end_s, index in self.intervals],
        }

    @classmethod
    def from_json(cls, data: Any) -> "TariffCertificate":
        """Reads a certificate. Raises ValueError where the object is not one."""
        if not isinstance(data, Mapping) or not all(isinstance(data.get(k), list) for k in ("points", "prices")):
            raise ValueError("a certificate must have lists of points, prices and intervals")
        points = tuple(map(_number, data["points"]))
        if len(points) > MAX_WINDOWS:
            raise ValueError(f"a certificate may have {MAX_WINDOWS} windows")
        if not points or points[0] != 0 or not all(map(math.isfinite, points)) or sorted(set(points)) != list(points):
            raise ValueError("points must ascend from 0")
        prices = tuple(prices_from_json(each, len(points)) for each in data["prices"])
        intervals, rows = [], data.get("intervals")
        for each in rows if isinstance(rows, list) and rows else [None]:
            if not isinstance(each, list) or len(each) != 2 or each[1] not in range(len(prices)):
                raise ValueError("intervals must be lists of an end and the index of prices")
            intervals.append((math.inf if each[0] is None else _number(each[0]), int(each[1])))
        ends = [end_s for end_s, _ in intervals]
        if ends[-1] != math.inf or not all(a < b for a, b in pairwise(ends)):
            raise ValueError("ends of intervals must ascend, and the last one must be null")
        return cls(points_s=points, prices=prices, intervals=tuple(intervals))


class TariffBound:
    """Bounds on the value of plans of a problem by its factors."""

    def __init__(self, problem: Problem, factors: Factors, *, points_s: Sequence[float] | None = None) -> None:
        self.problem, self.factors = problem, factors
        self.jobs = {job.id: _with_useful_options(job) for job in problem.jobs}
        self.heads_s = job_costs.earliest_starts_s(problem)
        self.kinds: dict[str, list[PlanningNode]] = {}
        first: dict[Any, str] = {}
        for node in problem.nodes:
            kind = first.setdefault((node.device_type, node.power_w, *_series(node)), node.id)
            self.kinds.setdefault(kind, []).append(node)
        self.classes = problem.classes
        if points_s is None:
            points_s, self.classes = _points_of(problem, self)
        self.points_s = tuple(points_s)
        self.ends_s = (*self.points_s[1:], math.inf)
        self._rates: dict[tuple[str, float, int], tuple[float, float]] = {}
        self._table: PriceTable | None = None

    def similar_jobs(self, max_columns: int) -> tuple[tuple[int, ...], ...]:
        """Returns classes of jobs with at most so many columns in a window, where these differ in options alone.

        The first job of each class stands for all of them: it scales alike with its devices, as far as possible.
        """
        classes = self.problem.classes
        size = sum(map(self.num_columns, classes)) / max_columns
        if size <= 1 or self.problem.is_fused:
            return classes
        alike: dict[Any, list[int]] = {}
        for j, job in enumerate(self.problem.jobs):
            alike.setdefault((self.heads_s[job.id], job.deadline_s, job.user), []).append(j)
        result = []
        for members in alike.values():
            members.sort(key=self._scaling)
            num = max(1, math.floor(len(members) * len(classes) / len(self.problem.jobs) / size))
            for chunk in np.array_split(np.array(members), min(num, len(members))):
                row = chunk.tolist()
                row.insert(0, row.pop(len(row) // 2))
                result.append(tuple(row))
        return tuple(result)

    def _scaling(self, j: int) -> tuple[int, float]:
        """Returns the fewest devices of a job, and how much faster it is on more of them than on one."""
        job = self.problem.jobs[j]
        return min(o.num_devices for o in job.options), least_area(job) / min(o.whole_s for o in job.options)

    def num_columns(self, members: Sequence[int]) -> int:
        """Returns the number of columns of a class of jobs in a window."""
        return len(self.jobs[self.problem.jobs[members[0]].id].options) * len(self.kinds)

    def kinds_of(self, option: Option) -> list[str]:
        """Returns the kinds of nodes that an option may use."""
        return [kind for kind, (node, *_) in self.kinds.items() if option.device_type in ("", node.device_type)]

    def least_rates(self, option: Option, kind: str, window: int) -> tuple[float, float]:
        """Returns the least money and grams of a device-second in a window on nodes of a kind."""
        node = self.kinds[kind][0]
        key = (kind, watts(option, node), window)
        if key not in self._rates:
            between, energy = (self.points_s[window], self.ends_s[window]), key[1] / J_PER_KWH
            money = _least(price_steps(node), *between) + energy * _least(node.energy_price_steps, *between)
            self._rates[key] = money, energy * _least(node.carbon_steps, *between)
        return self._rates[key]

    def span_s(self, job: PlanningJob, window: int) -> tuple[float, float]:
        """Returns from when until when a job may run in a window."""
        until_s = math.inf if job.deadline_s is None else job.deadline_s
        return max(self.points_s[window], self.heads_s[job.id]), min(self.ends_s[window], until_s)

    def windows_of(self, job: PlanningJob, *, before_s: float) -> list[int]:
        """Returns the windows that begin before a time and in which a job may run."""
        spans = ((i, *self.span_s(job, i)) for i, start_s in enumerate(self.points_s) if start_s < before_s)
        return [i for i, start_s, end_s in spans if start_s < end_s]

    @cached_property
    def latest_end_s(self) -> float:
        """The time after which no valid plan ends."""
        return max(math.inf if job.deadline_s is None else job.deadline_s for job in self.problem.jobs)

    def is_possible(self, start_s: float, end_s: float, *, bound_s: float) -> bool:
        """Whether the last job may end in an interval, if none ends before `bound_s` and all keep their deadlines."""
        return end_s >= bound_s and start_s <= self.latest_end_s

    def proved(self, certificate: TariffCertificate, *, bound_s: float) -> float:
        """Returns the value that no plan is below, as a certificate proves together with a bound on the last end.

        Raises ValueError where the certificate has a price of a budget that the problem has not.
        """
        assert certificate.points_s == self.points_s, "the bound has the windows of the certificate"
        priced = {name for prices in certificate.prices for name in prices.budgets}
        if unknown := sorted(priced - self.problem.budgets.keys()):
            raise ValueError(f"has a price of what has no budget: {', '.join(unknown)}")
        least, start_s = math.inf, 0.0
        for end_s, index in certificate.intervals:
            if self.is_possible(start_s, end_s, bound_s=bound_s):
                prices = certificate.prices[index]
                least = min(least, self.between(prices, max(start_s, bound_s), min(end_s, self.latest_end_s)))
            start_s = end_s
        return max(0.0, least) if least < math.inf else 0.0

    def between(self, prices: TariffPrices, start_s: float, end_s: float) -> float:
        """Returns the least value that plans have whose last job ends between two times, as prices prove."""
        if self.problem.is_fused:
            cost = self._covered(prices, before_s=end_s)
        else:
            cost = math.fsum(self._least_of(job, prices, before_s=end_s) for job in self.problem.jobs)
        if math.isinf(cost):
            return math.inf
        cost -= math.fsum(price * self.problem.budgets.get(name, 0.0) for name, price in prices.budgets.items())
        rates = list(self._rates_of(prices, before_s=end_s))
        changes = {point for rate in rates for point in (rate.start_s, rate.end_s) if start_s < point < end_s}
        lasting = math.fsum(rate.worth for rate in rates if math.isinf(rate.end_s))
        if math.isinf(end_s) and lasting > self.factors.end:
            return -math.inf
        ends = [start_s, *changes, *([end_s] if end_s < math.inf else [])]
        if math.isinf(end_s) and self.factors.end == 0:
            ends = [max([start_s, *changes])]  # the earnings only grow until then
        least = math.inf
        for at_s in ends:
            earned = math.fsum(
                rate.worth * (min(rate.end_s, at_s) - rate.start_s) for rate in rates if rate.start_s < at_s
            )
            size = abs(cost) + earned + self.factors.end * at_s
            least = min(least, self.factors.end * at_s + cost - earned - job_costs.ROUNDING * size)
        return least

    def lasting_worth(self, prices: TariffPrices) -> float:
        """Returns what is earned per second when all prices have stopped to change."""
        return math.fsum(r.worth for r in self._rates_of(prices, before_s=math.inf) if math.isinf(r.end_s))

    def _least_of(self, job: PlanningJob, prices: TariffPrices, *, before_s: float) -> float:
        """Returns the least that a job costs at the prices in the windows before a time."""
        job = self.jobs[job.id]
        per_second = self._table_of(prices).least(job, before_s=before_s)
        if math.inf in per_second:
            return math.inf
        return job_costs.least_of(job, per_second, self.problem.switch_cost_s)

    def whole_s(self, job: PlanningJob, option: int) -> float:
        """Returns the least seconds of a whole job, or of the jobs of an option, under it.

        Each segment of a group starts up and saves, unless it runs at time 0; so no share of its work pays less.
        """
        if not self.problem.is_fused:
            return job_costs.whole_of(job, option, self.problem.switch_cost_s)
        chosen = job.options[option]
        is_held = job.running is not None and job.running.option == option
        return chosen.runtime_s + chosen.save_s + (0.0 if is_held else chosen.startup_s)

    def _table_of(self, prices: TariffPrices) -> "PriceTable":
        if self._table is None or self._table.prices is not prices:
            self._table = PriceTable(self, prices)
        return self._table

    def windows_of_group(self, job: PlanningJob, option: Option, *, before_s: float) -> list[int]:
        """Returns the windows that begin before a time and in which all jobs of an option may run."""
        windows = self.windows_of(job, before_s=before_s)
        for name in option.jobs:
            others = set(self.windows_of(self.problem.job(name), before_s=before_s))
            windows = [i for i in windows if i in others]
        return windows

    def _covered(self, prices: TariffPrices, *, before_s: float) -> float:
        """Returns what all jobs cost at least at the prices in the windows before a time, alone or in groups.

        The worth of the jobs of an option is reduced to what its seconds cost, where it is more.
        """
        rows, table = [], self._table_of(prices)
        for job in self.jobs.values():
            for k, price in enumerate(table.least(job, before_s=before_s)):
                if price < math.inf:
                    rows.append(((job.id, *job.options[k].jobs), self.whole_s(job, k) * price))
        possible = {name for members, _ in rows for name in members}
        if len(possible) < len(self.jobs):
            return math.inf
        covers = {name: prices.covers.get(name, 0.0) for name in possible} if prices.covers else {}
        for members, cost in () if covers else rows:
            shares = ((name, min(cost / len(members), covers.get(name, math.inf))) for name in members)
            covers |= dict(shares)
        for members, cost in rows:
            if (total := sum(covers[name] for name in members)) > cost:
                covers |= {name: covers[name] * (cost / total) for name in members}
        return math.fsum(covers.values())

    def _rates_of(self, prices: TariffPrices, *, before_s: float) -> Iterator[Rate]:
        """Yields what nodes, jobs and quotas earn in the windows before a time."""
        for i, (start_s, end_s) in enumerate(zip(self.points_s, self.ends_s, strict=True)):
            if start_s >= before_s:
                return
            for kind, nodes in self.kinds.items():
                if not (of_kind := prices.slots[i].get(kind)):
                    continue
                pack = job_costs.pack_of(of_kind, self.problem)
                for node in nodes:
                    until_s = math.inf if node.available_until_s is None else node.available_until_s
                    if until_s > start_s and pack[node.num_devices] > 0:
                        yield Rate(start_s, min(end_s, until_s), pack[node.num_devices])
            for job in self.problem.jobs:
                own, (from_s, to_s) = prices.jobs.get(job.id), self.span_s(job, i)
                if own and own[i] > 0 and from_s < to_s:
                    yield Rate(from_s, to_s, own[i])
            for group, row in prices.quotas.items():
                if row[i] > 0:
                    yield Rate(start_s, end_s, row[i] * self.problem.quotas.get(group, self.problem.num_devices))


class PriceTable:
    """What a second under each option of each job is worth at least at given prices."""

    def __init__(self, bound: TariffBound, prices: TariffPrices) -> None:
        self.bound, self.prices = bound, prices
        self._per_second: dict[tuple[Any, ...], Any] = {}
        self._allowed: dict[str, Any] = {}
        self._least: dict[str, Any] = {}

    def least(self, job: PlanningJob, *, before_s: float) -> list[float]:
        """Returns the least worth of a second by option, in the windows before a time; infinite where it has none."""
        if job.id not in self._least:
            rows = [np.minimum.accumulate(self._by_window(job, option)) for option in job.options]
            self._least[job.id] = np.array(rows)
        num = bisect_left(self.bound.points_s, before_s)
        return list(map(float, self._least[job.id][:, num - 1])) if num else [math.inf] * len(job.options)

    def _by_window(self, job: PlanningJob, option: Option) -> Any:
        group = job.user if job.user in self.prices.quotas else ""
        key = (option.num_nodes, option.slot, option.num_devices, option.device_type, option.power_w, group)
        if key not in self._per_second:
            kinds = (self._on_kind(option, kind) for kind in self.bound.kinds_of(option))
            self._per_second[key] = np.minimum.reduce(list(kinds))
            if group:
                self._per_second[key] += option.num_devices * np.array(self.prices.quotas[group])
        row = self._per_second[key]
        for name in (job.id, *option.jobs):
            if name in self.prices.jobs:
                row = row + np.array(self.prices.jobs[name])
            row = np.where(self._may_run(name), row, math.inf)
        return row

    def _on_kind(self, option: Option, kind: str) -> Any:
        """Returns the worth of slots and devices on nodes of a kind by window, including what it takes of budgets."""
        bound, budgets = self.bound, self.prices.budgets
        result = np.empty(len(bound.points_s))
        for i in range(len(bound.points_s)):
            money, grams = bound.least_rates(option, kind, i)
            rate = bound.factors.rate(money, grams)
            rate += budgets.get("cost", 0.0) * money + budgets.get("emissions", 0.0) * grams
            slot = self.prices.slot_price(i, kind, option.slot)
            result[i] = option.num_nodes * slot + option.num_devices * rate
        return result

    def _may_run(self, name: str) -> Any:
        if name not in self._allowed:
            allowed = np.zeros(len(self.bound.points_s), np.bool_)
            allowed[self.bound.windows_of(self.bound.problem.job(name), before_s=math.inf)] = True
            self._allowed[name] = allowed
        return self._allowed[name]


def least_area(job: PlanningJob) -> float:
    """Returns the least device-seconds of a job."""
    return min(o.num_devices * o.whole_s for o in job.options)


def _series(node: PlanningNode) -> tuple[Steps, Steps, Steps]:
    return price_steps(node), node.energy_price_steps, node.carbon_steps


def _least(steps: Steps, start_s: float, end_s: float) -> float:
    """Returns the least value of a series between two times; 0 where there is none."""
    ends_s = [*(start for start, _ in steps[1:]), math.inf]
    values = (v for (from_s, v), to_s in zip(steps, ends_s, strict=False) if to_s > start_s and from_s < end_s)
    return min(values, default=0.0)


def _points_of(problem: Problem, bound: TariffBound) -> tuple[tuple[float, ...], tuple[tuple[int, ...], ...]]:
    """Returns where windows begin, and the classes of jobs that have columns together.

    Not more than the linear program can handle: similar jobs share columns, and windows are chosen evenly from all that
    matter.
    """
    points = change_points(problem.nodes) | {head_s for head_s in bound.heads_s.values() if head_s > 0}
    points |= {job.deadline_s for job in problem.jobs if job.deadline_s is not None}
    points |= {node.available_until_s for node in problem.nodes if node.available_until_s is not None}
    points = {point for point in points if point > 0}
    num_windows = min(MAX_WINDOWS, 1 + len(points))
    classes = bound.similar_jobs(MAX_COLUMNS // num_windows)
    per_window = sum(bound.num_columns(members) for members in classes)
    most = max(1, min(MAX_WINDOWS, MAX_COLUMNS // per_window))
    return (0.0, *evenly(sorted(points), most - 1)), classes


def useful_options(job: PlanningJob) -> tuple[int, ...]:
    """Returns the options of which no other one is as fast with no more devices, nodes and power.

    At prices of slots that grow with their size, no other option is cheaper. The one that runs at time 0 pays less.
    """
    return tuple(
        k
        for k, option in enumerate(job.options)
        if (job.running is not None and job.running.option == k)
        or not any(_is_beaten(option, other, first=i < k) for i, other in enumerate(job.options) if i != k)
    )


def _with_useful_options(job: PlanningJob) -> PlanningJob:
    kept = useful_options(job)
    running = job.running and replace(job.running, option=kept.index(job.running.option))
    return replace(job, options=tuple(job.options[k] for k in kept), running=running)


def _is_beaten(option: Option, other: Option, *, first: bool) -> bool:
    if (option.device_type, option.host_memory_bytes) != (other.device_type, other.host_memory_bytes):
        return False
    if (option.power_w is None) != (other.power_w is None) or set(option.jobs) != set(other.jobs):
        return False
    own, others = (
        (o.num_nodes, o.slot, o.runtime_s, o.power_w or 0.0, o.startup_s, o.save_s, o.evaluate_s)
        for o in (option, other)
    )
    return all(b <= a for a, b in zip(own, others, strict=True)) and (own != others or first)
