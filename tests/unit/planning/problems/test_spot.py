"""Nodes that may be evicted: expected runtimes, plans and bounds by them, and what is refused."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.tasks.planning import Plan, Problem, ProblemError, solve, verify
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.planning.objectives import registry
from ringmaster.tasks.planning.problems.spot import slowdown
from tests.drawing import draws
from tests.unit.planning.test_odd_problems import exhaustive


def spot_file(**changes) -> dict:
    """A job of an hour on two nodes: one that stays and costs 3, and one that is evicted and costs 1."""
    options = [{"technique": "single", "gpus": 1, "runtime": 3600.0}]
    nodes = [
        {"id": "stays", "gpus": 1, "price": 3.0},
        {"id": "spot", "gpus": 1, "price": 1.0, "evictions_per_hour": 0.5},
    ]
    file = {"name": "p", "switch_cost": 120.0, "checkpoint_interval": 600.0, "nodes": nodes}
    return file | {"jobs": [{"id": "a", "options": options}]} | changes


def test_the_example_of_the_documentation():
    factor = slowdown(0.5, interval_s=600.0, restart_s=120.0)
    assert factor == pytest.approx(1.0604, abs=1e-4)
    problem = Problem.from_json(spot_file())
    assert [option.runtime_s for option in problem.jobs[0].options] == pytest.approx([3600.0, 3600.0 * factor])
    cheap = solve(problem, objective="cost")
    assert verify(cheap, problem) == []
    assert [segment.devices for segment in cheap.segments] == [(("spot", (0,)),)]
    assert (cheap.value, cheap.value_bound) == pytest.approx((3600.0 * factor, 3600.0 * factor))
    (job,) = spot_file()["jobs"]
    hurried = Problem.from_json(spot_file(jobs=[job | {"deadline": 3700.0}]))
    kept = solve(hurried, objective="cost")
    assert verify(kept, hurried) == []
    assert [segment.devices for segment in kept.segments] == [(("stays", (0,)),)]
    # 117 s too many on the node that is evicted are saved on the other one, where switching were free.
    share = (3600.0 * factor - 3700.0) / (3600.0 * (factor - 1))
    assert kept.value_bound == pytest.approx(share * 3.0 * 3600.0 + (1 - share) * 3600.0 * factor)
    assert Problem.from_json(problem.to_json()) == problem


@draws(50)
@given(st.floats(0.0, 60.0), st.floats(1.0, 600.0), st.floats(0.0, 600.0), st.floats(1.0, 1.1))
def test_more_evictions_and_longer_losses_take_longer(rate, interval_s, restart_s, more):
    factor = slowdown(rate, interval_s=interval_s, restart_s=restart_s)
    assert factor >= 1.0
    assert slowdown(more * rate, interval_s=interval_s, restart_s=restart_s) >= factor * (1 - 1e-9)
    assert slowdown(rate, interval_s=more * interval_s, restart_s=restart_s) >= factor * (1 - 1e-9)
    assert slowdown(rate, interval_s=interval_s, restart_s=more * restart_s) >= factor * (1 - 1e-9)


def test_the_factor_is_the_mean_of_simulated_evictions():
    """Work in intervals of 600 s, evicted at random moments, with restarts of 120 s that may be evicted themselves."""
    random, rate, total_s, num = Random(0), 2.0 / 3600.0, 0.0, 20_000
    for _ in range(num):
        while (eviction_s := random.expovariate(rate)) < 600.0:
            total_s += eviction_s
            while (eviction_s := random.expovariate(rate)) < 120.0:
                total_s += eviction_s
            total_s += 120.0
        total_s += 600.0
    assert total_s / (num * 600.0) == pytest.approx(slowdown(2.0, interval_s=600.0, restart_s=120.0), rel=0.02)


def test_without_an_interval_it_follows_from_the_seconds_of_a_save():
    options = [{"technique": "single", "gpus": 1, "runtime": 3600.0, "save": 25.0}]
    file = spot_file(jobs=[{"id": "a", "options": options}])
    file.pop("checkpoint_interval")
    _, slow = Problem.from_json(file).jobs[0].options
    interval_s = math.sqrt(2 * 25.0 * 7200.0)
    assert slow.runtime_s == pytest.approx(3600.0 * slowdown(0.5, interval_s=interval_s, restart_s=120.0))


def test_options_keep_their_index_and_running_jobs_their_nodes():
    options = [{"technique": "t", "gpus": 1, "runtime": 100.0}, {"technique": "u", "gpus": 1, "runtime": 90.0}]
    running = {"option": 1, "gpus": [["spot", [0]]]}
    problem = Problem.from_json(spot_file(jobs=[{"id": "a", "options": options, "running": running}]))
    (job,) = problem.jobs
    assert [(o.technique, o.device_type) for o in job.options] == [
        ("t", "on-demand"), ("u", "on-demand"), ("t", "evicted 0.5/h"), ("u", "evicted 0.5/h")
    ]  # fmt: skip
    assert job.running.option == 3
    assert [node.device_type for node in problem.nodes] == ["on-demand", "evicted 0.5/h"]


def wrong() -> list[tuple[str, dict]]:
    nodes, (job,) = spot_file()["nodes"], spot_file()["jobs"]
    wide = job | {"options": [*job["options"], {"technique": "t", "gpus": 2, "nodes": 2, "runtime": 10.0}]}
    return [
        *(("node spot: evictions_per_hour must be", {"nodes": [nodes[0], nodes[1] | {"evictions_per_hour": rate}]})
          for rate in (-1.0, "often", True, None, math.nan, 61)),
        *(("checkpoint_interval must be", {"checkpoint_interval": wrong}) for wrong in (0, -5.0, "x", math.inf)),
        ("job a, option 1: no nodes that are evicted equally often", {"jobs": [wide]}),
        ("option 0: no nodes .* shorter checkpoint_interval", {"nodes": nodes[1:], "checkpoint_interval": 1e6}),
    ]  # fmt: skip


@pytest.mark.parametrize(("says", "changes"), wrong())
def test_wrong_values_are_refused_with_a_remedy(says, changes):
    with pytest.raises(ProblemError, match=says) as caught:
        Problem.from_json(spot_file(**changes))
    assert "To fix" in str(caught.value)


@st.composite
def spot_problems(draw) -> Problem:
    rates, prices = st.sampled_from([0.0, 0.5, 5.0]), st.sampled_from([0.0, 1.0, 4.0])
    nodes = [
        {"id": f"n{i}", "gpus": draw(st.integers(1, 2)), "price": draw(prices), "evictions_per_hour": draw(rates)}
        for i in range(2)
    ]
    jobs = [
        {"id": f"j{i}", "options": [{"technique": "t", "gpus": 1, "runtime": float(draw(st.integers(60, 4000)))}]}
        for i in range(draw(st.integers(1, 3)))
    ]
    return Problem.from_json({"name": "p", "switch_cost": 10.0, "nodes": nodes, "jobs": jobs})


@draws(25)
@given(spot_problems())
def test_no_exact_optimum_of_the_expected_cost_is_below_the_bound(problem):
    plan = solve(problem, objective="cost", work_s=2.0)
    assert verify(plan, problem) == []
    assert Plan.from_json(plan.to_json()) == plan
    bound = registry.objective("cost").best_bound(problem, preemptive_bound(problem))
    assert bound.value <= exhaustive(problem, "cost") * (1 + 1e-9)
    assert plan.value == pytest.approx(bound.value)


@draws(25)
@given(spot_problems(), st.data())
def test_the_bound_on_the_cost_is_below_plans_that_meet_deadlines(problem, data):
    jobs = tuple(
        replace(job, deadline_s=data.draw(st.sampled_from([1.02, 1.2, 2.0, 100.0])) * job.options[0].runtime_s)
        for job in problem.jobs
    )
    problem = replace(problem, jobs=jobs)
    try:
        plan = solve(problem, objective="cost", work_s=2.0)
    except ProblemError:
        return
    assert verify(plan, problem) == []
    bound = registry.objective("cost").best_bound(problem, preemptive_bound(problem)).value
    assert bound <= registry.objective("cost").value(plan, problem) * (1 + 1e-9)
