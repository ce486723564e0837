"""Tensor parallelism on Llama-like models: exact under every config, and refused with a reason elsewhere."""

from dataclasses import replace

import pytest

from ringmaster.techniques import ModelSpec
from ringmaster.techniques.tensor_parallel import TensorParallel
from tests.integration.workbench import ADAMW, GPT2, LLAMA, SGD, VIT, Layout, largest_difference
from tests.matrix import matrix

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FOUR_HEADS = replace(LLAMA, config=SHAPE)
MODELS = {
    "qwen2-biased-and-tied": ModelSpec(architecture="Qwen2ForCausalLM", config={**SHAPE, "tie_word_embeddings": True}),
    "qwen3-with-norms-of-heads": ModelSpec(architecture="Qwen3ForCausalLM", config={**SHAPE, "head_dim": 8}),
    "mistral-with-a-window": ModelSpec(architecture="MistralForCausalLM", config={**SHAPE, "sliding_window": 8}),
    "llama-with-an-uneven-vocabulary": replace(FOUR_HEADS, config={**SHAPE, "vocab_size": 303}),
}
LARGEST_DIFFERENCE = {"sgd": 2e-7, "adamw": 1e-4}


def layout(num_devices=2, *, micro_batch=8, recompute="none", sequence_parallel=True, loss_parallel=True):
    config = {
        "micro_batch": micro_batch,
        "recompute": recompute,
        "sequence_parallel": sequence_parallel,
        "loss_parallel": loss_parallel,
    }
    return Layout("ringmaster.techniques.tensor_parallel:TensorParallel", num_devices, config)


def assert_trains_the_same(bench, job, layout, folder):
    trained, expected = bench.train(job, layout, folder), bench.reference(job)
    assert trained.outcome.status == "done", trained.outcome
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=1e-6)
    assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE[job.optimizer.name]
    assert trained.outcome.result.metrics == pytest.approx(expected.outcome.result.metrics, abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", matrix([SGD, ADAMW], quick=[SGD], ids=["sgd", "adamw"]))
@pytest.mark.parametrize("sequence_parallel", matrix([True, False], quick=[True], ids=["sequence", "no-sequence"]))
def test_four_ranks_share_the_two_heads_of_keys_and_values(bench, tmp_path, sequence_parallel, optimizer):
    job = bench.job(FOUR_HEADS, optimizer=optimizer, clip_grad_norm=0.1)
    assert_trains_the_same(bench, job, layout(4, sequence_parallel=sequence_parallel), tmp_path)


# Llama is compared in test_conformance.py, and Qwen3 in test_architectures.py.
@pytest.mark.parametrize("model", matrix(MODELS.values(), quick=[], ids=list(MODELS)))
def test_models_of_llamas_kind(bench, tmp_path, model):
    assert_trains_the_same(bench, bench.job(model, clip_grad_norm=0.1), layout(), tmp_path)


@pytest.mark.full
def test_recomputed_in_two_micro_batches_with_whole_logits(bench, tmp_path):
    option = layout(micro_batch=4, recompute="full", loss_parallel=False)
    assert_trains_the_same(bench, bench.job(FOUR_HEADS), option, tmp_path)


@pytest.mark.parametrize(
    ("model", "num_devices", "reason"),
    [
        (GPT2, 2, "attn.c_attn (Conv1D) of GPT2LMHeadModel"),
        (VIT, 2, "causal language models"),
        (LLAMA, 4, "2 attention heads cannot be divided by 4"),
        (
            replace(LLAMA, config={**SHAPE, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}),
            2,
            "3 heads of keys",
        ),
        (replace(LLAMA, config={**SHAPE, "intermediate_size": 63}), 2, "63 features"),
        (replace(LLAMA, config={**SHAPE, "attention_dropout": 0.1}), 2, "drops out"),
        (
            ModelSpec(architecture="MixtralForCausalLM", config={**SHAPE, "num_local_experts": 2}),
            2,
            "MixtralForCausalLM",
        ),
        (FOUR_HEADS, 1, "two devices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_says_why_not(bench, model, num_devices, reason):
    job = bench.job(model)
    assert reason in TensorParallel().supports(job, bench.shape(num_devices), bench.facts(job))


def test_configs_divide_only_what_is_known_and_divisible(bench):
    technique, shape = TensorParallel(), bench.shape(2)
    job = bench.job(FOUR_HEADS)
    assert next(iter(technique.configs(job, shape, bench.facts(job)))) == layout().config
    odd = bench.job(FOUR_HEADS, data=replace(job.data, seq_len=25))
    assert not any(c["sequence_parallel"] for c in technique.configs(odd, shape, bench.facts(odd)))
    own = bench.job(FOUR_HEADS, loss="tests.integration.stubs:loss_of_some_tokens")
    assert not any(c["loss_parallel"] for c in technique.configs(own, shape, bench.facts(own)))
