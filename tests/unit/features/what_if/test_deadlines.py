"""Whether all jobs can end in time, and how many more devices do or do not make that possible."""

from functools import partial

import pytest

from ringmaster.features.what_if.answers import DeadlineVerdict, answer_deadline, deadline_lines, times
from ringmaster.features.what_if.gains import Deadline, MoreDevices, MoreNodes, WhatIf
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, solve

LITTLE = 0.2
JOBS = tuple(PlanningJob(f"j{i}", (Option("single", 1, 3600.0),)) for i in range(12))


def asked(due_s, *nodes):
    problem = Problem("twelve hours", nodes or (PlanningNode("n0", 2),), JOBS, switch_cost_s=0.0)
    what_if = WhatIf(problem, solve(problem, work_s=LITTLE))
    return answer_deadline(what_if, Deadline(due_s=due_s), partial(what_if.planned, work_s=LITTLE))


def test_no_more_devices_are_considered_than_a_node_has_room_for():
    jobs = tuple(PlanningJob(f"j{i}", (Option("ddp", 4, 10_000.0),)) for i in range(1500))
    problem = Problem("full", (PlanningNode("n", 4000),), jobs)
    answer = answer_deadline(WhatIf(problem, solve(problem, work_s=0.1)), Deadline(due_s=10_500.0))
    assert answer.verdict is DeadlineVerdict.NO
    assert answer.too_few == 96
    assert answer.enough is None


def test_the_plan_shows_that_it_is_possible():
    answer = asked(6 * 3600.0)
    assert answer.verdict is DeadlineVerdict.YES
    assert list(deadline_lines(answer, proof="by these runtimes")) == [
        "All jobs can end within 6.00 h: the plan ends after 6.00 h."
    ]


def test_how_many_more_devices_are_needed():
    """Twelve hours of work: two devices take six hours, three take four, and six take two."""
    answer = asked(4 * 3600.0)
    assert (answer.verdict, answer.too_few, answer.enough) == (DeadlineVerdict.NO, 0, 1)
    answer = asked(2 * 3600.0)
    assert (answer.verdict, answer.too_few, answer.enough) == (DeadlineVerdict.NO, 3, 4)
    assert answer.unit == MoreDevices(num_devices=1)
    said = list(deadline_lines(answer, proof="by these runtimes"))
    assert said[1:] == [
        "Even with 3 more devices it is impossible by these runtimes.",
        "With 4 more devices it is possible by these runtimes: there is a plan.",
    ]


def test_several_nodes_are_joined_by_further_ones():
    answer = asked(3600.0, PlanningNode("n0", 2), PlanningNode("n1", 2), PlanningNode("n2", 1))
    assert answer.unit == MoreNodes(num_devices=2)
    assert (answer.too_few, answer.enough) == (3, 4)
    assert times(answer.unit, 4) == MoreNodes(num_devices=2, num_nodes=4)


def test_no_number_of_devices_shortens_a_job_that_is_too_long():
    answer = asked(1800.0)
    assert (answer.verdict, answer.enough, answer.longest_job_s) == (DeadlineVerdict.NO, None, 3600.0)
    (said,) = deadline_lines(answer, proof="by these runtimes")
    assert "No number of devices" in said
    assert answer.longest_job in said


def test_between_the_bound_and_the_plan_nothing_is_known():
    jobs = tuple(PlanningJob(f"j{i}", (Option("single", 1, 100.0),)) for i in range(3))
    problem = Problem("three", (PlanningNode("n0", 2),), jobs, switch_cost_s=1e4)  # a switch never pays
    what_if = WhatIf(problem, solve(problem, work_s=LITTLE))
    assert (what_if.bound_s, what_if.makespan_s) == (pytest.approx(150.0), pytest.approx(200.0))
    answer = answer_deadline(what_if, Deadline(due_s=170.0), partial(what_if.planned, work_s=LITTLE))
    assert (answer.verdict, answer.too_few, answer.enough) == (DeadlineVerdict.UNKNOWN, 0, 1)
    assert "It is not known" in next(iter(deadline_lines(answer, proof="by these runtimes")))
