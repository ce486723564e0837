"""`ringmaster run` with adapters that one gang trains together: bit-equal to separate runs."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.integration.flows.test_run import FAST_CHECKPOINTS, Place, assert_gone
from tests.integration.workbench import is_bit_equal, weights_in

BATCH = """
name: nightly
devices: {{cpu: 2}}
grid:
  - template:
      name: tuned
      model: {{from_pretrained: base}}
      adapter: {{kind: lora, rank: 4}}
      data: {{path: prose.txt, seq_len: 16, vocab_size: 300}}
      clip_grad_norm: 0.5
      schedule: {{name: cosine, warmup_steps: 20}}
      global_batch_size: 1
      num_steps: {num_steps}
      evaluation: {{max_batches: 2}}
      techniques: {techniques}
    over: {{optimizer.lr: [1.0e-3, 2.0e-3, 4.0e-3, 1.0e-2, 2.0e-2, 4.0e-2]}}
"""
NAMES = [f"tuned-lr{rate}" for rate in ("1e-3", "2e-3", "4e-3", "0.01", "0.02", "0.04")]
NUM_STEPS = 600
pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]  # three runs in one test


def save_base(folder):
    """Saves a small model that all jobs adapt."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=64, **shape)).save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("groups"))
    save_base(place.folder / "base")
    place.batch.write_text(BATCH.format(num_steps=NUM_STEPS, techniques="[single, shared_base]"))
    return place


@pytest.fixture(scope="module")
def alone(place):
    """The weights of each job, trained alone."""
    batch = place.folder / "alone.yaml"
    batch.write_text(BATCH.format(num_steps=NUM_STEPS, techniques="[single]"))
    with place.run(batch=batch) as run:
        result = run.result(exit_code=0)
    assert result["fusion"] is None
    return {job["name"]: weights_in(Path(job["model_dir"])) for job in result["jobs"]}


def lead_in(run):
    """Returns the leader of the first group that has started."""
    return re.search(r"(\S+) and \d+ more start at step 0", run.said.decode())[1]


def assert_trained_together(result, alone):
    """Asserts bit-equal results in any grouping: measurements decide which jobs are grouped."""
    groups = result["fusion"]["groups"]
    assert_done_as_alone(result, alone)
    grouped = {name for lead, members in groups.items() for name in (lead, *members)}
    assert len(grouped) >= 2
    assert result["fusion"]["together_s"] < result["fusion"]["alone_s"]
    for job in result["jobs"]:
        technique = "shared_base" if job["name"] in grouped else "single"
        assert {segment["technique"] for segment in job["segments"]} == {technique}


def assert_done_as_alone(result, alone):
    assert result["status"] == "done"
    assert [job["name"] for job in result["jobs"]] == NAMES
    for job in result["jobs"]:
        assert job["num_steps"] == NUM_STEPS
        assert is_bit_equal(weights_in(Path(job["model_dir"])), alone[job["name"]]), job["name"]
        assert job["model_uri"].startswith("models:/")


def test_adapters_that_are_trained_together_end_as_each_does_alone(place, alone):
    result = place.done()
    assert_trained_together(result, alone)
    assert result["plan"]["lower_bound_s"] <= result["plan"]["makespan_s"]


def test_a_group_whose_rank_is_killed_goes_on_from_each_jobs_checkpoint(place, alone):
    with place.run(*FAST_CHECKPOINTS) as run:
        run.read_until("more start at step 0")
        lead = lead_in(run)
        rank = run.rank(lead)
        run.until_checkpointed(place.newest, job=lead)
        os.kill(rank, signal.SIGKILL)
        result = run.result(exit_code=0)
    assert_trained_together(result, alone)
    members = {lead, *result["fusion"]["groups"][lead]}
    for job in result["jobs"]:
        if job["name"] in members:
            crashed, again = job["segments"]
            assert (crashed["status"], again["status"]) == ("crashed", "done")
            assert 0 <= again["first_step"] < again["last_step"] == NUM_STEPS


def test_an_interrupted_group_is_resumed_to_the_same_bits(place, alone):
    with place.run(*FAST_CHECKPOINTS) as run:
        run.read_until("more start at step 0")
        lead = lead_in(run)
        started = run.tree()
        run.until_checkpointed(place.newest, job=lead)
        run.process.send_signal(signal.SIGINT)
        result = run.result(exit_code=130)
    assert result["status"] == "interrupted"
    assert_gone(started)
    steps = {job["name"]: job["num_steps"] for job in result["jobs"]}
    assert all(0 < steps[name] <= NUM_STEPS for name in (lead, *result["fusion"]["groups"][lead]))
    with place.run("--resume") as run:
        assert_done_as_alone(run.result(exit_code=0), alone)  # a few measured steps may decide for other groups
