"""Jobs whose results depend on the layout stay under the option that they start with."""

from dataclasses import replace

import pytest

from ringmaster.tasks.planning import Plan, Segment
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques.processes.gang_events import OutcomeStatus
from tests.unit.execution.fakes import Bench, FakeRunner, done, ends, job, profile

GRPO = {"loss": "grpo", "loss_options": {"rewards": ["my_rewards:length"]}}
PROFILES = (profile("ddp", 2), profile())


def halves(problem):
    """A plan in which each job spends one half of its work under each of its options."""
    segments, now_s = [], 0.0
    for row in problem.jobs:
        for number, option in enumerate(row.options[:2]):
            end_s = now_s + option.runtime_s / 2
            devices = tuple(range(option.num_devices))
            segments.append(Segment(row.id, number, now_s, end_s, 0.5, 0.0, ((problem.nodes[0].id, devices),)))
            now_s = end_s
    return Plan(problem.name, tuple(segments))


@pytest.mark.parametrize("is_generating", [False, True])
def test_a_plan_with_two_options(tmp_path, is_generating):
    trained = job("a", **(GRPO if is_generating else {}))
    bench = Bench(tmp_path, [trained], profiles={"a": PROFILES}, make_plan=halves)
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.DONE}
    used = [(call.order.technique.rpartition(".")[2], len(call.order.slots)) for call in bench.runner.calls]
    assert used[0] == (used[0][0], 2)
    assert len(used) > 1
    assert len(set(used)) == (1 if is_generating else 2)


def test_a_later_executor_keeps_it(tmp_path):
    first = Bench(tmp_path, [job("a", **GRPO)], profiles={"a": PROFILES}, make_plan=halves)
    assert first.run()
    first.journal.write_job("a", status=JobStatus.WAITING, step=5)
    second = Bench(tmp_path, [job("a", **GRPO)], profiles={"a": tuple(reversed(PROFILES))}, make_plan=halves)
    assert second.run()
    assert {len(call.order.slots) for call in second.runner.calls} == {2}


@pytest.mark.parametrize("step", [0, 4])
def test_it_is_left_only_before_the_first_step(tmp_path, step):
    runner = FakeRunner(0, script={"a": [ends(OutcomeStatus.OUT_OF_MEMORY), done]} if step == 0 else {})
    bench = Bench(tmp_path, [job("a", **GRPO)], profiles={"a": PROFILES}, make_plan=halves, runner=runner)
    table = bench.executor.job_table
    if step == 0:
        assert bench.run()
        assert [len(call.order.slots) for call in runner.calls][:2] == [2, 1]
        return
    table._read(table.entries)
    assert table.keep_layout("a", PROFILES[0]) == {1}
    assert table.keep_layout("a", PROFILES[0]) == set()
    table.write("a", step=step)
    assert not table.strike_out("a", replace(PROFILES[0]))
