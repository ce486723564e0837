"""Expert parallelism: mixtures of experts are trained as `single` trains them, whatever their tokens choose."""

from dataclasses import replace

import pytest

from ringmaster.techniques import Adapter, ModelSpec, registry
from tests.integration.techniques.test_conformance import (
    assert_trains_on_from,
    assert_trains_the_same,
)
from tests.integration.workbench import ADAMW, LLAMA, SGD, SINGLE, Layout, is_bit_equal
from tests.matrix import matrix

SIZES = {**LLAMA.config, "num_experts_per_tok": 2}
MIXTRAL = ModelSpec(architecture="MixtralForCausalLM", config={**SIZES, "num_local_experts": 4})
QWEN3 = ModelSpec(
    architecture="Qwen3MoeForCausalLM",
    config={**SIZES, "num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16, "decoder_sparse_step": 1},
)
ROUTED = replace(MIXTRAL, config={**MIXTRAL.config, "output_router_logits": True, "router_aux_loss_coef": 0.5})
TWO = Layout("expert", 2, {"reshard": True})
LAYOUTS = [
    TWO,
    Layout("expert", 2, {"reshard": False, "micro_batch": 2}),
    Layout("expert", 2, {"reshard": True, "micro_batch": 3, "recompute": "full"}),
    Layout("expert", 2, {"reshard": True, "recompute": "selective"}),
    Layout("expert", 4, {"reshard": True}),
]
LAYOUTS.append(
    Layout(
        "mesh",
        4,
        {"micro_batch": 2, "pp": 2, "dp_shard": 2, "tp": 1, "divided_experts": True, "reshard": False}
        | {"sequence_parallel": False, "loss_parallel": False},
    )
)
CASES = [(model, layout, optimizer) for model in (MIXTRAL, QWEN3) for layout in LAYOUTS for optimizer in (SGD, ADAMW)]


def _name(case):
    model, layout, optimizer = case
    return f"{model.architecture}-{layout}-{optimizer.name}"


@pytest.mark.parametrize(("model", "layout", "optimizer"), matrix(CASES, quick=[(QWEN3, TWO, ADAMW)], ids=_name))
def test_experts_are_trained_alike(bench, tmp_path, model, layout, optimizer):
    assert_trains_the_same(bench, bench.job(model, optimizer=optimizer), layout, tmp_path)


@pytest.mark.parametrize(
    "changes",
    matrix(
        [
            {"clip_grad_norm": 0.1},
            {"adapter": Adapter(rank=4)},
            {"freeze": ("*", "!*.experts.*")},
            {"global_batch_size": 2},
        ],
        quick=[],
        ids=lambda changes: next(iter(changes)),
    ),
)
def test_with_settings(bench, tmp_path, changes):
    assert_trains_the_same(bench, bench.job(MIXTRAL, **changes), TWO, tmp_path)


@pytest.mark.parametrize(
    ("num_devices", "optimizer"),
    matrix([(2, SGD), (4, SGD), (2, ADAMW)], quick=[(2, SGD)], ids=lambda case: str(case[0])),
)
def test_the_routers_loss_is_that_of_the_whole_batch(bench, tmp_path, num_devices, optimizer):
    job = bench.job(ROUTED, optimizer=optimizer)
    assert_trains_the_same(bench, job, Layout("expert", num_devices, {"reshard": True}), tmp_path)
    assert bench.reference(job).losses != bench.reference(bench.job(MIXTRAL, optimizer=optimizer)).losses


@pytest.mark.full
def test_experts_without_tokens_get_no_gradient_and_hold_nobody_up(bench, tmp_path):
    """16 tokens and 32 experts of which one is chosen: most experts have none."""
    model = replace(MIXTRAL, config={**SIZES, "num_local_experts": 32, "num_experts_per_tok": 1})
    job = bench.job(model, data=replace(bench.prose, seq_len=4), global_batch_size=4)
    assert_trains_the_same(bench, job, Layout("expert", 4, {"reshard": True}), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
def test_in_half_precision(bench, tmp_path, precision):
    job = bench.job(MIXTRAL, precision=precision)
    assert bench.train(job, TWO, tmp_path).losses == pytest.approx(bench.reference(job).losses, rel=0, abs=3e-3)


@pytest.mark.full
def test_a_resumed_job_is_bit_equal(bench, tmp_path):
    job = bench.job(MIXTRAL, optimizer=ADAMW)
    whole = bench.train(job, TWO, tmp_path / "whole")
    bench.train(job, TWO, tmp_path / "halves", last_step=3)
    assert is_bit_equal(bench.train(job, TWO, tmp_path / "halves").weights, whole.weights)


@pytest.mark.parametrize(
    ("before", "after"),
    matrix(
        [(TWO, SINGLE), (SINGLE, TWO), (TWO, Layout("fsdp", 2, {"reshard": True})), (Layout("ddp", 2), LAYOUTS[-1])],
        quick=[],
        ids=lambda pair: f"{pair[0]}-{pair[1]}",
    ),
)
def test_a_switch_carries_weights_and_optimizer_over(bench, tmp_path, before, after):
    job = bench.job(MIXTRAL, optimizer=ADAMW)
    bench.train(job, before, tmp_path, last_step=3)
    assert_trains_on_from(bench, job, after, tmp_path, first_step=3)


def test_what_it_does_not_train_is_refused_in_words(bench):
    def reason(model, num_devices=2, **changes):
        job = bench.job(model, **changes)
        return registry.load(TWO.path).supports(job, bench.shape(num_devices), bench.facts(job))

    assert reason(MIXTRAL) is None
    assert "is for mixtures of experts" in reason(LLAMA)
    assert "4 experts cannot be divided by 3" in reason(MIXTRAL, 3, global_batch_size=6)
    assert "compile" in reason(MIXTRAL, compile=True)
    assert reason(ROUTED) is None
    fsdp = registry.load(registry.dotted_path("fsdp"))
    job = bench.job(ROUTED)
    assert "dividing a batch changes its gradients" in fsdp.supports(job, bench.shape(2), bench.facts(job))
    configs = registry.load(TWO.path).configs(job, bench.shape(2), bench.facts(job))
    assert {config["micro_batch"] for config in configs} == {4}


def test_its_facts_and_memory(bench):
    job = bench.job(MIXTRAL)
    facts, technique = bench.facts(job), registry.load(TWO.path)
    assert facts.num_experts == 4
    assert facts.expert_bytes == 4 * 2 * 4 * (3 * 32 * 64)  # bytes, layers, experts, three matrices
    config = {"micro_batch": 4, "recompute": "none", "reshard": True}
    fsdp = registry.load(registry.dotted_path("fsdp"))
    shape = bench.shape(2)
    least = technique.estimate_memory(job, shape, config, facts)
    assert least < fsdp.estimate_memory(job, shape, config, facts)
    assert {tuple(c) for c in technique.configs(job, shape, facts)} == {
        ("micro_batch", "recompute", "reshard")
    } or bench.num_gpus
