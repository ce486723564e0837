import pytest

from ringmaster.errors import ProblemError
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, solve, verify
from ringmaster.tasks.planning.objectives import PlanningTerms, plan_giving_up_deadlines


def three() -> Problem:
    """Three jobs of 10, 20 and 30 s on one device."""
    jobs = tuple(PlanningJob(f"j{s}", (Option("single", 1, float(s)),)) for s in (10, 20, 30))
    return Problem("three", (PlanningNode("n", 1),), jobs, switch_cost_s=1.0)


def ends(plan: Plan) -> dict[str, float]:
    return {segment.job: segment.end_s for segment in plan.segments}


def test_deadlines_count_from_the_start_of_the_batch():
    terms = PlanningTerms(deadlines_s={"j30": 45.0, "j10": 3.0, "gone": 5.0}, weights={"j20": 2.0})
    problem = terms.on(three(), elapsed_s=5.0)
    assert [(job.deadline_s, job.weight) for job in problem.jobs] == [(0.0, 1.0), (None, 2.0), (40.0, 1.0)]
    assert all(node.price == 0.0 for node in problem.nodes)


def test_each_objective_is_planned_for_as_it_was_asked():
    weighted = PlanningTerms(objective="weighted", weights={"j30": 10.0})
    plan = solve(weighted.on(three()), objective=weighted.objective)
    assert ends(plan)["j30"] == 30.0
    cost = PlanningTerms(objective="cost", deadlines_s={"j20": 25.0}, price_per_device_hour=36.0)
    problem = cost.on(three())
    plan = solve(problem, objective=cost.objective)
    assert verify(plan, problem) == []
    assert plan.value == pytest.approx(0.6)  # 60 device-seconds at 0.01 each
    assert ends(plan)["j20"] <= 25.0


def test_no_more_deadlines_are_given_up_than_must_be():
    asked = PlanningTerms(deadlines_s={"j10": 5.0, "j20": 20.0, "j30": 60.0}).on(three())
    with pytest.raises(ProblemError, match="j10"):
        solve(asked)
    plan, given_up = plan_giving_up_deadlines(asked, solve)
    assert given_up == ("j10",)
    assert ends(plan)["j20"] <= 20.0
    kept, none = plan_giving_up_deadlines(three(), solve)
    assert (kept, none) == (solve(three()), ())


def test_a_fault_that_is_no_deadline_is_not_hidden():
    def refuse(problem: Problem) -> Plan:
        raise ProblemError(["no room"])

    with pytest.raises(ProblemError, match="no room"):
        plan_giving_up_deadlines(three(), refuse)
    with pytest.raises(ProblemError, match="no room"):
        plan_giving_up_deadlines(PlanningTerms(deadlines_s={"j10": 5.0, "j20": 6.0}).on(three()), refuse)
