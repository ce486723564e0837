"""The load of a machine: measurements are corrected by it, and stored with it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.errors import ChannelClosed
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.profiling.machine_load import MachineLoad, QuietTimes, at_load, present_load, without_load
from ringmaster.techniques import Profile
from ringmaster.techniques.estimates.device_rates import standard_error, time_reference
from ringmaster.techniques.processes.gang_events import ReferenceTimed, TrialMeasured, event_to_json
from ringmaster.techniques.profiles import GroupMemberProfile

SECONDS = {"step_s": 0.1, "startup_s": 2.0, "save_s": 1.0, "evaluate_s": 3.0, "export_s": 4.0, "stall_s": None}
PROFILE = Profile(technique="single", num_devices=1, num_ranks=1, peak_bytes=7, **SECONDS)
LOADS = st.floats(1.0, 20.0)


def timed(mean_s, fastest_s=1.0, spread=0.0, kind="cpu x1"):
    return ReferenceTimed(kind=kind, mean_s=mean_s, fastest_s=fastest_s, spread=spread)


def test_the_quiet_time_is_the_least_that_was_seen_of_a_kind(tmp_path):
    times = QuietTimes(tmp_path)
    assert times.load([timed(2.0)]).ratio == 2.0
    assert times.load([timed(2.0, fastest_s=2.0)]).ratio == 2.0  # busy all the time; the first timing tells
    assert QuietTimes(tmp_path).load([timed(1.0, fastest_s=0.5)]).ratio == 2.0
    assert times.load([timed(1.0, fastest_s=1.0)]).ratio == 2.0
    assert times.load([timed(9.0, fastest_s=9.0, kind="cpu x2")]).ratio == 1.0
    assert times.load([]) == MachineLoad()


def test_times_that_cannot_be_read_are_forgotten(tmp_path):
    times = QuietTimes(tmp_path)
    times.load([timed(1.0)])
    (file,) = tmp_path.iterdir()
    file.write_text("[1.0,")  # as after a power failure
    assert times.load([timed(3.0, fastest_s=2.0)]).ratio == 1.5


def test_a_load_that_changes_meanwhile_is_uncertain(tmp_path):
    found = QuietTimes(tmp_path).load([timed(1.0), timed(4.0, spread=0.1)])
    assert math.isclose(found.ratio, 2.0)
    assert math.isclose(found.spread, math.log(2.0))


def test_the_quiet_time_of_a_machine_that_changed_is_forgotten(tmp_path):
    times = QuietTimes(tmp_path)
    times.load([timed(1.0, fastest_s=0.1)])
    for _ in range(100):
        found = times.load([timed(1.0)])
    assert found.ratio == 1.0


@given(LOADS)
def test_measurements_are_corrected(ratio):
    measured = TrialMeasured(profile={**SECONDS, "peak_bytes": 7, "spread": 0.1}, mean_step_s=0.1)
    found = without_load(measured, MachineLoad(ratio=ratio))
    assert math.isclose(found["step_s"], 0.1 / ratio)
    assert math.isclose(found["save_s"], 1.0 / ratio)
    assert (found["stall_s"], found["peak_bytes"], found["spread"]) == (None, 7, 0.1)


def test_steps_that_are_shorter_than_a_time_slice_are_mostly_undisturbed():
    found = without_load(TrialMeasured(profile={**SECONDS, "step_s": 0.001}, mean_step_s=0.01), MachineLoad(ratio=2.0))
    assert found["step_s"] == 0.001
    command = without_load(TrialMeasured(profile=SECONDS), MachineLoad(ratio=1.0))
    assert command["step_s"] == 0.1


@given(LOADS, LOADS)
def test_a_profile_at_a_load_takes_so_many_times_as_long(first, second):
    member = GroupMemberProfile(job="b", num_steps=10, step_s=0.2, end_s=1.0)
    group = replace(PROFILE, members=(member,), own_step_s=0.05)
    loaded = group.under_load(first)
    assert math.isclose(loaded.runtime_s(num_steps=5), first * group.runtime_s(num_steps=5))
    again = loaded.under_load(second)
    assert math.isclose(again.runtime_s(num_steps=5), second * group.runtime_s(num_steps=5))
    assert at_load({"a": [group]}, MachineLoad(ratio=first)) == {"a": (loaded,)}


class Answers:
    """A fake fork server whose worker processes answer with these events; None for one that ends without any."""

    def __init__(self, *answers):
        self.answers, self.cores, self.closed = list(answers), [], 0

    def spawn(self, *, target, argument, log):
        self.cores.append(argument["cores"])
        return _Answer(self, self.answers.pop(0))


class _Answer:
    def __init__(self, server, event):
        self.server, self.messages = server, [{"event": "started", "pid": 1}]
        self.messages += [] if event is None else [event_to_json(event)]

    def receive(self):
        if not self.messages:
            raise ChannelClosed("ended")
        return self.messages.pop(0)

    def close(self):
        self.server.closed += 1


def device(kind, index):
    return Device(kind=kind, index=index, name="test", memory_bytes=1, cores=(index,))


def test_the_present_load_is_that_of_all_cpu_slots(tmp_path):
    server = Answers(timed(2.0), timed(8.0))
    found = present_load([device("cpu", 0), device("cpu", 1)], server=server, cache_dir=tmp_path)
    assert (found.ratio, server.cores, server.closed) == (pytest.approx(4.0), [[0], [1]], 2)
    assert present_load([device("cpu", 0)], server=Answers(None), cache_dir=tmp_path) == MachineLoad()
    assert present_load([device("gpu", 0)], server=Answers(), cache_dir=tmp_path) == MachineLoad()


def test_the_kernel_is_timed():
    found = time_reference(torch.device("cpu"), least_s=0.01)
    assert 0 < found.fastest_s <= found.mean_s
    assert found.kind.startswith("cpu x")


def test_the_standard_error_of_the_mean():
    assert standard_error([1.0]) == 0.0
    assert math.isclose(standard_error([1.0, 3.0]), math.sqrt(2) / math.sqrt(2) / 2)
