import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmaster.tasks.planning import (
    Certificate,
    Option,
    Plan,
    PlanningJob,
    PlanningNode,
    Problem,
    Segment,
    certified_bound,
    verify,
)
from ringmaster.tasks.planning.objectives import objective_by_name
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES, current_practice
from tests.unit.planning.draw import problems

PROBLEM = Problem(
    "p",
    (PlanningNode("n0", 2), PlanningNode("n1", 2)),
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
        (replace(GOOD, lower_bound_s=-math.inf), "lower_bound is -inf, below 0"),
        (replace(GOOD, solver_bound_s=-1.0), "solver_bound is -1.0, below 0"),
        (replace(GOOD, value_bound=-1.0), "value_bound is -1.0, below 0"),
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
    problem = replace(PROBLEM, nodes=nodes, jobs=tuple(replace(job, user=job.id) for job in PROBLEM.jobs))
    # A poor plan, whose value is above any bound that can be proved.
    found = current_practice(problem)
    late = tuple(replace(s, start_s=s.start_s + 500.0, end_s=s.end_s + 500.0) for s in found.segments)
    plan = replace(found, segments=late, objective=objective)
    plan = replace(plan, value=objective_by_name(objective).value(plan, problem))
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


def test_many_segments_gain_no_more_than_one():
    """The tolerance is one of a whole plan: it is not a time for each of thousands of segments."""
    num, least_s, memory = 2_000, 1e-6, 10
    jobs = tuple(PlanningJob(name, (Option("single", 1, least_s, host_memory_bytes=memory),)) for name in "ab")
    two = Problem("p", (PlanningNode("n", 2, host_memory_bytes=memory),), jobs, switch_cost_s=0.0)
    one = Problem("p", (PlanningNode("n", 2),), jobs[:1], switch_cost_s=0.0)

    def cut(job: str, device: int, *, step_s: float, length_s: float) -> tuple[Segment, ...]:
        return tuple(
            Segment(job, 0, k * step_s, k * step_s + length_s, 1 / num, 0.0, (("n", (device,)),)) for k in range(num)
        )

    part_s = least_s / num
    a, b = (cut(job, device, step_s=part_s, length_s=part_s) for job, device in (("a", 0), ("b", 1)))
    assert verify(Plan("p", a), one) == []
    assert verify(Plan("p", (*a, *b)), two) == [f"node n: gangs take 20 bytes of 10 at {2 * part_s}"]
    timeless = verify(Plan("p", cut("a", 0, step_s=0.0, length_s=0.0)), one)
    assert timeless == ["job a: its segments have time for 0.000000000 of its work"]
    overlapping = verify(Plan("p", cut("a", 0, step_s=part_s / 2, length_s=part_s)), one)
    assert [fault.split(" at ")[0] for fault in overlapping] == [
        "device n:0 serves a and a",
        "job a: its segments overlap",
    ]


def test_a_short_job_takes_its_time_beside_a_long_one():
    short, long = (PlanningJob(name, (Option("single", 1, s),)) for name, s in (("short", 0.01), ("long", 1e4)))
    problem = Problem("p", (PlanningNode("n", 1),), (short, long), switch_cost_s=0.0)
    plan = Plan("p", tuple(Segment(j, 0, 0.0, s, 1.0, 0.0, (("n", (0,)),)) for j, s in (("short", 0.0), ("long", 1e4))))
    assert verify(plan, problem) == ["job short: its segments have time for 0.000000000 of its work"]


def test_a_bound_below_0_says_nothing_of_a_plan():
    assert replace(GOOD, lower_bound_s=-1.0).gap is None
    assert replace(GOOD, value=200.0, value_bound=-1.0).gap is None


@pytest.mark.parametrize("makespan", [139.0, math.nan, math.inf])
def test_a_makespan_that_no_segment_ends_at_is_refused(makespan):
    with pytest.raises(ValueError, match=f"its makespan is {makespan}, but its last segment ends at 140.0. To fix"):
        Plan.from_json(GOOD.to_json() | {"makespan": makespan})


@settings(deadline=None)
@given(problems(max_jobs=4, with_after=False), st.lists(st.floats(0, 100), min_size=12, max_size=12))
def test_any_prices_prove_a_bound_that_plans_obey(problem, prices):
    slots = sorted({option.slot for job in problem.jobs for option in job.options})
    own = {job.id: price for job, price in zip(problem.jobs, prices, strict=False)}
    certificate = Certificate(dict(zip(slots, prices[4:], strict=False)), own)
    for baseline in BASELINES:
        assert certified_bound(certificate, problem) <= baseline(problem).makespan_s * (1 + 1e-9)
