"""Bounds on the largest of factor x end by windows between due dates: what their prices prove, and what is refused."""

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
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.planning.bounds.due_dates import best_latest_bound, dues_of, latest_bound
from ringmaster.tasks.planning.objectives import objective_by_name
from ringmaster.tasks.planning.plans.list_scheduling import schedule
from ringmaster.tasks.planning.plans.plan import WindowPrices
from tests.drawing import draws
from tests.unit.planning.bounds.drawing import plans_of, ruled_problems
from tests.unit.planning.test_odd_problems import exhaustive

FAIRNESS = objective_by_name("fairness")
USERS = Problem(
    "two users",
    (PlanningNode("n0", 2),),
    tuple(PlanningJob(f"{user}{i}", (Option("single", 1, 100.0),), user=user) for i, user in enumerate("aabbbb")),
    switch_cost_s=0.0,
)
LATEST = {job.id: 1 / (200.0 if job.user == "a" else 400.0) for job in USERS.jobs}
PRICES = WindowPrices((0.0, 200.0), ({"": {1: 1.0}}, {"": {1: 1.0}}))


@st.composite
def groups_of(draw, problem: Problem) -> Problem:
    jobs = tuple(replace(job, user=draw(st.sampled_from(["", "a", "b"]))) for job in problem.jobs)
    return replace(problem, jobs=jobs)


def test_the_example_of_the_documentation():
    """All work is 600 device-seconds, and the windows earn 800 at a value of 1."""
    assert FAIRNESS.coefficients(USERS).latest == pytest.approx(LATEST)
    assert latest_bound(USERS, LATEST, bound_s=0.0, certificate=Certificate(due=PRICES)) == pytest.approx(0.75)
    fair = Plan(USERS.name, schedule(USERS, [(job.id, 0) for job in USERS.jobs]))
    unfair = Plan(USERS.name, schedule(USERS, [(job.id, 0) for job in reversed(USERS.jobs)]))
    assert (FAIRNESS.value(fair, USERS), FAIRNESS.value(unfair, USERS)) == pytest.approx((0.75, 1.5))
    plan = FAIRNESS.valued(fair, USERS, preemptive_bound(USERS))
    assert plan.value_bound == pytest.approx(0.75)
    assert verify(plan, USERS) == []
    assert Plan.from_json(plan.to_json()) == plan
    higher = replace(plan, value=None, value_bound=0.76)
    assert "certificate proves" in "\n".join(verify(replace(higher, objective="fairness"), USERS))


def tampered() -> list[tuple[str, WindowPrices]]:
    return [
        ("negative or not finite", replace(PRICES, slot_prices=({"": {1: -1.0}}, {}))),
        ("negative or not finite", replace(PRICES, job_prices={"a0": (math.nan, 0.0)})),
        ("must begin at 0", replace(PRICES, points_s=(1.0, 200.0))),
        ("must begin at 0", replace(PRICES, points_s=(0.0, 0.0))),
        ("each of the 2 windows", replace(PRICES, slot_prices=({},))),
        ("each of the 2 windows", replace(PRICES, job_prices={"a0": (1.0,)})),
        ("not part of prices by due date", replace(PRICES, order_prices={"b2": {"a0": (0.0, 0.0)}})),
    ]


@pytest.mark.parametrize(("says", "prices"), tampered())
def test_tampered_prices_are_refused(says, prices):
    certificate = Certificate(due=prices)
    with pytest.raises(ValueError, match=says):
        latest_bound(USERS, LATEST, bound_s=0.0, certificate=certificate)
    plan = Plan(USERS.name, schedule(USERS, [(job.id, 0) for job in USERS.jobs]), objective="fairness")
    plan = replace(plan, value=FAIRNESS.value(plan, USERS), value_bound=0.1, value_certificate=certificate)
    assert says in "\n".join(verify(plan, USERS))
    with pytest.raises(ValueError, match="prove no bound on the last end"):
        certified_bound(certificate, USERS)


def test_renamed_jobs_keep_their_prices():
    certificate = best_latest_bound(USERS, LATEST, preemptive_bound(USERS)).certificate
    certificate = replace(certificate, due=replace(PRICES, job_prices={"a0": (1.0, 0.0)}))
    names = {job.id: f"new-{job.id}" for job in USERS.jobs}
    renamed = replace(USERS, jobs=tuple(replace(job, id=names[job.id]) for job in USERS.jobs))
    latest = {names[job]: factor for job, factor in LATEST.items()}
    found = latest_bound(renamed, latest, bound_s=0.0, certificate=certificate.renamed(names))
    assert found == latest_bound(USERS, LATEST, bound_s=0.0, certificate=certificate)


@draws(100)
@given(st.data(), ruled_problems().flatmap(groups_of))
def test_any_prices_prove_a_bound_that_plans_obey(data, problem):
    plan, latest = data.draw(plans_of(problem)), FAIRNESS.coefficients(problem).latest
    end, price = max(dues_of(problem, latest).values()), st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0])
    points = (0.0, *sorted(end * share for share in data.draw(st.sets(st.sampled_from([0.2, 0.5, 0.9, 2.0])))))
    slots = tuple({kind: {s: data.draw(price) for s in (1, 2, 3)} for kind in problem.device_types} for _ in points)
    own = {job.id: data.draw(st.tuples(*[price] * len(points))) for job in problem.jobs}
    certificate = Certificate(due=WindowPrices(points, slots, own))
    least = latest_bound(problem, latest, bound_s=0.0, certificate=certificate)
    if plan is not None:
        assert least <= FAIRNESS.value(plan, problem) * (1 + 1e-9)


@draws(50)
@given(st.data(), ruled_problems().flatmap(groups_of))
def test_the_best_bound_is_above_the_simple_one_and_below_every_plan(data, problem):
    bound = preemptive_bound(problem)
    if not math.isfinite(bound.seconds):
        return
    best = FAIRNESS.best_bound(problem, bound)
    assert best.value >= FAIRNESS.lower_bound(problem, bound) * (1 - 1e-9)
    plan = data.draw(plans_of(problem))
    if plan is not None:
        assert best.value <= FAIRNESS.value(plan, problem) * (1 + 1e-9)
        assert verify(FAIRNESS.valued(plan, problem, bound, best=best), problem) == []


@draws(15)
@given(ruled_problems(max_jobs=4, with_leaving=False).flatmap(groups_of))
def test_no_exact_optimum_is_below_the_bound(problem):
    best = FAIRNESS.best_bound(problem, preemptive_bound(problem))
    assert best.value <= exhaustive(problem, "fairness") * (1 + 1e-9)
