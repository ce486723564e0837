"""The lower bound that prices by window of time prove: for jobs that wait, arrive later, and nodes that go away.

Window i lasts from points_s[i] to points_s[i + 1], the last one for ever. Any prices >= 0 prove a bound:

    w_i(s)    worth of a slot of s devices for one second of window i
    l_ji      worth of a second of job j in window i
    f_abi     for a job b that waits for a: the part of l_ai and of l_bi that one second of either earns, not both

Per job and window, the parts that come in (from the jobs that j waits for) and those that go out (to the jobs that wait
for j) are at most l_ji. So the prices of jobs are a flow along chains of jobs that wait for each other. Jobs of a chain
never run at the same time, and none runs before the first one's `head`, the earliest second at which it can start. So
no second of window i earns more than

    sum_{n there} pack_i(G_n)  +  sum_{j: head_j is over} (l_ji - what comes in)                                  rates

where pack_i(G) is the maximum worth of slots that fit G devices together. All jobs together earn at least

    sum_j least_of(j, price_o = min_{i not over at head_j} nodes_o w_i(slot_o) + l_ji)

so no plan ends before the rates have earned that much.

`WindowModel`, the pattern LP by windows of time, finds such prices. Windows begin at releases, at the earliest starts
of jobs that wait, and where nodes go away.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ringmaster.tasks.planning.bounds import job_costs
from ringmaster.tasks.planning.bounds.linear_program import LinearProgram
from ringmaster.tasks.planning.plans.plan import WindowPrices
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Option, PlanningJob, PlanningNode


class Rate(NamedTuple):
    """What may be earned per second from `start_s` to `end_s`."""

    start_s: float
    end_s: float
    worth: float


def window_bound(prices: WindowPrices, problem: Problem) -> float:
    """Returns the seconds before which no plan can end, as the prices prove. Raises ValueError where they are invalid.

    The result is infinite where the nodes go away too early for all work.
    """
    prices = prices.mapped(job_costs.scaling_of(prices.prices()))
    if faults := list(faults_of(prices, problem)):
        raise ValueError("; ".join(faults))
    cost = math.fsum(costs_of_jobs(prices, problem).values())
    return time_to_earn(cost, list(rates(prices, problem)))


def costs_of_jobs(prices: WindowPrices, problem: Problem) -> dict[str, float]:
    """Returns the least that each job earns, by job id."""
    heads_s = job_costs.earliest_starts_s(problem)
    return {job.id: _cost_of(job, prices, problem, heads_s[job.id]) for job in problem.jobs}


def faults_of(prices: WindowPrices, problem: Problem) -> Iterator[str]:
    """Yields what is wrong with prices, apart from what they prove."""
    if faults := list(faults_of_numbers(prices, problem)):
        yield from faults
        return
    waits = {(job.id, other) for job in problem.jobs for other in job.after}
    if wrong := [
        (job, other) for job, rows in prices.order_prices.items() for other in rows if (job, other) not in waits
    ]:
        yield f"prices of order for {wrong[0][0]!r}, which does not wait for {wrong[0][1]!r}"
    if wrong_jobs := prices.job_prices.keys() - {job.id for job in problem.jobs}:
        yield f"prices of an unknown job {min(wrong_jobs)!r}"
    for job in problem.jobs:
        for i, (own, into, out) in enumerate(_flows(prices, job.id)):
            if max(into, out) > own:
                yield f"prices of order of {job.id} in window {i} exceed its own price"


def faults_of_numbers(prices: WindowPrices, problem: Problem) -> Iterator[str]:
    """Yields what makes prices by window, or by due date, useless for any computation."""
    num, points_s = len(prices.points_s), prices.points_s
    if problem.is_fused:
        yield "prices by window or by due date are for jobs that are trained alone"
    if any(not math.isfinite(number) or number < 0 for number in prices.every()):
        yield "a price is negative or not finite"
    if wrong := [point for point in points_s if point and not job_costs.LEAST <= point <= job_costs.LARGEST]:
        yield f"a window begins at {wrong[0]:g}; times are 0, or between {job_costs.LEAST:g} and {job_costs.LARGEST:g}"
    if not num or points_s[0] != 0.0 or sorted(set(points_s)) != list(points_s):
        yield "the windows must begin at 0 and ascend"
    order = [row for rows in prices.order_prices.values() for row in rows.values()]
    if any(len(row) != num for row in (prices.slot_prices, *prices.job_prices.values(), *order)):
        yield f"every price must be given for each of the {num} windows"


def rates(prices: WindowPrices, problem: Problem) -> Iterator[Rate]:
    """Yields what may be earned by nodes, and by jobs that do not run at the same time as those that they wait for."""
    for _, rate in rates_of_nodes(prices, problem):
        yield rate
    for _, rate in rates_of_jobs(prices, problem):
        yield rate


def rates_of_nodes(prices: WindowPrices, problem: Problem) -> Iterator[tuple[PlanningNode, Rate]]:
    """Yields what each node may earn in each window for as long as it is there."""
    ends_s = (*prices.points_s[1:], math.inf)
    for start_s, end_s, typed in zip(prices.points_s, ends_s, prices.slot_prices, strict=True):
        packs = {kind: job_costs.pack_of(typed.get(kind, {}), problem) for kind in problem.device_types}
        for node in problem.nodes:
            until_s = end_s if node.available_until_s is None else min(end_s, node.available_until_s)
            if until_s > start_s:
                yield node, Rate(start_s, until_s, packs[node.device_type][node.num_devices])


def rates_of_jobs(prices: WindowPrices, problem: Problem) -> Iterator[tuple[str, Rate]]:
    """Yields what each job may earn in each window in addition to the jobs that it waits for, by job id."""
    ends_s, heads_s = (*prices.points_s[1:], math.inf), job_costs.earliest_starts_s(problem)
    for job in prices.job_prices:
        for start_s, end_s, (own, into, _) in zip(prices.points_s, ends_s, _flows(prices, job), strict=True):
            if end_s > heads_s[job]:
                yield job, Rate(max(start_s, heads_s[job]), end_s, own - into)


def prices_of_seconds(prices: WindowPrices, job: PlanningJob, problem: Problem, window: int) -> list[float]:
    """Returns the worth of a second of a job in a window under each of its options, on the cheapest type of nodes."""
    typed, own = prices.slot_prices[window], prices.job_prices.get(job.id)
    price = own[window] if own else 0.0
    return [
        o.num_nodes * min(typed.get(kind, {}).get(o.slot, 0.0) for kind in problem.types_of(o)) + price
        for o in job.options
    ]


def time_to_earn(cost: float, rates: Sequence[Rate]) -> float:
    """Returns the least time by which the rates have earned the cost; infinite where they never do.

    The rest of a cost of which most is earned may have few digits left, so that it is rounded down.
    """
    usable = [rate for rate in rates if rate.worth > 0]
    times = sorted({0.0, *(rate.start_s for rate in usable), *(rate.end_s for rate in usable if rate.end_s < math.inf)})
    earned = 0.0
    for now_s, next_s in zip(times, [*times[1:], math.inf], strict=True):
        missing = cost - earned - (job_costs.ROUNDING * cost if earned else 0.0)
        if missing <= 1e-9 * cost:
            return now_s
        per_second = math.fsum(rate.worth for rate in usable if rate.start_s <= now_s < rate.end_s)
        if per_second * (next_s - now_s) >= missing:
            return now_s + missing / per_second
        earned += per_second * (next_s - now_s) if per_second else 0.0
    return math.inf


def _cost_of(job: PlanningJob, prices: WindowPrices, problem: Problem, head_s: float) -> float:
    ends_s = (*prices.points_s[1:], math.inf)
    columns = (prices_of_seconds(prices, job, problem, i) for i, end_s in enumerate(ends_s) if end_s > head_s)
    return job_costs.least_of(job, [min(row) for row in zip(*columns, strict=True)], problem.switch_cost_s)


def _flows(prices: WindowPrices, job: str) -> Iterator[tuple[float, float, float]]:
    """Yields a job's price in each window, what comes in from jobs that it waits for, and what goes out."""
    num = len(prices.points_s)
    into = prices.order_prices.get(job, {}).values()
    out = [rows[job] for rows in prices.order_prices.values() if job in rows]
    own = prices.job_prices.get(job, (0.0,) * num)
    for i in range(num):
        yield own[i], math.fsum(row[i] for row in into), math.fsum(row[i] for row in out)


Classes = Sequence[tuple[int, ...]]  # indices of jobs that are alike


class WindowRows:
    """A linear program over windows i from points a_i, with times in units of `unit_s`.

    The last window ends at the column T that the program minimises, or never if `with_end` is False; it then has none
    of the rows below. x[c,o,i] is the number of seconds of the m[c] jobs of class c under option o in window i.
    Columns: d[c,i] for jobs that wait or are waited for, the time in window i by which they and all that they wait for
    are done for it; f[g,v,s,i] the time that nodes of group g step from position v by s devices. Rows:

        begin  d[c,i] - sum_o x[c,o,i] / m[c] >= length of i before head[c]
        wait   d[c,i] - d[a,i] - sum_o x[c,o,i] / m[c]  >= 0                        for each a that c waits for
        stop   d[c,i]                         <= length of i
        slots  sum_{c,o of slot s} nodes[o] x[c,o,i] - sum_{g,v} f[g,v,s,i]  <= 0   for each type and slot size s
        walk   as in the pattern LP, where the nodes of group g are there for their part of window i
    """

    def __init__(
        self, problem: Problem, *, classes: Classes, points_s: tuple[float, ...], unit_s: float, with_end: bool
    ) -> None:
        self.problem, self.classes, self.points_s, self.unit_s = problem, classes, points_s, unit_s
        self.points = [point / unit_s for point in points_s]
        self.num, self.last = len(points_s), len(points_s) - 1
        self.lp = LinearProgram()
        self.end = self.lp.column(cost=1.0) if with_end else None
        heads_s = job_costs.earliest_starts_s(problem)
        self.jobs = [problem.jobs[members[0]] for members in classes]
        self.heads = [heads_s[job.id] / unit_s for job in self.jobs]
        special = {other for job in problem.jobs for other in job.after}
        self.is_ordered = [bool(job.after) or job.id in special for job in self.jobs]
        self.class_of = {problem.jobs[j].id: c for c, members in enumerate(classes) for j in members}
        ends_s = (*points_s[1:], math.inf)
        self.windows = [[i for i, end_s in enumerate(ends_s) if end_s > heads_s[job.id]] for job in self.jobs]
        self.options = [
            [
                (job.options[k], job_costs.whole_of(job, k, problem.switch_cost_s) / unit_s)
                for k in job_costs.useful_options(job)
            ]
            for job in self.jobs
        ]
        self._begin: dict[tuple[int, int], int] = {}
        self._wait: dict[tuple[int, int, int], int] = {}

    def slot_rows(self, i: int, option: Option) -> list[tuple[int, float]]:
        """Returns the row and coefficient of an option in window i for each type of devices that it may use."""
        kinds = self.problem.types_of(option)
        return [(self.lp.slot_row(i, kind, option.slot), float(option.num_nodes)) for kind in kinds]

    def order_rows(self, c: int, i: int) -> list[tuple[int, float]]:
        """Adds the rows `begin` and `wait` of a class in window i, and returns its coefficients there."""
        share = -1.0 / len(self.classes[c])
        self._begin[c, i] = self.lp.row(max(0.0, self.heads[c] - self.points[i]), math.inf)
        rows = [(self._begin[c, i], share)]
        for other in self.jobs[c].after:
            a = self.class_of.get(other)
            if a is not None and i in self.windows[a]:
                self._wait[a, c, i] = self.lp.row(0.0, math.inf)
                rows.append((self._wait[a, c, i], share))
        return rows

    def add_order(self) -> None:
        """Adds the columns d[c,i] and the rows that stop them at the end of the window."""
        entries = {key: [(row, 1.0)] for key, row in self._begin.items()}
        for (a, c, i), row in self._wait.items():
            entries[c, i].append((row, 1.0))
            entries[a, i].append((row, -1.0))
        for (_, i), column in entries.items():
            if i < self.last:
                self.lp.column(column, upper=self.points[i + 1] - self.points[i])
            else:
                assert self.end is not None
                stop = self.lp.row(-math.inf, -self.points[i], [(self.end, -1.0)])
                self.lp.column([*column, (stop, 1.0)])

    def add_nodes(self) -> None:
        """Adds the walks over nodes in each window."""
        for (kind, size, until_s), count in self.problem.node_groups.items():
            until = math.inf if until_s is None else until_s / self.unit_s
            for i in range(self.num if self.end is not None else self.last):
                if until <= self.points[i] or not any(key[:2] == (i, kind) for key in self.lp.slots):
                    continue
                self.lp.add_walks(self._walk_rows(i, count, until, size), i, kind)

    def _walk_rows(self, i: int, count: int, until: float, size: int) -> list[int]:
        """Adds the rows of the positions of a group of nodes; what leaves position 0 is the time that it is there."""
        if i < self.last or self.end is None:
            there = count * (min(until, self.points[i + 1]) - self.points[i])
            return [self.lp.row(there, there), *(self.lp.row(0.0, 0.0) for _ in range(size - 1))]
        first = self.lp.row(-math.inf, -count * self.points[i], [(self.end, -float(count))])
        if until < math.inf:
            rest = [self.lp.row(0.0, 0.0) for _ in range(size)]
            self.lp.column([(first, 1.0), (rest[0], -1.0)], upper=count * (until - self.points[i]))
            return rest
        return [first, *(self.lp.row(0.0, 0.0) for _ in range(size - 1))]

    def window_prices(self, duals: Sequence[float], own: dict[str, list[float]]) -> WindowPrices:
        """Returns the dual prices of slots and of the order; `own` are those of jobs that are alone in the order."""
        slots: list[dict[str, dict[int, float]]] = [defaultdict(dict) for _ in range(self.num)]
        for (i, kind, slot), row in self.lp.slots.items():
            if duals[row] < 0:
                slots[i][kind][slot] = -duals[row]
        order = self._order_prices(duals)
        into, out = (_sums(pairs, self.num) for pairs in (order, _turned(order)))
        none = [0.0] * self.num
        for (c, i), row in self._begin.items():
            for j in self.classes[c]:
                job = self.problem.jobs[j].id
                source = max(0.0, duals[row]) / len(self.classes[c])
                price = max(into.get(job, none)[i] + source, out.get(job, none)[i])
                if price > 0:
                    own.setdefault(job, [0.0] * self.num)[i] = price
        rows = {job: tuple(row) for job, row in own.items()}
        return WindowPrices(self.points_s, tuple(map(dict, slots)), rows, order)

    def _order_prices(self, duals: Sequence[float]) -> dict[str, dict[str, tuple[float, ...]]]:
        """Returns the dual prices of the rows `wait`: by job that waits, job that it waits for, and window."""
        prices: dict[str, dict[str, list[float]]] = defaultdict(dict)
        for (a, c, i), row in self._wait.items():
            members = self.classes[c]
            if duals[row] > 1e-12:
                for j in members:
                    by_other = prices[self.problem.jobs[j].id]
                    by_other.setdefault(self.jobs[a].id, [0.0] * self.num)[i] = duals[row] / len(members)
        return {job: {other: tuple(row) for other, row in rows.items()} for job, rows in prices.items()}


Pairs = Mapping[str, Mapping[str, tuple[float, ...]]]


def _turned(order: Pairs) -> Pairs:
    """Returns the prices of pairs by their second job, and then by their first one."""
    others = {other for rows in order.values() for other in rows}
    return {other: {job: rows[other] for job, rows in order.items() if other in rows} for other in others}


def _sums(order: Pairs, num: int) -> dict[str, list[float]]:
    """Returns the sum of the prices of pairs by their first job and window."""
    return {job: [math.fsum(row[i] for row in rows.values()) for i in range(num)] for job, rows in order.items()}


MAX_WINDOWS = 16
MAX_SIZE = 600  # limit of windows x classes of jobs: a few tenths of a second


def has_windows(problem: Problem) -> bool:
    """Whether the time at which something runs matters for the bound: windows can raise it then."""
    return not problem.is_fused and (
        any(job.after or job.release_s for job in problem.jobs)
        or any(node.available_until_s is not None for node in problem.nodes)
    )


def points_of(problem: Problem, *, before_s: float) -> tuple[float, ...]:
    """Returns where windows begin, in seconds: not more than the LP can handle, evenly chosen from all that matter."""
    points = {*job_costs.earliest_starts_s(problem).values()}
    points |= {node.available_until_s for node in problem.nodes if node.available_until_s is not None}
    ascending = sorted(point for point in points if 0 < point < before_s * (1 - 1e-6))
    most = max(2, min(MAX_WINDOWS, MAX_SIZE // len(problem.classes))) - 1
    return (0.0, *evenly(ascending, most))


def evenly(values: Sequence[float], most: int) -> list[float]:
    """Returns at most that many of the values, evenly chosen."""
    if len(values) <= most:
        return list(values)
    return [values[(2 * k + 1) * len(values) // (2 * most)] for k in range(most)]


class WindowModel(WindowRows):
    """The LP that minimises T over the columns x[c,o,i], for windows that are not over at head[c].

    In addition to the rows of `WindowRows`:

        work   sum_{o,i} x[c,o,i] / whole[o]  >= m[c]
        time   sum_o x[c,o,i]                 <= m[c] (length of i after head[c])   where c is alone in the order
    """

    def __init__(self, problem: Problem, *, points_s: tuple[float, ...], unit_s: float) -> None:
        super().__init__(problem, classes=problem.classes, points_s=points_s, unit_s=unit_s, with_end=True)
        self._time: dict[tuple[int, int], int] = {}
        for c, members in enumerate(self.classes):
            work = self.lp.row(float(len(members)), math.inf)
            for i in self.windows[c]:
                entries = self.order_rows(c, i) if self.is_ordered[c] else [(self._time_row(c, i), 1.0)]
                for option, whole in self.options[c]:
                    for slot in self.slot_rows(i, option):
                        self.lp.column([(work, 1.0 / whole), slot, *entries])
        self.add_order()
        self.add_nodes()

    def prices(self) -> WindowPrices | None:
        """Solves the LP and returns its dual prices; None without a solution."""
        duals = self.lp.prices()
        if duals is None:
            return None
        own: dict[str, list[float]] = {}
        for (c, i), row in self._time.items():
            for j in self.classes[c] if duals[row] < -1e-12 else ():
                own.setdefault(self.problem.jobs[j].id, [0.0] * self.num)[i] = -duals[row]
        return self.window_prices(duals, own)

    def _time_row(self, c: int, i: int) -> int:
        count, begins = len(self.classes[c]), max(self.points[i], self.heads[c])
        if i < self.last:
            self._time[c, i] = self.lp.row(-math.inf, count * (self.points[i + 1] - begins))
        else:
            assert self.end is not None
            self._time[c, i] = self.lp.row(-math.inf, -count * begins, [(self.end, -float(count))])
        return self._time[c, i]
