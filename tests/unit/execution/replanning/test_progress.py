"""The progress of a running segment, as its gang reports it."""

from dataclasses import replace

from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.progress import FEWEST_STEPS, MAX_STEPS, RunningSegment
from ringmaster.tasks.execution.replanner import Replanner
from ringmaster.techniques.processes.gang_events import Steps
from ringmaster.techniques.profiles import ProfileKey
from tests.unit.execution.fakes import profile


def test_the_speed_contains_what_other_processes_take_from_a_few_steps():
    segment = PlannedSegment(job="a", option=0, last_step=10_000, devices=(("n", 0),), start_s=0.0, end_s=1.0)
    running = RunningSegment(segment, profile(), (), 0)
    running.handle_event(Steps(first_step=0, seconds=(9.0, *(1.0, 1.0, 1.0, 5.0) * 3)))
    assert running.step_s == 2.0


def test_the_speed_is_that_of_the_newest_steps():
    segment = PlannedSegment(job="a", option=0, last_step=10_000, devices=(("n", 0),), start_s=0.0, end_s=1.0)
    running = RunningSegment(segment, profile(), (), 0)
    running.handle_event(Steps(first_step=0, seconds=(9.0,)))  # it warms up
    for step in range(1, FEWEST_STEPS):
        running.handle_event(Steps(first_step=step, seconds=(2.0,)))
        assert running.step_s is None
    running.handle_event(Steps(first_step=FEWEST_STEPS, seconds=(2.0,)))
    assert running.step_s == 2.0
    running.handle_event(Steps(first_step=running.step, seconds=(1.0,) * MAX_STEPS))
    assert running.step_s == 1.0


def test_steps_without_seconds_say_nothing_of_the_speed():
    """As those of a command with a clock of whole seconds."""
    segment = PlannedSegment(job="a", option=0, last_step=10_000, devices=(("n", 0),), start_s=0.0, end_s=1.0)
    key = ProfileKey(fingerprint="f", speed_class="class", device_kind="cpu, 1 core")
    running = RunningSegment(segment, replace(profile(), key=key), (), 0)
    running.handle_event(Steps(first_step=0, seconds=(0.0,) * 9))
    Replanner(name="b", make_plan=lambda _: None).handle_event(running)
    assert running.measured({}) is None
