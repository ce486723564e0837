"""Options for nodes that are gone or never existed: only the jobs that need these nodes wait."""

import pytest

from ringmaster.tasks.execution.replanner import RemainingWork, Replanner
from tests.unit.execution.fakes import at_once, cluster, in_a_row, job, profile

SMALL, WIDE = profile(), profile("ddp", 4)


def planned(profiles):
    """Plans the jobs on two devices. Returns the option and the devices of each planned job."""
    replanner = Replanner(name="x", make_plan=in_a_row, background=at_once)
    state = RemainingWork(
        jobs=[job(name) for name in profiles],
        profiles=profiles,
        steps=dict.fromkeys(profiles, 0),
        running=(),
        planned=(),
        cluster=cluster(2),
    )
    pending_plan = replanner.demand(state, why="a node is gone")
    return {} if pending_plan is None else {s.job: (s.option, s.devices) for s in pending_plan.plan.result().segments}


def test_a_job_without_an_option_for_the_nodes_that_are_there_waits():
    assert planned({"wide": (WIDE,), "small": (SMALL,)}).keys() == {"small"}
    assert planned({"wide": (WIDE,)}) == {}


@pytest.mark.parametrize("options", [(WIDE, SMALL), (SMALL, WIDE)])
def test_a_job_goes_on_under_those_of_its_options_that_there_is_room_for(options):
    (option, devices) = planned({"both": options})["both"]
    assert options[option] is SMALL
    assert devices == (("here", (0,)),)
