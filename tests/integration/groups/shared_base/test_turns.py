"""Groups with more jobs than train at once: a job joins when another leaves, and each ends as in a separate run."""

import os
import signal
from dataclasses import replace

import pytest

from ringmaster.techniques import EvaluationSpec
from ringmaster.techniques.processes.gang_events import CheckpointSaved, JobOfGroupEnded, JobReady, JobResult, Steps
from ringmaster.techniques.processes.reporter import STOP, leave_command, until_command
from tests.integration.groups.shared_base.groups import (
    BRIEF,
    EVEN,
    LEADER,
    LORA,
    assert_ended_as_alone,
    result_of,
    said,
    tell,
)
from tests.integration.workbench import SGD, is_bit_equal

LATE, LAST = "late", "last"
TWO = {"recompute": "none", "at_once": 2}
ONE_BY_ONE = {"recompute": "none", "at_once": 1}


@pytest.fixture
def queue(jobs):
    """Jobs for two positions: the lead with 30 steps, others with 12, 20 and 25; the last outlives the lead."""
    lead, even, brief = jobs
    late = replace(brief, name=LATE, num_steps=20, seed=5)
    return [lead, brief, late, even]


def order_of(trained, *events):
    """Returns (event, job) in the order of the gang's events; repeated events of a job count once, at the first."""
    told = [(event.NAME, event.job) for event in trained.events if event.NAME in events]
    return list(dict.fromkeys(told))


def most_at_once(trained):
    """Returns the largest number of active jobs; the end of a lead job is visible by its last step only."""
    lead = trained.order.job
    now, most = set(), 0
    for event in trained.events:
        if isinstance(event, JobReady):
            now.add(event.job)
        elif isinstance(event, JobOfGroupEnded):
            now.discard(event.job)
        elif isinstance(event, Steps) and event.first_step + len(event.losses) == lead.num_steps:
            now -= {event.job} & {lead.name}
        most = max(most, len(now))
    return most


@pytest.mark.full
def test_one_joins_when_another_is_through_and_each_ends_as_alone(groups, queue, alone):
    trained = groups.train(queue, config=TWO)
    assert_ended_as_alone(groups, trained, queue, alone)
    assert order_of(trained, "ready", "ended") == [
        ("ready", LEADER),
        ("ready", BRIEF),
        ("ended", BRIEF),  # after 12 steps
        ("ready", LATE),
        ("ready", EVEN),  # after 30, when the lead job ends, whose own event comes last
        ("ended", LATE),  # after 32
        ("ended", EVEN),
    ]
    assert all(event.step == 0 and event.startup_s >= 0 for event in trained.said("ready"))


@pytest.mark.full
def test_weights_of_ones_own_begin_as_the_bases_even_where_it_is_computed_in_half(groups, queue, alone):
    """A late member gets a base that was rounded for earlier members; no step changes the weights that are compared."""
    headed = replace(LORA, modules_to_save=("lm_head", "norm"))
    still = {"precision": "bf16-params", "optimizer": replace(SGD, lr=1e-30), "num_steps": 1, "clip_grad_norm": None}
    jobs = [replace(job, adapter=headed, **still) for job in queue[:2]]
    groups.train(jobs, config=ONE_BY_ONE)
    for job in jobs:
        mine, trained = groups.weights(job), alone(job).weights
        own = [name for name in trained if ".lora_" not in name]
        assert own and is_bit_equal({name: mine[name] for name in own}, {name: trained[name] for name in own})


@pytest.mark.full
def test_one_at_a_time_is_one_after_another(groups, queue, alone):
    trained = groups.train(queue, config=ONE_BY_ONE)
    assert_ended_as_alone(groups, trained, queue, alone)
    order = order_of(trained, "ready", "ended")
    assert order == [("ready", LEADER), *((e, job.name) for job in queue[1:] for e in ("ready", "ended"))]


@pytest.mark.full
def test_a_queue_that_is_stopped_goes_on_where_it_was(groups, queue, alone):
    """Waiting jobs have no checkpoint; jobs that have begun resume first."""
    first = groups.train(queue, config=TWO, on_event=tell(STOP, job=LATE))
    assert first.outcome.status == "preempted"
    results = {job.name: result_of(first, job) for job in queue}
    assert [result.status for result in results.values()] == ["preempted", "done", "preempted", "preempted"]
    assert results[EVEN].step == 0 and not (groups.folder / EVEN / "checkpoints").exists()
    assert results[LEADER].step == groups.step(queue[0]) == 12 + results[LATE].step
    assert said(first, "ready", queue[3]) == [] and said(first, "steps", queue[3]) == []
    second = groups.train([queue[0], *queue[2:]], config=TWO)
    assert [event.job for event in second.said("ready")] == [LEADER, LATE, EVEN]
    assert_ended_as_alone(groups, second, [queue[0], *queue[2:]], alone)


@pytest.mark.full
def test_a_queue_that_is_killed_goes_on_from_what_each_had_kept(groups, queue, alone):
    def kill(gang, event):
        if isinstance(event, CheckpointSaved) and event.job == LATE and event.step > 2:
            os.kill(gang.pids[0], signal.SIGKILL)

    first = groups.train(queue, config=TWO, on_event=kill, checkpoint_every_s=0.0)
    assert first.outcome.status == "crashed"
    second = groups.train(queue, config=TWO)
    steps = {event.job: event.step for event in second.said("ready")}
    assert list(steps) == [LEADER, BRIEF, LATE, EVEN]  # brief is found to be complete, and takes no position from late
    assert steps[BRIEF] == 12 and steps[LATE] > 2 and steps[EVEN] == 0
    for job in queue:
        assert result_of(second, job).metrics == alone(job).outcome.result.metrics
        assert is_bit_equal(groups.weights(job), alone(job).weights), job.name


@pytest.mark.full
def test_who_leaves_makes_room_and_who_leaves_while_it_waits_never_begins(groups, queue, alone):
    """A job with a checkpoint from a separate run resumes from it."""
    lead, brief, late, even = queue
    groups.train_alone(even, last_step=4)

    def on_event(gang, event):
        if isinstance(event, JobReady) and event.job == BRIEF:
            gang.send(leave_command(BRIEF))
            gang.send(leave_command(LATE))

    trained = groups.train(queue, config=TWO, on_event=on_event)
    assert_ended_as_alone(groups, trained, [lead, even], alone)
    assert [(e.job, e.step) for e in trained.said("ready")] == [(LEADER, 0), (BRIEF, 0), (EVEN, 4)]
    (ended,) = said(trained, "ended", late)
    assert ended.outcome == result_of(trained, late) == JobResult(status="left", step=0)
    assert 0 < result_of(trained, brief).step == groups.step(brief) < 12
    for job in (brief, late):
        assert is_bit_equal(groups.train_alone(job).weights, alone(job).weights)


def test_a_leader_that_leaves_sends_those_that_wait_away(groups, queue):
    groups.train_alone(queue[3], last_step=4)
    trained = groups.train(queue, config=TWO, on_event=tell(leave_command(LEADER)))
    assert trained.outcome.status == "preempted"
    assert {result_of(trained, job).status for job in queue} == {"preempted"}
    assert [result_of(trained, job).step for job in queue[2:]] == [0, 4]


@pytest.mark.full
def test_faults_make_room_for_the_next(groups, queue, alone):
    """Covers losses that are not numbers, data that cannot be loaded, and training faults, also in jobs that joined."""
    lead, brief, late, even = queue
    wild = replace(brief, name="wild", loss="tests.integration.stubs:loss_that_is_not_a_number")
    broken = replace(brief, name="broken", adapter=replace(LORA, targets=("nowhere",)))
    wrong = replace(brief, name="wrong", loss="tests.integration.stubs:loss_that_is_wrong")
    jobs = [lead, wild, broken, wrong, replace(wild, name=LAST), late, even, brief]
    trained = groups.train(jobs, config=TWO)
    assert_ended_as_alone(groups, trained, [lead, late, even, brief], alone)
    for job in (wild, broken, wrong, jobs[4]):
        assert result_of(trained, job).status == "invalid", job.name
    assert most_at_once(trained) == 2


def test_when_the_leaders_loss_is_lost_nobody_joins(groups, queue):
    wild = replace(queue[0], name="wild", loss="tests.integration.stubs:loss_that_is_not_a_number")
    trained = groups.train([wild, *queue[1:]], config=TWO)
    assert trained.outcome.status == "invalid"
    assert {result_of(trained, job).status for job in queue[1:]} == {"preempted"}
    assert [result_of(trained, job).step for job in queue[2:]] == [0, 0]
    assert [event.job for event in trained.said("ready")] == ["wild", BRIEF]


@pytest.mark.full
def test_a_full_disk_of_the_one_that_joined_is_waited_for(groups, queue, alone):
    lead, brief, late, even = queue
    shelved = replace(late, loss="tests.integration.stubs:loss_of_some_tokens")  # its module registers the store
    full = {"checkpoint_dir": f"full-shelf://{groups.folder}/full-1/shelf"}
    trained = groups.train([lead, brief, shelved, even], config=TWO, fellow_changes={LATE: full})
    assert_ended_as_alone(groups, trained, [lead, brief, even], alone)
    assert (result_of(trained, late).status, result_of(trained, late).step) == ("done", 20)
    assert any(event.waits for event in said(trained, "checkpoint_failed", late))


@pytest.mark.full
def test_a_queue_goes_on_for_as_long_as_its_leader_is_told_to(groups, queue, alone):
    """Members that join after the command was received obey it too."""
    lasts = {LEADER: 14, BRIEF: 12, LATE: 2, EVEN: 0}
    trained = groups.train(queue, config=TWO, last_steps=lasts, on_event=tell(until_command(20)))
    steps = {job.name: result_of(trained, job).step for job in queue}
    assert steps == {LEADER: 20, BRIEF: 12, LATE: 8, EVEN: 6}
    left = [queue[0], *queue[2:]]
    assert_ended_as_alone(groups, groups.train(left, config=TWO), left, alone)


@pytest.mark.full
def test_one_that_joined_is_measured_on_the_way_as_alone(groups, queue, alone):
    lead, brief, late, _ = queue
    watched = replace(late, evaluation=EvaluationSpec(every_steps=8, max_batches=2))
    trained = groups.train([lead, brief, watched], config=TWO)
    assert_ended_as_alone(groups, trained, [lead, brief, watched], alone)
    told = [(event.step, event.metrics) for event in said(trained, "metrics", watched)]
    assert told == [(event.step, event.metrics) for event in alone(watched).said("metrics")]
    assert [step for step, _ in told] == [8, 16]
