"""Plans for nodes that end, by the real planner."""

from functools import partial

import pytest

from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, solve
from ringmaster.tasks.planning.plans.verify import verify
from ringmaster.tasks.planning.solve import checked_plan
from ringmaster.tasks.pool.node_scaler import plan_before_ends

MAKE = partial(checked_plan, work_s=1.0, seed=0, objective="makespan")


def problem(*runtimes_s, nodes=("n1", "n2")):
    rows = tuple(PlanningJob(f"j{i}", (Option("single", 1, s),)) for i, s in enumerate(runtimes_s))
    return Problem(name="p", nodes=tuple(PlanningNode(name, 1) for name in nodes), jobs=rows, switch_cost_s=1.0)


def plan(given, ends_s):
    return plan_before_ends(given, ends_s=ends_s, objective="makespan", make_plan=MAKE)


def last_s(plan, node):
    return max((s.end_s for s in plan.segments if node in dict(s.devices)), default=0.0)


@pytest.mark.parametrize("end_s", [20.0, 60.0, 95.0])
def test_no_segment_outlasts_its_node(end_s):
    given = problem(100.0, 100.0)
    made = plan(given, {"n1": end_s})
    assert last_s(made, "n1") <= end_s + 1e-6
    assert not verify(made, given), "its bound and certificate are those of the problem"


def test_an_end_after_the_plan_changes_nothing():
    given = problem(100.0, 100.0)
    assert plan(given, {"n1": 1000.0}).makespan_s == pytest.approx(100.0)


def test_where_all_nodes_end_too_early_the_plan_is_made_as_if_they_stayed():
    made = plan(problem(100.0, 100.0), {"n1": 10.0, "n2": 10.0})
    assert made.makespan_s == pytest.approx(100.0)


def test_work_that_outlasts_all_nodes_is_on_the_one_that_stays_longest(caplog):
    given = problem(100.0, 100.0, 1000.0)
    with caplog.at_level("INFO"):
        made = plan(given, {"n1": 60.0, "n2": 600.0})
    assert last_s(made, "n1") <= 60.0 + 1e-6
    assert last_s(made, "n2") >= 1000.0
    assert not verify(made, given), "its bound and certificate are those of the problem"
    assert "outlast all nodes: they stop at checkpoints on n2" in caplog.text


def test_nodes_that_end_almost_together_share_the_work_that_outlasts_them():
    made = plan(problem(100.0, 100.0), {"n1": 50.0, "n2": 60.0})
    assert made.makespan_s == pytest.approx(100.0)


def test_a_node_that_is_about_to_end_gets_nothing():
    made = plan(problem(30.0, 30.0), {"n1": -5.0})
    assert last_s(made, "n1") == 0.0
    assert made.makespan_s == pytest.approx(60.0)


def test_a_node_that_ends_earlier_by_its_price_does_not_stay_longer():
    """A plan of a node that is emptied later keeps what the problem says of it."""
    seen = []

    def make_plan(given):
        seen.append([node.available_until_s for node in given.nodes])
        return solve(given, work_s=0.05)

    nodes = (PlanningNode("spot", 1, available_until_s=5.0), PlanningNode("stays", 1))
    jobs = (PlanningJob("a", (Option("single", 1, 4.0),)), PlanningJob("b", (Option("single", 1, 4.0),)))
    plan_before_ends(
        Problem("p", nodes, jobs), ends_s={"spot": 5.5, "stays": 2.0}, objective="makespan", make_plan=make_plan
    )
    assert seen[1] == [5.0, 2.0]
