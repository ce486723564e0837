import pytest

from tasks.planning import solve
from tasks.planning.simulate import clairvoyant, simulate

from .draw import tiny


def test_without_errors_a_plan_takes_what_it_says():
    problem = tiny(num_jobs=6)
    plan = solve(problem)
    for replan_every in (None, 0.25):
        assert simulate(problem, plan, noise=0.0, replan_every=replan_every).makespan_s == pytest.approx(
            plan.makespan_s
        )


def test_errors_and_failures_repeat_with_their_seed_and_cost_time():
    problem = tiny(num_jobs=6)
    plan = solve(problem)
    first = simulate(problem, plan, noise=0.25, failures_per_day=500.0, seed=3)
    assert first == simulate(problem, plan, noise=0.25, failures_per_day=500.0, seed=3)
    assert first.num_failures > 0
    assert first.makespan_s > simulate(problem, plan, noise=0.25, seed=3).makespan_s


def test_nobody_beats_the_bound_of_who_knows_the_runtimes():
    problem = tiny(num_jobs=6)
    plan = solve(problem)
    bound_s = clairvoyant(problem, noise=0.25, seed=1).lower_bound_s
    for replan_every in (None, 0.4):
        done = simulate(problem, plan, noise=0.25, seed=1, replan_every=replan_every)
        assert done.makespan_s >= bound_s * (1 - 1e-9)
