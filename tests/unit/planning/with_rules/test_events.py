"""Preemptive plans by the order of events."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.families import draw
from ringmaster.errors import NoRoomError
from ringmaster.tasks.planning import Coefficients, Option, PlanningJob, PlanningNode, Problem, Segment, solve, verify
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.planning.event_search import (
    EventKind,
    EventLp,
    ScheduleEvent,
    merged,
    plan_by_events,
    within_fair_memory,
)
from ringmaster.tasks.planning.objectives import objective_by_name
from ringmaster.tasks.planning.plans.list_scheduling import current_practice
from ringmaster.tasks.planning.work import WorkBudget
from tests.drawing import draws
from tests.unit.planning.bounds.drawing import ruled_problems
from tests.unit.planning.test_constrained import constrained

LAST = Coefficients(latest={"a": 1.0, "b": 1.0, "c": 1.0})
END_OF_A = ScheduleEvent(EventKind.END, frozenset({"a"}))


def three(**fields) -> Problem:
    """On two devices, b waits for a; c may run at any time."""
    jobs = tuple(PlanningJob(name, (Option("single", 1, seconds),)) for name, seconds in (("a", 100), ("b", 60)))
    waiting = replace(jobs[1], after=("a",))
    free = PlanningJob("c", (Option("single", 1, 120.0),), **fields)
    return Problem("three", (PlanningNode("n0", 1), PlanningNode("n1", 1)), (jobs[0], waiting, free), switch_cost_s=1.0)


def test_periods_are_as_long_as_their_jobs_need():
    found = EventLp(three(), [END_OF_A], LAST, unit_s=160.0).solved()
    assert found.lengths_s == pytest.approx((100.0, 60.0))
    assert found.value == pytest.approx(160.0)
    assert found.shares[0]["a"] == pytest.approx(1.0)
    assert "b" not in found.shares[0]
    assert found.shares[0].get("c", 0.0) + found.shares[1].get("c", 0.0) == pytest.approx(1.0)


def test_ends_of_jobs_are_weighted():
    weights = Coefficients(ends={"a": 1.0, "b": 2.0})
    ends = [END_OF_A, ScheduleEvent(EventKind.END, frozenset({"b"}))]
    assert EventLp(three(), ends, weights, unit_s=160.0).solved().value == pytest.approx(100.0 + 2 * 160.0)


def test_releases_and_last_seconds_are_kept():
    release = ScheduleEvent(EventKind.RELEASE, frozenset({"c"}), 90.0)
    found = EventLp(three(release_s=90.0), [release, END_OF_A], LAST, unit_s=160.0).solved()
    assert found.lengths_s[0] >= 90.0 - 1e-6
    assert "c" not in found.shares[0]
    assert found.value == pytest.approx(210.0)
    leave = ScheduleEvent(EventKind.LEAVE, frozenset({"n1"}), 50.0)
    lp = EventLp(three(), [leave, END_OF_A], LAST, unit_s=160.0)
    assert [[node.id for node in lp.nodes_in(p)] for p in range(3)] == [["n0", "n1"], ["n0"], ["n0"]]
    assert lp.solved().value == pytest.approx(280.0 - 50.0)


def test_an_order_that_cannot_be_has_no_periods():
    due = ScheduleEvent(EventKind.DUE, frozenset({"c"}), 110.0)
    assert EventLp(three(deadline_s=110.0), [due, END_OF_A], LAST, unit_s=160.0).solved() is None


def test_what_continues_on_idle_devices_becomes_one_segment():
    def segment(job: str, start_s: float, end_s: float, device: int) -> Segment:
        return Segment(job, 0, start_s, end_s, 0.5, 0.0, (("n0", (device,)),))

    rows = [segment("a", 0.0, 10.0, 0), segment("b", 0.0, 10.0, 1), segment("c", 10.0, 20.0, 1)]
    rows += [segment("a", 12.0, 22.0, 0), segment("b", 20.0, 30.0, 1)]
    found = merged(rows)
    assert [(s.job, s.start_s, s.end_s, s.work) for s in found if s.job == "a"] == [("a", 0.0, 22.0, 1.0)]
    assert len([s for s in found if s.job == "b"]) == 2


def test_options_within_their_share_of_memory_keep_their_meaning():
    options = (Option("spilling", 1, 50.0, host_memory_bytes=60), Option("single", 1, 70.0, host_memory_bytes=50))
    problem = Problem("memory", (PlanningNode("n0", 2, host_memory_bytes=100),), (PlanningJob("a", options),))
    safe = within_fair_memory(problem)
    assert [o.runtime_s for o in safe.problem.jobs[0].options] == [70.0]
    assert safe.options["a"][0] == 1
    hungry = replace(problem, jobs=(PlanningJob("a", options[:1]),))
    assert within_fair_memory(hungry) is None


@draws(3)
@given(ruled_problems(), st.sampled_from(["makespan", "weighted"]))
def test_every_plan_by_events_keeps_every_rule(problem, name):
    objective = objective_by_name(name)
    try:
        start = current_practice(problem)
    except NoRoomError:
        return
    plan = plan_by_events(
        problem,
        start,
        bound_s=preemptive_bound(problem).seconds,
        least_value=0.0,
        objective=objective,
        least_s=5.0,
        seed=0,
        work=WorkBudget(),
    )
    if plan is not None:
        assert verify(plan, problem) == []


@pytest.mark.full
@pytest.mark.parametrize(("rules", "objective", "gap"), [("au", "makespan", 0.05), ("r", "weighted", 0.12)])
def test_plans_by_events_come_close_to_their_bounds(rules, objective, gap):
    problem = constrained(draw("paper-mixed-8x16", seed=3), rules, seed=3, length_s=3e4)
    plan = solve(problem, objective=objective)
    assert verify(plan, problem) == []
    assert plan.gap < gap
    assert plan == solve(problem, objective=objective)
