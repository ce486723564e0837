"""Groups of jobs that one gang trains over two devices."""

import pytest

from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques.processes.gang_events import CheckpointSaved, Outcome
from tests.unit.execution.fakes import FakeRunner, ends
from tests.unit.execution.groups.grouped import GroupBench, all_done, bench_of, group, stopped_at

OVER_TWO = group("b", "c", num_devices=2, base="sharded")


def test_a_group_over_two_devices_is_one_gang_that_has_both(tmp_path):
    held = []

    def act(call, runner):
        held.append(set(bench.leases.held()))
        return all_done(call, runner)

    bench = bench_of(tmp_path, act, together=(OVER_TWO,))
    assert bench.run()
    (call,) = bench.runner.calls
    assert (call.num_ranks, call.order.config["base"]) == (2, "sharded")
    assert [len(order.slots) for order in (call.order, *call.order.members)] == [2, 2, 2]
    assert held == [{"here:cpu:0", "here:cpu:1"}]
    assert bench.leases.held() == {}
    assert {segment.spec.num_devices for name in "abc" for segment in bench.journal.segments(name)} == {2}
    assert bench.statuses == dict.fromkeys("abc", JobStatus.DONE)


def test_a_group_without_memory_on_one_device_goes_on_over_two(tmp_path):
    def act(call, runner):
        runner.steps |= dict.fromkeys("abc", 4)
        for name in "abc":
            call.on_event(CheckpointSaved(job=name, step=4, seconds=0.1))
        return Outcome(status="out_of_memory", message="no room")

    bench = bench_of(tmp_path, act, all_done, together=(group("b", "c"), OVER_TWO))
    assert bench.run()
    assert [(call.num_ranks, len(call.order.members)) for call in bench.runner.calls] == [(1, 2), (2, 2)]
    assert bench.journal.segments("b")[1].spec.first_step == 4
    assert bench.statuses == dict.fromkeys("abc", JobStatus.DONE)


def test_a_group_over_two_devices_that_keeps_crashing_parts_onto_both(tmp_path):
    bench = bench_of(tmp_path, *[ends("crashed")] * 3, together=(OVER_TWO,))
    assert bench.run()
    assert [(call.num_ranks, len(call.order.members)) for call in bench.runner.calls] == [(2, 2)] * 3 + [(1, 0)] * 3
    assert bench.statuses == dict.fromkeys("abc", JobStatus.DONE)


@pytest.mark.parametrize("together", [(OVER_TWO,), (group("b", "c"), OVER_TWO)], ids=["over two", "either"])
def test_a_group_that_was_interrupted_goes_on_over_what_devices_it_may(tmp_path, together):
    def act(call, runner):
        bench.executor.stop_starting()
        runner.steps |= dict.fromkeys("abc", 5)
        return stopped_at(5, "bc")

    bench = bench_of(tmp_path, act, together=together)
    assert not bench.run()
    bench.journal.close()
    runner = FakeRunner(steps=bench.runner.steps, script={"a": [all_done]})
    again = GroupBench(tmp_path, bench.jobs, runner=runner, together=(OVER_TWO, group("b", "c")))
    assert again.run()
    assert [(call.num_ranks, len(call.order.members)) for call in again.runner.calls] == [(2, 2)]
    assert {segment.spec.first_step for segment in again.journal.segments("b")} == {0, 5}
