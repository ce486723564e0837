"""Resuming of batches that were stopped, or whose process died between any two writes."""

from functools import partial

import pytest

from ringmaster.tasks.execution.execution_events import PlanUpdate, SegmentStarted
from ringmaster.tasks.storage.journal import JobStatus, Journal
from tests.unit.execution.fakes import (
    Bench,
    FakeRunner,
    crashes_after,
    done,
    ends,
    in_a_row,
    job,
    open_journal,
    preempted,
    profile,
)

SEEDS = pytest.mark.parametrize("seed", range(5))


@SEEDS
def test_a_stopped_batch_is_resumed_where_it_stood(tmp_path, seed):
    runner = FakeRunner(seed)
    jobs = [job(name) for name in "abcd"]
    bench = Bench(tmp_path, jobs, runner=runner, make_plan=partial(in_a_row, num_parts=2))

    def stop(call, runner):
        bench.executor.stop_starting()
        for other, _ in runner.running:
            runner.script[other.order.job.name] = [preempted]
        return done(call, runner)

    runner.script["b"] = [done, stop]
    assert not bench.run()
    interrupted = dict(runner.steps)
    assert JobStatus.DONE in bench.statuses.values()
    assert JobStatus.WAITING in bench.statuses.values()
    num_calls = len(runner.calls)

    runner.script.clear()
    again = Bench(tmp_path, jobs, runner=runner)
    assert again.run()
    assert set(again.statuses.values()) == {JobStatus.DONE}
    ended = [name for name, step in interrupted.items() if step == 10]
    assert not set(ended) & set(runner.names()[num_calls:])
    assert all(e.first_step == interrupted.get(e.segment.job, 0) for e in again.told(SegmentStarted))
    assert again.told(PlanUpdate)[0].why == "resumed"


def test_a_failed_job_gets_another_chance_when_its_batch_is_resumed(tmp_path):
    jobs = [job("a"), job("b", base="a"), job("c")]
    runner = FakeRunner(script={"a": [ends("invalid")]})
    assert Bench(tmp_path, jobs, runner=runner).run()
    again = Bench(tmp_path, jobs, runner=runner)
    assert again.run()
    assert again.statuses == {"a": JobStatus.DONE, "b": JobStatus.DONE, "c": JobStatus.DONE}
    assert {record.message for record in again.journal.jobs().values()} == {""}
    assert runner.names().count("c") == 1


class ProcessDies(BaseException):
    pass


class FragileJournal(Journal):
    """A journal whose process dies just before its n-th write. Reads continue to work."""

    left = 10**9

    def _write(self):
        self.left -= 1
        if self.left == 0:
            raise ProcessDies

    def write_job(self, *args, **kwargs):
        self._write()
        return super().write_job(*args, **kwargs)

    def change_jobs(self, *args, **kwargs):
        self._write()
        return super().change_jobs(*args, **kwargs)

    def start_segments(self, *args, **kwargs):
        self._write()
        return super().start_segments(*args, **kwargs)

    def end_segment(self, *args, **kwargs):
        self._write()
        return super().end_segment(*args, **kwargs)

    def write_plan(self, *args, **kwargs):
        self._write()
        return super().write_plan(*args, **kwargs)


def eventful():
    """Jobs with many faults: a base and its child, a crash, an out-of-memory error, and an invalid job."""
    jobs = [job("child", base="base"), job("base"), job("wide"), job("wrong"), job("orphan", base="wrong")]
    profiles = {j.name: (profile(),) for j in jobs}
    profiles["wide"] = (profile(), profile("fsdp", 2))
    script = {
        "base": [crashes_after(4), ends("crashed")],
        "wide": [ends("out_of_memory"), done, crashes_after(2)],
        "wrong": [ends("invalid")] * 9,
    }
    return jobs, profiles, script


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.full)])
def test_a_process_that_dies_between_any_two_writes_is_resumed_by_the_next(tmp_path, every):
    moment, died = 0, True
    while died:
        moment += every
        folder = tmp_path / str(moment)
        jobs, profiles, script = eventful()
        runner = FakeRunner(moment, script=script)
        journal = open_journal(folder, FragileJournal)
        journal.left = moment
        options = {"profiles": profiles, "runner": runner, "make_plan": partial(in_a_row, num_parts=2)}
        died = False
        try:
            Bench(folder, jobs, journal=journal, **options).run()
        except ProcessDies:
            died = True
        journal.close()
        runner.running.clear()  # gangs die with their parent process
        before = open_journal(folder)
        ended = {name for name, record in before.jobs().items() if record.status == JobStatus.DONE}
        before.close()
        num_calls = len(runner.calls)
        again = Bench(folder, jobs, **options)
        assert again.run()
        assert again.statuses == {
            "child": JobStatus.DONE,
            "base": JobStatus.DONE,
            "wide": JobStatus.DONE,
            "wrong": JobStatus.FAILED,
            "orphan": JobStatus.FAILED,
        }
        assert not ended & set(runner.names()[num_calls:]), f"died before write {moment}: a job that was done ran again"
        assert all(again.journal.jobs()[name].step == 10 for name in ("child", "base", "wide"))
        again.journal.close()
    assert moment > 30
