"""How many nodes of an engine are worth their price."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, solve
from ringmaster.tasks.planning.node_prices import HOUR_S, NodePrices, nodes_worth
from ringmaster.tasks.planning.plans.plan import Plan, Segment

COME_S = 60.0


def problem_on(num_nodes):
    """Eight jobs of an hour each, on nodes of one device."""
    jobs = tuple(PlanningJob(f"j{i}", (Option("single", 1, HOUR_S),)) for i in range(8))
    return Problem("hours", nodes=tuple(PlanningNode(f"n{i}", 1) for i in range(num_nodes)), jobs=jobs)


def even_plan(problem):
    """A plan whose end and bound are those of jobs that are divided evenly, with no more than a device each."""
    end_s = max(len(problem.jobs) / len(problem.nodes), 1.0) * HOUR_S
    segments = (Segment("j0", 0, end_s - HOUR_S, end_s, 1.0, 0.0, (("n0", (0,)),)),)
    return Plan(problem.name, segments, lower_bound_s=end_s)


def worth(prices, *, least=1, most=20, make_plan=even_plan, come_s=COME_S):
    return nodes_worth(problem_on, least=least, most=most, prices=prices, come_s=come_s, make_plan=make_plan)


def test_by_hand():
    # The second node gains 4 h less a minute, and costs 4 hours. The minute decides, unless time has a worth, too.
    assert worth(NodePrices(per_node_hour=1.0, per_hour_earlier=0.0)).num_nodes == 1
    answer = worth(NodePrices(per_node_hour=1.0, per_hour_earlier=1.0))
    assert answer.num_nodes == 8 and answer.ends_s == HOUR_S
    assert answer.why == "one more node gains at least 0 s by these runtimes, worth 0.00, and costs 1.00"
    assert worth(NodePrices(per_node_hour=1.0, per_hour_earlier=1.0), come_s=0.8 * HOUR_S).num_nodes == 2


def test_nodes_stay_within_the_budget():
    # As eight hours of work cost 8 on any number of nodes up to eight, only the time that nodes take to come matters.
    assert worth(NodePrices(per_node_hour=1.0, per_hour_earlier=9.0, budget=8.0)).num_nodes == 8
    refused = worth(NodePrices(per_node_hour=1.0, per_hour_earlier=9.0, budget=7.9))
    assert refused.num_nodes == 0 and refused.why == "1 nodes cost 8.00, more than the budget of 7.9"
    assert worth(NodePrices(per_node_hour=1.0, per_hour_earlier=9e9, budget=8.5), most=9).num_nodes == 8


def test_the_least_number_is_kept_whatever_it_gains():
    assert worth(NodePrices(per_node_hour=9.0, per_hour_earlier=0.0), least=3).num_nodes == 3


@given(st.floats(0.0, 10.0), st.floats(0.0, 100.0), st.floats(0.0, 7200.0), st.integers(1, 4), st.integers(1, 9))
def test_dearer_nodes_and_cheaper_time_never_mean_more_nodes(price, hour, come_s, least, most):
    def number(price, hour, come_s):
        prices = NodePrices(per_node_hour=price, per_hour_earlier=hour)
        return worth(prices, least=least, most=most, come_s=come_s).num_nodes

    found = number(price, hour, come_s)
    assert least <= found <= max(least, most)
    assert number(price, hour + 1.0, come_s) >= found
    assert number(price, hour, come_s + 60.0) <= found


@pytest.mark.parametrize("most", [1, 6])
def test_real_plans(most):
    answer = worth(
        NodePrices(per_node_hour=1.0, per_hour_earlier=5.0), most=most, make_plan=lambda p: solve(p, work_s=1.0)
    )
    assert answer.num_nodes == {1: 1, 6: 6}[most]
    assert answer.ends_s == pytest.approx(8 * HOUR_S / most, rel=0.05)


@pytest.mark.parametrize("wrong", [{"per_node_hour": -1.0}, {"per_hour_earlier": math.nan}, {"budget": -1.0}])
def test_wrong_prices_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        NodePrices(**{"per_node_hour": 1.0, "per_hour_earlier": 1.0} | wrong)


def test_prices_are_read_as_they_are_written():
    for budget in (300.0, math.inf):
        prices = NodePrices(per_node_hour=2.5, per_hour_earlier=40.0, budget=budget)
        assert NodePrices.from_text(prices.to_text()) == prices
    with pytest.raises(ValueError, match="not enough values"):
        NodePrices.from_text("2.5,40")
