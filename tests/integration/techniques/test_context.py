"""Context parallelism: exact for every division of tokens and weights, and refused with a reason elsewhere."""

from dataclasses import replace

import pytest
import torch

from ringmaster.techniques import ModelSpec
from ringmaster.techniques.context_parallel import ContextParallel
from ringmaster.techniques.sharding.sequences import positions
from tests.integration.workbench import (
    ADAMW,
    GPT2,
    GPT2_WITH_DROPOUT,
    LLAMA,
    SGD,
    SINGLE,
    VIT,
    Layout,
    largest_difference,
)
from tests.matrix import matrix

FOUR_HEADS = replace(LLAMA, config={**LLAMA.config, "num_attention_heads": 4, "num_key_value_heads": 4})
SHARED_HEADS = replace(LLAMA, config={**LLAMA.config, "num_attention_heads": 4, "num_key_value_heads": 2})
WINDOW = ModelSpec(architecture="MistralForCausalLM", config={**SHARED_HEADS.config, "sliding_window": 8})
BIASED = ModelSpec(architecture="Qwen2ForCausalLM", config={**SHARED_HEADS.config, "tie_word_embeddings": True})
LARGEST_DIFFERENCE = {"sgd": 2e-7, "adamw": 1e-4}
# A loss is an fp32 sum of 184 tokens' losses (8 x 23), about 1000: three units in the last place of the sum, over 184.
LARGEST_LOSS_DIFFERENCE = 3 * 2**-13 / 184


def layout(num_devices=2, *, exchange="all_gather", sharded=False, micro_batch=8, recompute="none"):
    config = {"micro_batch": micro_batch, "recompute": recompute, "exchange": exchange, "sharded": sharded}
    return Layout("ringmaster.techniques.context_parallel:ContextParallel", num_devices, config)


def assert_trains_the_same(bench, job, layout, folder):
    trained, expected = bench.train(job, layout, folder), bench.reference(job)
    assert trained.outcome.status == "done", trained.outcome
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=LARGEST_LOSS_DIFFERENCE)
    assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE[job.optimizer.name]
    assert trained.outcome.result.metrics == pytest.approx(expected.outcome.result.metrics, abs=1e-5)


# Four ranks; two are compared in test_conformance.py.
@pytest.mark.full
@pytest.mark.parametrize("optimizer", matrix([SGD, ADAMW], quick=[SGD], ids=["sgd", "adamw"]))
@pytest.mark.parametrize("sharded", matrix([False, True], quick=[True], ids=["replicated", "sharded"]))
@pytest.mark.parametrize("exchange", matrix(["all_gather", "ulysses"], quick=["ulysses"]))
def test_four_ranks(bench, tmp_path, exchange, sharded, optimizer):
    job = bench.job(FOUR_HEADS, optimizer=optimizer, clip_grad_norm=0.1)
    assert_trains_the_same(bench, job, layout(4, exchange=exchange, sharded=sharded), tmp_path)


@pytest.mark.parametrize(
    "model",
    matrix([GPT2, SHARED_HEADS, WINDOW, BIASED], quick=[WINDOW], ids=["gpt2", "llama", "mistral", "qwen2"]),
)
@pytest.mark.parametrize("exchange", matrix(["all_gather", "ulysses"], quick=["all_gather"]))
def test_other_models_in_two_recomputed_micro_batches(bench, tmp_path, exchange, model):
    option = layout(exchange=exchange, micro_batch=4, recompute="full")
    assert_trains_the_same(bench, bench.job(model), option, tmp_path)


def test_the_sharded_form_and_one_process_take_over_from_each_other(bench, tmp_path):
    job = bench.job(SHARED_HEADS, optimizer=ADAMW)
    bench.train(job, layout(sharded=True), tmp_path, last_step=2)
    bench.train(job, SINGLE, tmp_path, last_step=4)
    last = bench.train(job, layout(sharded=True, exchange="ulysses"), tmp_path)
    assert last.outcome.result.first_step == 4
    assert largest_difference(last.weights, bench.reference(job).weights) <= 1e-4


def test_accuracy_counts_each_token_once(bench, tmp_path):
    job = bench.job()
    job = replace(job, evaluation=replace(job.evaluation, metrics=("loss", "accuracy")))
    assert_trains_the_same(bench, job, layout(), tmp_path)


@pytest.mark.parametrize("exchange", ["all_gather", "ulysses"])
def test_every_token_is_on_one_rank(exchange):
    held = [positions(rank, 3, 24, exchange=exchange) for rank in range(3)]
    assert torch.cat(held).sort().values.tolist() == list(range(24))
    assert {len(at) for at in held} == {8}


def test_gathering_gives_each_rank_as_many_tokens_to_look_at():
    seen = [int((positions(rank, 4, 64, exchange="all_gather") + 1).sum()) for rank in range(4)]
    assert len(set(seen)) == 1


@pytest.mark.parametrize(
    ("model", "changes", "num_devices", "reason"),
    [
        (VIT, {}, 2, "causal language models"),
        (LLAMA, {}, 5, "24 tokens make no 10 equal chunks"),
        (LLAMA, {"loss": "tests.integration.stubs:loss_of_some_tokens"}, 2, "looks at whole sequences"),
        (replace(LLAMA, attention="flex"), {}, 2, "attention: flex knows no tokens of other devices"),
        (GPT2_WITH_DROPOUT, {}, 2, "drops out"),
        (
            ModelSpec(architecture="BloomForCausalLM", config={"hidden_size": 32, "n_head": 2}),
            {},
            2,
            "BloomForCausalLM",
        ),
        (LLAMA, {}, 1, "two devices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_says_why_not(bench, model, changes, num_devices, reason):
    job = bench.job(model, **changes)
    assert reason in ContextParallel().supports(job, bench.shape(num_devices), bench.facts(job))


def test_heads_are_exchanged_where_there_are_enough(bench):
    def exchanges(model, num_devices):
        job = bench.job(model)
        configs = ContextParallel().configs(job, bench.shape(num_devices), bench.facts(job))
        return list(dict.fromkeys(config["exchange"] for config in configs))

    assert exchanges(SHARED_HEADS, 2) == ["ulysses", "all_gather"]
    assert exchanges(SHARED_HEADS, 4) == ["all_gather"]
