"""Tariffs in the terms of plans: series of values since the epoch become steps from a problem's time 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ringmaster.codec import SINCE_LATER
from ringmaster.errors import ProblemError
from ringmaster.features.tariffs.series import DAY_S, HOUR_S, Series, Steps, shown_time
from ringmaster.findings import Finding, findings_where
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import PlanningNode
from ringmaster.tasks.planning.problems.series import J_PER_KWH, MAX_STEPS
from ringmaster.tasks.planning.term_features import DeviceUse, PastUse, TermsFeature
from ringmaster.text import enumerated

G_PER_KG = 1000.0
GIVEN = "given by power_w"
PRICES = ("price", "energy_price")
SERIES_KEYS = (*PRICES, "carbon")
KEPT_S, MAX_FORMER = 90 * DAY_S, 100  # of the former tariffs of a pool: what no batch needs that still runs
CARBON = "give carbon, or `ringmaster pool tariff`"


@dataclass(frozen=True, kw_only=True)
class Tariff:
    """What devices cost and emit over time; None where nothing is known.

    price: of a device-hour.
    energy_price, carbon: of a kWh, in money and in grams of CO2e.
    power_w: of a device while a job holds it.
    until_s: when the devices go away, in seconds since the epoch.
    """

    price: Series | None = None
    energy_price: Series | None = None
    carbon: Series | None = None
    power_w: float | None = None
    until_s: float | None = None

    def in_words(self) -> Iterator[str]:
        """Yields what is known, with units."""
        for key, unit in (("price", "a device-hour"), ("energy_price", "a kWh"), ("carbon", "g CO2e a kWh")):
            if (series := getattr(self, key)) is not None:
                yield f"{key} {series.in_words()} {unit}"
        if self.power_w is not None:
            yield f"power {self.power_w:g} W a device"
        if self.until_s is not None:
            yield f"until {shown_time(self.until_s)}"

    def over(self, other: Tariff) -> Tariff:
        """Returns the tariff with what it lacks of another."""
        return Tariff(**{key: value if value is not None else getattr(other, key) for key, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What was spent.

    money: None without prices. emissions_g: grams of CO2e; None without their series.
    energy_j: None where nothing says what power devices take.
    """

    money: float | None
    emissions_g: float | None
    energy_j: float | None

    @classmethod
    def sum_of(cls, each: Iterable[Spending]) -> Spending:
        """Returns the sum of what is known."""
        rows = list(each)

        def total(key: str) -> float | None:
            values = [value for row in rows if (value := getattr(row, key)) is not None]
            return math.fsum(values) if values else None

        return cls(money=total("money"), emissions_g=total("emissions_g"), energy_j=total("energy_j"))


@dataclass(frozen=True, kw_only=True)
class TariffTable:
    """The tariffs of nodes. every: of all nodes. nodes: by node, what differs there."""

    every: Tariff = field(default_factory=Tariff)
    nodes: Mapping[str, Tariff] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of any node, as in a pool whose tariffs were removed."""
        return all(tariff == Tariff() for tariff in (self.every, *self.nodes.values()))

    def tells(self, *keys: str) -> bool:
        """Returns whether some node has any of these: "price", "energy_price", "carbon"."""
        return any(getattr(tariff, key) is not None for tariff in (self.every, *self.nodes.values()) for key in keys)

    def of(self, node: str) -> Tariff:
        """Returns the tariff of a node, in plans as in results: where others alone have prices, it costs nothing."""
        own = self.nodes.get(node, Tariff()).over(self.every)
        is_free = own.price is None and own.energy_price is None and self.tells(*PRICES)
        return replace(own, price=Series.constant(0.0)) if is_free else own


@dataclass(frozen=True, kw_only=True)
class FormerTariffs(TariffTable):
    """The tariffs of a pool until others were set. until_s: when, in seconds since the epoch."""

    until_s: float


@dataclass(frozen=True, kw_only=True)
class Tariffs(TariffTable, TermsFeature):
    """The tariffs of nodes, and what of them plans must keep, or minimise.

    max_money, max_emissions_g: the most that may be spent; None for no bound.
    factors: for the objective "trade-off": by measure ("end", "cost", "emissions"), the worth of a second, a unit of
        money and a gram.
    since_s: when a pool got its first tariffs, in seconds since the epoch; None for those of a batch.
    former: the earlier tariffs of a pool, in order, by which that counts which was spent then. Those that say nothing
        are of a time in which the pool had none.
    """

    key = "tariffs"

    max_money: float | None = None
    max_emissions_g: float | None = None
    factors: Mapping[str, float] = field(default_factory=dict)
    since_s: float | None = field(default=None, metadata=SINCE_LATER)
    former: tuple[FormerTariffs, ...] = field(default=(), metadata=SINCE_LATER)

    def replacing(self, former: Tariffs | None, *, now_s: float) -> Tariffs:
        """Returns the tariffs of a pool from now on, with those that they replace; the same ones replace nothing."""
        if former is None:
            return replace(self, since_s=now_s)
        if (self.every, self.nodes) == (former.every, former.nodes):
            return replace(self, since_s=former.since_s, former=former.former)
        ended = FormerTariffs(until_s=now_s, every=former.every, nodes=former.nodes)
        kept = [each for each in (*former.former, ended) if each.until_s > now_s - KEPT_S]
        return replace(self, since_s=former.since_s, former=tuple(kept[-MAX_FORMER:]))

    def former_with(self, own: Tariffs) -> tuple[FormerTariffs, ...]:
        """Returns the former tariffs of a pool, with those of a batch where the pool had none."""
        assert self.since_s is not None, "it is the tariff of a pool"
        every = (FormerTariffs(until_s=self.since_s), *self.former)
        return tuple(replace(each, every=own.every, nodes=own.nodes) if each.is_empty else each for each in every)

    def resuming(self, before: Tariffs, *, now_s: float) -> Tariffs:
        """Returns the tariffs from now on, with those by which that counts which was spent before."""
        return self.replacing(before, now_s=now_s)

    def findings(self, *, objective: str, of_pool: Tariffs | None) -> Iterator[Finding]:
        """Yields which keys have no effect, since the pool has a tariff, and what nothing says, though it counts."""
        if of_pool is not None and of_pool.is_empty:
            of_pool = None
        if of_pool is not None:
            remedy = "leave it out; `ringmaster pool tariff` shows, sets and removes the pool's"
            for place in self._given():
                yield Finding(place, "is said by the pool, whose tariff holds for all batches", remedy)
        known = of_pool or self
        is_paid, emits = known.tells(*PRICES), known.tells("carbon")
        yield from findings_where(
            (objective == "emissions" and not emits, ("objective",), "is emissions, and nothing says them", CARBON),
            (
                self.max_money is not None and not is_paid,
                ("at_most", "money"),
                "is a bound, and nothing has a price",
                "give price or energy_price, or `ringmaster pool tariff`",
            ),
            (
                self.max_emissions_g is not None and not emits,
                ("at_most", "carbon_kg"),
                "is a bound, and nothing says what a kWh emits",
                CARBON,
            ),
        )

    def overrides(self, *, price_per_device_hour: float) -> Iterator[str]:
        """Yields that a batch's price of devices does not count, since the pool has prices."""
        if price_per_device_hour != 1.0 and self.tells(*PRICES):
            yield "price_per_device_hour does not count: the pool has prices, which `ringmaster pool tariff` shows"

    def _given(self) -> Iterator[tuple[str, ...]]:
        yield from ((key,) for key, value in vars(self.every).items() if value is not None)
        yield from (("tariffs", node) for node in self.nodes)

    def node_findings(self, nodes: Mapping[str, str]) -> Iterator[Finding]:
        """Yields the tariffs of nodes that are not there, among them those of kinds of devices."""
        for name in (name for name in self.nodes if name not in nodes):
            alike = sorted(node for node, kind in nodes.items() if name and name.casefold() in kind.casefold())
            if alike:
                what = f"names a kind of devices, and tariffs are by node: {enumerated(alike)} have this kind"
                yield Finding(("tariffs", name), what, "give the tariff to each of these nodes")
                continue
            remedy = f"name one of {enumerated(sorted(nodes)) or 'those that will be there'}"
            yield Finding(("tariffs", name), "is the tariff of no node that is there", remedy)

    def in_words(self) -> Iterator[str]:
        """Yields the tariff of all nodes, and what differs by node."""
        own = [(f" of {name}", each) for name, each in self.nodes.items()]
        for name, tariff in [("", self.every), *own]:
            if texts := list(tariff.in_words()):
                yield f"tariff{name}: {', '.join(texts)}"
        if self.tells(*PRICES) and all(getattr(self.every, key) is None for key in PRICES):
            yield "nodes without a price of their own cost nothing"

    def on(self, problem: Problem, *, now_s: float, past: PastUse) -> Problem:
        """Returns a problem with the tariffs from now on, and what is left to spend.

        Raises ProblemError where energy counts, and nothing says what power the devices of a node take.
        """
        horizon_s, most_w = _horizon_s(problem), max(node.power_w for node in problem.nodes)
        # A node that is not there, for which jobs wait, is taken to be as the others.
        powered = [replace(node, power_w=node.power_w or most_w) for node in problem.nodes]
        nodes = [self._on_node(node, now_s=now_s, horizon_s=horizon_s) for node in powered]
        faults = [
            f"node {node.id}: nothing says what power its devices take. To fix: give power_w, the watts of one"
            for node in nodes
            if (node.energy_price_steps or node.carbon_steps) and not node.power_w
        ]
        if faults:
            raise ProblemError(faults)
        problem = replace(problem, nodes=tuple(nodes))
        budgets = self.with_power(problem).left(past, now_s=now_s)
        return replace(problem, budgets=budgets, factors=dict(self.factors))

    def with_power(self, problem: Problem) -> Tariffs:
        """Returns the tariffs with the power that a problem's nodes have, where none is given."""
        nodes = {
            node.id: replace(self.of(node.id), power_w=self.of(node.id).power_w or node.power_w or None)
            for node in problem.nodes
        }
        return replace(self, nodes={**self.nodes, **nodes})

    def spent(self, use: DeviceUse, *, energy_j: float | None = None) -> Spending:
        """Returns what a segment's devices on a node have cost and emitted.

        energy_j: as it was measured; without it, by the power of the tariff.
        """
        seconds, power = use.ended_s - use.started_s, Tariff(power_w=self.of(use.node).power_w)
        parts = []
        for tariff, part in self._parts(use):
            share = (part.ended_s - part.started_s) / seconds if seconds > 0 else 1.0
            parts.append(_spent(tariff.over(power), part, energy_j=None if energy_j is None else energy_j * share))
        return Spending.sum_of(parts)

    def _parts(self, use: DeviceUse) -> Iterator[tuple[Tariff, DeviceUse]]:
        """Yields what was used under each of the tariffs that held meanwhile."""
        started_s = use.started_s
        for former in self.former:
            ended_s = min(former.until_s, use.ended_s)
            if started_s < ended_s:
                yield former.of(use.node), replace(use, started_s=started_s, ended_s=ended_s)
                started_s = ended_s
        if started_s < use.ended_s or started_s == use.started_s:
            yield self.of(use.node), replace(use, started_s=started_s)

    @classmethod
    def combined(cls, each: Sequence[Tariffs | None], *, of_pool: Tariffs | None = None) -> Tariffs | None:
        """Returns the tariffs of the pool or, without any, of the first batch that has any.

        Bounds are those of all batches together, where each has one. The factors are the first ones.
        """
        known = [tariffs for tariffs in each if tariffs is not None]
        telling = next((tariffs for tariffs in known if tariffs.tells(*SERIES_KEYS)), known[0] if known else None)
        base = telling if of_pool is None or (of_pool.is_empty and telling is not None) else of_pool
        if base is None:
            return None
        if of_pool is not None and of_pool.since_s is not None and telling is not None:
            base = replace(base, former=of_pool.former_with(telling))
        return replace(
            base,
            factors=next((tariffs.factors for tariffs in known if tariffs.factors), {}),
            max_money=_sum_of_all([None if tariffs is None else tariffs.max_money for tariffs in each]),
            max_emissions_g=_sum_of_all([None if tariffs is None else tariffs.max_emissions_g for tariffs in each]),
        )

    def _on_node(self, node: PlanningNode, *, now_s: float, horizon_s: float) -> PlanningNode:
        tariff = self.of(node.id)
        ends_s = [node.available_until_s, None if tariff.until_s is None else max(0.0, tariff.until_s - now_s)]
        prices = _steps(tariff.price, now_s=now_s, horizon_s=horizon_s, unit=HOUR_S)
        energy_prices = _steps(tariff.energy_price, now_s=now_s, horizon_s=horizon_s)
        return replace(
            node,
            price=0.0 if prices or energy_prices else node.price,  # what is spent is counted by the tariff alone
            price_steps=prices,
            energy_price_steps=energy_prices,
            carbon_steps=_steps(tariff.carbon, now_s=now_s, horizon_s=horizon_s),
            power_w=node.power_w if tariff.power_w is None else tariff.power_w,
            power_source=node.power_source if tariff.power_w is None else GIVEN,
            available_until_s=min((end_s for end_s in ends_s if end_s is not None), default=None),
        )

    def left(self, past: PastUse, *, now_s: float) -> dict[str, float]:
        """Returns what is left to spend, by measure. What was spent is not refunded by planning again."""
        if self.max_money is None and self.max_emissions_g is None:
            return {}
        spent = Spending.sum_of(self.spent(replace(use, ended_s=min(use.ended_s, now_s))) for use in past())
        left = {}
        if self.max_money is not None:
            left["cost"] = max(0.0, self.max_money - (spent.money or 0.0))
        if self.max_emissions_g is not None:
            left["emissions"] = max(0.0, self.max_emissions_g - (spent.emissions_g or 0.0))
        return left


def _steps(series: Series | None, *, now_s: float, horizon_s: float, unit: float = 1.0) -> Steps:
    """Returns the values until the horizon, and then the highest one of the day after it.

    The last step of a problem lasts for ever: a low one would be a reason to wait for it.
    """
    known: list[tuple[float, float]] = []
    later: list[tuple[float, float]] = []
    for at_s, value in () if series is None else series.each_step(now_s, horizon_s=horizon_s + DAY_S):
        if at_s < horizon_s and len(known) < MAX_STEPS - 1:
            known.append((at_s, value / unit))
        elif later and at_s > later[0][0] + DAY_S:
            break
        else:
            later.append((at_s, value / unit))
    if later:
        known.append((later[0][0], max(value for _, value in (known[-1], *later))))
    return tuple(known)


def _spent(tariff: Tariff, use: DeviceUse, *, energy_j: float | None) -> Spending:
    """Returns what was spent under one tariff. energy_j: None where only the power of the tariff says it."""
    seconds = max(0.0, use.ended_s - use.started_s)
    if energy_j is None and tariff.power_w is not None:
        energy_j = tariff.power_w * use.num_devices * seconds
    by_device = _mean(tariff.price, use) * seconds * use.num_devices / HOUR_S if tariff.price else None
    by_energy = _mean(tariff.energy_price, use) * energy_j / J_PER_KWH if tariff.energy_price and energy_j else None
    carbon_g = _mean(tariff.carbon, use) * energy_j / J_PER_KWH if tariff.carbon and energy_j is not None else None
    parts = [part for part in (by_device, by_energy) if part is not None]
    return Spending(money=sum(parts) if parts else None, emissions_g=carbon_g, energy_j=energy_j)


def _mean(series: Series, use: DeviceUse) -> float:
    """Returns the mean value over an interval; the value there where it is empty."""
    seconds = use.ended_s - use.started_s
    return series.integral(use.started_s, use.ended_s) / seconds if seconds > 0 else series.value_at(use.started_s)


def _sum_of_all(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _horizon_s(problem: Problem) -> float:
    """Returns the seconds for which values matter: all jobs, one after another, and a day in which they may wait.

    Deadlines may leave more time.
    """
    in_a_row_s = sum(min(option.whole_s for option in job.options) for job in problem.jobs)
    due_s = max((job.deadline_s for job in problem.jobs if job.deadline_s is not None), default=0.0)
    return max(due_s, in_a_row_s + DAY_S)


TERMS_FEATURES = (Tariffs,)
