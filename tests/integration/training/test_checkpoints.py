"""Checkpoints of gangs that are killed, with damaged files, and on full disks."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ringmaster.features.foreign_models.conversion import convert
from ringmaster.techniques.processes.gang_events import CheckpointSaved
from tests.integration.workbench import ADAMW, SINGLE, Layout, is_bit_equal, largest_difference, weights_in
from tests.matrix import matrix

FSDP = Layout("fsdp", 2, {"reshard": True})


def steps_in(folder):
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-????????"))


HELD = {"single": "tests.integration.stubs:HeldSingle", "fsdp": "tests.integration.stubs:HeldFsdp"}
SHELVED_SINGLE = Layout("tests.integration.stubs:ShelvedSingle")
SHELVED_FSDP = Layout("tests.integration.stubs:ShelvedFsdp", 2, {"reshard": True})


def held(layout):
    """Returns the layout with a technique that stops after twelve saves, so that the gang is killed before its end."""
    technique = HELD.get(layout.technique, layout.technique)
    return Layout(technique, layout.num_devices, {**layout.config, "most_saves": 12})


def kill_at_checkpoint(number, *, rank):
    """Returns an `on_event` that kills a rank after checkpoint event `number`, most likely during the next save."""
    told = []

    def on_event(gang, event):
        if isinstance(event, CheckpointSaved):
            told.append(event.step)
            if len(told) == number:
                os.kill(gang.pids[rank], signal.SIGKILL)

    return on_event, told


@pytest.mark.full
@pytest.mark.parametrize("layout", matrix([SINGLE, FSDP], quick=[SINGLE]))
def test_killed_again_and_again_it_ends_in_the_same_weights(bench, tmp_path, layout):
    job = bench.job(optimizer=ADAMW, num_steps=60)
    whole = bench.train(job, layout, tmp_path / "whole")
    folder, reached = tmp_path / "killed", 0
    for number in (1, 2, 4, 3):
        on_event, told = kill_at_checkpoint(number, rank=number % layout.num_devices)
        killed = bench.train(job, held(layout), folder, checkpoint_every_s=0.0, on_event=on_event)
        assert killed.outcome.status == "crashed"
        assert killed.said("ready")[0].step >= reached  # lost: at most the steps after the last event
        reached = told[-1]
    last = bench.train(job, layout, folder)
    assert last.outcome.result.first_step >= reached > 0
    assert is_bit_equal(last.weights, whole.weights)
    assert not list((folder / "checkpoints").glob("*.tmp"))


@pytest.mark.full
def test_a_save_tells_for_how_long_it_held_training_up(bench, tmp_path):
    job = bench.job(optimizer=ADAMW, num_steps=30)
    told = bench.train(job, FSDP, tmp_path, checkpoint_every_s=0.0).said("checkpoint")
    assert told and all(0 < event.stall_s < event.seconds for event in told)
    steps = [event.step for event in told]
    assert steps == sorted(set(steps)) and steps[0] == 1
    assert steps_in(tmp_path)[-1] == 30


@pytest.mark.full
def test_a_store_without_renames_serves_every_technique_and_survives_kills(bench, tmp_path):
    job, root = bench.job(optimizer=ADAMW, num_steps=40), f"shelf://{tmp_path}/shelf"
    reached = 0
    for layout in (SHELVED_FSDP, SHELVED_SINGLE):
        on_event, told = kill_at_checkpoint(2, rank=0)
        killed = bench.train(
            job, held(layout), tmp_path, checkpoint_every_s=0.0, checkpoint_dir=root, on_event=on_event
        )
        assert killed.outcome.status == "crashed"
        assert killed.said("ready")[0].step >= reached
        reached = told[-1]
    last = bench.train(job, SHELVED_FSDP, tmp_path, checkpoint_dir=root)
    assert last.outcome.result.first_step >= reached > 0
    assert largest_difference(last.weights, bench.reference(job).weights) < 1e-3  # AdamW, two layouts
    convert(root, tmp_path / "back", to="hf")
    assert is_bit_equal(weights_in(tmp_path / "back"), last.weights)


@pytest.mark.parametrize("layout", matrix([SINGLE, FSDP], quick=[FSDP]))
def test_a_flipped_byte_sends_it_back_to_the_checkpoint_before(bench, tmp_path, layout):
    job = bench.job(optimizer=ADAMW)
    bench.train(job, layout, tmp_path, last_step=2)
    bench.train(job, layout, tmp_path, last_step=4)
    assert steps_in(tmp_path) == [2, 4]
    file = max((tmp_path / "checkpoints" / "step-00000004").glob("rank-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-7] ^= 0x04
    file.write_bytes(content)
    trained = bench.train(job, layout, tmp_path)
    assert trained.outcome.result.first_step == 2
    assert [e.message for e in trained.said("checkpoint_failed")] == [
        f"checkpoint {file.parent} is damaged and was passed over: training continues from step 2"
    ]
    assert is_bit_equal(trained.weights, bench.train(job, layout, tmp_path / "whole").weights)


def test_where_no_checkpoint_is_whole_it_starts_afresh_and_says_so(bench, tmp_path):
    job = bench.job(optimizer=ADAMW)
    bench.train(job, SINGLE, tmp_path, last_step=3)
    (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    trained = bench.train(job, SINGLE, tmp_path)
    assert trained.outcome.result.first_step == 0
    assert "training continues from step 0" in trained.said("checkpoint_failed")[0].message
    assert is_bit_equal(trained.weights, bench.reference(job).weights)


@pytest.mark.full
def test_a_full_disk_is_waited_for_and_costs_no_step(bench, tmp_path):
    job = bench.job(optimizer=ADAMW, num_steps=40)
    full = Layout("tests.integration.stubs:NoRoom")
    trained = bench.train(job, full, tmp_path, checkpoint_every_s=0.0)
    told = [event.NAME for event in trained.events if event.NAME.startswith("checkpoint")]
    assert told[:5] == ["checkpoint"] * 2 + ["checkpoint_failed"] * 2 + ["checkpoint"]
    assert set(told[5:]) <= {"checkpoint"}
    tried, waits = trained.said("checkpoint_failed")
    assert (tried.waits, waits.waits) == (False, True)
    assert "could not be written under" in waits.message and "To fix: free space there" in waits.message
    assert trained.said("checkpoint")[2].step == waits.step, "no step was taken meanwhile"
    assert is_bit_equal(trained.weights, bench.reference(job).weights)
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


def test_a_disk_that_stays_full_is_an_error_that_leaves_the_earlier_checkpoints(bench, tmp_path):
    job = bench.job(optimizer=ADAMW, num_steps=20)
    full = Layout("tests.integration.stubs:NoRoomAtTheEnd")
    trained = bench.train(job, full, tmp_path, checkpoint_every_s=0.0)
    outcome, told = trained.outcome, [event.step for event in trained.said("checkpoint")]
    assert outcome.status == "crashed"  # retried: a store that is briefly unavailable must not fail the job
    assert "CheckpointError: checkpoint step-" in outcome.message and "could not be written under" in outcome.message
    assert len(told) == 2 and steps_in(tmp_path) == told
    tried, waits = trained.said("checkpoint_failed")
    assert waits.step - tried.step <= 5, "it trained on with its state in memory alone"
    assert min({path.name for path in (tmp_path / "checkpoints").iterdir()} - {"chain.json"}) == "latest"
    again = bench.train(job, SINGLE, tmp_path)
    assert again.outcome.result.first_step == told[-1]
    assert is_bit_equal(again.weights, bench.reference(job).weights)


def test_a_command_to_stop_ends_the_wait_for_a_full_disk(bench, tmp_path):
    job = bench.job(optimizer=ADAMW, num_steps=20)
    full = Layout("tests.integration.stubs:StoppedWithoutRoom")
    trained = bench.train(job, full, tmp_path, checkpoint_every_s=0.0)
    told = [event.step for event in trained.said("checkpoint")]
    assert (trained.outcome.status, trained.outcome.result.step) == ("preempted", told[-1])
    assert steps_in(tmp_path) == told[-2:]
    again = bench.train(job, SINGLE, tmp_path)
    assert again.outcome.result.first_step == told[-1]
    assert is_bit_equal(again.weights, bench.reference(job).weights)


@pytest.mark.parametrize("layout", [SINGLE, FSDP], ids=str)
def test_the_state_of_another_job_is_refused_with_the_remedy(bench, tmp_path, layout):
    job = bench.job()
    bench.train(job, layout, tmp_path, last_step=2)
    outcome = bench.train(replace(job, seed=1), layout, tmp_path).outcome
    assert outcome.status == "invalid"
    assert "is of another version of job tiny: its model, data, optimizer or seed changed" in outcome.message
    assert "To fix: give the job another name, or remove the folder" in outcome.message


@pytest.mark.full
def test_a_checkpoint_becomes_megatrons_and_then_hugging_faces(bench, tmp_path):
    trained = bench.train(bench.job(optimizer=ADAMW), FSDP, tmp_path)
    convert(str(tmp_path / "checkpoints"), tmp_path / "megatron", to="megatron")
    convert(str(tmp_path / "megatron"), tmp_path / "back", to="hf")
    assert is_bit_equal(weights_in(tmp_path / "back"), trained.weights)
    theirs, ours = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("back", "model"))
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, ours(tokens).logits)
    words = [AutoTokenizer.from_pretrained(tmp_path / name)("a word").input_ids for name in ("back", "model")]
    assert words[0] == words[1]


def test_what_does_not_touch_the_weights_may_change(bench, tmp_path):
    job = bench.job()
    bench.train(job, SINGLE, tmp_path, last_step=2)
    evaluation = replace(job.evaluation, max_batches=2, metrics=("loss", "accuracy"))
    trained = bench.train(replace(job, evaluation=evaluation, techniques=("ddp",)), SINGLE, tmp_path)
    assert trained.outcome.result.first_step == 2
    assert set(trained.outcome.result.metrics) == {"loss", "accuracy"}


def test_a_job_of_which_only_the_export_is_left_is_exported(bench, tmp_path):
    job = bench.job()
    whole = bench.train(job, SINGLE, tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    again = bench.train(job, SINGLE, tmp_path)
    assert again.outcome.result.first_step == job.total_steps
    assert is_bit_equal(again.weights, whole.weights)
    assert again.outcome.result.metrics == whole.outcome.result.metrics
