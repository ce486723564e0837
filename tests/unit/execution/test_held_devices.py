"""A gang that keeps its devices until it ends by itself: plans have neither the job nor the devices."""

from dataclasses import replace

import pytest

from ringmaster.tasks.execution.execution_events import SegmentStarted
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques import registry
from ringmaster.techniques.processes.gang_events import OutcomeStatus
from tests.fake_engine import FakeEngine
from tests.unit.execution.clocked import clocked_bench
from tests.unit.execution.fakes import job, profile
from tests.unit.execution.serving import CALM, over_nodes, two_nodes

NEVER_S, IDLE_S = 1e6, 10.0


class HeldBench:
    """Three jobs of 100 s, and one that holds its device, on two nodes with a device each."""

    def __init__(self, folder):
        names = ("a", "b", "c")
        speeds = {(name, registry.dotted_path("single"), 1): 1.0 for name in names}
        self.gangs = FakeEngine({**speeds, ("held", registry.dotted_path("endpoint"), 1): NEVER_S})
        option = replace(profile("endpoint", step_s=IDLE_S), num_ranks=1, holds_devices=True)
        self.bench = clocked_bench(
            folder,
            [job("held", num_steps=1), *(job(name, num_steps=100) for name in names)],
            self.gangs,
            make_plan=over_nodes,
            policy=CALM,
            profiles={"held": (option,), **{name: (profile(),) for name in names}},
        )
        self.executor = self.bench.executor
        self.executor._plan_manager.cluster = two_nodes()

    def serve(self, *, until_s):
        self.gangs.at(until_s, self.executor.stop_starting)
        self.executor.replan_soon(why="begin")
        self.executor.serve()

    def end(self, status, **result):
        self.gangs.end(self.gangs.gang("held"), status, "as it should", **result)

    def started(self, name):
        return [each for each in self.bench.told(SegmentStarted) if each.segment.job == name]


@pytest.fixture
def held(tmp_path):
    return HeldBench(tmp_path)


def test_it_goes_on_beyond_its_planned_end_and_plans_have_neither_it_nor_its_device(held):
    held.gangs.at(50.0, lambda: held.executor.replan_soon(why="a person asks"))
    held.serve(until_s=150.0)
    assert [len(held.started(name)) for name in ("held", "a", "b", "c")] == [1, 1, 1, 0]
    assert held.bench.statuses["held"] == JobStatus.RUNNING and not held.gangs.heard
    problem = held.bench.plans[-1]
    assert "held" not in {each.id for each in problem.jobs}
    assert [node.num_devices for node in problem.nodes] == [1]
    assert {device for each in held.started("held") for device in each.segment.devices}.isdisjoint(
        (node.id, 0) for node in problem.nodes
    )


def test_what_waits_for_its_device_starts_once_it_has_ended(held):
    held.gangs.at(50.0, lambda: held.end(OutcomeStatus.DONE, first_step=0, step=1, metrics={}))
    held.serve(until_s=60.0)
    assert held.bench.statuses["held"] == JobStatus.DONE
    assert [len(held.started(name)) for name in ("a", "b")] == [1, 1]


def test_a_crash_after_it_has_answered_is_not_counted(held):
    for second in range(1, 6):
        held.gangs.at(10.0 * second, lambda: held.end(OutcomeStatus.CRASHED))
    held.serve(until_s=90.0)
    assert held.bench.statuses["held"] == JobStatus.RUNNING
    assert len(held.started("held")) == 6


def test_it_stops_where_a_person_cancels_it_or_needs_its_device(held):
    held.gangs.at(20.0, lambda: held.executor.vacate({("n1", 0), ("n2", 0)}))
    held.gangs.at(30.0, lambda: held.executor.cancel(["held"], message="by hand"))
    held.serve(until_s=40.0)
    (number,) = [each.number for each in held.gangs.calls if each.order.job.name == "held"]
    assert (number, "stop") in held.gangs.heard
    assert held.bench.statuses["held"] == JobStatus.CANCELLED
