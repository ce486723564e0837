"""The bound for equal jobs that are too short to split: exact, and recomputed by arithmetic alone."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from ringmaster.flows.cli import app
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, solve, verify
from ringmaster.tasks.planning.bounds.bounds import COUNTING, counted_bound_s


def problem(*runtimes_s, num_jobs=3, num_devices=2, switch_cost_s=5.0, **changes):
    """Equal jobs on one node. runtimes_s: on 1, 2, ... devices."""
    options = tuple(Option("single", n, s, **changes) for n, s in enumerate(runtimes_s, 1))
    jobs = tuple(PlanningJob(id=f"job{i}", options=options) for i in range(num_jobs))
    return Problem("equal", (PlanningNode("node", num_devices),), jobs, switch_cost_s=switch_cost_s)


@pytest.mark.parametrize(
    ("given", "least_s"),
    [
        (problem(30.0), 60.0),
        (problem(30.0, 18.0), 48.0),  # two side by side, then the third on both
        (problem(30.0, 14.0), 42.0),  # one after another, each on both
        (problem(30.0, num_jobs=4), 60.0),
        (problem(30.0, num_jobs=7, num_devices=3), 90.0),
        (problem(30.0, save_s=1.0, startup_s=2.0), 66.0),
    ],
)
def test_the_bound_is_the_optimum(given, least_s):
    assert counted_bound_s(given) == pytest.approx(least_s)
    plan = solve(given)
    assert plan.makespan_s == pytest.approx(least_s)
    assert plan.gap == pytest.approx(0.0, abs=1e-9)
    assert verify(plan, given) == []


def test_jobs_that_are_not_equal_are_not_counted():
    given = problem(30.0)
    first, *others = given.jobs
    longer = replace(first, options=(replace(first.options[0], runtime_s=40.0),))
    assert counted_bound_s(replace(given, jobs=(longer, *others))) == 0.0


def test_a_job_that_is_long_enough_is_split():
    given = problem(3000.0)
    plan = solve(given)
    assert plan.makespan_s < 4600
    assert plan.proof != COUNTING


def test_a_bound_that_counting_does_not_give_is_a_fault():
    given = problem(30.0)
    plan = solve(given)
    assert plan.proof == COUNTING
    (fault,) = verify(replace(plan, lower_bound_s=60.0), replace(given, nodes=(PlanningNode("node", 3),)))
    assert fault == "lower bound 60.0 claimed, counting equal jobs proves 30.0"


def test_check_recomputes_it(tmp_path):
    given = problem(30.0)
    (tmp_path / "problem.json").write_text(json.dumps(given.to_json()))
    run = CliRunner().invoke(app, ["plan", str(tmp_path / "problem.json"), "-o", str(tmp_path / "plan.json")])
    assert run.exit_code == 0, run.output
    run = CliRunner().invoke(app, ["check", str(tmp_path / "problem.json"), str(tmp_path / "plan.json")])
    assert "by counting equal jobs, no plan that splits none of them ends before 60.0 s" in run.output
