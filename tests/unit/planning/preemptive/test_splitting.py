"""Jobs that change between two types of devices: which ones, and plans in which they do."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.families import draw
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, verify
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.planning.kernels.configurations import INFEASIBLE, config_lp
from ringmaster.tasks.planning.node_groups import (
    NEVER,
    NodeGroups,
    Tables,
    TypeDivision,
    divided,
    split_jobs,
    whole_jobs,
)
from ringmaster.tasks.planning.preemptive import plan_preemptive
from ringmaster.tasks.planning.problems.problem_parts import CurrentRun
from ringmaster.tasks.planning.work import WorkBudget

NODES = (PlanningNode("n0", 1, "fast"), PlanningNode("n1", 1, "slow"))


def division_of(problem: Problem, *, most: list[int], homes: dict[int, tuple[int, int]] | None = None) -> TypeDivision:
    costs = [min(option.runtime_s for option in job.options) for job in problem.jobs]
    bound = preemptive_bound(problem)
    found = divided(problem, bound, costs=costs, most=most, homes=homes or {}, least_s=0.0, work=WorkBudget())
    assert found is not None
    return found


def on_both(name: str, fast_s: float, **more: object) -> PlanningJob:
    return PlanningJob(
        name, (Option("t", 1, fast_s, device_type="fast"), Option("t", 1, 2 * fast_s, device_type="slow")), **more
    )


def two_alike(**of_first: object) -> Problem:
    """Two jobs of about 300 s, or 600 s on the slow device: each is best done half the time on either, in 400 s."""
    return Problem("alike", NODES, (on_both("a", 300.0, **of_first), on_both("b", 301.0)), switch_cost_s=1.0)


def test_jobs_that_need_all_the_time_change_between_types():
    problem = two_alike()
    segments = plan_preemptive(problem, preemptive_bound(problem))
    assert segments is not None
    plan = Plan(problem.name, segments)
    assert verify(plan, problem) == []
    assert plan.makespan_s < 0.8 * 600.0  # what one of them takes if it keeps to the slow device


@pytest.mark.parametrize("home", [0, 1])
def test_a_running_job_may_change_to_another_type(home):
    running = CurrentRun(home, ((f"n{home}", (0,)),))
    problem = two_alike(running=running)
    segments = plan_preemptive(problem, preemptive_bound(problem))
    assert segments is not None
    plan = Plan(problem.name, segments)
    assert verify(plan, problem) == []
    assert plan.makespan_s < 0.8 * 600.0


@given(seed=st.integers(0, 10_000), most=st.integers(0, 4), num_jobs=st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_no_more_jobs_are_divided_than_may_be(seed, most, num_jobs):
    problem = draw(f"types-{num_jobs}x32", seed=seed)
    found = division_of(problem, most=[most, most])
    used = Counter(kind for split in found.splits for kind in (split.first, split.second))
    assert max(used.values(), default=0) <= most
    assert found.length >= 1 - 1e-6
    assert len(found.kinds) == num_jobs
    for split in found.splits:
        assert 0 < split.share < 1
        assert 0 < split.until < 1
        assert split.first != split.second
        assert found.kinds[split.job] == split.first


def test_the_jobs_of_a_sweep_are_divided_as_one():
    options = on_both("", 100.0).options
    problem = Problem("sweep", NODES, tuple(PlanningJob(f"j{i}", options) for i in range(9)))
    found = division_of(problem, most=[1, 1])
    assert len(found.splits) <= 1
    assert found.kinds.count(0) >= 5


@given(seed=st.integers(0, 200), within=st.floats(0.3, 1.0))
@settings(max_examples=25, deadline=None)
def test_the_configuration_lp_keeps_to_windows(seed, within):
    problem = draw("paper-txt-6x8", seed=seed)
    tables = Tables.of(problem, preemptive_bound(problem))
    layout, share = np.array([8], np.int32), np.ones(6)
    jobs, limits = np.arange(6, dtype=np.int32), np.full(6, NEVER)
    limits[0], share[0] = within, 0.5
    time, configs, times, prices = config_lp(jobs, share, limits, tables.options_of(0), layout, np.zeros(1))
    if time == INFEASIBLE:
        shortest = 0.5 / max(tables.options.rate[tables.options.first[0, 0] : tables.options.last[0, 0]])
        assert shortest > within
        return
    assert sum(t for c, t in zip(configs, times, strict=True) if c[0] >= 0) <= within + 1e-7
    for i in range(6):
        work = sum(t * tables.options.rate[c[i]] for c, t in zip(configs, times, strict=True) if c[i] >= 0)
        assert work >= share[i] - 1e-7
    assert time == pytest.approx(times.sum())
    assert min(prices) >= -1e-9


@pytest.mark.parametrize("seed", range(3))
def test_parts_of_a_job_are_its_whole_work_and_do_not_overlap(seed):
    problem = draw("types-30x32", seed=seed)
    bound = preemptive_bound(problem)
    tables = Tables.of(problem, bound)
    groups = NodeGroups.of(tables, [[v] for v in range(len(problem.nodes))])
    division = division_of(problem, most=[2, 2])
    parts, kinds = split_jobs(tables, whole_jobs(tables, groups), division)
    assert kinds.size == parts.job.size == len(problem.jobs) + len(division.splits)
    work = np.bincount(parts.job, weights=parts.share)
    assert work == pytest.approx(np.ones(len(problem.jobs)))
    for q, split in enumerate(division.splits, start=len(problem.jobs)):
        assert parts.due[split.job] <= parts.release[q]
