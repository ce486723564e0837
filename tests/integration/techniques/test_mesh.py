"""Meshes of pipeline, data and tensor parallelism: exact in every combination, and refused with a reason elsewhere."""

from dataclasses import replace

import pytest

from ringmaster.techniques import ModelSpec
from ringmaster.techniques.mesh import Mesh
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

FOUR_HEADS = replace(LLAMA, config={**LLAMA.config, "num_attention_heads": 4, "num_key_value_heads": 2})
TIED = replace(FOUR_HEADS, config={**FOUR_HEADS.config, "tie_word_embeddings": True, "vocab_size": 303})
BIASED = ModelSpec(architecture="Qwen2ForCausalLM", config={**FOUR_HEADS.config, "tie_word_embeddings": True})
LARGEST_DIFFERENCE = {"sgd": 2e-7, "adamw": 1e-4}
# A loss is an fp32 sum of 184 tokens' losses (8 x 23), about 1000: three units in the last place of the sum, over 184.
LARGEST_LOSS_DIFFERENCE = 3 * 2**-13 / 184


def layout(pp=1, dp_shard=1, tp=1, *, micro_batch=2, recompute="none", reshard=False, divided=False):
    config = {
        "micro_batch": micro_batch,
        "recompute": recompute,
        "pp": pp,
        "dp_shard": dp_shard,
        "tp": tp,
        "reshard": reshard,
        "sequence_parallel": divided,
        "loss_parallel": divided,
    }
    return Layout("ringmaster.techniques.mesh:Mesh", pp * dp_shard * tp, config)


def assert_trains_the_same(bench, job, layout, folder):
    trained, expected = bench.train(job, layout, folder), bench.reference(job)
    assert trained.outcome.status == "done", trained.outcome
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=LARGEST_LOSS_DIFFERENCE)
    assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE[job.optimizer.name]
    assert trained.outcome.result.metrics == pytest.approx(expected.outcome.result.metrics, abs=1e-5)


MESHES = [
    layout(1, 2, 2, divided=True),
    layout(1, 2, 2, reshard=True, recompute="full", micro_batch=4),
    layout(2, 2, 1, reshard=True, recompute="full"),
    layout(2, 1, 2, recompute="full", micro_batch=4),
]
CUT = replace(MESHES[2], config={**MESHES[2].config, "stage_layers": [3, 1]})


@pytest.mark.full
@pytest.mark.parametrize("optimizer", matrix([SGD, ADAMW], quick=[SGD], ids=["sgd", "adamw"]))
@pytest.mark.parametrize("option", matrix(MESHES, quick=[MESHES[3]]))
def test_two_axes_train_the_same(bench, tmp_path, option, optimizer):
    assert_trains_the_same(bench, bench.job(FOUR_HEADS, optimizer=optimizer, clip_grad_norm=0.1), option, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("model", [TIED, BIASED], ids=["llama-tied-uneven", "qwen2"])
@pytest.mark.parametrize("option", [MESHES[0], MESHES[3]], ids=str)
def test_tied_embeddings_and_biases(bench, tmp_path, option, model):
    assert_trains_the_same(bench, bench.job(model, clip_grad_norm=0.1), option, tmp_path)


@pytest.mark.full
def test_stages_may_have_as_many_layers_as_were_measured_to_be_best(bench, tmp_path):
    model = replace(FOUR_HEADS, config={**FOUR_HEADS.config, "num_hidden_layers": 4})
    assert_trains_the_same(bench, bench.job(model, clip_grad_norm=0.1), CUT, tmp_path)


@pytest.mark.full
def test_three_axes_on_eight_ranks_train_the_same(bench, tmp_path):
    assert_trains_the_same(bench, bench.job(TIED, clip_grad_norm=0.1), layout(2, 2, 2), tmp_path)


@pytest.mark.full
def test_gpt2_in_sharded_pipelines(bench, tmp_path):
    assert_trains_the_same(bench, bench.job(GPT2, clip_grad_norm=0.1), layout(2, 2), tmp_path)


@pytest.mark.full
def test_meshes_and_one_process_take_over_from_each_other(bench, tmp_path):
    job = bench.job(TIED, optimizer=ADAMW)
    bench.train(job, layout(2, 1, 2), tmp_path, last_step=1)
    bench.train(job, layout(1, 2, 2, divided=True), tmp_path, last_step=2)
    bench.train(job, layout(2, 2, 1), tmp_path, last_step=3)
    bench.train(job, SINGLE, tmp_path, last_step=4)
    last = bench.train(job, layout(2, 1, 2), tmp_path)
    assert last.outcome.result.first_step == 4
    assert largest_difference(last.weights, bench.reference(job).weights) <= 1e-4


@pytest.mark.full
def test_dropout_in_sharded_pipelines_is_that_of_one_process(bench, tmp_path):
    job = bench.job(GPT2_WITH_DROPOUT)
    trained = bench.train(job, layout(2, 2), tmp_path)
    assert largest_difference(trained.weights, bench.reference(job).weights) <= 2e-7


@pytest.mark.parametrize(
    ("model", "changes", "num_devices", "reason"),
    [
        (VIT, {}, 4, "causal language models"),
        (LLAMA, {}, 2, "four devices"),
        (LLAMA, {}, 5, "no equal groups"),
        (LLAMA, {"global_batch_size": 1}, 9, "2 attention heads cannot be divided by 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_says_why_not(bench, model, changes, num_devices, reason):
    job = bench.job(model, **changes)
    assert reason in Mesh().supports(job, bench.shape(num_devices), bench.facts(job))


def test_its_sizes_are_searched_and_suit_the_model(bench):
    def sizes(model, shape, **changes):
        job = bench.job(model, **changes)
        assert Mesh().supports(job, shape, bench.facts(job)) is None
        configs = list(Mesh().configs(job, shape, bench.facts(job)))
        assert all(set(Mesh().mesh_shape(shape, config)) <= {"pp", "dp_shard", "tp"} for config in configs)
        return list(dict.fromkeys((c["pp"], c["dp_shard"], c["tp"]) for c in configs))

    four, eight = bench.shape(4), bench.shape(8)
    assert sizes(FOUR_HEADS, four) == [(1, 2, 2), (2, 2, 1), (2, 1, 2)]
    assert sizes(FOUR_HEADS, four, global_batch_size=3) == [(2, 1, 2)]  # two ranks cannot divide three rows
    assert sizes(GPT2, four) == [(2, 2, 1)]  # tensor parallelism does not support GPT-2
    assert sizes(FOUR_HEADS, eight) == [(1, 4, 2), (1, 2, 4), (2, 4, 1), (2, 2, 2), (2, 1, 4)]
    two_nodes = replace(eight, num_nodes=4)
    assert all(tp <= 2 for _, _, tp in sizes(FOUR_HEADS, two_nodes))
