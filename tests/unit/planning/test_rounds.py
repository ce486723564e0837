"""Rules that divide devices in rounds, which the planner's benchmark compares with."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.families import draw
from benchmarks.planning.rounds import ROUND_S, RULES, State, best_choice, played
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, solve, verify
from tests.drawing import draws


def problem_of(num_jobs: int, num_devices: int) -> Problem:
    options = tuple(Option("ddp", size, 1000.0 / size**0.5) for size in (1, 2, 4) if size <= num_devices)
    jobs = tuple(PlanningJob(f"j{i}", options) for i in range(num_jobs))
    return Problem("p", (PlanningNode("n", num_devices),), jobs, switch_cost_s=10.0)


@draws(50)
@given(st.data(), st.integers(1, 4), st.sampled_from([1, 2, 4, 8]))
def test_the_choice_of_a_round_is_the_best_that_fits(data, num_jobs, num_devices):
    problem = problem_of(num_jobs, num_devices)
    sizes = [option.num_devices for option in problem.jobs[0].options]
    gains = {(job.id, k): data.draw(st.floats(0.0, 10.0)) for job in problem.jobs for k in range(len(sizes))}
    chosen = best_choice(State(problem, left=dict.fromkeys((job.id for job in problem.jobs), 1.0)), gains)
    assert sum(sizes[k] for k in chosen.values()) <= num_devices
    best = max(
        sum(gains[job.id, k] for job, k in zip(problem.jobs, row, strict=True) if k >= 0)
        for row in product(range(-1, len(sizes)), repeat=num_jobs)
        if sum(sizes[k] for k in row if k >= 0) <= num_devices
    )
    assert sum(gains[job, k] for job, k in chosen.items()) == pytest.approx(best)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("family", ["gavel-6x4", "gavel-12x16"])
def test_played_plans_keep_every_rule(name, family):
    problem = draw(family, seed=1)
    plan = played(problem, RULES[name], name=name)
    assert verify(plan, problem) == []
    assert plan.makespan_s >= (solve(problem, work_s=1.0).lower_bound_s or 0.0)


def test_a_job_alone_runs_without_a_switch():
    problem = problem_of(1, 4)
    for rule in RULES.values():
        plan = played(problem, rule, name="rule")
        assert plan.num_switches == 0
        assert plan.makespan_s == pytest.approx(500.0)
        assert plan.makespan_s > ROUND_S
