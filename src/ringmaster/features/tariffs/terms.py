"""Tariffs in the terms of plans: series of values since the epoch become steps from a problem's time 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ringmaster.errors import ProblemError
from ringmaster.features.tariffs.series import DAY_S, HOUR_S, Series, Steps
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import PlanningNode
from ringmaster.tasks.planning.problems.series import MAX_STEPS
from ringmaster.tasks.planning.term_features import DeviceUse, PastUse, TermsFeature

J_PER_KWH = 3.6e6
G_PER_KG = 1000.0
GIVEN = "given by power_w"


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
class Tariffs(TermsFeature):
    """The tariffs of nodes, and what of them plans must keep, or minimise.

    every: of all nodes. nodes: by node, what differs there.
    max_money, max_emissions_g: the most that may be spent; None for no bound.
    factors: for the objective "trade-off": by measure ("end", "cost", "emissions"), the worth of a second, a unit of
        money and a gram.
    """

    key = "tariffs"

    every: Tariff = field(default_factory=Tariff)
    nodes: Mapping[str, Tariff] = field(default_factory=dict)
    max_money: float | None = None
    max_emissions_g: float | None = None
    factors: Mapping[str, float] = field(default_factory=dict)

    def of(self, node: str) -> Tariff:
        """Returns the tariff of a node."""
        return self.nodes.get(node, Tariff()).over(self.every)

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
        tariff, seconds = self.of(use.node), max(0.0, use.ended_s - use.started_s)
        if energy_j is None and tariff.power_w is not None:
            energy_j = tariff.power_w * use.num_devices * seconds
        by_device = _mean(tariff.price, use) * seconds * use.num_devices / HOUR_S if tariff.price else None
        by_energy = _mean(tariff.energy_price, use) * energy_j / J_PER_KWH if tariff.energy_price and energy_j else None
        carbon_g = _mean(tariff.carbon, use) * energy_j / J_PER_KWH if tariff.carbon and energy_j is not None else None
        parts = [part for part in (by_device, by_energy) if part is not None]
        return Spending(money=sum(parts) if parts else None, emissions_g=carbon_g, energy_j=energy_j)

    @classmethod
    def combined(cls, each: Sequence[Tariffs | None]) -> Tariffs | None:
        """Returns the tariffs of the first batch that has any.

        Bounds are those of all batches together, where each has one.
        """
        first = next((tariffs for tariffs in each if tariffs is not None), None)
        if first is None or len(each) == 1:
            return first
        return replace(
            first,
            max_money=_sum_of_all([None if tariffs is None else tariffs.max_money for tariffs in each]),
            max_emissions_g=_sum_of_all([None if tariffs is None else tariffs.max_emissions_g for tariffs in each]),
        )

    def _on_node(self, node: PlanningNode, *, now_s: float, horizon_s: float) -> PlanningNode:
        tariff = self.of(node.id)
        ends_s = [node.available_until_s, None if tariff.until_s is None else max(0.0, tariff.until_s - now_s)]
        prices = _steps(tariff.price, now_s=now_s, horizon_s=horizon_s, unit=HOUR_S)
        return replace(
            node,
            price=0.0 if prices else node.price,
            price_steps=prices,
            energy_price_steps=_steps(tariff.energy_price, now_s=now_s, horizon_s=horizon_s),
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
    steps = () if series is None else series.steps(now_s, horizon_s=horizon_s + DAY_S)
    known = [step for step in steps if step[0] < horizon_s][: MAX_STEPS - 1]
    if later := steps[len(known) :]:
        known.append((later[0][0], max(value for _, value in (known[-1], *later))))
    return tuple((at_s, value / unit) for at_s, value in known)


def _mean(series: Series, use: DeviceUse) -> float:
    """Returns the mean value over an interval; the value there where it is empty."""
    seconds = use.ended_s - use.started_s
    return series.integral(use.started_s, use.ended_s) / seconds if seconds > 0 else series.value_at(use.started_s)


def _sum_of_all(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _horizon_s(problem: Problem) -> float:
    """Returns the seconds for which values matter: all jobs, one after another, and a day in which they may wait.

    Deadlines may leave more time.
    """
    in_a_row_s = sum(min(option.whole_s for option in job.options) for job in problem.jobs)
    due_s = max((job.deadline_s for job in problem.jobs if job.deadline_s is not None), default=0.0)
    return max(due_s, in_a_row_s + DAY_S)


TERMS_FEATURES = (Tariffs,)
