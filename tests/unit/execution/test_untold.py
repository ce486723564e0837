"""Checkpoints that were never reported, because their gang died after writing and before reporting."""

from ringmaster.tasks.execution.execution_events import SegmentStarted
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques.processes.gang_events import JobReady, Outcome
from tests.unit.execution.fakes import Bench, FakeRunner, done, job


def dies_before_telling(call, runner):
    """Starts at the last checkpoint, writes another one, and dies before it reports that."""
    first = runner.steps.get(call.order.job.name, 0)
    call.on_event(JobReady(step=first))
    runner.steps[call.order.job.name] = first + 1
    return Outcome(status="crashed", message="as it should")


def begins_and_ends(call, runner):
    call.on_event(JobReady(step=runner.steps[call.order.job.name]))
    return done(call, runner)


def test_a_checkpoint_that_was_not_told_of_is_progress_all_the_same(tmp_path):
    runner = FakeRunner(script={"a": [*[dies_before_telling] * 6, begins_and_ends]})
    bench = Bench(tmp_path, [job("a")], runner=runner)
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.DONE}
    assert [e.first_step for e in bench.told(SegmentStarted)] == [0, 0, 1, 2, 3, 4, 5]
