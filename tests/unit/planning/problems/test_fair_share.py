"""The seconds of a group on its fair share of the devices."""

from dataclasses import replace

import pytest
from hypothesis import given

from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, solve
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from tests.drawing import draws
from tests.unit.planning.draw import problems

ONE, TWO = Option("single", 1, 100.0), Option("ddp", 2, 60.0)


def fair_s(*jobs: PlanningJob, num_devices: int = 4) -> dict[str, float]:
    return dict(Problem("p", (PlanningNode("n", num_devices),), jobs).fair_s)


def test_a_job_without_a_group_is_one_of_its_own():
    assert fair_s(PlanningJob("a", (ONE, TWO)), PlanningJob("b", (ONE,))) == {"a": 60.0, "b": 100.0}
    assert fair_s(PlanningJob("a", (ONE,), user="b"), PlanningJob("b", (ONE,))) == {"a": 100.0, "b": 100.0}


def test_a_share_of_two_devices_does_three_jobs_in_their_area_or_longest():
    """Three jobs of 100 device-seconds on one device each, on two devices: 150 s."""
    jobs = [PlanningJob(f"a{i}", (ONE,), user="a") for i in range(3)]
    assert fair_s(*jobs, PlanningJob("b", (ONE,))) == {**dict.fromkeys(("a0", "a1", "a2"), 150.0), "b": 100.0}


def test_work_is_divided_over_options():
    """A job in T s takes 120 - (T - 60) / 40 x 20 device-seconds; two on three devices take 2 x 112.5 = 3 x 75."""
    jobs = [PlanningJob(f"a{i}", (ONE, TWO), user="a") for i in range(2)]
    found = fair_s(*jobs, PlanningJob("b", (ONE,)), num_devices=6)
    assert found["a0"] == found["a1"] == pytest.approx(75.0)


def test_options_wider_than_the_share_do_not_count_unless_all_are():
    wide = Option("fsdp", 4, 40.0)
    assert fair_s(PlanningJob("a", (ONE, wide)), PlanningJob("b", (ONE,)))["a"] == 100.0
    assert fair_s(PlanningJob("a", (wide,)), PlanningJob("b", (ONE,)))["a"] == 80.0


def test_releases_and_waiting_count():
    waits = PlanningJob("b", (ONE,), after=("a",), user="u")
    late = PlanningJob("c", (ONE,), release_s=500.0)
    assert fair_s(PlanningJob("a", (ONE, TWO), user="u"), waits, late) == {"a": 160.0, "b": 160.0, "c": 600.0}


@draws(30)
@given(problems(max_jobs=5, with_after=False))
def test_of_one_group_the_seconds_are_no_more_than_any_plan_takes(problem):
    jobs = tuple(replace(job, user="all") for job in problem.jobs)
    problem = replace(problem, jobs=jobs)
    (found,) = set(problem.fair_s.values())
    assert found <= solve(problem, preemption="never", work_s=0.2).makespan_s * (1 + 1e-9)
    assert preemptive_bound(problem).seconds >= found * (1 - 1e-6)
