"""Quotas of users: every plan keeps them, its bound counts them, and simulated gangs keep them while runtimes err."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.simulation.simulated_runs import simulate
from ringmaster.errors import ProblemError
from ringmaster.features.quotas.job import UserQuota
from ringmaster.features.quotas.quota_worth import MoreQuota, quota_lines, quota_prices
from ringmaster.features.quotas.terms import Quotas
from ringmaster.features.what_if.answers import explain, explanation_lines, gain_json, gain_lines
from ringmaster.features.what_if.gains import WhatIf
from ringmaster.tasks.execution.dispatch import NO_LIMITS, PlannedSegment, UserLimits, end_of, startable_segments
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, Segment, solve, verify
from ringmaster.tasks.planning.bounds.bounds import certified_bound, preemptive_bound
from ringmaster.tasks.planning.bounds.job_costs import earliest_ends_s
from ringmaster.tasks.planning.fusion import choose_groups
from ringmaster.tasks.planning.objectives import PlanningTerms
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES, SharedAmount, current_practice
from tests.drawing import draws
from tests.unit.planning.draw import problems
from tests.unit.planning.test_whole_problem import whole_problems

SHORT = (Option("single", 1, 100.0), Option("ddp", 2, 60.0))


def of_users(*users, num_devices=4, quotas=None, options=SHORT):
    jobs = tuple(PlanningJob(f"j{i}", options, user=user) for i, user in enumerate(users))
    return Problem("users", (PlanningNode("n", num_devices),), jobs, 1.0, quotas or {})


def most_held(plan, problem):
    """By user, the most devices that the user's jobs hold at a time."""
    most, held = Counter(), Counter()
    changes = []
    for segment in plan.segments:
        size = sum(len(ids) for _, ids in segment.devices)
        user = problem.job(segment.job).user
        changes += [(round(segment.start_s, 6), size, user), (round(segment.end_s, 6), -size, user)]
    for _, change, user in sorted(changes):
        held[user] += change
        most[user] = max(most[user], held[user])
    return most


@st.composite
def with_quotas(draw, drawn):
    """A problem whose jobs are of two users, of whom each may have a quota that all of its jobs can run within."""
    problem = draw(drawn)
    jobs = tuple(replace(job, user=draw(st.sampled_from(["ana", "ben", ""]))) for job in problem.jobs)
    quotas = {}
    for user in ("ana", "ben"):
        smallest = [min(o.num_devices for o in job.options) for job in jobs if job.user == user]
        if smallest and draw(st.booleans()):
            quotas[user] = draw(st.integers(max(smallest), max(smallest) + 3))
    return replace(problem, jobs=jobs, quotas=quotas)


@draws(12)
@given(with_quotas(problems(max_jobs=6) | whole_problems()), st.sampled_from(["makespan", "weighted", "cost"]))
def test_every_plan_keeps_the_quotas_and_proves_its_bound(problem, objective):
    plan = solve(problem, objective=objective, work_s=0.2)
    assert verify(plan, problem) == []
    assert Plan.from_json(plan.to_json()) == plan
    assert Problem.from_json(problem.to_json()) == problem
    for user, most in most_held(plan, problem).items():
        assert most <= problem.quotas.get(user, problem.num_devices)


@draws(40)
@given(with_quotas(problems(max_jobs=6)))
def test_no_simple_plan_is_below_the_bound_or_ends_a_job_before_its_earliest_end(problem):
    bound, earliest_s = preemptive_bound(problem), earliest_ends_s(problem)
    for baseline in BASELINES:
        plan = baseline(problem) if not problem.limits else None
        for segment in [] if plan is None else plan.segments:
            assert segment.end_s >= earliest_s[segment.job] * (1 - 1e-9)
    plan = solve(problem, work_s=0.05)
    assert bound.seconds <= plan.makespan_s * (1 + 1e-6)
    ends_s = {segment.job: segment.end_s for segment in plan.segments}
    assert all(ends_s[job] >= at_s * (1 - 1e-6) for job, at_s in earliest_s.items())


def test_a_quota_is_part_of_the_proof():
    problem = of_users("ana", "ana", "ana", "ben", quotas={"ana": 1})
    plan = solve(problem)
    assert plan.makespan_s == pytest.approx(300.0)
    assert plan.lower_bound_s == pytest.approx(300.0)
    assert plan.certificate.quota_prices["ana"] > 0
    assert certified_bound(plan.certificate, problem) == pytest.approx(300.0)
    assert certified_bound(plan.certificate, replace(problem, quotas={"ana": 2})) < 200.0
    assert solve(replace(problem, quotas={})).makespan_s < 150.0


def test_the_verifier_finds_what_exceeds_a_quota():
    problem = of_users("ana", "ana", quotas={"ana": 1})
    segments = [Segment(f"j{i}", 0, 0.0, 100.0, 1.0, 0.0, (("n", (i,)),)) for i in range(2)]
    assert verify(Plan("users", tuple(segments)), problem) == ["ana: its jobs hold 2 devices at 0.0, its quota is 1"]


@pytest.mark.parametrize(
    ("quotas", "fault"),
    [
        ({"ana": 0}, "a whole number > 0"),
        ({"ana": 1.5}, "a whole number > 0"),
        ([], "must be an object"),
        ({"ana": 1}, "needs 2 devices, the quota of ana is 1"),
    ],
)
def test_impossible_quotas_are_refused(quotas, fault):
    with pytest.raises(ProblemError, match=fault):
        Problem.from_json({**of_users("ana", options=SHORT[1:]).to_json(), "quotas": quotas})


def test_one_job_after_another_is_within_the_quotas_too():
    problem = of_users("a", "b", "a", quotas={"a": 1})
    plan = current_practice(problem)
    assert verify(plan, problem) == []
    assert [s.option for s in sorted(plan.segments, key=lambda s: s.job)] == [0, 1, 0]


def test_shares_follow_the_devices_and_let_each_job_run():
    quotas = Quotas(users={"ana": UserQuota(max_devices=3, share=0.5), "ben": UserQuota(share=0.1)})
    terms = PlanningTerms(users={"j0": "ana", "j1": "ben"}, features=(quotas,))
    assert terms.on(of_users("", "", num_devices=8)).quotas == {"ana": 3, "ben": 1}
    assert terms.on(of_users("", "", num_devices=4, options=SHORT[1:])).quotas == {"ana": 2, "ben": 2}
    few = PlanningTerms(users={"j0": "ana"}, features=(Quotas(users={"ana": UserQuota(max_devices=1)}),))
    assert few.on(of_users("", options=SHORT[1:])).quotas == {"ana": 2}


def test_jobs_of_different_users_are_not_trained_together_under_a_quota():
    together = Option("fused", 1, 20.0, jobs=("j1",))
    problem = of_users("ana", "ben", num_devices=2)
    jobs = (replace(problem.jobs[0], options=(*SHORT, together)), problem.jobs[1])
    assert choose_groups(replace(problem, jobs=jobs), work_s=0.2).groups == {"j0": ("j1",)}
    assert choose_groups(replace(problem, jobs=jobs, quotas={"ana": 1}), work_s=0.2).groups == {}


def test_shared_amounts():
    memory = SharedAmount(8)
    memory.take(6, 10.0, 20.0)
    memory.take(2, 15.0, 30.0)
    assert memory.earliest(2, 0.0, 15.0) == 0.0
    assert memory.earliest(2, 0.0, 15.1) == 20.0
    assert memory.earliest(7, 0.0, 11.0) == 30.0
    assert memory.earliest(9, 0.0, 1.0) == float("inf")


# -- execution -------------------------------------------------------------------------------------------------------


def planned(job, *devices, last_step=9):
    return PlannedSegment(job=job, option=0, last_step=last_step, devices=tuple(("n", d) for d in devices), start_s=0,
                          end_s=1)  # fmt: skip


def test_a_segment_waits_for_the_quota_of_its_user():
    quotas = UserLimits(devices={"ana": 2}, users={"a": "ana", "b": "ana", "c": "ana"})
    a, b, c = planned("a", 0, 1), planned("b", 2), planned("c", 3)
    x = planned("x", 4)
    rules = {"done_jobs": (), "after": {}}
    assert startable_segments([b, c, x], running=[a], limits=quotas, **rules) == [x]
    assert startable_segments([b, c, x], running=[], limits=quotas, **rules) == [b, c, x]
    assert startable_segments([a, b, c], running=[], limits=quotas, **rules) == [a]
    assert startable_segments([b], running=[a], limits=NO_LIMITS, **rules) == [b]
    # The gang's planned end has come, and its quota is awaited, though its devices are not.
    more = planned("a", 5, last_step=20)
    assert end_of(a, [b, more], running=[a], limits=quotas, **rules) == "ends"
    assert end_of(a, [x], running=[a, x], limits=quotas, **rules) == "continues"


@draws(15)
@given(with_quotas(problems(max_jobs=6, with_after=False)), st.integers(0, 3))
def test_simulated_gangs_keep_the_quotas_whatever_runtimes_are(problem, seed):
    assume(problem.limits)
    plan = solve(problem, work_s=0.05)
    held, most = Counter(), Counter()
    run = simulate(problem, plan, noise=0.4, seed=seed, replan="never")
    for at_s, change, job in sorted(
        row
        for each in run.segments
        for row in (
            (each.starts_s, len(each.stretch.segment.devices), each.stretch.segment.job),
            (each.ends_s, -len(each.stretch.segment.devices), each.stretch.segment.job),
        )
    ):
        user = problem.job(job).user
        held[user] += change
        most[user] = max(most[user], held[user])
        assert at_s >= 0
    for user, limit in problem.limits.items():
        assert most[user] <= limit
    assert run.ended_s.keys() == {job.id for job in problem.jobs}


# -- what-if ---------------------------------------------------------------------------------------------------------


def test_one_more_device_for_a_user_costs_the_other_one_so_much():
    problem = of_users("ana", "ana", "ana", "ana", "ben", "ben", "ben", "ben", quotas={"ana": 1, "ben": 3})
    what_if = WhatIf(problem, solve(problem))
    gain = what_if.gain(MoreQuota(user="ana", taken_from="ben"))
    assert gain.most_s == pytest.approx(200.0, rel=0.02)
    text = " ".join(gain_lines(gain, what_if, proof="by these runtimes"))
    assert text.startswith("With one more device for ana and as many less for ben: the best plan ends ")
    later = what_if.planned(gain, work_s=0.5)
    users = {each.user: each for each in later.users}
    assert users["ana"].planned_s < users["ana"].before_s
    assert users["ben"].bound_s == pytest.approx(200.0)
    assert users["ben"].bound_s <= users["ben"].planned_s
    lines = list(gain_lines(later, what_if, proof="by these runtimes"))
    assert any(line.startswith("The jobs of ben then end after ") for line in lines)
    assert gain_json(later)["users"][0]["user"] == "ana"
    explained = " ".join(explanation_lines(explain(what_if)))
    assert "of the bound is due to the quota of ana (1 device): one more gains at most" in explained
    with pytest.raises(ProblemError, match="'kim' has no quota"):
        what_if.gain(MoreQuota(user="kim"))
    with pytest.raises(ProblemError, match="a whole number > 0"):
        what_if.gain(MoreQuota(user="ana", num_devices=3, taken_from="ben"))


def test_a_quota_has_the_price_that_its_user_and_the_other_one_would_pay():
    problem = of_users("ana", "ana", "ana", "ana", "ben", "ben", "ben", "ben", quotas={"ana": 1, "ben": 3})
    ana, ben = quota_prices(problem)
    assert (ana.user, ana.most, ana.sooner_s, ana.later_s) == ("ana", 1, pytest.approx(200.0, rel=0.01), None)
    assert (ben.sooner_s, ben.later_s) == (pytest.approx(100 / 3, rel=0.05), pytest.approx(200 / 3, rel=0.05))
    first, second = quota_lines(problem)
    assert first.startswith(
        "ana may hold 1 device at a time; one more would save its jobs 200 s, and cost those of ben 6"
    )
    assert "cost" not in second  # ana has no device to spare
    assert quota_lines(replace(problem, quotas={"kim": 1})) == []
