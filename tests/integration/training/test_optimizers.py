"""Every optimizer, frozen parameters and settings by parameter train the same weights under every technique."""

from dataclasses import replace

import pytest

from ringmaster.techniques import OptimizerSpec, registry
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.job_specs import OF_WHOLE_TENSORS, ParameterGroup
from ringmaster.techniques.technique import why_no_optimizer
from tests.integration.techniques.test_conformance import (
    MODEL_PARALLEL,
    PLAIN_MESH,
    SPILLED,
    SWITCHED,
)
from tests.integration.workbench import ADAMW, LLAMA, SGD, SINGLE, VIT, Layout, largest_difference
from tests.matrix import matrix

ADAFACTOR = OptimizerSpec(name="adafactor", lr=1e-2)
LION = OptimizerSpec(name="lion", lr=1e-4, options={"weight_decay": 0.1})
MUON = OptimizerSpec(name="muon", lr=5e-4, options={"adjust_lr_fn": "match_rms_adamw"})
NEW = [ADAFACTOR, LION, MUON]
LAYOUTS = [
    *SWITCHED[1:],
    Layout("fsdp", 4, {"reshard": True, "num_replicas": 2}),
    Layout("context", 2, {"micro_batch": 8, "exchange": "all_gather", "sharded": True}),
    Layout("mesh", 4, {"micro_batch": 2, "pp": 2, "dp_shard": 2, "tp": 1, **PLAIN_MESH}),
    Layout("mesh", 4, {"micro_batch": 4, "pp": 2, "dp_shard": 1, "tp": 2, **PLAIN_MESH}),
]
"""A layout of each technique; all divide weights in another way."""
FSDP, ZERO1, ZERO2 = SWITCHED[4], SWITCHED[2], SWITCHED[3]
PIPELINE = MODEL_PARALLEL[2]
# Those of `test_conformance`. Muon orthogonalizes in bf16, so that the last digits of gradients, which depend on the
# division of the batch, may change a direction by a percent: `single` differs as much with another micro-batch.
LARGEST_DIFFERENCE = {"sgd": 2e-7, "adafactor": 1e-5, "adamw": 1e-4, "lion": 1e-4, "muon": 1e-4}
LARGEST_LOSS_DIFFERENCE = 2e-6  # losses near 6 are 5e-7 apart in fp32
HEAD_ALONE = ("*", "!lm_head.*")


def supports(layout, optimizer):
    return layout.technique != "zero2" or optimizer.name not in OF_WHOLE_TENSORS


def assert_trains_the_same(bench, job, layout, folder):
    trained, expected = bench.train(job, layout, folder), bench.reference(job)
    assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE[job.optimizer.name]
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=LARGEST_LOSS_DIFFERENCE)


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    matrix(
        [(layout, optimizer) for layout in LAYOUTS for optimizer in NEW if supports(layout, optimizer)],
        quick=[],  # Adafactor's steps are compared after a switch below, and Muon's under two divisions of the weights
        ids=lambda case: f"{case[0]}-{case[1].name}",
    ),
)
def test_every_optimizer_trains_the_same_llama(bench, tmp_path, layout, optimizer):
    assert_trains_the_same(bench, bench.job(optimizer=optimizer), layout, tmp_path)


@pytest.mark.parametrize("optimizer", matrix([ADAFACTOR, MUON], quick=[MUON], ids=lambda optimizer: optimizer.name))
def test_gathering_changes_nothing(bench, tmp_path, optimizer):
    """Both divide the batch in the same way, and only one divides the weights."""
    job = bench.job(optimizer=optimizer)
    whole = bench.train(job, Layout("ddp", 2), tmp_path / "whole").weights
    assert largest_difference(bench.train(job, FSDP, tmp_path / "divided").weights, whole) <= 1e-6


@pytest.mark.parametrize("optimizer", matrix(NEW, quick=[], ids=lambda optimizer: optimizer.name))
def test_every_optimizer_lowers_the_loss(bench, tmp_path, optimizer):
    rates = {"adafactor": 3e-2, "lion": 1e-3, "muon": 1e-3}
    job = bench.job(optimizer=replace(optimizer, lr=rates[optimizer.name]), num_steps=30)
    losses = bench.train(job, SINGLE, tmp_path).losses
    assert losses[-1] < losses[0] - 0.3


def test_pieces_of_matrices_are_refused(bench, tmp_path):
    job = bench.job(optimizer=MUON)
    assert why_no_optimizer(registry.load(ZERO2.path), job) == (
        "muon needs whole matrices, and zero2 holds a part of each"
    )
    assert all(why_no_optimizer(registry.load(layout.path), job) is None for layout in [FSDP, ZERO1, PIPELINE])
    assert all(why_no_optimizer(registry.load(ZERO2.path), bench.job(optimizer=o)) is None for o in (SGD, ADAMW, LION))
    outcome = bench.train(job, ZERO2, tmp_path).outcome
    assert (outcome.status, "muon needs whole matrices" in outcome.message) == ("invalid", True)


MOVED = [
    (optimizer, before, after)
    for optimizer in NEW
    for before, after in zip(SWITCHED, [*SWITCHED[1:], SWITCHED[0]], strict=True)
    if supports(before, optimizer) and supports(after, optimizer)
]


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    matrix(
        MOVED,
        quick=[case for case in MOVED if case[1] == FSDP and case[0] is ADAFACTOR],
        ids=lambda case: f"{case[0].name}-{case[1]}-{case[2]}",
    ),
)
def test_a_checkpoint_carries_the_state_of_every_optimizer(bench, tmp_path, optimizer, before, after):
    job = bench.job(optimizer=optimizer)
    bench.train(job, before, tmp_path, last_step=3)
    trained, expected = bench.train(job, after, tmp_path), bench.reference(job)
    assert trained.outcome.result.first_step == 3
    assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE[optimizer.name]
    assert trained.losses == pytest.approx(expected.losses[3:], rel=0, abs=1e-5)


def states(folder):
    checkpoint = CheckpointStore(folder / "checkpoints").newest()
    names = [name for name in checkpoint.manifest.tensors if name.startswith("optimizer/")]
    return {name.removeprefix("optimizer/"): checkpoint.manifest.tensors[name].shape for name in names}


def test_a_checkpoint_has_whole_rows_and_columns(bench, tmp_path):
    bench.train(bench.job(optimizer=ADAFACTOR), FSDP, tmp_path, last_step=1)
    found = states(tmp_path)
    layer = "model.layers.0.mlp.up_proj.weight"
    assert (found[f"{layer}/row_var"], found[f"{layer}/col_var"]) == ((64, 1), (1, 32))
    assert found["model.norm.weight/variance"] == (32,)


@pytest.mark.parametrize("layout", matrix(LAYOUTS, quick=[PIPELINE]))
def test_a_head_alone_is_trained_the_same(bench, tmp_path, layout):
    job = bench.job(optimizer=ADAMW, freeze=HEAD_ALONE)
    assert_trains_the_same(bench, job, layout, tmp_path)
    before, after = bench.reference(bench.job(optimizer=ADAMW, num_steps=1)), bench.reference(job).weights
    assert set(after) == set(before.weights)
    assert {name.rpartition("/")[0] for name in states(tmp_path)} == {"lm_head.weight"}


@pytest.mark.parametrize("layout", matrix(LAYOUTS, quick=[ZERO2]))
def test_upper_layers_alone_are_trained_the_same(bench, tmp_path, layout):
    frozen = ("model.embed_tokens.*", "model.layers.0.*")
    job = bench.job(optimizer=SGD, freeze=frozen, clip_grad_norm=0.1)
    assert_trains_the_same(bench, job, layout, tmp_path)
    weights = bench.reference(job).weights
    moved = {
        name
        for name, w in bench.reference(bench.job(optimizer=SGD)).weights.items()
        if bool((w != weights[name]).any())
    }
    assert moved >= {name for name in weights if name.startswith(("model.embed_tokens.", "model.layers.0."))}


@pytest.mark.parametrize("layout", matrix([FSDP, ZERO1, ZERO2, SPILLED], quick=[]))
def test_a_head_of_an_image_model_is_trained_the_same(bench, tmp_path, layout):
    assert_trains_the_same(bench, bench.job(VIT, freeze=("*", "!classifier.*")), layout, tmp_path)


BY_NAME = replace(
    SGD,
    options={"weight_decay": 0.1},
    layer_decay=0.5,
    groups=(ParameterGroup(match="lm_head.*", lr=0.3), ParameterGroup(match="*.q_proj.*", weight_decay=0.5)),
    decay_norms_and_biases=False,
)


@pytest.mark.parametrize("layout", matrix(LAYOUTS, quick=[ZERO2]))
def test_settings_by_parameter_are_the_same(bench, tmp_path, layout):
    job = bench.job(optimizer=BY_NAME)
    assert_trains_the_same(bench, job, layout, tmp_path)
    plain = bench.reference(bench.job(optimizer=replace(SGD, options={"weight_decay": 0.1})))
    assert largest_difference(bench.reference(job).weights, plain.weights) > 1e-3


DEEP = replace(LLAMA, config={**LLAMA.config, "num_hidden_layers": 4})
TIED = replace(LLAMA, config={**LLAMA.config, "tie_word_embeddings": True})


@pytest.mark.full
@pytest.mark.parametrize("frozen", [HEAD_ALONE, ("lm_head.*", "model.norm.*")], ids=" ".join)
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero_bubble"])
def test_stages_without_trained_parameters_pass_gradients_on(bench, tmp_path, schedule, frozen):
    layout = Layout("pipeline", 2, {"micro_batch": 2, "schedule": schedule})
    assert_trains_the_same(bench, bench.job(DEEP, freeze=frozen), layout, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [SGD, MUON, ADAFACTOR], ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("frozen", [(), ("model.embed_tokens.*", "lm_head.*")], ids=["all", "frozen"])
@pytest.mark.parametrize("layout", [PIPELINE, MODEL_PARALLEL[0], FSDP, ZERO1], ids=str)
def test_a_shared_weight_is_trained_or_frozen_the_same(bench, tmp_path, layout, frozen, optimizer):
    assert_trains_the_same(bench, bench.job(TIED, freeze=frozen, optimizer=optimizer), layout, tmp_path)
