"""Groups over several ranks: each job's batch is divided, and each job ends as in a separate run, up to rounding."""

import os
import signal
from dataclasses import replace

import pytest

from ringmaster.techniques import Adapter, EvaluationSpec, OptimizerSpec, ScheduleSpec
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.processes.gang_events import CheckpointSaved
from ringmaster.techniques.processes.order import TRIAL
from ringmaster.techniques.processes.reporter import MEASURE, STOP, leave_command, until_command
from tests.integration.groups.shared_base.groups import (
    BRIEF,
    EVEN,
    GROUP,
    HANGING,
    HEADED,
    IA3,
    LEADER,
    LORA,
    Groups,
    assert_was_taken_for_hung,
    losses,
    result_of,
    said,
    tell,
)
from tests.integration.workbench import ADAMW, DIGITS, SGD, SINGLE, VIT, largest_difference
from tests.matrix import matrix

WHOLE = replace(GROUP, num_devices=2, config={"base": "whole"})
SHARDED = replace(GROUP, num_devices=2, config={"base": "sharded"})
RECOMPUTED = [replace(layout, config={**layout.config, "recompute": "full"}) for layout in (WHOLE, SHARDED)]
LAYOUTS = pytest.mark.parametrize("layout", matrix([WHOLE, SHARDED], quick=[SHARDED]))
TOLERANCES = {"adamw": 1e-5, "sgd": 1e-6}


@pytest.fixture(scope="module")
def jobs(bench):
    """Jobs that differ in adapter, batch, steps, rank and optimizer; two ranks can divide some held-out batches."""
    job = bench.job(name=LEADER, base="stem", adapter=LORA, optimizer=ADAMW, num_steps=14, clip_grad_norm=1.0)
    even = replace(job, name=EVEN, adapter=IA3, optimizer=SGD, num_steps=10, schedule=ScheduleSpec(name="cosine"))
    even = replace(even, evaluation=EvaluationSpec(max_rows=11))  # no whole batches
    heady = replace(LORA, rank=2, targets=("q_proj", "lm_head"))
    brief = replace(job, name=BRIEF, adapter=heady, global_batch_size=6, num_steps=6, seed=2)
    short = replace(job.data, seq_len=9)
    return [job, even, replace(brief, data=short, evaluation=EvaluationSpec(max_batches=1000))]


def assert_ended_nearly_as_alone(groups, trained, jobs, alone):
    for job in jobs:
        mine, result = alone(job), result_of(trained, job)
        tolerance = TOLERANCES[job.optimizer.name]
        assert (result.status, result.step) == ("done", job.num_steps), job.name
        assert result.metrics == pytest.approx(mine.outcome.result.metrics, abs=10 * tolerance), job.name
        assert result.num_rows == mine.outcome.result.num_rows, job.name
        assert largest_difference(groups.weights(job), mine.weights) < tolerance, job.name
        first, told = losses(trained, job)
        assert told == pytest.approx(mine.losses[first:], abs=10 * tolerance), job.name


# The group of test_gangs.py, divided over ranks.
@pytest.mark.full
@pytest.mark.parametrize("layout", matrix([WHOLE, SHARDED, *RECOMPUTED], quick=[SHARDED]))
def test_each_job_ends_as_alone(groups, jobs, alone, layout):
    trained = groups.train(jobs, layout=layout)
    assert trained.outcome.status == "done", trained.outcome
    assert_ended_nearly_as_alone(groups, trained, jobs, alone)
    assert [event.job for event in trained.said("ended")] == [BRIEF, EVEN]


@pytest.mark.full
@LAYOUTS
def test_prefixes_and_modules_of_ones_own_are_divided_too(groups, jobs, alone, layout):
    adapters = [Adapter(kind="prefix", num_virtual_tokens=4), replace(HEADED, rank=8), LORA]
    every = [replace(jobs[0], name=f"kind-{i}", adapter=adapter, num_steps=5 - i) for i, adapter in enumerate(adapters)]
    trained = groups.train(every, layout=layout)
    assert_ended_nearly_as_alone(groups, trained, every, alone)


@pytest.mark.full
@LAYOUTS
def test_samples_that_are_stacked_are_divided_too(bench, jobs, tmp_path, layout):
    base = bench.reference(bench.job(VIT, optimizer=ADAMW)).order.model_dir
    groups = Groups(bench, base, tmp_path)
    lead = replace(jobs[0], model=VIT, data=DIGITS, num_steps=4)
    both = [lead, replace(lead, name=EVEN, optimizer=SGD, global_batch_size=4, seed=1)]
    trained = groups.train(both, layout=layout)
    for job in both:
        alone = bench.train(job, SINGLE, tmp_path / f"{job.name}-alone", weights_from=base)
        assert largest_difference(groups.weights(job), alone.weights) < TOLERANCES[job.optimizer.name]
        assert losses(trained, job)[1] == pytest.approx(alone.losses, abs=1e-5)


@pytest.mark.full
@LAYOUTS
def test_a_group_that_is_stopped_goes_on_where_it_was(groups, jobs, alone, layout):
    first = groups.train(jobs, layout=layout, on_event=tell(STOP), checkpoint_every_s=0.0)
    assert first.outcome.status == "preempted", first.outcome
    steps = {job.name: result_of(first, job).step for job in jobs}
    assert steps == {job.name: groups.step(job) for job in jobs}
    assert 0 < steps[LEADER] < 14
    second = groups.train(jobs, layout=layout, checkpoint_every_s=0.0)
    assert {event.job: event.step for event in second.said("ready")} == steps
    assert {event.job for event in second.said("checkpoint")} <= {LEADER, EVEN, BRIEF}
    assert_ended_nearly_as_alone(groups, second, jobs, alone)


@pytest.mark.full
@LAYOUTS
def test_a_job_that_is_told_to_leave_goes_on_by_itself(groups, jobs, alone, layout):
    lead, even, brief = jobs
    trained = groups.train(jobs, layout=layout, on_event=tell(leave_command(EVEN)))
    assert_ended_nearly_as_alone(groups, trained, [lead, brief], alone)
    left = result_of(trained, even)
    assert left.status == "left" and 0 < left.step == groups.step(even) < 10
    assert largest_difference(groups.train_alone(even).weights, alone(even).weights) < 1e-6


@pytest.mark.full
@LAYOUTS
def test_one_joins_on_all_ranks_when_another_is_through(groups, jobs, alone, layout):
    """A waiting job that is sent the command to leave does so on all ranks."""
    lead, even, brief = jobs
    away = replace(even, name="away")
    layout = replace(layout, config={**layout.config, "at_once": 2})
    trained = groups.train([lead, brief, away, even], layout=layout, on_event=tell(leave_command("away")))
    assert_ended_nearly_as_alone(groups, trained, jobs, alone)
    assert [event.job for event in trained.said("ready")] == [LEADER, BRIEF, EVEN]
    assert [event.job for event in trained.said("ended")] == ["away", BRIEF, EVEN]


@pytest.mark.full
@LAYOUTS
def test_checkpoints_move_from_two_ranks_to_one_and_back(groups, jobs, alone, layout):
    groups.train(jobs, layout=layout, last_steps={LEADER: 4, EVEN: 3, BRIEF: 2})
    groups.train(jobs, last_steps={LEADER: 8, EVEN: 7, BRIEF: 4})
    assert {job.name: groups.step(job) for job in jobs} == {LEADER: 8, EVEN: 7, BRIEF: 4}
    trained = groups.train(jobs, layout=layout)
    assert {event.job: event.step for event in trained.said("ready")} == {LEADER: 8, EVEN: 7, BRIEF: 4}
    assert_ended_nearly_as_alone(groups, trained, jobs, alone)


@pytest.mark.full
def test_a_group_goes_on_for_as_long_as_its_leader_is_told_to(groups, jobs, alone):
    trained = groups.train(
        jobs, layout=WHOLE, last_steps={LEADER: 5, EVEN: 4, BRIEF: 4}, on_event=tell(until_command(12))
    )
    assert {job.name: result_of(trained, job).step for job in jobs} == {LEADER: 12, EVEN: 10, BRIEF: 6}
    assert_ended_nearly_as_alone(groups, groups.train(jobs[:1], layout=WHOLE), jobs[:1], alone)


@pytest.mark.full
def test_a_loss_that_is_lost_ends_that_job_alone(groups, jobs, alone):
    wild = replace(jobs[0], name="wild", optimizer=OptimizerSpec(name="sgd", lr=1e30), clip_grad_norm=None)
    trained = groups.train([*jobs, wild], layout=WHOLE)
    assert_ended_nearly_as_alone(groups, trained, jobs, alone)
    (ended,) = said(trained, "ended", wild)
    assert ended.outcome.status == "invalid" and "the loss became" in ended.outcome.message


@pytest.mark.full
def test_when_the_leaders_loss_is_lost_the_others_are_kept(groups, jobs, alone):
    wild = replace(jobs[0], name="wild", optimizer=OptimizerSpec(name="sgd", lr=1e30), clip_grad_norm=None)
    trained = groups.train([wild, *jobs[1:]], layout=SHARDED)
    assert trained.outcome.status == "invalid" and "the loss became" in trained.outcome.message
    assert {result_of(trained, job).status for job in jobs[1:]} == {"preempted"}
    assert all(0 < result_of(trained, job).step == groups.step(job) for job in jobs[1:])
    assert_ended_nearly_as_alone(groups, groups.train(jobs[1:], layout=WHOLE), jobs[1:], alone)


@pytest.mark.full
@LAYOUTS
def test_a_group_that_loses_a_rank_goes_on_from_what_each_had_kept(groups, jobs, alone, layout):
    def kill(gang, event):
        if isinstance(event, CheckpointSaved) and event.job == EVEN:
            os.kill(gang.pids[1], signal.SIGKILL)

    first = groups.train(jobs, layout=layout, on_event=kill, checkpoint_every_s=0.0)
    assert first.outcome.status == "crashed"
    assert groups.step(jobs[1]) > 0
    second = groups.train(jobs, layout=layout)
    assert_ended_nearly_as_alone(groups, second, jobs, alone)


@pytest.mark.full
@LAYOUTS
def test_a_group_all_of_whose_ranks_hang_goes_on_from_what_each_had_kept(groups, jobs, alone, layout):
    """The first rank stops itself when its event is received, and the other rank is stopped before that."""
    pids = set()

    def stop(gang, event):
        if isinstance(event, CheckpointSaved) and event.job == EVEN:
            pids.update(gang.pids)
            os.kill(gang.pids[1], signal.SIGSTOP)

    hanging = replace(layout, technique=HANGING.technique)
    hung = groups.train(jobs, layout=hanging, on_event=stop, checkpoint_every_s=0.0)
    assert_was_taken_for_hung(hung, pids)
    assert groups.step(jobs[1]) > 0
    assert_ended_nearly_as_alone(groups, groups.train(jobs, layout=layout), jobs, alone)


def test_a_batch_that_the_ranks_cannot_divide_is_refused(groups, jobs):
    odd = replace(jobs[2], name="odd", global_batch_size=5)
    trained = groups.train([jobs[0], odd], layout=WHOLE)
    assert trained.outcome.status == "invalid"
    assert "odd: global_batch_size 5 is not a multiple of 2 devices" in trained.outcome.message


@pytest.mark.full
def test_another_error_ends_the_gang_and_leaves_what_was_kept(groups, jobs):
    broken = replace(jobs[1], name="broken", loss="tests.integration.stubs:loss_that_fails")
    groups.train(jobs[:1], layout=WHOLE, last_steps={LEADER: 3})
    trained = groups.train([jobs[0], broken], layout=WHOLE)
    assert trained.outcome.status == "crashed" and "no such luck" in trained.outcome.message
    assert CheckpointStore(groups.folder / LEADER / "checkpoints").newest().manifest.step == 3


@pytest.mark.parametrize("precision", matrix(["bf16", "bf16-params"], quick=[]))
def test_precisions_are_those_of_a_job_alone(groups, jobs, alone, precision):
    """Compares with a loose tolerance: the order of sums changes what is rounded again."""
    headed = replace(jobs[0], name="headed", adapter=replace(HEADED, rank=8))
    rounded = [replace(job, precision=precision) for job in (*jobs[:2], headed)]
    trained = groups.train(rounded, layout=SHARDED)
    for job in rounded:
        assert result_of(trained, job).metrics == pytest.approx(alone(job).outcome.result.metrics, rel=1e-2)


@pytest.mark.full
@LAYOUTS
def test_a_trial_measures_all_of_a_group_at_once(groups, jobs, layout):
    def on_event(gang, event):
        if command := {"ready": MEASURE, "measured": STOP}.get(event.NAME):
            gang.send(command)

    trained = groups.train(jobs, layout=layout, purpose=TRIAL, on_event=on_event)
    assert trained.outcome.status == "done", trained.outcome
    (profile,) = (event.profile for event in trained.said("measured"))
    assert min(profile[key] for key in ("step_s", "save_s", "stall_s", "export_s", "evaluate_s")) > 0
    assert not (groups.folder / LEADER / "gang" / "scratch").exists()
