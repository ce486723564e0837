"""The certain interval of what a change gains, against plans and bounds that are made independently of it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.families import draw
from ringmaster.errors import ProblemError
from ringmaster.features.what_if import gains
from ringmaster.features.what_if.gains import (
    METHOD,
    FewerJobs,
    MoreDevices,
    MoreNodes,
    WhatIf,
    dependents,
    quick_plan,
)
from ringmaster.tasks.planning import Certificate, Option, PlanningJob, PlanningNode, Problem, certified_bound, solve
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from tests.drawing import draws
from tests.matrix import matrix
from tests.unit.planning.bounds.drawing import plans_of, ruled_problems
from tests.unit.planning.bounds.test_windows import any_prices

LITTLE = 0.2  # work of a search


def job(name, runtime_s, **more):
    return PlanningJob(name, (Option("single", 1, runtime_s),), **more)


PAIR = Problem(
    "pair", (PlanningNode("n0", 2),), (job("a", 3600.0), job("b", 3000.0), job("c", 3000.0)), switch_cost_s=0.0
)


def of(problem):
    return WhatIf(problem, solve(problem, work_s=LITTLE))


@st.composite
def changes(draw, problem):
    """Any change that is possible."""
    kind = draw(st.sampled_from(problem.device_types))
    number = draw(st.integers(1, 3))
    possible = [MoreDevices(num_devices=number, device_type=kind), MoreNodes(num_devices=number, device_type=kind)]
    for name in [each.id for each in problem.jobs]:
        together = (name, *dependents(problem, (name,)))
        if len(together) < len(problem.jobs):
            possible.append(FewerJobs(jobs=together))
    return draw(st.sampled_from(possible))


def test_an_example_by_hand():
    """The three jobs take 9,600 s in all: 4,800 s on two devices. On three devices the longest one takes 3,600 s."""
    what_if = WhatIf(PAIR, solve(PAIR, work_s=2.0))
    assert (what_if.makespan_s, what_if.bound_s) == (pytest.approx(4800.0), pytest.approx(4800.0))
    more = what_if.gain(MoreDevices(num_devices=1))
    assert more.on == "n0"
    assert more.most_by_prices_s == pytest.approx(1600.0)  # by area: 9,600 / 3 = 3,200 s
    assert more.most_s == pytest.approx(1200.0)
    assert more.planned_s is None
    anew = what_if.planned(more, work_s=2.0)
    assert anew.planned_s == anew.least_s == anew.most_s == pytest.approx(1200.0)
    less = what_if.gain(FewerJobs(jobs=("a",)))
    assert less.most_s == pytest.approx(1800.0)
    assert what_if.planned(less, work_s=2.0).planned_s == pytest.approx(1800.0)


@draws(40)
@given(st.data(), ruled_problems(max_jobs=4))
def test_prices_of_the_old_plan_bound_every_plan_of_the_changed_problem(data, problem):
    change = data.draw(changes(problem))
    after = change.on(problem)
    prices = data.draw(any_prices(problem))
    plan = data.draw(plans_of(after))
    if plan is not None:
        certificate = Certificate(windows=prices).only({job.id for job in after.jobs})
        assert certified_bound(certificate, after) <= plan.makespan_s * (1 + 1e-9)


@draws(20)
@given(st.data(), ruled_problems(max_jobs=4))
def test_what_planning_anew_gains_is_in_the_interval(data, problem):
    try:
        what_if = of(problem)
    except ProblemError:  # the node goes away too early
        return
    first = what_if.gain(data.draw(changes(problem)))
    anew = what_if.planned(first, work_s=LITTLE)
    tolerance_s = 1e-6 * what_if.makespan_s
    assert 0 <= first.least_s <= anew.least_s + tolerance_s
    assert anew.least_s - tolerance_s <= anew.planned_s <= anew.most_s + tolerance_s
    assert anew.most_s <= first.most_s + tolerance_s
    assert first.most_s <= first.most_by_prices_s + tolerance_s


FAMILIES = ("scale-12x16", "types-12x16", "lora-6x4", "multi-6x32", "paper-txt-12xhet")


@pytest.mark.parametrize("family", matrix(FAMILIES, quick=["lora-6x4", "multi-6x32"]))
def test_larger_problems_are_answered_from_both_sides_at_once(family):
    problem = draw(family, seed=3)
    what_if = of(problem)
    kind = problem.device_types[0]
    change = MoreNodes(num_devices=problem.nodes[0].num_devices, device_type=kind)
    first = what_if.gain(change)
    assert 0 < first.least_s <= first.most_s
    found = solve(change.on(problem), work_s=LITTLE)  # a plan that the interval knows nothing of
    assert what_if.makespan_s - found.makespan_s <= first.most_s * (1 + 1e-6)
    assert what_if.bound_s - found.lower_bound_s >= first.least_s * (1 - 1e-6)


def test_a_quick_plan_is_a_search_worth_of_seconds_only_where_it_can_gain_some():
    problem = draw("scale-12x16", seed=1)
    plan = solve(problem, work_s=LITTLE)
    after = MoreNodes(num_devices=8).on(problem)
    bound = preemptive_bound(after)
    found = quick_plan(after, bound=bound, start=plan, before=problem)
    assert found.method == METHOD
    assert found.makespan_s < plan.makespan_s
    kept = quick_plan(after, bound=replace(bound, certificate=None), start=plan, before=problem)
    assert kept.segments == plan.segments


def test_devices_go_where_they_gain_most():
    small, large = PlanningNode("small", 1, available_until_s=200.0), PlanningNode("large", 2)
    jobs = tuple(job(f"j{i}", 1000.0) for i in range(6))
    what_if = of(Problem("two nodes", (small, large), jobs, switch_cost_s=0.0))
    assert what_if.gain(MoreDevices(num_devices=1)).on == "large"


def test_the_bound_anew_can_be_left_out(monkeypatch):
    what_if = of(draw("scale-12x16"))
    monkeypatch.setattr(gains, "preemptive_bound", lambda problem: pytest.fail("solved anew"))
    gain = what_if.gain(MoreNodes(num_devices=8), solves_bound=False)
    assert gain.most_s == gain.most_by_prices_s > 0


CHAIN = replace(
    PAIR, jobs=(job("base", 100.0), job("tuned", 50.0, after=("base",)), job("last", 9.0, after=("tuned",)))
)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (FewerJobs(jobs=("nix",)), "no job 'nix'. To fix: name some of base, tuned, last"),
        (FewerJobs(jobs=("base",)), "tuned, last would wait .* To fix: .* --without base,tuned,last"),
        (FewerJobs(jobs=("base", "tuned", "last")), "no job is left"),
        (MoreDevices(num_devices=1, device_type="a100"), "type 'a100'. To fix: leave the type out"),
    ],
)
def test_impossible_changes_are_refused(change, says):
    with pytest.raises(ProblemError, match=says):
        change.on(CHAIN)


def test_several_types_must_be_named():
    typed = replace(PAIR, nodes=(PlanningNode("n0", 2, "fast"), PlanningNode("n1", 2, "slow")))
    with pytest.raises(ProblemError, match=r"several types of devices\. To fix: name one of 'fast', 'slow'"):
        MoreNodes(num_devices=1).on(typed)
    added = MoreNodes(num_devices=2, device_type="slow", num_nodes=2).on(typed).nodes[2:]
    assert [(node.id, node.device_type) for node in added] == [("new1", "slow"), ("new2", "slow")]


def test_plans_of_other_problems_and_objectives_are_refused():
    with pytest.raises(ProblemError, match="To fix: plan with --objective makespan"):
        WhatIf(PAIR, solve(PAIR, objective="weighted", work_s=LITTLE))
    with pytest.raises(ProblemError):
        WhatIf(CHAIN, solve(PAIR, work_s=LITTLE))
