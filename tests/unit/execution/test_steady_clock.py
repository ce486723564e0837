"""Durations stay what they were when the system's clock is corrected while jobs train."""

from contextlib import closing
from dataclasses import replace

import pytest

from ringmaster import clock as clock_module
from ringmaster.clock import SteadyClock
from ringmaster.flows.batch.result import _span_s, longest_idle_s
from ringmaster.tasks.storage import journal as journal_module
from ringmaster.tasks.storage.fact_keys import CLOCK
from ringmaster.tasks.storage.journal import Journal, SegmentSpec
from ringmaster.tasks.timeline.queries import Archive
from ringmaster.techniques.processes.gang_events import JobResult

DAY_S = 86400.0
SPEC = SegmentSpec(technique="single", devices=("cpu:0",))


class Clocks:
    """The wall clock and the time since the boot, which tests set."""

    def __init__(self):
        self.wall_s, self.boot_s = 1.8e9, 100.0

    def pass_by(self, seconds):
        self.wall_s += seconds
        self.boot_s += seconds

    def steady(self, **options):
        options = {"wall_clock": lambda: self.wall_s} | options
        return SteadyClock(clock=lambda: self.boot_s, **options)


@pytest.fixture
def clocks(monkeypatch):
    result = Clocks()
    monkeypatch.setattr(journal_module, "SteadyClock", result.steady)
    return result


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
def test_a_steady_clock_passes_over_corrections(clocks, step_s):
    steady = clocks.steady()
    began_s = steady()
    clocks.wall_s += step_s
    clocks.pass_by(30)
    assert steady() - began_s == pytest.approx(30)
    assert clocks.steady()() == pytest.approx(clocks.wall_s)
    assert clocks.steady(not_before_s=began_s + 2 * DAY_S)() == pytest.approx(began_s + 2 * DAY_S)


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
def test_another_process_reads_the_times_of_a_run_by_the_clock_of_that_run(clocks, tmp_path, monkeypatch, step_s):
    with closing(Journal.of_file(tmp_path / "journal.db")) as journal:
        journal.clock = clock = clocks.steady()
        journal.put(CLOCK, clock.to_json())
        monkeypatch.setattr(clock_module, "boot_s", lambda: clocks.boot_s)
        monkeypatch.setattr(clock_module.time, "time", lambda: clocks.wall_s)
        monkeypatch.setattr(clock_module, "SteadyClock", clocks.steady)
        begun_s = journal.clock()
        clocks.wall_s += step_s
        clocks.pass_by(40)
        archive = Archive(journal.database, is_pool=False)
        assert archive.clock() - begun_s == pytest.approx(40)
        journal.put(CLOCK, {**clock.to_json(), "boot_id": "of another boot"})
        assert archive.clock() == clocks.wall_s


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_segment_has_its_duration(clocks, tmp_path, step_s, is_alone):
    with closing(Journal.of_file(tmp_path / "journal.db")) as journal:
        journal.clock = clocks.steady() if is_alone else lambda: clocks.wall_s
        (number,) = journal.start_segments([("a", SPEC)])
        clocks.pass_by(20)
        clocks.wall_s += step_s
        clocks.pass_by(9)
        journal.end_segment(number, JobResult(status="done"))
        (record,) = journal.segments()
        assert record.seconds == pytest.approx(29)
        if is_alone:
            (number,) = journal.start_segments([("b", SPEC)])
            clocks.pass_by(5)
            journal.end_segment(number, JobResult(status="done"))
            assert _span_s(journal.segments()) == pytest.approx(34)
            assert longest_idle_s(journal.segments()) == pytest.approx(0)


def test_what_another_process_began_before_the_clock_was_set_back_lasted_no_negative_time(clocks, tmp_path):
    with closing(Journal.of_file(tmp_path / "journal.db")) as journal:
        journal.clock = lambda: clocks.wall_s
        (number,) = journal.start_segments([("a", SPEC)])
    clocks.wall_s -= DAY_S
    with closing(Journal.of_file(tmp_path / "journal.db")) as later:
        later.clock = lambda: clocks.wall_s
        later.end_segment(number, JobResult(status="lost"))
        (record,) = later.segments()
        assert record.seconds == 0
        assert replace(record, ended_s=record.started_s - DAY_S).seconds == 0
        assert _span_s([replace(record, ended_s=record.started_s - DAY_S)]) == 0
