"""Limits of a search in work: the same plan at any load, and an end by the wall clock far behind."""

import itertools
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.families import draw
from ringmaster.tasks.planning import solve, verify
from ringmaster.tasks.planning.fusion import choose_groups
from ringmaster.tasks.planning.work import CORES, WorkBudget, clock
from tests.matrix import matrix

SHORT_S = 0.05  # work that ends the searches of these problems early


def advancing(seconds):
    """Returns a clock that advances at each reading, as on a machine that is as much slower."""
    readings = itertools.count()
    return lambda: seconds * next(readings)


@pytest.mark.parametrize(
    ("preemption", "work_s"),
    matrix(product(["auto", "never"], [SHORT_S, 0.2]), quick=[("auto", SHORT_S), ("never", 0.2)]),
)
def test_a_slow_machine_finds_the_same_plan(preemption, work_s, monkeypatch):
    problem, plans = draw("scale-8x16", seed=1), []
    for seconds in (1e-9, 1e-3):
        monkeypatch.setattr(clock, "now_s", advancing(seconds))
        plans.append(solve(problem, work_s=work_s, preemption=preemption))
    assert plans[0] == plans[1]


def test_a_slow_machine_chooses_the_same_groups(monkeypatch):
    problem, found = draw("adapters-8x4", seed=1), []
    for seconds in (1e-9, 1e-3):
        monkeypatch.setattr(clock, "now_s", advancing(seconds))
        fusion = choose_groups(problem, work_s=SHORT_S)
        found.append((fusion.groups, fusion.fused_plan.segments))
    assert found[0] == found[1]


def test_more_work_finds_no_worse_plan():
    problem = draw("scale-8x16", seed=1)
    short, long = (solve(problem, work_s=work_s, preemption="never") for work_s in (1e-3, 3.0))
    assert long.makespan_s < short.makespan_s


def test_the_wall_clock_ends_a_search_that_takes_much_longer(monkeypatch):
    monkeypatch.setattr(clock, "now_s", advancing(1e3))
    problem = draw("scale-8x16", seed=1)
    assert verify(solve(problem), problem) == []
    assert WorkBudget.of(30.0, time_limit_s=300.0).is_over()


def test_the_work_is_at_most_the_time_limit():
    assert WorkBudget.of(30.0, time_limit_s=2.0).limit_s == 2.0


@given(st.floats(0.0, 100.0), st.lists(st.floats(0.0, 100.0), max_size=5))
def test_a_part_is_charged_at_its_end(limit_s, charges):
    whole = WorkBudget(limit_s)
    for charge in charges:
        left_s = whole.left_s
        with whole.part(0.5) as own:
            assert own.limit_s == left_s / 2
            own.charge(charge)
    assert whole.spent_s == pytest.approx(sum(charges))
    assert whole.is_over() == (whole.spent_s >= limit_s)


@given(st.floats(1.0, 100.0), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9))
def test_parallel_searches_within_their_budgets_stay_within_the_whole(limit_s, shares):
    whole = WorkBudget(limit_s)
    with whole.parallel(len(shares)) as parts:
        for own, share in zip(parts, shares, strict=True):
            own.charge(share * own.limit_s)
    assert whole.spent_s <= limit_s * (1 + 1e-9)
    assert whole.spent_s >= sum(own.spent_s for own in parts) / CORES * (1 - 1e-9)
