"""How many nodes of an engine are worth their price: each must gain more than it costs, by the given runtimes.

Let n nodes be there, let no plan on them end before LB(n), and let a known plan on n + 1 nodes end at UB(n + 1). A node
that comes after c seconds then makes the last job end earlier by at least

    gain  =  LB(n) - c - UB(n + 1)

since all jobs may wait for it and then follow that plan. In that time the n other nodes are given back earlier, too. At
a price of p for a node's hour and a worth of w for an hour by which the last job ends earlier, node n + 1 is worth its
price where

    gain (w + n p)  >=  p UB(n + 1)

Nodes are added one by one while this holds, and while (n + 1) p UB(n + 1), which is the most that all of them can cost,
is within the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ringmaster.tasks.planning.plans.plan import Plan
from ringmaster.tasks.planning.problems.problem import Problem

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class NodePrices:
    """What nodes cost and what time is worth, all in one currency. Raises ValueError for negative numbers.

    per_node_hour: the price of one node for an hour.
    per_hour_earlier: what it is worth that the last job ends an hour earlier.
    budget: the most that the nodes may cost until the jobs that are there have ended.
    """

    per_node_hour: float
    per_hour_earlier: float
    budget: float = math.inf

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ValueError(f"{name} must be a number >= 0, not {value!r}")

    @classmethod
    def from_text(cls, text: str) -> NodePrices:
        """Reads three numbers with commas between them, as `to_text` writes them. Raises ValueError."""
        per_node_hour, per_hour_earlier, budget = map(float, text.split(","))
        return cls(per_node_hour=per_node_hour, per_hour_earlier=per_hour_earlier, budget=budget)

    def to_text(self) -> str:
        """Returns the three numbers with commas between them."""
        return f"{self.per_node_hour!r},{self.per_hour_earlier!r},{self.budget!r}"

    def cost(self, num_nodes: int, seconds: float) -> float:
        """Returns what nodes cost for a time."""
        return self.per_node_hour * num_nodes * seconds / HOUR_S


@dataclass(frozen=True, kw_only=True)
class NodesWorth:
    """How many nodes are worth their price, and why not more.

    ends_s: the end of the known plan on them; None where the least number of nodes costs more than the budget.
    """

    num_nodes: int
    why: str
    ends_s: float | None = None


def nodes_worth(
    problem_on: Callable[[int], Problem],
    *,
    least: int,
    most: int,
    prices: NodePrices,
    come_s: float,
    make_plan: Callable[[Problem], Plan],
) -> NodesWorth:
    """Returns how many nodes, between `least` and `most`, are worth their price.

    Returns no nodes where even the least number costs more than the budget.

    problem_on: returns the problem of what is left to do on so many borrowed nodes, in addition to the nodes of one's
    own. least: the number without which a job cannot run.
    come_s: seconds that a node takes to come.
    make_plan: plans for the makespan, with a lower bound.
    """
    now = make_plan(problem_on(least))
    if (cost := prices.cost(least, now.makespan_s)) > prices.budget:
        return NodesWorth(num_nodes=0, why=f"{least} nodes cost {cost:.2f}, more than the budget of {prices.budget:g}")
    for num_nodes in range(least, most):
        more = make_plan(problem_on(num_nodes + 1))
        gain_s = (now.lower_bound_s or 0.0) - come_s - more.makespan_s
        worth = gain_s / HOUR_S * prices.per_hour_earlier + prices.cost(num_nodes, gain_s)
        price, cost, why = prices.cost(1, more.makespan_s), prices.cost(num_nodes + 1, more.makespan_s), ""
        if worth < price:
            gains = f"gains at least {max(gain_s, 0.0):.0f} s by these runtimes, worth {max(worth, 0.0):.2f}"
            why = f"one more node {gains}, and costs {price:.2f}"
        elif cost > prices.budget:
            why = f"{num_nodes + 1} nodes cost {cost:.2f}, more than the budget of {prices.budget:g}"
        if why:
            return NodesWorth(num_nodes=num_nodes, why=why, ends_s=now.makespan_s)
        now = more
    return NodesWorth(num_nodes=max(least, most), why="no more nodes are allowed", ends_s=now.makespan_s)
