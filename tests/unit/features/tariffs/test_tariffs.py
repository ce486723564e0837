"""Plans by prices and carbon intensities that change over time, their bounds, certificates and budgets."""

import re
from copy import deepcopy
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.families import draw
from ringmaster.errors import ProblemError
from ringmaster.features.tariffs import tariff_bound
from ringmaster.features.tariffs.tariff_planner import TariffProof
from ringmaster.features.tariffs.tariff_values import Factors, measures_of
from ringmaster.tasks.planning import (
    Certificate,
    Option,
    Plan,
    PlanningJob,
    PlanningNode,
    Problem,
    Segment,
    solve,
    verify,
)
from ringmaster.tasks.planning.fusion import choose_groups
from ringmaster.tasks.planning.objectives import objective_by_name
from ringmaster.tasks.planning.problems.problem_parts import CurrentRun
from tests.drawing import draws
from tests.unit.features.tariffs.drawing import best_value, priced_problems, unit_problems

DAY = tuple((3600.0 * hour, 1.0 if 10 <= hour < 16 else 3.0) for hour in range(24))
WORK_S = 0.1


def day(*jobs: PlanningJob, num_devices: int = 2, **fields) -> Problem:
    node = PlanningNode("n0", num_devices, price_steps=DAY, carbon_steps=((0.0, 360.0), (7200.0, 36.0)), power_w=100.0)
    return Problem("day", (node,), jobs, **fields)


def job(hours: float, **fields) -> PlanningJob:
    return PlanningJob(fields.pop("id", "a"), (Option("single", 1, hours * 3600.0),), **fields)


def small(seed: int, **fields) -> Problem:
    problem = draw("tiny", seed=seed)
    nodes = tuple(replace(node, price_steps=DAY) for node in problem.nodes)
    jobs = tuple(
        replace(j, deadline_s=86_400.0, options=tuple(replace(o, runtime_s=o.runtime_s / 4) for o in j.options))
        for j in problem.jobs
    )
    return replace(problem, nodes=nodes, jobs=jobs, **fields)


def test_a_plan_takes_what_its_segments_hold():
    option = Option("ddp", 2, 100.0, power_w=50.0)
    node = PlanningNode("n0", 2, price_steps=((0.0, 1.0), (40.0, 3.0)), energy_price_steps=((0.0, 3.6e6),))
    node = replace(node, carbon_steps=((0.0, 7.2e6), (90.0, 0.0)))
    problem = Problem("one", (node,), (PlanningJob("a", (option,)),))
    plan = Plan("one", (Segment("a", 0, 10.0, 110.0, 1.0, 0.0, (("n0", (0, 1)),)),))
    measures = measures_of(plan, problem)
    assert measures.end_s == 110.0
    assert measures.cost == pytest.approx(2 * (30 * 1.0 + 70 * 3.0 + 100 * 50.0))
    assert measures.emissions_g == pytest.approx(2 * 50.0 * 2.0 * 80.0)


@draws(12)
@given(unit_problems())
def test_tiny_problems_are_planned_as_well_as_by_an_integer_program(problem):
    least = best_value(problem, horizon=12)
    plan = solve(problem, objective="trade-off", work_s=WORK_S)
    assert verify(plan, problem) == []
    assert plan.value_bound <= least * (1 + 1e-6) + 1e-9
    assert plan.value <= 1.02 * least + 1e-9


@draws(15)
@given(priced_problems(), st.sampled_from(["cost", "emissions", "trade-off"]))
def test_every_plan_is_valid_and_its_bound_holds_for_it_and_for_other_plans(problem, objective):
    plan = solve(problem, objective=objective, work_s=WORK_S)
    assert verify(plan, problem) == []
    assert Plan.from_json(plan.to_json()) == plan
    other = solve(problem, work_s=WORK_S)  # ignores prices
    claim = replace(other, objective=objective, value=None, value_bound=plan.value_bound)
    assert verify(replace(claim, value_certificate=plan.value_certificate), problem) == []


@pytest.mark.parametrize("seed", range(20))
def test_certificates_are_recomputed_and_tampered_ones_are_refused(seed: int):
    problem = small(seed, factors={"cost": 1.0, "end": 0.2})
    plan = solve(problem, objective=("cost", "trade-off")[seed % 2], work_s=WORK_S)
    assert verify(plan, problem) == [] and plan.value_bound > 0
    (told,) = verify(replace(plan, value_bound=plan.value_bound * (1 + 1e-4)), problem)[-1:]
    assert "its certificate proves" in told or "above" in told
    assert verify(tampered(plan, lambda data: data["intervals"][-1].__setitem__(0, 5.0)), problem)
    assert verify(tampered(plan, lambda data: data["prices"][0]["slots"][0].update(n0={"1": -1.0})), problem)
    assert verify(tampered(plan, lambda data: data["prices"][0]["budgets"].update(cost="x")), problem)
    for change in (
        lambda data: data["prices"][0]["slots"][0].update(n0={"0": 1e9}),  # a slot that no node has to give
        lambda data: data["prices"][0]["budgets"].update(cost=1e9),  # of no budget
        lambda data: data["prices"][0]["budgets"].update(cost=10**400),
        lambda data: data.update(intervals=5),
    ):
        assert any(fault.startswith("certificate of ") for fault in verify(tampered(plan, change), problem))
    proved = Certificate(of_objective=plan.value_certificate.of_objective)
    objective = objective_by_name(plan.objective)
    assert objective.certified_bound(proved, problem, bound_s=plan.lower_bound_s) == pytest.approx(plan.value_bound)
    other = tampered(plan, lambda data: with_other_prices(data, Random(seed))).value_certificate
    # Any prices >= 0 prove a bound, but none that a plan is below.
    assert objective.certified_bound(other, problem, bound_s=plan.lower_bound_s) <= plan.value


def with_other_prices(data: dict, random: Random) -> None:
    for prices in data["prices"]:
        for row in prices["slots"]:
            row["n0"] = {size: random.uniform(0.0, 3.0) for size in "1234"}
        prices["jobs"] = {"j1": [random.uniform(0.0, 3.0) for _ in data["points"]]}
        for row in (prices["slots"][-1]["n0"], *prices["jobs"].values()):  # what has no end may earn nothing
            row.update(dict.fromkeys(row, 0.0)) if isinstance(row, dict) else row.__setitem__(-1, 0.0)


def tampered(plan: Plan, change) -> Plan:
    data = deepcopy(dict(plan.value_certificate.of_objective))
    change(data)
    return replace(plan, value_certificate=Certificate(of_objective=data))


def test_similar_jobs_share_columns_of_a_large_linear_program(monkeypatch):
    drawn = draw("scale-30x32")
    nodes = tuple(replace(node, price_steps=DAY) for node in drawn.nodes)
    jobs = tuple(replace(each, deadline_s=40 * 86_400.0) for each in drawn.jobs)
    problem = replace(drawn, nodes=nodes, jobs=jobs)
    whole = TariffProof(problem, Factors(cost=1.0), bound_s=0.0)
    whole.run()
    monkeypatch.setattr(tariff_bound, "MAX_COLUMNS", 1_500)
    shared = TariffProof(problem, Factors(cost=1.0), bound_s=0.0)
    shared.run()
    assert shared.bound.points_s == whole.bound.points_s and len(shared.bound.classes) < len(whole.bound.classes)
    assert 0.97 * whole.value <= shared.value_bound().value <= whole.value * (1 + 1e-6)


def test_a_job_waits_for_cheap_hours_within_its_deadline():
    plan = solve(day(job(3, deadline_s=86_400.0)), objective="cost", work_s=WORK_S)
    assert plan.value == pytest.approx(3 * 3600.0) and plan.gap < 1e-6
    (segment,) = plan.segments
    assert segment.start_s >= 10 * 3600.0 and segment.end_s <= 16 * 3600.0 + 1e-6
    early = solve(day(job(3, deadline_s=9 * 3600.0)), objective="cost", work_s=WORK_S)
    assert early.value == pytest.approx(9 * 3600.0) and early.gap < 1e-6
    at_once = solve(day(job(3, deadline_s=3 * 3600.0)), objective="cost", work_s=WORK_S)
    assert at_once.value == pytest.approx(9 * 3600.0) and at_once.gap < 1e-6


def test_a_job_pauses_where_that_gains_more_than_a_switch():
    node = PlanningNode("n0", 1, price_steps=((0.0, 1.0), (3600.0, 9.0), (7200.0, 1.0)))
    one = job(2, deadline_s=4 * 3600.0, release_s=0.0)
    cheap = replace(day(one), nodes=(node,), switch_cost_s=60.0)
    plan = solve(cheap, objective="trade-off", work_s=WORK_S)
    assert len(plan.segments) in (1, 2) and plan.value <= 7200.0 + 60.0 + 1e-6
    tight = replace(cheap, jobs=(replace(one, deadline_s=3 * 3600.0 + 120.0),))
    plan = solve(tight, objective="cost", work_s=WORK_S)
    assert len(plan.segments) == 2 and plan.value == pytest.approx(7200.0 + 60.0)
    single = solve(tight, objective="cost", preemption="never", work_s=WORK_S)
    assert len(single.segments) == 1 and single.value > 2 * plan.value


def test_the_end_is_weighed_against_money():
    late = solve(day(job(3), factors={"cost": 1.0, "end": 0.1}), objective="trade-off", work_s=WORK_S)
    soon = solve(day(job(3), factors={"cost": 1.0, "end": 2.0}), objective="trade-off", work_s=WORK_S)
    assert late.makespan_s == pytest.approx(13 * 3600.0) and soon.makespan_s == pytest.approx(3 * 3600.0)
    assert late.value == pytest.approx(3 * 3600.0 + 0.1 * late.makespan_s)
    assert late.gap < 1e-6 and soon.gap < 1e-6


def test_budgets_are_kept_and_those_that_cannot_be_are_refused_with_the_proof():
    free = day(job(1, deadline_s=9 * 3600.0), factors={"end": 1.0})
    assert solve(free, objective="trade-off", work_s=WORK_S).makespan_s == pytest.approx(3600.0)
    # 100 W for an hour: 36 g in the first two hours, and 3.6 g later
    tight = replace(free, budgets={"emissions": 10.0})
    plan = solve(tight, objective="trade-off", work_s=1.0)
    assert verify(plan, tight) == [] and measures_of(plan, tight).emissions_g <= 10.0 * (1 + 1e-6)
    assert plan.makespan_s > 7200.0 and plan.gap < 0.1
    assert verify(replace(plan, segments=solve(free, work_s=WORK_S).segments), tight)
    with pytest.raises(ProblemError, match=r"budget of emissions: no plan takes less than 3\.6"):
        solve(replace(free, budgets={"emissions": 3.0}), objective="trade-off", work_s=WORK_S)
    with pytest.raises(ProblemError, match=r"has budgets, which makespan does not keep\. To fix: choose one of cost"):
        solve(tight)


def with_clean_hour(**fields) -> Problem:
    """A job of an hour, within three: a cheap one that emits much, one that is bad in both, and a dear, clean one."""
    hours = (0.0, 3600.0, 7200.0)
    prices, carbon = (tuple(zip(hours, row, strict=True)) for row in ((1.0, 9.0, 3.0), (360.0, 3600.0, 36.0)))
    node = PlanningNode("n0", 1, price_steps=prices, carbon_steps=carbon, power_w=100.0)
    return Problem("clean", (node,), (job(1, deadline_s=3 * 3600.0),), switch_cost_s=0.0, **fields)


def test_budgets_that_cannot_be_kept_together_are_refused_with_weights_that_prove_it():
    budgets = {"cost": 5400.0, "emissions": 18.0}  # a quarter of the clean hour at most, and five ninths at least
    for each in (with_clean_hour(budgets={name: budget}) for name, budget in budgets.items()):
        assert verify(solve(each, objective="cost", work_s=WORK_S), each) == []
    for factors in ({"end": 1.0}, {"cost": 1.0}):
        with pytest.raises(ProblemError, match=r"in any plan, and .* within all budgets\. To fix: raise") as caught:
            solve(with_clean_hour(budgets=budgets, factors=factors), objective="trade-off", work_s=WORK_S)
    (text,) = caught.value.faults
    weights = {name: float(weight) for weight, name in re.findall(r"(\S+) (cost|emissions)", text)}
    least, allowed = map(float, re.search(r"at least (\S+) in any plan, and (\S+) within", text).groups())
    assert allowed == pytest.approx(sum(weight * budgets[name] for name, weight in weights.items()), rel=1e-5)
    free = with_clean_hour(factors=weights)
    plan = solve(free, objective="trade-off", work_s=WORK_S)
    assert verify(plan, free) == [], "the bound is recomputed with arithmetic alone"
    assert plan.value_bound == pytest.approx(least, rel=1e-5) and least > 1.05 * allowed


def test_that_no_plan_keeps_budgets_is_not_claimed_without_a_proof():
    tight = with_clean_hour(budgets={"cost": 7950.0, "emissions": 17.4})  # only with a pause in the second hour
    parts = ((2160.0, 3600.0, 0.4), (7200.0, 9360.0, 0.6))
    paused = (Segment("a", 0, start_s, end_s, work, 0.0, (("n0", (0,)),)) for start_s, end_s, work in parts)
    assert verify(Plan("clean", tuple(paused), objective="cost"), tight) == []
    with pytest.raises(ProblemError, match="no plan was found that takes less, and none is proved to be impossible"):
        solve(tight, objective="cost", preemption="never", work_s=WORK_S)


@pytest.mark.parametrize("seed", range(2))
def test_plans_are_near_the_bound_where_a_budget_binds_or_the_end_is_weighed(seed: int):
    problem = small(seed)
    cheapest = solve(problem, objective="cost", work_s=0.3).value
    soonest = measures_of(solve(problem, work_s=WORK_S), problem).cost
    tight = replace(problem, budgets={"cost": 0.7 * cheapest + 0.3 * soonest}, factors={"end": 1.0})
    weighed = replace(problem, factors={"cost": 1.0, "end": 0.5 * cheapest / 86_400.0})
    for each in (tight, weighed):
        plan = solve(each, objective="trade-off", work_s=1.5)
        assert verify(plan, each) == [] and plan.gap < 0.02


@pytest.mark.parametrize("preemption", ["auto", "never"])
def test_a_constant_series_has_the_plan_and_the_bound_of_a_price(preemption):
    plain = draw("tiny", seed=3)
    priced = replace(plain, nodes=tuple(replace(node, price=0.5) for node in plain.nodes))
    series = replace(plain, nodes=tuple(replace(node, price_steps=((0.0, 0.5),)) for node in plain.nodes))
    plans = [solve(each, objective="cost", preemption=preemption, work_s=WORK_S) for each in (priced, series)]
    assert plans[0] == plans[1] and plans[0].value_bound > 0


def test_jobs_that_run_and_a_node_that_ends_are_kept():
    running = CurrentRun(0, (("n0", (1,)),), pinned_until_s=600.0)
    first, second = job(2, running=running, deadline_s=86_400.0), job(2, id="b", after=("a",))
    problem = day(first, second)
    problem = replace(problem, nodes=(replace(problem.nodes[0], available_until_s=15 * 3600.0),))
    plan = solve(problem, objective="cost", work_s=WORK_S)
    assert verify(plan, problem) == []
    assert plan.segments[0].devices == (("n0", (1,)),) and plan.segments[0].start_s == 0.0


def test_fused_groups_have_a_certified_bound_with_series_too():
    jobs = (
        PlanningJob("a", (Option("t", 1, 3600.0), Option("t", 1, 4000.0, jobs=("b",)))),
        PlanningJob("b", (Option("t", 1, 3600.0),)),
    )
    problem = day(*jobs)
    plan = solve(problem, objective="cost", work_s=WORK_S)
    assert verify(plan, problem) == []
    assert plan.value == pytest.approx(measures_of(plan, problem).cost) and plan.gap < 1e-6
    for change in ({"a": 1e9, "b": 1e9}, {"a": 4000.0}, {"c": 1.0}):  # any prices prove a bound, but no false one
        other = tampered(plan, lambda data, covers=change: data["prices"][0].update(covers=covers)).value_certificate
        proved = objective_by_name("cost").certified_bound(other, problem, bound_s=plan.lower_bound_s)
        assert proved <= plan.value * (1 + 1e-9)
    assert verify(tampered(plan, lambda data: data["prices"][-1].update(covers={"a": -1.0})), problem)
    slow = tuple(replace(j, options=tuple(replace(o, startup_s=900.0, save_s=60.0) for o in j.options)) for j in jobs)
    assert solve(day(*slow), objective="cost", work_s=WORK_S).gap < 1e-6
    apart = day(*jobs, factors={"cost": 1.0, "end": 0.2})
    assert solve(apart, objective="trade-off", work_s=0.3).gap < 1e-6


def test_jobs_that_exceed_a_budget_alone_keep_it_as_a_group():
    """What they would take alone is planned without the budget, to compare."""
    together = Option("multi", 1, 4000.0, jobs=("b",))
    rows = (PlanningJob("a", (Option("single", 1, 3600.0), together)), PlanningJob("b", (Option("single", 1, 3600.0),)))
    priced = Problem("p", (PlanningNode("n", 1, price_steps=((0.0, 1e-3),)),), rows, budgets={"cost": 5.0})
    fusion = choose_groups(priced, objective="cost", work_s=0.05)
    assert fusion.groups == {"a": ("b",)} and not fusion.alone_is_late
    assert (fusion.fused_plan.value, fusion.alone.value) == (pytest.approx(4.0), pytest.approx(7.2))
    assert verify(fusion.fused_plan, priced) == []
