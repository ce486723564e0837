"""Precision, communication and compilation: equal under every technique, up to bf16's own rounding."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ringmaster.features.kernels.job import Numerics
from ringmaster.techniques import registry
from ringmaster.techniques.data import prepare
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.processes.order import TRIAL
from ringmaster.techniques.technique import KERNELS
from ringmaster.techniques.training.gradients import compute_in_half
from tests.integration.techniques.test_conformance import QUICK, SWITCHED
from tests.integration.workbench import ADAMW, GPT2, RESNET, SINGLE, VIT, Layout, is_bit_equal, largest_difference
from tests.matrix import matrix

HALF = {"precision": "bf16-params"}
# Compiled layers that tensor parallelism divides need divided activations too.
COMPILED_MESH = Layout(
    "mesh",
    4,
    {
        "micro_batch": 4,
        "pp": 1,
        "dp_shard": 2,
        "tp": 2,
        "reshard": False,
        "sequence_parallel": True,
        "loss_parallel": False,
    },
)
DDP = next(layout for layout in SWITCHED if layout.technique == "ddp")
EXCHANGING = [layout for layout in SWITCHED if layout.technique not in ("single", "offload", "tensor", "pipeline")]


@pytest.mark.parametrize("layout", matrix(SWITCHED[1:], quick=QUICK[:1]))
def test_bf16_weights_train_alike_under_every_technique(bench, tmp_path, layout):
    job = bench.job(**HALF)
    assert bench.train(job, layout, tmp_path).losses == pytest.approx(bench.reference(job).losses, rel=0, abs=1e-3)


def test_bf16_weights_are_neither_fp32_nor_autocast(bench):
    half, full, cast = (bench.reference(bench.job(precision=p)).losses for p in ("bf16-params", "fp32", "bf16"))
    assert half != full and half != cast
    assert half == pytest.approx(full, rel=0, abs=2e-2)


@pytest.mark.parametrize("model", matrix([GPT2, VIT, RESNET], quick=[RESNET], ids=["gpt2", "vit", "resnet"]))
def test_other_architectures_compute_with_bf16_weights(bench, model):
    losses, full = (bench.reference(bench.job(model, **changes)).losses for changes in (HALF, {}))
    assert losses[0] == pytest.approx(full[0], rel=0, abs=1e-2)
    assert losses == pytest.approx(full, rel=0, abs=0.2)  # batch statistics amplify rounding differences


# Half-precision weights under FSDP are compared with `single` above.
@pytest.mark.parametrize("layout", matrix([SINGLE, Layout("fsdp", 2, {"reshard": True})], quick=[SINGLE]))
def test_the_optimizer_keeps_what_bf16_would_lose(bench, tmp_path, layout):
    """With a learning rate this small, a weight in bf16 would never change."""
    job = bench.job(optimizer=replace(ADAMW, lr=1e-6), **HALF)
    weights = bench.train(job, layout, tmp_path).weights
    norm = weights["model.norm.weight"]  # initially ones, whose neighbours in bf16 are 0.4 % away
    assert norm.dtype == torch.float32
    assert bool((norm != 1).any()) and bool((norm.to(torch.bfloat16) == 1).all())


@pytest.mark.full
def test_a_switch_between_techniques_carries_fp32_weights_over(bench, tmp_path):
    job = bench.job(optimizer=ADAMW, **HALF)
    bench.train(job, SINGLE, tmp_path, last_step=3)
    trained = bench.train(job, Layout("fsdp", 2, {"reshard": True}), tmp_path)
    assert trained.losses == pytest.approx(bench.reference(job).losses[3:], rel=0, abs=1e-3)


@pytest.mark.parametrize("layout", matrix(EXCHANGING, quick=[DDP]))
def test_gradients_rounded_on_their_way_train_almost_the_same(bench, tmp_path, layout):
    job, plain = bench.job(communication="bf16"), bench.job()
    rounded = bench.train(job, layout, tmp_path / "rounded")
    exact = bench.train(plain, layout, tmp_path / "exact")
    assert rounded.losses == pytest.approx(exact.losses, rel=0, abs=1e-4)
    assert not is_bit_equal(rounded.weights, exact.weights)


def test_one_device_sends_nothing_and_so_rounds_nothing(bench, tmp_path):
    rounded = bench.train(bench.job(communication="bf16"), SINGLE, tmp_path)
    assert is_bit_equal(rounded.weights, bench.reference(bench.job()).weights)


@pytest.mark.full
@pytest.mark.timeout(900)  # compilers are slow, and each rank runs one
@pytest.mark.parametrize("layout", [x for x in SWITCHED if x.technique != "mesh"] + [COMPILED_MESH], ids=str)
def test_compiled_layers_train_alike(bench, tmp_path, layout):
    losses = bench.train(bench.job(compile=True), layout, tmp_path).losses
    assert losses == pytest.approx(bench.reference(bench.job()).losses, rel=0, abs=2e-6)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
def test_compiled_layers_in_bf16(bench, tmp_path, precision):
    losses = bench.train(bench.job(precision=precision, compile=True), SINGLE, tmp_path).losses
    assert losses == pytest.approx(bench.reference(bench.job(precision=precision)).losses, rel=0, abs=2e-3)


KERNELS_OF = [
    Layout("single", 1, {KERNELS: "attention:eager"}),
    Layout("single", 1, {KERNELS: "compile:default"}),
    Layout("single", 1, {KERNELS: "optimizer:foreach", "micro_batch": 4}),
    Layout("ddp", 2, {KERNELS: "attention:eager", "micro_batch": 2}),
    Layout("zero1", 2, {KERNELS: "optimizer:foreach"}),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", matrix(KERNELS_OF, quick=KERNELS_OF[:1]))
def test_permitted_kernels_train_almost_the_same(bench, tmp_path, layout):
    job = bench.job(optimizer=ADAMW)
    trained = bench.train(job.with_features(Numerics(tolerance=1e-5)), layout, tmp_path)
    assert not trained.said("kernels_refused")
    assert largest_difference(trained.weights, bench.reference(job).weights) <= 1e-4


def test_kernels_beyond_the_tolerance_are_left_out_with_the_reason(bench, tmp_path):
    job = bench.job(features=(Numerics(tolerance=1e-12),))
    trained = bench.train(job, KERNELS_OF[0], tmp_path / "segment")
    (refused,) = trained.said("kernels_refused")
    assert "attention:eager are left out: its step differs from the plain one by" in refused.message
    assert is_bit_equal(trained.weights, bench.reference(job.without(Numerics)).weights)
    trial = bench.train(job, KERNELS_OF[0], tmp_path / "trial", purpose=TRIAL)
    assert (trial.outcome.status, refused.message in trial.outcome.message) == ("invalid", True)


def test_what_compilers_do_wrong_is_never_offered(bench):
    job = bench.job(compile=True)
    odd = replace(bench.prose, seq_len=23)
    known = model_facts(job.model, data=prepare(job.data, cache_dir=bench.cache_dir))
    unknown = model_facts(job.model, data=prepare(odd, cache_dir=bench.cache_dir))
    tensor, mesh = (registry.load(registry.dotted_path(name)) for name in ("tensor", "mesh"))
    assert all(config["sequence_parallel"] for config in tensor.configs(job, bench.shape(2), known))
    assert "along the sequence" in tensor.supports(job, bench.shape(2), unknown)
    configs = list(mesh.configs(job, bench.shape(4), known))
    assert configs and all(config["sequence_parallel"] or config["tp"] == 1 for config in configs)


def test_weights_that_a_module_reads_of_another_are_rounded_too():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    compute_in_half(attention)
    tokens = torch.randn(2, 3, 8)
    output, _ = attention(tokens, tokens, tokens)
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in attention.parameters())
    assert not set(attention.__dict__) & {"in_proj_weight", "weight"}  # the substitutes are removed


def test_what_stands_in_for_a_weight_goes_when_forward_fails():
    layer = nn.Linear(4, 4)
    compute_in_half(layer)
    with pytest.raises(RuntimeError):
        layer(torch.randn(2, 5))
    assert layer.weight.dtype == torch.float32
