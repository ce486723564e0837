"""Current practice: one job after another, each on all devices of its node that it can use."""

import pytest

from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, solve
from ringmaster.tasks.planning.plans.list_scheduling import current_practice
from ringmaster.tasks.planning.plans.verify import verify


def problem(*nodes, sizes=(1,)):
    options = tuple(Option("command", size, 10.0 / size) for size in sizes)
    nodes = tuple(PlanningNode(f"n{i}", num) for i, num in enumerate(nodes))
    return Problem("p", nodes, tuple(PlanningJob(name, options) for name in "abcd"))


@pytest.mark.parametrize(
    ("nodes", "sizes", "seconds"),
    [
        ((2,), (1,), 40.0),  # commands for one device: a script runs one after the other, and a device idles
        ((2,), (1, 2), 20.0),
        ((4,), (1, 2), 20.0),
        ((2, 2), (1,), 20.0),  # a script on each node
        ((4, 2), (1,), 20.0),
    ],
)
def test_a_node_trains_one_job_at_a_time(nodes, sizes, seconds):
    found = current_practice(problem(*nodes, sizes=sizes))
    assert found.makespan_s == seconds
    assert verify(found, problem(*nodes, sizes=sizes)) == []


def test_two_commands_for_one_device_take_half_the_time_of_current_practice_on_two():
    given = problem(2)
    assert current_practice(given).makespan_s / solve(given).makespan_s == pytest.approx(2.0)
