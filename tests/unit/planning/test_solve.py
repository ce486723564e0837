import itertools
import json
import subprocess
import sys

import pytest
from hypothesis import given

from benchmarks.planning.families import draw
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, solve, verify
from ringmaster.tasks.planning.plans.list_scheduling import BASELINES, schedule
from tests.drawing import draws
from tests.unit.planning.draw import problems, tiny


@draws(4)
@given(problems())
def test_every_plan_is_valid_and_no_worse_than_a_simple_one(problem):
    for preemption in ("auto", "never"):
        plan = solve(problem, preemption=preemption)
        assert verify(plan, problem) == []
        assert plan.lower_bound_s <= plan.makespan_s * (1 + 1e-9)
        for baseline in BASELINES:
            simple = baseline(problem)
            assert verify(simple, problem) == []
            assert plan.makespan_s <= simple.makespan_s * (1 + 1e-9)


def exhaustive_s(problem: Problem) -> float:
    """The best list schedule over all orders and options: the optimum on one node."""
    best = float("inf")
    for options in itertools.product(*(range(len(job.options)) for job in problem.jobs)):
        choices = list(zip((job.id for job in problem.jobs), options, strict=True))
        best = min(best, *(max(s.end_s for s in schedule(problem, order)) for order in itertools.permutations(choices)))
    return best


@pytest.mark.parametrize("num_devices", [2, 3])
def test_tiny_problems_are_solved_to_their_optimum(num_devices):
    problem = tiny(num_jobs=4, num_devices=num_devices)
    assert solve(problem, preemption="never").makespan_s == pytest.approx(exhaustive_s(problem))


def test_one_long_job_is_proved_optimal():
    long = PlanningJob("long", (Option("ddp", 2, 100.0),))
    short = PlanningJob("short", (Option("single", 1, 1.0),))
    plan = solve(Problem("p", (PlanningNode("n0", 3),), (long, short)))
    assert plan.makespan_s == 100.0
    assert plan.gap == 0.0


def test_jobs_wait_for_those_that_they_name():
    jobs = [PlanningJob(f"j{i}", (Option("single", 1, 10.0),), (f"j{i - 1}",) if i else ()) for i in range(4)]
    plan = solve(Problem("chain", (PlanningNode("n0", 4),), tuple(reversed(jobs))))
    assert plan.makespan_s == pytest.approx(40.0)
    assert plan.lower_bound_s == pytest.approx(40.0)


def test_the_same_seed_gives_the_same_plan():
    problem = tiny(num_jobs=8)
    assert solve(problem, seed=3) == solve(problem, seed=3)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_many_small_jobs_on_a_node_are_split_seldom(seed):
    plan = solve(draw("gavel-24x8", seed=seed), seed=seed)
    assert plan.gap < 0.004
    assert plan.num_switches <= 8


def test_a_plan_survives_json():
    plan = solve(tiny())
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("wrong", [{"preemption": "maybe"}, {"objective": "speed"}])
def test_unknown_words_are_refused(wrong):
    with pytest.raises(ValueError, match=r"preemption|objective"):
        solve(tiny(), **wrong)


def test_a_file_that_is_no_plan_is_refused():
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json({"segments": [{"job": "a"}]})


def test_importing_planning_is_light():
    code = (
        "import sys, ringmaster.tasks.planning; "
        "print([m for m in ('torch', 'prefect', 'mlflow', 'pulp', 'highspy', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
