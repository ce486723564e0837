"""What segments measure of their options: at their end it is told, stored, and planned on by later runs."""

from dataclasses import replace

import pytest

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.execution_events import SegmentEnded
from ringmaster.tasks.execution.progress import RunningSegment
from ringmaster.tasks.profiling.profile_store import MeasuredOptions, ProfileStore
from ringmaster.tasks.profiling.search import ProfilingFailure
from ringmaster.techniques.processes.gang_events import CheckpointSaved, JobReady, JobResult, Steps
from ringmaster.techniques.profiles import GroupMemberProfile, ProfileKey
from tests.fake_engine import FakeEngine
from tests.unit.execution.fakes import Bench, FakeRunner, ends, job, profile

SINGLE = "ringmaster.techniques.single:Single"


def predicted(name="f", technique="single", num_devices=1, step_s=1.0):
    """A predicted option."""
    key = ProfileKey(fingerprint=name, speed_class="class", device_kind="cpu, 1 core")
    found = profile(technique, num_devices, step_s)
    return replace(found, source="predicted", predicted_step_s=step_s, key=key, spread=0.35, save_s=9.0)


def running(option, **changes):
    devices = (("here", 0),)
    segment = PlannedSegment(job="a", option=0, devices=devices, start_s=0.0, end_s=1.0, last_step=10)
    return RunningSegment(segment=segment, profile=option, names=("here 0",), first_step=0, **changes)


def steps(first, *seconds, peak_bytes=0):
    return Steps(first_step=first, seconds=seconds, peak_bytes=peak_bytes)


def opened_store():
    """A store, and the rows that it keeps: fingerprint and content of each."""
    rows = []

    def find(names):
        return {name: row for name, row in rows if name in names}

    return ProfileStore(find=find, keep=lambda name, row: rows.append((name, row))), rows


def test_predictions_that_are_wrong_by_a_factor_of_three_are_corrected_for_the_next_run(tmp_path):
    engine = FakeEngine(step_s={("a", SINGLE, 1): 3.0, ("b", SINGLE, 1): 1 / 3}, startup_s=0.5)
    jobs = [job("a", num_steps=40), job("b", num_steps=40)]
    bench = Bench(tmp_path, jobs, profiles={"a": (predicted("fa"),), "b": (predicted("fb"),)}, runner=engine)
    assert bench.run()
    store, _ = opened_store()
    measured = MeasuredOptions(store)
    for event in bench.told(SegmentEnded):
        again = from_json(SegmentEnded, to_json(event))  # as a pool passes it on
        assert again == event
        measured.add(again.profile, number=again.number)
    known = store.results(["fa", "fb"])
    assert {name: found.step_s for name, found in known.items()} == pytest.approx({"fa": 3.0, "fb": 1 / 3})
    for found in known.values():
        assert (found.source, found.predicted_step_s, found.startup_s) == ("measured", 1.0, 0.5)
        assert found.num_measured_steps == 39  # the first one warms up
        assert found.spread < 0.05


def test_an_option_that_runs_out_of_memory_is_remembered_and_costs_no_step(tmp_path):
    options = (predicted("f1"), predicted("f2", "fsdp", 2))
    runner = FakeRunner(script={"a": [ends("out_of_memory", "no room")]})
    bench = Bench(tmp_path, [job("a")], profiles={"a": options}, runner=runner)
    assert bench.run()
    first, second = bench.told(SegmentEnded)
    assert (first.profile, second.profile) == (options[0], None)
    store, _ = opened_store()
    MeasuredOptions(store).add_unfit(first.profile, message=first.outcome.message)
    assert store.results(["f1"]) == {"f1": ProfilingFailure(kind="out_of_memory", message="no room")}


def test_all_that_a_gang_reports_becomes_part_of_the_profile():
    gang = running(predicted(), number=1)
    assert gang.measured(JobResult()) is None
    for event in (
        JobReady(step=0, startup_s=2.0),
        steps(0, 9.0, 1.0, 1.0, peak_bytes=7),
        CheckpointSaved(step=3, seconds=0.4, stall_s=0.1),
        steps(3, 1.0, 1.0, peak_bytes=5),
    ):
        gang.handle_event(event)
    found = gang.measured(JobResult(evaluate_s=0.6, export_s=0.7, step=5))
    assert (found.step_s, found.num_measured_steps, found.peak_bytes) == (1.0, 4, 7)
    assert (found.startup_s, found.save_s, found.stall_s) == (2.0, 0.4, 0.1)
    assert (found.evaluate_s, found.export_s, found.load) == (0.6, 0.7, 1.0)
    assert gang.measured(JobResult(save_s=0.5)).save_s == 0.5


def test_what_is_stored_is_on_a_quiet_machine(tmp_path):
    gang = running(predicted().under_load(2.0), number=1)
    gang.handle_event(steps(0, *[3.0] * 10))
    store, rows = opened_store()
    MeasuredOptions(store).add(gang.measured(JobResult()), number=1)
    ((_, row),) = rows
    assert (row["step_s"], row["load"]) == (3.0, 2.0)
    assert store.results(["f"])["f"].step_s == 1.5


def test_a_group_is_measured_while_all_of_its_jobs_are_there():
    group = replace(predicted(), members=(GroupMemberProfile(job="b", num_steps=5, step_s=1.0),), own_step_s=1.0)
    gang = running(group, first_steps={"b": 0})
    gang.handle_event(steps(0, *[2.0] * 8))
    gang.lose("b")
    assert gang.step_s is None
    gang.handle_event(steps(8, *[1.0] * 50))
    gang.lose("b")  # a repeated report
    assert gang.step_s == 1.0, "the speed of those that are left"
    found = gang.measured(JobResult(save_s=5.0))
    assert (found.step_s, found.members, found.own_step_s, found.save_s) == (2.0, (), 0.0, 9.0)


def test_what_is_left_of_a_group_is_not_stored_as_the_whole_group():
    members = tuple(GroupMemberProfile(job=name, num_steps=5, step_s=1.0) for name in "bc")
    whole = replace(predicted(), members=members, own_step_s=1.0)
    left = whole.restricted_to(["b"])
    for option in (whole, left):  # c rests for now, or has ended
        gang = running(option, first_steps={"b": 3})
        gang.handle_event(steps(3, *[2.0] * 8))
        assert gang.measured(JobResult()) is None
    store, rows = opened_store()
    MeasuredOptions(store).add_unfit(left, message="no room")
    assert rows == []


def test_an_option_without_a_key_is_not_stored():
    gang = running(profile())
    gang.handle_event(steps(0, *[1.0] * 9))
    assert gang.measured(JobResult()) is None


def test_segments_of_equal_jobs_are_stored_a_few_times():
    store, rows = opened_store()
    options = MeasuredOptions(store)
    for number in range(500):
        gang = running(predicted())
        gang.handle_event(steps(0, *[2.0] * 11))
        options.add(gang.measured(JobResult()), number=number)
        options.add(gang.measured(JobResult()), number=number)  # it is called again if the store fails
    options.close()
    assert len(rows) < 12
    assert store.results(["f"])["f"].step_s == pytest.approx(2.0)
