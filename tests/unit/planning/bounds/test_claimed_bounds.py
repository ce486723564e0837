"""No bound is accepted that some valid plan is below, whatever the plan, its prices and its proof claim."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ringmaster.flows.cli import app
from ringmaster.tasks.planning import Certificate, Option, Plan, PlanningJob, PlanningNode, Problem, Segment, verify
from ringmaster.tasks.planning.objectives import OBJECTIVES, objective_by_name
from ringmaster.tasks.planning.plans.plan import CompletionPrices, WindowPrices
from ringmaster.tasks.planning.solve import solve
from tests.drawing import draws
from tests.unit.planning.bounds.drawing import nested, plans_of, ruled_problems

TINY, HUGE = 5e-324, 1.7e308
USUAL = st.sampled_from([0.0, 0.5, 1.0, 3.0])
PRICE = USUAL | st.sampled_from([TINY, 1e-310, 1e-200, 1e-17, 1e16, 1e17, 1e200, HUGE])
NO_PRICE = st.sampled_from([-1.0, -TINY, math.nan, math.inf])
LATE_S = 1e4
PROOFS = ("", "dual prices", "exhausted search", "pattern MILP", "window prices", "critical path")
TWO = Problem(
    "two",
    (PlanningNode("n", 2),),
    tuple(PlanningJob(name, (Option("single", 1, 100.0),)) for name in "ab"),
    switch_cost_s=0.0,
)
ONE_AFTER_THE_OTHER = Plan(
    "two",
    (Segment("a", 0, 0.0, 100.0, 1.0, 0.0, (("n", (0,)),)), Segment("b", 0, 100.0, 200.0, 1.0, 0.0, (("n", (0,)),))),
)


@st.composite
def windows_of(draw, problem: Problem, price, *, with_order: bool, ends: bool) -> WindowPrices:
    times = st.sampled_from([5.0, 20.0, 47.5]) | st.sampled_from([TINY, 1e-200, 1e15, HUGE])
    points = (0.0, *sorted(draw(st.sets(times, min_size=1, max_size=3))))
    row = st.tuples(*[price] * (len(points) - 1), st.just(0.0) if ends else price)
    pairs = [(other, job.id) for job in problem.jobs for other in job.after] if with_order else []
    slots = [{kind: {s: draw(price) for s in (1, 2, 3)} for kind in problem.device_types} for _ in points]
    return WindowPrices(
        points,
        (*slots[:-1], {} if ends else slots[-1]),
        {job.id: draw(row) for job in problem.jobs},
        nested({pair: draw(row) for pair in pairs if draw(st.booleans())}),
    )


@st.composite
def certificates(draw, problem: Problem) -> Certificate | None:
    price = draw(st.sampled_from([PRICE, PRICE, PRICE, USUAL | NO_PRICE, st.sampled_from([0.0, TINY]), USUAL]))
    by_job = st.fixed_dictionaries({job.id: price for job in problem.jobs})
    slots = st.fixed_dictionaries(dict.fromkeys((1, 2, 3), price))
    kind = draw(st.sampled_from(["none", "slots", "types", "work", "windows", "completions", "due"]))
    if kind == "none":
        return None
    if kind == "slots":
        return Certificate(draw(slots), draw(by_job), cover_prices=draw(by_job))
    if kind == "types":
        return Certificate({}, draw(by_job), typed_prices={each: draw(slots) for each in problem.device_types})
    if kind == "work":
        return Certificate(work_prices=draw(by_job))
    if kind == "windows":
        return Certificate(windows=draw(windows_of(problem, price, with_order=True, ends=False)))
    if kind == "due":
        return Certificate(due=draw(windows_of(problem, price, with_order=False, ends=False)))
    waits = {(other, job.id): draw(price) for job in problem.jobs for other in job.after if draw(st.booleans())}
    windows = draw(windows_of(problem, price, with_order=True, ends=True))
    work = {job.id: draw(st.tuples(*[price] * len(windows.points_s))) for job in problem.jobs}
    return Certificate(completions=CompletionPrices(windows, draw(by_job), nested(waits), work))


def delayed(plan: Plan) -> Plan:
    """The same plan, much later: a valid plan that is poor enough for any bound."""
    late = (replace(s, start_s=s.start_s + LATE_S, end_s=s.end_s + LATE_S) for s in plan.segments)
    return Plan(plan.problem_name, tuple(late))


@draws(100)
@given(st.data(), ruled_problems(max_jobs=3, with_leaving=False), st.sampled_from([*OBJECTIVES.builtin]))
def test_no_bound_is_accepted_that_a_valid_plan_is_below(data, problem, objective):
    problem = replace(problem, nodes=tuple(replace(node, price=2.0) for node in problem.nodes))
    good = data.draw(plans_of(problem))
    assume(good is not None)
    assert verify(good, problem) == []
    proof, factor = data.draw(st.sampled_from(PROOFS)), data.draw(st.sampled_from([1.001, 1.5, 50.0]))
    one, other = data.draw(certificates(problem)), data.draw(certificates(problem))
    poor, of = delayed(good), objective_by_name(objective)
    value = of.value(good, problem)
    assume(value > 0)
    above_s, above = factor * good.makespan_s, factor * value
    if objective == "makespan":
        assert verify(replace(poor, lower_bound_s=above_s, certificate=one, proof=proof), problem)
        return
    if objective == "cost":  # the same for a plan that is later
        poor = replace(poor, segments=good.segments)
    claims = replace(poor, objective=objective, value=of.value(poor, problem), value_bound=above, value_certificate=one)
    assert verify(claims, problem)
    assert verify(replace(claims, lower_bound_s=above_s, certificate=other, proof=proof), problem)


@pytest.mark.parametrize("objective", ["makespan", "fairness"])
@pytest.mark.parametrize("proof", PROOFS)
def test_a_bound_without_prices_is_no_bound(objective, proof):
    claims = replace(ONE_AFTER_THE_OTHER, lower_bound_s=200.0, proof=proof)
    if objective == "fairness":
        claims = replace(claims, objective=objective, value=2.0, value_bound=2.0)
    faults = verify(claims, TWO)
    assert faults[0].startswith(
        "lower bound 200.0 claimed, but it has no prices, and without any 100.0 are proved. To fix:"
    )
    assert verify(replace(ONE_AFTER_THE_OTHER, lower_bound_s=100.0), TWO) == []


def test_a_tiny_price_proves_no_more_than_a_usual_one():
    problem = Problem(
        "one", (PlanningNode("n", 1),), (PlanningJob("a", (Option("single", 1, 1.5),)),), switch_cost_s=0.0
    )
    plan = Plan("one", (Segment("a", 0, 0.5, 2.0, 1.0, 0.0, (("n", (0,)),)),), lower_bound_s=2.0)
    for price in (TINY, 1e-310, 1.0, 2.0**1023):
        assert verify(replace(plan, certificate=Certificate({1: price})), problem) == [
            "lower bound 2.0 claimed, the certificate proves 1.5"
        ]


def test_check_tells_what_it_does_not_prove(tmp_path):
    """A plan that splits no job has the bound of a search, which only another search could check."""
    jobs = tuple(PlanningJob(f"j{i}", (Option("single", 1, float(s)),)) for i, s in enumerate((100, 90, 80, 70, 60)))
    problem = Problem("five", (PlanningNode("n", 2),), jobs, switch_cost_s=1.0)
    plan = solve(problem, preemption="never")
    assert plan.solver == "exhausted search"
    assert plan.lower_bound_s < plan.solver_bound_s == pytest.approx(plan.makespan_s, rel=1e-4)
    assert plan.gap == plan.makespan_s / plan.solver_bound_s - 1
    assert Plan.from_json(plan.to_json()) == plan
    (tmp_path / "problem.json").write_text(json.dumps(problem.to_json()))
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    done = CliRunner().invoke(app, ["check", str(tmp_path / "problem.json"), str(tmp_path / "plan.json")])
    assert done.exit_code == 0
    assert "not checked: that no plan which splits no job ends before" in done.stdout
