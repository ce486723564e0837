"""Bounds on weighted completion by windows of time: what their prices prove, and what is refused."""

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
from ringmaster.tasks.planning.bounds.bounds import certified_ends_bound, pattern_bound, preemptive_bound
from ringmaster.tasks.planning.bounds.completions import CompletionModel, completion_certificate, completion_points
from ringmaster.tasks.planning.objectives import objective_by_name
from ringmaster.tasks.planning.plans.list_scheduling import schedule
from ringmaster.tasks.planning.plans.plan import CompletionPrices, WindowPrices
from tests.drawing import draws
from tests.unit.planning.bounds.drawing import nested, plans_of, ruled_problems
from tests.unit.planning.draw import tiny
from tests.unit.planning.test_odd_problems import exhaustive

WEIGHTED = objective_by_name("weighted")
PAIR = Problem(
    "two jobs and one that waits",
    (PlanningNode("n0", 1),),
    (
        PlanningJob("a", (Option("single", 1, 100.0),), weight=1.0),
        PlanningJob("b", (Option("single", 1, 100.0),), weight=1.0),
        PlanningJob("c", (Option("single", 1, 50.0),), weight=1.0, after=("a",)),
    ),
    switch_cost_s=0.0,
)
WEIGHTS = {job.id: job.weight for job in PAIR.jobs}
PRICES = CompletionPrices(
    WindowPrices((0.0, 100.0, 200.0), ({"": {1: 2.0}}, {"": {1: 1.0}}, {})),
    end_prices={"a": 1.0, "b": 1.0},
    work_prices={"a": (300.0, 200.0, 100.0), "b": (300.0, 200.0, 100.0)},
)


def test_the_example_of_the_documentation():
    """Both jobs pay 300 wherever they end, and the windows earn 300; the job that waits ends at 150 s or later."""
    problem, weights = replace(PAIR, jobs=PAIR.jobs[:2]), {"a": 1.0, "b": 1.0}
    assert certified_ends_bound(Certificate(completions=PRICES), problem, weights) == pytest.approx(300.0)
    assert certified_ends_bound(Certificate(completions=PRICES), PAIR, WEIGHTS) == pytest.approx(450.0)
    bound = WEIGHTED.best_bound(PAIR, preemptive_bound(PAIR))
    assert bound.value <= 100.0 + 150.0 + 250.0
    assert bound.value > WEIGHTED.lower_bound(PAIR, preemptive_bound(PAIR))


def tampered() -> list[tuple[str, CompletionPrices]]:
    windows = PRICES.windows
    last = replace(windows, slot_prices=({}, {}, {"": {1: 1.0}}))
    return [
        ("negative or not finite", replace(PRICES, end_prices={"a": -1.0})),
        ("negative or not finite", replace(PRICES, work_prices={"a": (1.0, math.inf, 0.0)})),
        ("negative or not finite", replace(PRICES, windows=replace(windows, points_s=(0.0, 1.0, math.nan)))),
        ("last window has no end", replace(PRICES, windows=last)),
        ("last window has no end", replace(PRICES, windows=replace(windows, job_prices={"a": (0.0, 0.0, 1.0)}))),
        ("each of the 3 windows", replace(PRICES, work_prices={"a": (1.0,)})),
        ("unknown job 'x'", replace(PRICES, end_prices={"x": 0.0})),
        ("'b', which does not wait", replace(PRICES, wait_prices={"b": {"a": 0.5}})),
        ("end of a exceeds its weight", replace(PRICES, end_prices={"a": 1.5})),
        ("end of c exceeds its weight", replace(PRICES, wait_prices={"c": {"a": 1.5}})),
        ("must begin at 0", replace(PRICES, windows=replace(windows, points_s=(0.0, 2.0, 1.0)))),
    ]


@pytest.mark.parametrize(("says", "prices"), tampered())
def test_tampered_prices_are_refused(says, prices):
    certificate = Certificate(completions=prices)
    with pytest.raises(ValueError, match=says):
        certified_ends_bound(certificate, PAIR, WEIGHTS)
    plan = Plan(PAIR.name, schedule(PAIR, [(job.id, 0) for job in PAIR.jobs]), objective="weighted")
    plan = replace(plan, value=WEIGHTED.value(plan, PAIR), value_bound=1.0, value_certificate=certificate)
    assert says in "\n".join(verify(plan, PAIR))


def test_a_bound_above_what_the_prices_prove_is_refused():
    plan = Plan(PAIR.name, schedule(PAIR, [(name, 0) for name in "acb"]))
    plan = WEIGHTED.valued(plan, PAIR, preemptive_bound(PAIR))
    assert plan.value == 500.0
    assert plan.value_certificate.completions is not None
    assert verify(plan, PAIR) == []
    assert Plan.from_json(plan.to_json()) == plan
    higher = replace(plan, value_bound=plan.value_bound * 1.001)
    assert "certificate proves" in "\n".join(verify(higher, PAIR))
    with pytest.raises(ValueError, match="prove no bound on the last end"):
        certified_bound(plan.value_certificate, PAIR)


def test_renamed_jobs_keep_their_prices():
    certificate = completion_certificate(PAIR, WEIGHTS, bound_s=250.0)
    names = {job.id: f"new-{job.id}" for job in PAIR.jobs}
    jobs = (replace(job, id=names[job.id], after=tuple(names[other] for other in job.after)) for job in PAIR.jobs)
    renamed, weights = replace(PAIR, jobs=tuple(jobs)), {names[job]: weight for job, weight in WEIGHTS.items()}
    expected = certified_ends_bound(certificate, PAIR, WEIGHTS)
    assert certified_ends_bound(certificate.renamed(names), renamed, weights) == expected


@st.composite
def any_prices(draw, problem: Problem) -> CompletionPrices:
    points = (0.0, *sorted(draw(st.sets(st.sampled_from([5.0, 20.0, 30.0, 47.5]), min_size=1, max_size=3))))
    num, price = len(points), st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0])
    row = st.tuples(*[price] * (num - 1), st.just(0.0))
    pairs = [(other, job.id) for job in problem.jobs for other in job.after]
    order = {pair: draw(row) for pair in pairs if draw(st.booleans())}
    own, ends, net = {}, {}, {job.id: job.weight for job in problem.jobs}
    for job in problem.jobs:
        into = [sum(r[i] for (_, b), r in order.items() if b == job.id) for i in range(num)]
        out = [sum(r[i] for (a, _), r in order.items() if a == job.id) for i in range(num)]
        more = draw(row)
        own[job.id] = tuple(max(x, y) + z for x, y, z in zip(into, out, more, strict=True))
    waits = {}
    for a, b in reversed(pairs):
        waits[a, b] = net[b] * draw(st.sampled_from([0.0, 0.25, 0.5]))
        net[a], net[b] = net[a] + waits[a, b], net[b] - waits[a, b]
    for job in problem.jobs:
        ends[job.id] = 0.999 * net[job.id] * draw(st.sampled_from([0.0, 0.5, 1.0]))
    slots = [{kind: {s: draw(price) for s in (1, 2, 3)} for kind in problem.device_types} for _ in range(num - 1)]
    work = {job.id: draw(st.tuples(*[st.sampled_from([0.0, 5.0, 20.0, 80.0])] * num)) for job in problem.jobs}
    return CompletionPrices(WindowPrices(points, (*slots, {}), own, nested(order)), ends, nested(waits), work)


@draws(100)
@given(st.data(), ruled_problems())
def test_any_prices_prove_a_bound_that_plans_obey(data, problem):
    plan = data.draw(plans_of(problem))
    weights = {job.id: job.weight for job in problem.jobs}
    least = certified_ends_bound(Certificate(completions=data.draw(any_prices(problem))), problem, weights)
    if plan is not None:
        assert least <= WEIGHTED.value(plan, problem) * (1 + 1e-9) + 1e-9


@draws(50)
@given(st.data(), ruled_problems())
def test_the_bound_is_between_the_old_one_and_every_plan(data, problem):
    bound = preemptive_bound(problem)
    if not math.isfinite(bound.seconds):
        return
    best = WEIGHTED.best_bound(problem, bound)
    assert best.value >= WEIGHTED.lower_bound(problem, pattern_bound(problem))
    plan = data.draw(plans_of(problem))
    if plan is not None:
        assert best.value <= WEIGHTED.value(plan, problem) * (1 + 1e-9) + 1e-9
        assert verify(WEIGHTED.valued(plan, problem, bound, best=best), problem) == []


@draws(50)
@given(ruled_problems())
def test_the_prices_prove_what_the_linear_program_found(problem):
    weights = {job.id: job.weight for job in problem.jobs}
    if not any(weights.values()) or not math.isfinite(old := pattern_bound(problem).seconds):
        return
    points_s = completion_points(problem, weights, end_s=old)
    model = CompletionModel(problem, weights, points_s=points_s, unit_s=old)
    highs = model.lp.loaded()
    highs.run()
    found = highs.getInfo().objective_function_value * old * sum(weights.values())
    proved = certified_ends_bound(Certificate(completions=model.prices()), problem, weights)
    assert proved == pytest.approx(found, rel=1e-4)


@draws(15)
@given(ruled_problems(max_jobs=4, with_leaving=False), st.sampled_from(["weighted", "mean_completion"]))
def test_no_exact_optimum_is_below_the_bound(problem, name):
    objective = objective_by_name(name)
    best = objective.best_bound(problem, preemptive_bound(problem))
    assert best.value <= exhaustive(problem, name) * (1 + 1e-9) + 1e-9


def test_jobs_of_a_class_share_rows_and_change_no_bound():
    first = PlanningJob("first", (Option("single", 1, 20.0),))
    waiting = tuple(replace(j, id=f"{j.id}-{i}", after=("first",)) for j in tiny(3).jobs for i in range(3))
    alike = Problem("p", (PlanningNode("n0", 3), PlanningNode("n1", 2, available_until_s=60.0)), (*waiting, first), 1.0)
    apart = replace(alike, jobs=tuple(replace(j, deadline_s=1e6 + i) for i, j in enumerate(alike.jobs)))
    weights, bound_s = {job.id: 1.0 for job in alike.jobs}, preemptive_bound(alike).seconds
    assert (len(alike.classes), len(apart.classes)) == (4, 10)
    found = [
        certified_ends_bound(completion_certificate(p, weights, bound_s=bound_s), p, weights) for p in (alike, apart)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    different = weights | {"first": 2.0, waiting[0].id: 3.0}
    assert certified_ends_bound(completion_certificate(alike, different, bound_s=bound_s), alike, different) > found[0]
