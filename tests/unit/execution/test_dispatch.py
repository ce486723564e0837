"""Dispatch: a plan fixes an order, not start times. Tests cover what may start when, and which steps it does."""

import math

from hypothesis import given
from hypothesis import strategies as st

from ringmaster.tasks.execution.dispatch import PlannedSegment, in_steps, startable_segments
from ringmaster.tasks.execution.progress import PlanProgress
from ringmaster.tasks.execution.starter import MAX_OVERHEAD, checkpoint_interval_s
from ringmaster.tasks.planning import Plan, Segment
from tests.drawing import draws


def planned(job, *devices, at=0.0, last_step=1):
    return PlannedSegment(
        job=job, option=0, last_step=last_step, devices=tuple(("n", d) for d in devices), start_s=at, end_s=at + 1
    )


def starts(segments, *, running=(), done=(), bases=None):
    found = startable_segments(
        segments, running=running, done_jobs=set(done), after={job: (base,) for job, base in (bases or {}).items()}
    )
    return [segment.job for segment in found]


def test_what_is_free_starts_at_once_whatever_the_clock_says():
    assert starts([planned("a", 0), planned("b", 1, at=500.0)]) == ["a", "b"]


def test_a_busy_device_is_waited_for_and_nobody_overtakes_on_it():
    wide, narrow = planned("wide", 0, 1), planned("narrow", 1, at=1.0)
    assert starts([wide, narrow], running=[planned("x", 0)]) == []
    assert starts([wide, narrow]) == ["wide"]
    assert starts([wide, narrow, planned("other", 2)], running=[planned("x", 0)]) == ["other"]


def test_a_base_is_waited_for():
    segments = [planned("child", 0)]
    assert starts(segments, bases={"child": "base"}) == []
    assert starts(segments, bases={"child": "base"}, done={"base"}) == ["child"]


def test_a_job_runs_one_segment_at_a_time_in_order():
    first, second = planned("a", 0), planned("a", 1, at=1.0)
    assert starts([first, second]) == ["a"]
    assert starts([second], running=[first]) == []


def test_what_may_start_is_asked_without_a_change_of_the_plan():
    progress = PlanProgress(totals={"a": 9}, after={})
    progress.planned = segments = [planned("a", 0, last_step=4), planned("a", 1, at=1.0, last_step=9)]
    assert progress.startable(done_jobs=()) == segments[:1] and progress.planned == segments
    progress.drop_passed({"a": 4})
    assert progress.startable(done_jobs=()) == segments[1:]


@st.composite
def orders(draw):
    """Draws segments in the order of a plan, and base jobs whose segments all precede those of their children."""
    num_jobs = draw(st.integers(1, 6))
    bases = {}
    for i in range(1, num_jobs):
        base = draw(st.none() | st.integers(0, i - 1))
        if base is not None:
            bases[f"j{i}"] = f"j{base}"
    segments = [
        planned(f"j{i}", *draw(st.sets(st.integers(0, 3), min_size=1, max_size=3)))
        for i in range(num_jobs)
        for _ in range(draw(st.integers(1, 3)))
    ]
    if not bases:
        segments = draw(st.permutations(segments))
    return segments, bases, draw(st.randoms(use_true_random=False))


@draws(100)
@given(orders())
def test_everything_starts_once_in_order_and_no_device_serves_two(case):
    segments, bases, draw = case
    after = {job: (base,) for job, base in bases.items()}
    left, running, started, done = list(enumerate(segments)), [], [], set()
    while left or running:
        waiting, busy_gangs = [segment for _, segment in left], [s for _, s in running]
        found = startable_segments(waiting, running=busy_gangs, done_jobs=done, after=after)
        assert startable_segments(waiting, running=busy_gangs, done_jobs=done, after=after, num_devices=4) == found
        for segment in found:
            number = next(i for i, s in left if s is segment)
            left = [(i, s) for i, s in left if i != number]
            running.append((number, segment))
            started.append(number)
            assert bases.get(segment.job) in (None, *done)
        busy = [device for _, segment in running for device in segment.devices]
        assert len(busy) == len(set(busy))
        assert len(running) == len({segment.job for _, segment in running})
        assert running, "nothing runs and nothing may start"
        _, ended = running.pop(draw.randrange(len(running)))
        if not any(segment.job == ended.job for _, segment in left):
            done.add(ended.job)
    assert sorted(started) == list(range(len(segments)))
    for device in {device for segment in segments for device in segment.devices}:
        on_it = [number for number in started if device in segments[number].devices]
        assert on_it == sorted(on_it)


def plan_of(works, *, job="a"):
    """A plan of consecutive segments with the given shares of work, on two devices in turn."""
    segments = [
        Segment(job, i % 2, float(i), float(i + 1), work, 0.0, (("n", (i % 2,)),)) for i, work in enumerate(works)
    ]
    return Plan("p", tuple(segments))


shares = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=6).map(lambda parts: [p / math.fsum(parts) for p in parts])


@draws(150)
@given(shares, st.integers(1, 40), st.integers(0, 40))
def test_segments_cover_all_steps_exactly(works, num_steps, steps_done):
    steps_done = min(steps_done, num_steps)
    segments = in_steps(plan_of(works), num_steps={"a": num_steps}, steps_done={"a": steps_done})
    ends = [segment.last_step for segment in segments]
    assert ends[-1] == num_steps
    if steps_done == num_steps:
        assert len(ends) == 1  # only evaluation and export are left
    else:
        assert [steps_done, *ends] == sorted({steps_done, *ends})  # each segment does at least one step
    assert [segment.start_s for segment in segments] == sorted(segment.start_s for segment in segments)


def test_shares_are_rounded_to_the_nearest_step():
    segments = in_steps(plan_of([0.26, 0.5, 0.24]), num_steps={"a": 110}, steps_done={"a": 10})
    assert [segment.last_step for segment in segments] == [36, 86, 110]
    assert [segment.option for segment in segments] == [0, 1, 0]


def test_a_share_that_rounds_to_no_step_is_left_out():
    assert [s.option for s in in_steps(plan_of([0.999, 0.001]), num_steps={"a": 10}, steps_done={})] == [0]
    assert [s.option for s in in_steps(plan_of([0.001, 0.999]), num_steps={"a": 10}, steps_done={})] == [1]


def test_checkpoints_cost_little_and_come_oftener_where_more_may_fail():
    # sqrt(2 * 0.5 s * 86400 s)
    assert math.isclose(checkpoint_interval_s(0.5, num_devices=1), 293.9, rel_tol=1e-3)
    assert checkpoint_interval_s(0.5, num_devices=4) < checkpoint_interval_s(0.5, num_devices=1)
    slow_s = 600.0
    assert slow_s / checkpoint_interval_s(slow_s, num_devices=64) <= MAX_OVERHEAD
