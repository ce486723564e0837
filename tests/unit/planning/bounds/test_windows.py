"""Bounds by windows of time: what their prices prove, and what is refused."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.tasks.planning import (
    Certificate,
    Option,
    Plan,
    PlanningJob,
    PlanningNode,
    Problem,
    certified_bound,
    verify,
)
from ringmaster.tasks.planning.bounds.bounds import critical_path, pattern_bound, preemptive_bound
from ringmaster.tasks.planning.bounds.job_costs import earliest_ends_s
from ringmaster.tasks.planning.bounds.windows import WindowModel, points_of
from ringmaster.tasks.planning.plans.list_scheduling import schedule
from ringmaster.tasks.planning.plans.plan import WindowPrices
from tests.drawing import draws
from tests.unit.planning.bounds.drawing import nested, plans_of, ruled_problems
from tests.unit.planning.draw import tiny
from tests.unit.planning.test_odd_problems import exhaustive


def job(name: str, seconds: float, *, after: tuple[str, ...] = (), release_s: float = 0.0) -> PlanningJob:
    return PlanningJob(name, (Option("single", 1, seconds),), after=after, release_s=release_s)


FIRST = Problem(
    "three jobs wait for one",
    (PlanningNode("n0", 2),),
    (job("first", 100.0), *(job(name, 300.0, after=("first",)) for name in "bcd")),
    switch_cost_s=0.0,
)
PRICES = WindowPrices((0.0, 100.0), ({}, {"": {1: 1.0}}))


def test_the_example_of_the_documentation():
    """For 100 s only one device of two is used, then 900 s of work are left: 100 + 900 / 2."""
    assert certified_bound(Certificate(windows=PRICES), FIRST) == pytest.approx(550.0)
    assert pattern_bound(FIRST).seconds == pytest.approx(500.0)
    bound = preemptive_bound(FIRST)
    assert bound.seconds == pytest.approx(550.0)
    assert bound.proof == "window prices"


def test_a_chain_earns_one_price_for_all_its_jobs():
    jobs = (job("a", 100.0), job("b", 200.0, after=("a",)), job("c", 300.0, after=("b",), release_s=350.0))
    problem = Problem("chain", (PlanningNode("n0", 4),), (*jobs, job("d", 10.0, after=("a",))), 0.0)
    certificate = critical_path(replace(problem, jobs=(*jobs[:2], replace(jobs[2], release_s=0.0), problem.jobs[3])))
    assert certified_bound(certificate, problem) == pytest.approx(600.0)
    alone = Certificate(windows=replace(certificate.windows, order_prices={}))
    assert certified_bound(alone, problem) < 400.0
    late = critical_path(problem)
    assert list(late.windows.job_prices) == ["c"]
    assert certified_bound(late, problem) == pytest.approx(650.0)
    assert preemptive_bound(problem).seconds == pytest.approx(650.0)


def test_work_that_leaving_nodes_cannot_do_is_never_done():
    problem = Problem("gone", (PlanningNode("n0", 1, available_until_s=250.0),), (job("a", 300.0),), 0.0)
    assert certified_bound(Certificate(windows=WindowPrices((0.0,), ({"": {1: 1.0}},))), problem) == math.inf


def tampered() -> list[tuple[str, WindowPrices]]:
    order = replace(PRICES, job_prices={"first": (1.0, 1.0), "b": (1.0, 1.0)})
    return [
        ("negative or not finite", replace(PRICES, slot_prices=({}, {"": {1: -1.0}}))),
        ("negative or not finite", replace(PRICES, job_prices={"b": (math.nan, 0.0)})),
        ("negative or not finite", replace(PRICES, points_s=(0.0, math.inf))),
        ("must begin at 0", replace(PRICES, points_s=(1.0, 100.0))),
        ("must begin at 0", replace(PRICES, points_s=(0.0, 0.0))),
        ("must begin at 0", WindowPrices((), ())),
        ("each of the 2 windows", replace(PRICES, job_prices={"b": (1.0,)})),
        ("each of the 2 windows", replace(PRICES, slot_prices=({},))),
        ("unknown job 'x'", replace(PRICES, job_prices={"x": (1.0, 1.0)})),
        ("'c', which does not wait for 'b'", replace(order, order_prices={"c": {"b": (1.0, 1.0)}})),
        ("exceed its own price", replace(order, order_prices={"b": {"first": (1.0, 2.0)}})),
        ("exceed its own price", replace(PRICES, order_prices={"b": {"first": (1.0, 1.0)}})),
    ]


@pytest.mark.parametrize(("says", "prices"), tampered())
def test_tampered_prices_are_refused(says, prices):
    certificate = Certificate(windows=prices)
    with pytest.raises(ValueError, match=says):
        certified_bound(certificate, FIRST)
    plan = Plan(FIRST.name, schedule(FIRST, [(each.id, 0) for each in FIRST.jobs]), 1.0, certificate)
    assert says in "\n".join(verify(plan, FIRST))


def test_a_bound_above_what_the_prices_prove_is_refused():
    plan = Plan(FIRST.name, schedule(FIRST, [(each.id, 0) for each in FIRST.jobs]), 550.0, Certificate(windows=PRICES))
    assert verify(plan, FIRST) == []
    assert Plan.from_json(plan.to_json()) == plan
    assert "the certificate proves 550" in "\n".join(verify(replace(plan, lower_bound_s=560.0), FIRST))
    later = Certificate(windows=replace(PRICES, points_s=(0.0, 90.0)))
    assert "the certificate proves 540" in "\n".join(verify(replace(plan, certificate=later), FIRST))


def test_renamed_jobs_keep_their_prices():
    certificate = preemptive_bound(FIRST).certificate
    names = {each.id: f"new-{each.id}" for each in FIRST.jobs}
    after = {each.id: tuple(names[other] for other in each.after) for each in FIRST.jobs}
    renamed = replace(FIRST, jobs=tuple(replace(j, id=names[j.id], after=after[j.id]) for j in FIRST.jobs))
    assert certified_bound(certificate.renamed(names), renamed) == certified_bound(certificate, FIRST)


@st.composite
def any_prices(draw, problem: Problem) -> WindowPrices:
    points = (0.0, *sorted(draw(st.sets(st.sampled_from([5.0, 20.0, 30.0, 47.5]), max_size=3))))
    price = st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0])
    row = st.tuples(*[price] * len(points))
    pairs = [(other, job.id) for job in problem.jobs for other in job.after]
    order = {pair: draw(row) for pair in pairs if draw(st.booleans())}
    own = {}
    for job_ in problem.jobs:
        into = [sum(r[i] for (_, b), r in order.items() if b == job_.id) for i in range(len(points))]
        out = [sum(r[i] for (a, _), r in order.items() if a == job_.id) for i in range(len(points))]
        own[job_.id] = tuple(max(x, y) + draw(price) for x, y in zip(into, out, strict=True))
    slots = tuple({kind: {s: draw(price) for s in (1, 2, 3)} for kind in problem.device_types} for _ in points)
    return WindowPrices(points, slots, own, nested(order))


@draws(100)
@given(st.data(), ruled_problems())
def test_any_prices_prove_a_bound_that_plans_obey(data, problem):
    plan = data.draw(plans_of(problem))
    prices = data.draw(any_prices(problem))
    if plan is not None:
        assert verify(plan, problem) == []
        assert certified_bound(Certificate(windows=prices), problem) <= plan.makespan_s * (1 + 1e-9)


@draws(50)
@given(st.data(), ruled_problems())
def test_the_bound_is_between_the_old_one_and_every_plan(data, problem):
    bound, old = preemptive_bound(problem), pattern_bound(problem)
    assert bound.seconds >= old.seconds
    assert certified_bound(bound.certificate, problem) == pytest.approx(bound.seconds, rel=1e-9)
    plan = data.draw(plans_of(problem))
    if plan is not None:
        assert bound.seconds <= plan.makespan_s * (1 + 1e-9)


@draws(50)
@given(ruled_problems(with_seconds=False))
def test_the_prices_prove_what_the_linear_program_found(problem):
    old = pattern_bound(problem).seconds
    if not math.isfinite(old):
        return
    model = WindowModel(problem, points_s=points_of(problem, before_s=old), unit_s=old)
    highs = model.lp.loaded()
    highs.run()
    found_s = highs.getInfo().objective_function_value * old
    assert certified_bound(Certificate(windows=model.prices()), problem) == pytest.approx(found_s, rel=1e-4)
    assert found_s >= max(earliest_ends_s(problem).values()) * (1 - 1e-6)


@draws(15)
@given(ruled_problems(max_jobs=4, with_leaving=False))
def test_no_exact_optimum_is_below_the_bound(problem):
    assert preemptive_bound(problem).seconds <= exhaustive(problem, "makespan") * (1 + 1e-9)


def test_jobs_of_a_class_share_rows_and_change_no_bound():
    waiting = tuple(replace(j, id=f"{j.id}-{i}", after=("first",)) for j in tiny(3).jobs for i in range(3))
    alike = Problem(
        "p", (PlanningNode("n0", 3), PlanningNode("n1", 2, available_until_s=60.0)), (*waiting, job("first", 20.0)), 1.0
    )
    apart = replace(alike, jobs=tuple(replace(j, weight=1.0 + i) for i, j in enumerate(alike.jobs)))
    assert (len(alike.classes), len(apart.classes)) == (4, 10)
    assert preemptive_bound(alike).proof == "window prices"
    assert preemptive_bound(alike).seconds == pytest.approx(preemptive_bound(apart).seconds, rel=1e-6)
