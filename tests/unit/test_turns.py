"""Jobs that take turns in a gang: which jobs train at each step, and the runtime of the group's profile."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.techniques import Profile
from ringmaster.techniques.profiles import GroupMemberProfile
from ringmaster.techniques.training.fused.group_requirements import first_steps, num_steps_of_gang, steps_taken

JOBS = st.lists(st.integers(0, 30), min_size=1, max_size=12)


def gang(num_steps, at_once):
    """Simulates a gang step by step. Returns the step at which each job joined, and the number of all steps."""
    left, firsts, at = dict(enumerate(num_steps)), {}, 0
    while True:
        for job in [job for job in left if job not in firsts]:
            if sum(left[other] > 0 for other in firsts) < at_once:
                firsts[job] = at
        if not any(left.values()) and len(firsts) == len(left):
            return [firsts[job] for job in left], at
        left = {job: steps - 1 if job in firsts and steps else steps for job, steps in left.items()}
        at += 1


@given(JOBS, st.integers(1, 13))
def test_one_joins_whenever_another_is_through(num_steps, at_once):
    assert (first_steps(num_steps, at_once=at_once), num_steps_of_gang(num_steps, at_once=at_once)) == gang(
        num_steps, at_once
    )


@given(JOBS)
def test_all_at_once_is_as_long_as_the_longest(num_steps):
    assert first_steps(num_steps, at_once=None) == [0] * len(num_steps)
    assert num_steps_of_gang(num_steps, at_once=None) == max(num_steps)


@given(JOBS, st.integers(1, 13), st.integers(0, 60), st.integers(0, 60))
def test_it_goes_on_as_it_would_have_whenever_it_is_interrupted(num_steps, at_once, first, second):
    """The jobs that have started are the first of those that are left."""
    taken = steps_taken(num_steps, at_once=at_once, after=first)
    left = [steps - done for steps, done in zip(num_steps, taken, strict=True)]
    more = steps_taken(left, at_once=at_once, after=second)
    both = [a + b for a, b in zip(taken, more, strict=True)]
    assert both == steps_taken(num_steps, at_once=at_once, after=first + second)


def queue(at_once, *num_steps):
    """A group's profile. A step takes 1 s, a quarter of it for the lead job, and 0.5 s more for each present member."""
    return Profile(
        technique="shared_base",
        config={"at_once": at_once},
        num_devices=1,
        num_ranks=1,
        step_s=1.0,
        own_step_s=0.25,
        peak_bytes=1,
        startup_s=3.0,
        members=tuple(GroupMemberProfile(job=str(i), num_steps=steps, step_s=0.5) for i, steps in enumerate(num_steps)),
    )


def test_a_queue_takes_its_steps_and_so_much_for_each_job_while_it_is_there():
    profile = queue(2, 4, 6, 10)  # they join after 0, 4, 10 steps: the lead job has finished then
    steps_s = 20 * 0.75 + 10 * 0.25 + (4 + 6 + 10) * 0.5
    assert profile.runtime_s(num_steps=10) == pytest.approx(3.0 + steps_s)
    assert profile.at_pace(2.0).runtime_s(num_steps=10) == pytest.approx(3.0 + 2 * steps_s)
    assert profile.runtime_s(num_steps=0, members_left={"0": 0, "1": 0, "2": 7}) == pytest.approx(3.0 + 7 * 1.25)
    assert profile.gang_step_s == 1.5
    assert profile.restricted_to(["1"]).gang_step_s == 1.5
    everyone = replace(profile, config={})
    assert everyone.runtime_s(num_steps=10) == pytest.approx(3.0 + 10 + 20 * 0.5)
    assert everyone.gang_step_s == 2.5
