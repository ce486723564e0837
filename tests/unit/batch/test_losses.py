"""Losses in batch files and in batches made in Python."""

from dataclasses import dataclass, replace

import pytest

from ringmaster.codec import digest, from_json, to_json
from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch import Batch, parse_batch
from ringmaster.techniques import DataSpec, Job, ModelSpec
from ringmaster.techniques.loss import LOSSES, DottedNames, option
from ringmaster.techniques.losses.supervised import CrossEntropy

TEXT = """
jobs:
  - name: a
    model: {{architecture: LlamaForCausalLM}}
    data: {{source: python-stdlib, seq_len: 64}}
    num_steps: 10
    loss: {loss}
"""
JOB = Job(
    name="a",
    model=ModelSpec(architecture="LlamaForCausalLM"),
    data=DataSpec(source="python-stdlib", seq_len=64),
    num_steps=10,
)


@pytest.mark.parametrize(
    ("said", "loss", "options"),
    [
        ("dpo", "dpo", {}),
        ("{name: dpo, beta: 0.2, loss_type: ipo}", "dpo", {"beta": 0.2, "loss_type": "ipo"}),
        ("{name: cross-entropy}", "cross-entropy", {}),
        ("{name: cross-entropy, class_weights: [1, 2.5]}", "cross-entropy", {"class_weights": [1, 2.5]}),
        ("my_losses:focal", "my_losses:focal", {}),
    ],
)
def test_a_loss_is_a_name_or_a_name_with_options(tmp_path, said, loss, options):
    (tmp_path / "my_losses.py").write_text("def focal(output, batch):\n    ...\n")
    (job,) = parse_batch(TEXT.format(loss=said), folder=tmp_path, name="x.yaml").jobs
    assert (job.loss, dict(job.loss_options)) == (loss, options)
    assert Batch.of(name="x", jobs=[job], folder=tmp_path).jobs == (job,)
    assert from_json(Job, to_json(job)) == job


@pytest.mark.parametrize("more", ["", ", loss_type: kto"])
def test_kto_compares_rows_of_a_step(tmp_path, more):
    text = TEXT + "    global_batch_size: 1\n"
    with pytest.raises(BatchFileError, match="global_batch_size: is 1, and the loss kto compares each row of a step"):
        parse_batch(text.format(loss=f"{{name: kto{more}}}"), folder=tmp_path, name="x.yaml")
    for loss in ("{name: kto, loss_type: apo_zero_unpaired}", "dpo"):
        assert parse_batch(text.format(loss=loss), folder=tmp_path, name="x.yaml").jobs


def test_options_can_be_varied(tmp_path):
    text = """
grid:
  - template:
      name: a
      model: {architecture: LlamaForCausalLM}
      data: {source: python-stdlib, seq_len: 64}
      num_steps: 10
      loss: {name: simpo}
    over: {loss.beta: [1, 2]}
"""
    jobs = parse_batch(text, folder=tmp_path, name="x.yaml").jobs
    assert [dict(job.loss_options) for job in jobs] == [{"beta": 1}, {"beta": 2}]


def test_a_job_made_in_python_is_checked_as_a_file(tmp_path):
    with pytest.raises(BatchFileError, match=r"jobs\[0\]\.loss\.bta: is not an option of dpo"):
        Batch.of(name="x", jobs=[replace(JOB, loss="dpo", loss_options={"bta": 1})], folder=tmp_path)


def test_a_job_without_options_keeps_its_form_and_digest():
    assert "loss_options" not in to_json(JOB)
    assert digest(JOB) == digest(to_json(JOB))
    assert digest(replace(JOB, loss="dpo", loss_options={"beta": 1})) != digest(replace(JOB, loss="dpo"))


PROMPTS = """
jobs:
  - name: a
    model: {{architecture: LlamaForCausalLM}}
    data: {{kind: {kind}, path: prompts.jsonl}}
    num_steps: 10
    loss: {loss}
"""


def parse_grpo(tmp_path, loss, *, kind="prompt"):
    (tmp_path / "my_rewards.py").write_text("def length(completions):\n    ...\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Write a poem"}\n')
    return parse_batch(PROMPTS.format(loss=loss, kind=kind), folder=tmp_path, name="x.yaml")


def test_grpo_names_its_rewards_and_is_measured_by_them(tmp_path):
    (job,) = parse_grpo(tmp_path, '{name: grpo, rewards: ["my_rewards:length"], scale_rewards: none}').jobs
    assert job.loss_options == {"rewards": ["my_rewards:length"], "scale_rewards": "none"}
    assert job.evaluation.metrics == ("reward",)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("grpo", "x.yaml:7: jobs[0].loss.rewards: is missing. To fix: give a list of functions such as"),
        ("{name: grpo, rewards: length}", "rewards: must be a list of functions such as"),
        ('{name: grpo, rewards: ["my_reward:length"]}', "module my_reward cannot be found"),
        ('{name: grpo, rewards: ["my_rewards:lenght"]}', "defines no lenght"),
        ('{name: grpo, rewards: ["my_rewards:length"], num_generations: 1.5}', "must be a whole number, at least 2"),
        (
            '{name: grpo, rewards: ["my_rewards:length"], loss_type: sapo}',
            "must be one of dapo, grpo, bnpo",
        ),
        ('{name: grpo, rewards: ["my_rewards:length"], reward_weights: [1, 2]}', "has 2 numbers for 1 rewards"),
        ("null", "prompt has no answers to learn"),
    ],
)
def test_wrong_options_of_grpo(tmp_path, loss, said):
    with pytest.raises(BatchFileError) as raised:
        parse_grpo(tmp_path, loss)
    assert said in str(raised.value)
    assert "x.yaml:" in str(raised.value)


def test_grpo_reads_prompts(tmp_path):
    with pytest.raises(BatchFileError, match="is not prompt, and the loss grpo reads prompts"):
        parse_grpo(tmp_path, '{name: grpo, rewards: ["my_rewards:length"]}', kind="completion")


@dataclass(frozen=True, kw_only=True)
class Judged(CrossEntropy):
    """A loss of one's own, which calls functions."""

    name = "judged"
    judges: tuple[str, ...] = option((), DottedNames())


def test_functions_that_an_option_names_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setitem(LOSSES.registered, "judged", f"{__name__}:Judged")
    with pytest.raises(BatchFileError, match="module my_judge cannot be found"):
        parse_batch(TEXT.format(loss='{name: judged, judges: ["my_judge:fair"]}'), folder=tmp_path, name="x.yaml")
