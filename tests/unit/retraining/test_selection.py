"""Selection of the due models that fit in the limits of a retraining run."""

import pytest

from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem
from ringmaster.tasks.planning.objectives import HOUR_S, PlanningTerms
from ringmaster.tasks.planning.solve import checked_plan
from ringmaster.tasks.retraining.selection import DueModel, RunLimits, choose, cost_of

SECONDS = {"a": 60.0, "b": 30.0, "c": 20.0, "a-2": 60.0, "a-3": 60.0}


def chosen(wanted, limits=RunLimits()):
    """Selects models on one device, where a job takes the time that SECONDS gives."""

    def problem_of(names):
        jobs = tuple(PlanningJob(id=name, options=(Option("single", 1, SECONDS[name]),)) for name in names)
        problem = Problem(name="night", nodes=(PlanningNode("n", 1),), jobs=jobs, switch_cost_s=1.0)
        deadlines_s = {} if limits.left_s is None else dict.fromkeys(names, limits.left_s)
        return PlanningTerms(deadlines_s=deadlines_s).on(problem)

    return choose(wanted, limits, problem_of=problem_of, make_plan=lambda p: checked_plan(p, work_s=5.0, seed=0))


def until(seconds):
    return RunLimits(left_s=seconds, deadline_s=1_795_000_000.0)


A, B, C = (DueModel(model=name) for name in "abc")


def test_without_limits_all_is_trained():
    found = chosen([A, B, C])
    assert (found.jobs, dict(found.left)) == (("a", "b", "c"), {})
    assert found.plan is not None
    assert found.plan.makespan_s == pytest.approx(110.0)
    assert found.cost == pytest.approx(110.0 / HOUR_S)


def test_what_does_not_fit_is_left_and_the_smaller_behind_it_may_fit():
    found = chosen([B, A, C], until(55.0))
    assert found.jobs == ("b", "c")
    assert found.left == {"a": "with it the run would not be over at 2026-11-18 11:06 UTC"}


def test_the_higher_priority_comes_first_then_who_waited_longest():
    first = DueModel(model="c", priority=1)
    assert chosen([A, B, first], until(55.0)).jobs == ("c", "b")
    waited = DueModel(model="a", waited=2)
    found = chosen([B, C, waited], until(85.0))
    assert found.jobs == ("a", "c")
    assert list(found.left) == ["b"]


def test_a_budget_is_kept():
    found = chosen([A, B, C], RunLimits(budget=0.02))
    assert found.jobs == ("a",)
    assert found.left["b"] == "with it the run would cost 0.025 of 0.02 device-hours"
    paid = chosen([A, B], RunLimits(budget=0.18, price_per_device_hour=7.2))
    assert (paid.jobs, paid.cost) == (("a", "b"), pytest.approx(0.18))


def test_a_sweep_is_left_out_before_its_model_is():
    swept = DueModel(model="a", variants=("a-2", "a-3"))
    found = chosen([swept, B], until(100.0))
    assert found.jobs == ("a", "b")
    assert found.left["a"].startswith("its sweep does not fit in the run: with it")


def test_a_model_that_does_not_fit_with_or_without_its_sweep_is_left():
    found = chosen([DueModel(model="a", variants=("a-2",)), B], until(40.0))
    assert found.jobs == ("b",)
    assert found.left["a"].startswith("with it the run")


def test_after_the_deadline_nothing_is_trained():
    found = chosen([A, B], until(-1.0))
    assert (found.jobs, found.plan) == ((), None)
    assert set(found.left) == {"a", "b"}
    assert "was over at 2026-11-18 11:06 UTC" in found.left["a"]


def test_nothing_due_needs_no_plan():
    assert chosen([]).plan is None


def test_the_cost_counts_every_device_of_a_gang():
    job = PlanningJob(id="a", options=(Option("ddp", 2, 90.0),))
    problem = Problem(name="p", nodes=(PlanningNode("n", 2),), jobs=(job,), switch_cost_s=1.0)
    plan = checked_plan(problem, work_s=5.0, seed=0)
    assert cost_of(plan, problem, price_per_device_hour=2.0) == pytest.approx(2 * 90 * 2 / 3600)
