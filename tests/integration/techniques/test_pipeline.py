"""Pipelines: exact under every schedule, with embeddings tied across stages, and refused with a reason elsewhere."""

from dataclasses import replace

import pytest

from ringmaster.techniques import ModelSpec
from ringmaster.techniques.pipeline import Pipeline
from ringmaster.techniques.sharding.pipe import owners, partition
from tests.integration.workbench import (
    ADAMW,
    GPT2,
    GPT2_WITH_DROPOUT,
    LLAMA,
    RESNET,
    SGD,
    SINGLE,
    VIT,
    Layout,
    is_bit_equal,
    largest_difference,
    weights_in,
)
from tests.matrix import matrix

FOUR_LAYERS = replace(LLAMA, config={**LLAMA.config, "num_hidden_layers": 4})
FIVE_BLOCKS = replace(GPT2, config={**GPT2.config, "n_layer": 5})
SHAPE = {**FOUR_LAYERS.config, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "qwen2-tied": ModelSpec(architecture="Qwen2ForCausalLM", config={**SHAPE, "tie_word_embeddings": True}),
    "qwen3": ModelSpec(architecture="Qwen3ForCausalLM", config={**SHAPE, "head_dim": 8}),
    "mistral-with-a-window": ModelSpec(architecture="MistralForCausalLM", config={**SHAPE, "sliding_window": 8}),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
LARGEST_DIFFERENCE = {"sgd": 2e-7, "adamw": 1e-4}
# A loss is an fp32 sum of 184 tokens' losses (8 x 23), about 1000: three units in the last place of the sum, over 184.
LARGEST_LOSS_DIFFERENCE = 3 * 2**-13 / 184


def layout(num_devices=2, *, schedule="1f1b", micro_batch=2, recompute="none"):
    config = {"micro_batch": micro_batch, "recompute": recompute, "schedule": schedule}
    return Layout("ringmaster.techniques.pipeline:Pipeline", num_devices, config)


def assert_trains_the_same(bench, job, layout, folder):
    trained, expected = bench.train(job, layout, folder), bench.reference(job)
    assert trained.outcome.status == "done", trained.outcome
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=LARGEST_LOSS_DIFFERENCE)
    assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE[job.optimizer.name]
    assert trained.outcome.result.metrics == pytest.approx(expected.outcome.result.metrics, abs=1e-5)


@pytest.mark.parametrize(
    "model", matrix([FOUR_LAYERS, FIVE_BLOCKS], quick=[FIVE_BLOCKS], ids=["llama", "gpt2-with-tied-ends"])
)
@pytest.mark.parametrize("schedule", matrix(SCHEDULES, quick=list(SCHEDULES)[-1:]))
def test_every_schedule_trains_the_same(bench, tmp_path, schedule, model):
    assert_trains_the_same(bench, bench.job(model, clip_grad_norm=0.1), layout(schedule=schedule), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("model", [FOUR_LAYERS, FIVE_BLOCKS], ids=["llama", "gpt2-with-tied-ends"])
def test_four_ranks(bench, tmp_path, model, optimizer):
    job = bench.job(model, optimizer=optimizer, clip_grad_norm=0.1)
    assert_trains_the_same(bench, job, layout(4, recompute="full"), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("model", matrix(MODELS.values(), quick=[MODELS["qwen2-tied"]], ids=list(MODELS)))
def test_models_of_llamas_kind(bench, tmp_path, model):
    option = layout(schedule="zero_bubble", micro_batch=4, recompute="full")
    assert_trains_the_same(bench, bench.job(model, clip_grad_norm=0.1), option, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_stages_of_any_length_train_the_same_and_take_over_from_each_other(bench, tmp_path, schedule):
    """A different cut after a checkpoint is harmless; the same cut, interrupted, is bit-equal."""

    def cut(*stage_layers):
        option = layout(schedule=schedule)
        return replace(option, config={**option.config, "stage_layers": list(stage_layers)})

    uneven, other = (cut(4, 1), cut(2, 3)) if schedule == "1f1b" else (cut(2, 1, 1, 1), cut(1, 1, 1, 2))
    job = bench.job(FIVE_BLOCKS, clip_grad_norm=0.1)
    assert_trains_the_same(bench, job, uneven, tmp_path / "whole")
    ended = {}
    for name, then in (("same", uneven), ("other", other)):
        bench.train(job, uneven, tmp_path / name, last_step=2)
        ended[name] = bench.train(job, then, tmp_path / name)
        assert ended[name].outcome.result.first_step == 2
    assert is_bit_equal(ended["same"].weights, weights_in(tmp_path / "whole" / "model"))
    assert largest_difference(ended["other"].weights, bench.reference(job).weights) <= LARGEST_DIFFERENCE["sgd"]


def test_tied_ends_are_stored_once_and_taken_over(bench, tmp_path):
    """Moves from a pipeline to one process and back, including the weight that both end stages hold."""
    job = bench.job(FIVE_BLOCKS, optimizer=ADAMW)
    bench.train(job, layout(4), tmp_path, last_step=2)
    bench.train(job, SINGLE, tmp_path, last_step=4)
    last = bench.train(job, layout(), tmp_path)
    assert last.outcome.result.first_step == 4
    assert largest_difference(last.weights, bench.reference(job).weights) <= 1e-4


@pytest.mark.full
def test_dropout_resumed_is_bit_equal(bench, tmp_path):
    job = bench.job(GPT2_WITH_DROPOUT)
    once = bench.train(job, layout(), tmp_path / "once")
    bench.train(job, layout(), tmp_path / "again", last_step=2)
    again = bench.train(job, layout(), tmp_path / "again")
    assert is_bit_equal(once.weights, again.weights)
    assert largest_difference(once.weights, bench.reference(job).weights) <= 2e-7


def test_accuracy_is_counted_where_the_output_is(bench, tmp_path):
    job = bench.job()
    job = replace(job, evaluation=replace(job.evaluation, metrics=("loss", "accuracy")))
    assert_trains_the_same(bench, job, layout(), tmp_path)


@pytest.mark.parametrize(
    ("model", "changes", "num_devices", "reason"),
    [
        (VIT, {}, 2, "causal language models"),
        (RESNET, {}, 2, "causal language models"),
        (LLAMA, {}, 4, "2 layers are too few for 4 devices"),
        (FOUR_LAYERS, {"global_batch_size": 2}, 4, "no micro-batch for each of 4"),
        (ModelSpec(architecture="GemmaForCausalLM", config=SHAPE), {}, 2, "does not know how to cut GemmaForCausalLM"),
        (LLAMA, {}, 1, "two devices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_says_why_not(bench, model, changes, num_devices, reason):
    job = bench.job(model, **changes)
    assert reason in Pipeline().supports(job, bench.shape(num_devices), bench.facts(job))


def test_configs_have_a_layer_for_each_stage_and_a_micro_batch_for_each_device(bench):
    def configs(model, **changes):
        job = bench.job(model, **changes)
        found = list(Pipeline().configs(job, bench.shape(2), bench.facts(job)))
        assert all(job.global_batch_size // config["micro_batch"] >= 2 for config in found)
        return [(config["schedule"], config["micro_batch"]) for config in found if config["recompute"] == "none"]

    assert len(configs(FOUR_LAYERS)) == 6  # with the same number that recompute, a dozen in all
    assert configs(LLAMA)[:3] == [("1f1b", 1), ("1f1b", 2), ("1f1b", 4)]
    assert {schedule for schedule, _ in configs(LLAMA)} == {"1f1b", "gpipe"}
    assert {schedule for schedule, _ in configs(FOUR_LAYERS)} == set(SCHEDULES)
    assert configs(LLAMA, global_batch_size=5)[:1] == [("1f1b", 1)]


def test_stages_are_balanced_and_the_head_counts():
    assert partition([1, 1, 1, 1], 2) == [(0, 2), (2, 4)]
    assert partition([1, 1, 1, 4], 2) == [(0, 3), (3, 4)]
    assert partition([5, 1, 1], 3) == [(0, 1), (1, 2), (2, 3)]
    assert partition([3], 1) == [(0, 1)]


def test_stages_go_round_or_to_and_fro():
    assert owners(2, 4, style="loop") == [0, 1, 0, 1]
    assert owners(2, 4, style="v") == [0, 1, 1, 0]
