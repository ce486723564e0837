"""Gangs that train groups: each job ends bit-equal to a separate run, whichever commands the gang receives."""

from dataclasses import replace

import pytest

from ringmaster.techniques import EvaluationSpec
from ringmaster.techniques.processes.gang_events import JobReady, TrialMeasured
from ringmaster.techniques.processes.order import TRIAL
from ringmaster.techniques.processes.reporter import MEASURE, STOP, leave_command, until_command
from tests.integration.groups.shared_base.groups import (
    BRIEF,
    EVEN,
    LEADER,
    assert_ended_as_alone,
    result_of,
    said,
    tell,
)
from tests.integration.workbench import SINGLE, is_bit_equal


def test_each_job_ends_as_alone_and_is_told_of_by_name(groups, jobs, alone):
    """Holds also where the lead job has the fewest steps, and the gang continues after its end."""
    lead, even, brief = jobs
    trained = groups.train([brief, lead, even])
    assert trained.outcome.status == "done"
    assert_ended_as_alone(groups, trained, jobs, alone)
    assert [event.job for event in trained.said("ready")] == [BRIEF, LEADER, EVEN]
    assert [event.job for event in trained.said("ended")] == [EVEN, LEADER]  # members only
    for event in trained.said("ended"):
        assert event.outcome == trained.outcome.result.members[event.job]
    assert trained.outcome.result.evaluate_s > 0 and trained.outcome.result.save_s > 0


@pytest.mark.full
def test_a_group_that_is_stopped_goes_on_where_it_was(groups, jobs, alone):
    first = groups.train(jobs, on_event=tell(STOP))
    assert first.outcome.status == "preempted"
    steps = {job.name: result_of(first, job).step for job in jobs}
    assert [result_of(first, job).status for job in jobs] == ["preempted"] * 3
    assert steps == {job.name: groups.step(job) for job in jobs}
    assert 0 < steps[LEADER] < 30
    second = groups.train(jobs)
    assert {event.job: event.step for event in second.said("ready")} == steps
    assert_ended_as_alone(groups, second, jobs, alone)


@pytest.mark.full
def test_jobs_move_between_groups_and_runs_of_their_own(groups, jobs, alone):
    lead, even, brief = jobs
    groups.train(jobs, last_steps={LEADER: 7, EVEN: 5, BRIEF: 3})
    for job, last_step in ((lead, 9), (even, 8), (brief, 12)):
        assert groups.train_alone(job, last_step=last_step).outcome.status == "done"
    trained = groups.train([even, lead])
    assert_ended_as_alone(groups, trained, [even, lead], alone)
    assert is_bit_equal(groups.weights(brief), alone(brief).weights)


@pytest.mark.full
def test_a_job_that_is_told_to_leave_is_kept_and_the_others_go_on(groups, jobs, alone):
    lead, even, brief = jobs
    trained = groups.train(jobs, on_event=tell(leave_command(EVEN)))
    assert_ended_as_alone(groups, trained, [lead, brief], alone)
    (ended,) = said(trained, "ended", even)
    assert ended.outcome == result_of(trained, even)
    assert ended.outcome.status == "left" and ended.outcome.metrics is None
    assert 0 < ended.outcome.step == groups.step(even) < 25
    assert is_bit_equal(groups.train_alone(even).weights, alone(even).weights)


def test_a_leader_that_leaves_takes_all_with_it(groups, jobs):
    trained = groups.train(jobs, on_event=tell(leave_command(LEADER)))
    assert trained.outcome.status == "preempted"
    assert {result_of(trained, job).status for job in jobs} == {"preempted"}
    assert all(result_of(trained, job).step == groups.step(job) for job in jobs)


@pytest.mark.full
def test_a_group_goes_on_for_as_long_as_its_leader_is_told_to(groups, jobs, alone):
    trained = groups.train(jobs, last_steps={LEADER: 12, EVEN: 10, BRIEF: 9}, on_event=tell(until_command(24)))
    assert {job.name: result_of(trained, job).step for job in jobs} == {LEADER: 24, EVEN: 22, BRIEF: 12}
    assert [result_of(trained, job).status for job in jobs] == ["done"] * 3
    assert [name for name in (LEADER, EVEN, BRIEF) if (groups.folder / name / "model").exists()] == [BRIEF]
    assert_ended_as_alone(groups, groups.train(jobs[:2]), jobs[:2], alone)


@pytest.mark.full
def test_those_that_are_measured_on_the_way_are_told_of_as_alone(groups, jobs, bench, base):
    watched = [replace(job, evaluation=EvaluationSpec(every_steps=4, max_batches=2)) for job in jobs]
    trained = groups.train(watched, last_steps={LEADER: 12, EVEN: 10, BRIEF: 12})
    again = groups.train(watched[:1], last_steps={LEADER: 12})  # the repeat of a run whose result may have been lost
    for job, last_step in zip(watched, (12, 10, 12), strict=True):
        mine = bench.train(job, SINGLE, groups.folder / f"{job.name}-alone", weights_from=base, last_step=last_step)
        told = [(event.step, event.metrics) for event in said(trained, "metrics", job)]
        assert told == [(event.step, event.metrics) for event in mine.said("metrics")], job.name
        assert len(told) == {LEADER: 3, EVEN: 2, BRIEF: 2}[job.name]
    assert [(event.step, event.metrics) for event in again.said("metrics")] == [
        (event.step, event.metrics) for event in said(trained, "metrics", watched[0])[-1:]
    ]


@pytest.mark.full
def test_jobs_that_are_done_already_are_measured_and_exported_again(groups, jobs, alone):
    """The first gang may have died before it reported results; the second one only evaluates and exports."""
    groups.train(jobs)
    again = groups.train(jobs)
    assert again.said("steps") == []
    for job in jobs:
        assert result_of(again, job).metrics == alone(job).outcome.result.metrics
        assert is_bit_equal(groups.weights(job), alone(job).weights)


def test_a_trial_measures_all_of_a_group_at_once(groups, jobs):
    def on_event(gang, event):
        if command := {"ready": MEASURE, "measured": STOP}.get(event.NAME):
            gang.send(command)

    trained = groups.train(jobs, purpose=TRIAL, on_event=on_event)
    assert trained.outcome.status == "done"
    assert [e.NAME for e in trained.events if isinstance(e, (JobReady, TrialMeasured))] == ["ready", "measured"]
    (profile,) = (event.profile for event in trained.said("measured"))
    assert min(profile[key] for key in ("step_s", "save_s", "stall_s", "export_s", "evaluate_s")) > 0
    assert profile["startup_s"] >= 0 and 20e6 < profile["peak_bytes"] < 4e9
    assert not any((groups.folder / job.name / "checkpoints").exists() for job in jobs)
    assert not (groups.folder / LEADER / "gang" / "scratch").exists()
