import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmaster.tasks.planning import (
    Certificate,
    Node,
    Option,
    Plan,
    PlanningJob,
    Problem,
    Segment,
    certified_bound,
    verify,
)
from ringmaster.tasks.planning.objectives import registry
from ringmaster.tasks.planning.plans.baselines import BASELINES, current_practice
from tests.unit.planning.draw import problems

PROBLEM = Problem(
    "p",
    (Node("n0", 2), Node("n1", 2)),
    (
        PlanningJob("a", (Option("single", 1, 100.0), Option("ddp", 2, 60.0))),
        PlanningJob("b", (Option("wide", 4, 50.0, 2),), after=("a",)),
    ),
    switch_cost_s=10.0,
)
A1 = Segment("a", 0, 0.0, 50.0, 0.5, 0.0, (("n0", (0,)),))
A2 = Segment("a", 1, 50.0, 90.0, 0.5, 10.0, (("n1", (0, 1)),))
B = Segment("b", 0, 90.0, 140.0, 1.0, 0.0, (("n0", (0, 1)), ("n1", (0, 1))))
GOOD = Plan("p", (A1, A2, B), lower_bound_s=50.0, certificate=Certificate({}, {"b": 1.0}))


def change(index: int, **fields) -> Plan:
    segments = list(GOOD.segments)
    segments[index] = replace(segments[index], **fields)
    return replace(GOOD, segments=tuple(segments))


def test_a_good_plan_has_no_faults():
    assert verify(GOOD, PROBLEM) == []
    assert GOOD.num_switches == 1
    assert GOOD.gap == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (change(0, job="ghost"), "no such job"),
        (change(0, option=7), "no such option"),
        (change(0, option=-1), "no such option"),
        (change(0, end_s=float("nan")), "not finite"),
        (change(0, start_s=-50.0, end_s=0.0), "impossible times"),
        (change(0, work=0.9), "claims work 0.9"),
        (change(0, end_s=40.0, work=0.4), "work 0.9"),
        (change(1, overhead_s=0.0, end_s=80.0), "pays 0.0 of 10.0"),
        (change(1, overhead_s=-10.0, end_s=70.0), "negative overhead"),
        (change(1, start_s=40.0, end_s=80.0), "segments overlap"),
        (change(1, devices=(("n1", (0, 0)),)), "has devices (0, 0)"),
        (change(1, devices=(("n1", (0,)),)), "has devices (0,)"),
        (change(1, devices=(("n1", (1, 2)),)), "does not exist"),
        (change(1, devices=(("n9", (0, 1)),)), "does not exist"),
        (change(1, devices=(("n0", (0,)), ("n1", (0,)))), "is on 2 nodes"),
        (change(2, devices=(("n0", (0, 1)), ("n0", (0, 1)))), "names a node twice"),
        (change(2, start_s=80.0, end_s=130.0), "device n1:0 serves a and b"),
        (change(2, start_s=80.0, end_s=130.0), "waits for a"),
        (replace(GOOD, segments=(A1, A2)), "job b: work 0.0"),
        (replace(GOOD, lower_bound_s=141.0, certificate=None), "above the makespan"),
        (replace(GOOD, lower_bound_s=60.0), "the certificate proves 50"),
        (replace(GOOD, certificate=Certificate({2: -1.0}, {})), "negative or not finite"),
        (replace(GOOD, certificate=Certificate({}, {"b": float("inf")})), "negative or not finite"),
    ],
)
def test_each_kind_of_fault_is_found(plan, says):
    assert says in "\n".join(verify(plan, PROBLEM))


@pytest.mark.parametrize("objective", ["weighted", "mean_completion", "fairness", "cost"])
@pytest.mark.parametrize("forged", [1.0, math.nan])
def test_a_bound_of_an_objective_needs_a_proof(objective, forged):
    nodes = tuple(replace(node, price=3.0) for node in PROBLEM.nodes)
    problem = replace(PROBLEM, nodes=nodes, jobs=tuple(replace(job, group=job.id) for job in PROBLEM.jobs))
    # A poor plan, whose value is above any bound that can be proved.
    found = current_practice(problem)
    late = tuple(replace(s, start_s=s.start_s + 500.0, end_s=s.end_s + 500.0) for s in found.segments)
    plan = replace(found, segments=late, objective=objective)
    plan = replace(plan, value=registry.objective(objective).value(plan, problem))
    assert verify(plan, problem) == []
    faults = verify(replace(plan, value_bound=forged * plan.value), problem)
    assert faults
    assert all(fault.startswith(f"bound {forged * plan.value} on {objective}") for fault in faults)


def test_going_on_without_a_pause_costs_nothing_and_a_pause_does():
    first = Segment("a", 0, 0.0, 50.0, 0.5, 0.0, (("n0", (0,)),))
    second = Segment("a", 0, 50.0, 100.0, 0.5, 0.0, (("n0", (0,)),))
    alone = replace(PROBLEM, jobs=PROBLEM.jobs[:1])
    assert verify(Plan("p", (first, second)), alone) == []
    late = replace(second, start_s=55.0, end_s=105.0)
    assert "switches" in "\n".join(verify(Plan("p", (first, late)), alone))


@settings(deadline=None)
@given(problems(max_jobs=4, with_after=False), st.lists(st.floats(0, 100), min_size=12, max_size=12))
def test_any_prices_prove_a_bound_that_plans_obey(problem, prices):
    slots = sorted({option.slot for job in problem.jobs for option in job.options})
    own = {job.id: price for job, price in zip(problem.jobs, prices, strict=False)}
    certificate = Certificate(dict(zip(slots, prices[4:], strict=False)), own)
    for baseline in BASELINES:
        assert certified_bound(certificate, problem) <= baseline(problem).makespan_s * (1 + 1e-9)
