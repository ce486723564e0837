"""What a plan costs and emits under series of prices and carbon, and what a second of a gang is worth at given factors.

A device of a node draws W watts while a job holds it, whether it works, starts or saves:

    money per device-second      price(t) + W energy_price(t) / 3.6e6
    grams per device-second      W carbon(t) / 3.6e6
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Option, PlanningNode, Steps
from ringmaster.tasks.planning.problems.series import J_PER_KWH, integral, value_at


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What a plan takes.

    end_s: the end of the last job.
    cost: money.
    emissions_g: grams of CO2 equivalents.
    """

    end_s: float
    cost: float
    emissions_g: float

    def of(self, name: str) -> float:
        """Returns the measure that a budget or factor calls "end", "cost" or "emissions"."""
        return {"end": self.end_s, "cost": self.cost, "emissions": self.emissions_g}[name]


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What a second of the last end, a unit of money and a gram add to the value of a plan."""

    end: float = 0.0
    cost: float = 0.0
    emissions: float = 0.0

    def value(self, measures: Measures) -> float:
        """Returns the value of a plan with these measures."""
        return self.end * measures.end_s + self.cost * measures.cost + self.emissions * measures.emissions_g

    def rate(self, cost: float, grams: float) -> float:
        """Returns the worth of a second that costs so much money and emits so many grams."""
        return self.cost * cost + self.emissions * grams


def watts(option: Option, node: PlanningNode) -> float:
    """Returns the power of one device of a node under an option."""
    return node.power_w if option.power_w is None else option.power_w


def price_steps(node: PlanningNode) -> Steps:
    """Returns the price of a device of a node over time."""
    return node.price_steps or ((0.0, node.price),)


def change_points(nodes: Iterable[PlanningNode]) -> set[float]:
    """Returns the times after 0 at which a price or an intensity of a node changes."""
    series = (s for node in nodes for s in (node.price_steps, node.energy_price_steps, node.carbon_steps))
    return {start_s for steps in series for start_s, _ in steps if start_s > 0}


def rates_at(node: PlanningNode, power_w: float, at_s: float) -> tuple[float, float]:
    """Returns the money and the grams of a device-second at a time."""
    energy = power_w / J_PER_KWH
    money = value_at(price_steps(node), at_s) + energy * value_at(node.energy_price_steps, at_s)
    return money, energy * value_at(node.carbon_steps, at_s)


def constant_rates(node: PlanningNode, problem: Problem) -> tuple[float, float]:
    """Returns the mean money and grams of a node's device-second up to the last change of a price of the problem."""
    until_s = max(change_points(problem.nodes), default=0.0)
    if not until_s:
        return rates_at(node, node.power_w, 0.0)
    energy = node.power_w / J_PER_KWH
    money = integral(price_steps(node), 0.0, until_s) + energy * integral(node.energy_price_steps, 0.0, until_s)
    return money / until_s, energy * integral(node.carbon_steps, 0.0, until_s) / until_s


def measures_of(plan: Plan, problem: Problem) -> Measures:
    """Returns what a plan takes of a problem."""
    return measures_of_segments(plan.segments, problem)


def measures_of_segments(segments: Iterable[Segment], problem: Problem) -> Measures:
    """Returns what segments take; devices that do not exist take nothing."""
    nodes = {node.id: node for node in problem.nodes}
    money, grams, end_s = [], [], 0.0
    for segment in segments:
        option = problem.job(segment.job).options[segment.option]
        end_s = max(end_s, segment.end_s)
        for name, ids in segment.devices:
            if (node := nodes.get(name)) is None:
                continue
            energy, between = watts(option, node) / J_PER_KWH, (segment.start_s, segment.end_s)
            per_device = integral(price_steps(node), *between) + energy * integral(node.energy_price_steps, *between)
            money.append(len(ids) * per_device)
            grams.append(len(ids) * energy * integral(node.carbon_steps, *between))
    return Measures(end_s=end_s, cost=math.fsum(money), emissions_g=math.fsum(grams))
