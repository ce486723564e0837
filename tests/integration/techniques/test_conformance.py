"""Conformance of techniques: the plan never changes the model, and every technique trains what `single` trains.

A new technique needs one line in LAYOUTS, and one in SWITCHED.
"""

from dataclasses import replace

import pytest

from ringmaster.techniques import ScheduleSpec, registry
from ringmaster.techniques.black_box import BlackBox
from tests.integration.workbench import (
    ADAMW,
    GPT2,
    GPT2_WITH_DROPOUT,
    RESNET,
    SGD,
    SINGLE,
    VIT,
    Layout,
    is_bit_equal,
    largest_difference,
)
from tests.matrix import matrix

LAYOUTS = [
    Layout("single", 1, {"micro_batch": 2}),
    Layout("single", 1, {"micro_batch": 3}),
    Layout("single", 1, {"recompute": "full"}),
    Layout("single", 1, {"recompute": "selective"}),
    Layout("single", 2),
    Layout("ddp", 2),
    Layout("ddp", 2, {"micro_batch": 2}),
    Layout("ddp", 2, {"micro_batch": 3, "recompute": "full"}),
    Layout("ddp", 2, {"recompute": "selective"}),
    Layout("ddp", 4),
    Layout("zero1", 2, {"micro_batch": 2}),
    Layout("zero1", 4),
    Layout("zero2", 2, {"bucket_bytes": 1 << 14}),
    Layout("zero2", 2, {"bucket_bytes": 1 << 20, "micro_batch": 3}),
    Layout("zero2", 2, {"bucket_bytes": 1 << 14, "micro_batch": 2, "every_micro_batch": True, "recompute": "full"}),
    Layout("zero2", 4, {"bucket_bytes": 1 << 12}),
    Layout("fsdp", 2, {"reshard": False}),
    Layout("fsdp", 2, {"reshard": True}),
    Layout("fsdp", 2, {"reshard": False, "micro_batch": 2}),
    Layout("fsdp", 2, {"reshard": True, "micro_batch": 3, "recompute": "full"}),
    Layout("fsdp", 2, {"reshard": True, "recompute": "selective"}),
    Layout("fsdp", 4, {"reshard": True}),
    Layout("fsdp_static", 2, {"reshard": False, "micro_batch": 3}),
    Layout("fsdp_static", 4, {"reshard": True, "recompute": "full"}),
]
SPILLED = Layout("offload", 1, {"num_slices": 2, "recompute": "full", "host_activations": True})
LAYOUTS += [
    SPILLED,
    Layout("offload", 1, {"num_slices": 1}),
    Layout("offload", 1, {"num_slices": 2, "micro_batch": 3}),
]
SWITCHED = [
    SINGLE,
    Layout("ddp", 2),
    Layout("zero1", 2),
    Layout("zero2", 2, {"bucket_bytes": 1 << 14}),
    Layout("fsdp", 2, {"reshard": True}),
    Layout("fsdp_static", 2, {"reshard": True}),
]
PARALLEL = SWITCHED[1:]
SWITCHED.append(SPILLED)
# Techniques that cut the model support transformers of some kinds; their own tests check which, and the refusals.
PLAIN_MESH = {"reshard": False, "sequence_parallel": False, "loss_parallel": False}
MODEL_PARALLEL = [
    Layout("tensor", 2, {"micro_batch": 8, "sequence_parallel": True, "loss_parallel": False}),
    Layout("context", 2, {"micro_batch": 8, "exchange": "all_gather", "sharded": False}),
    Layout("pipeline", 2, {"micro_batch": 2, "schedule": "1f1b"}),
    Layout("mesh", 4, {"micro_batch": 4, "pp": 1, "dp_shard": 2, "tp": 2, **PLAIN_MESH}),
]
SWITCHED += MODEL_PARALLEL
LAYOUTS += [
    *MODEL_PARALLEL,
    Layout("tensor", 2, {"micro_batch": 8, "recompute": "selective", "sequence_parallel": True, "loss_parallel": True}),
    Layout("tensor", 2, {"micro_batch": 4, "recompute": "full", "sequence_parallel": False, "loss_parallel": True}),
    Layout("tensor", 2, {"micro_batch": 3, "sequence_parallel": True, "loss_parallel": True}),
    Layout("context", 2, {"micro_batch": 3, "recompute": "full", "exchange": "all_gather", "sharded": True}),
    Layout("pipeline", 2, {"micro_batch": 4, "schedule": "gpipe", "recompute": "full"}),
    Layout("pipeline", 2, {"micro_batch": 4, "schedule": "1f1b", "recompute": "selective"}),
    Layout("mesh", 4, {"micro_batch": 2, "pp": 2, "dp_shard": 2, "tp": 1, **PLAIN_MESH}),
    Layout("mesh", 4, {"micro_batch": 4, "pp": 2, "dp_shard": 1, "tp": 2, **PLAIN_MESH}),
]
# A checkpoint is independent of its reader: each technique writes for two others, and reads from two.
PAIRS = [*zip(SWITCHED, [*SWITCHED[1:], SWITCHED[0]], strict=True)]
QUICK_PAIRS = [PAIRS[3], PAIRS[8]]
PAIRS += [(second, first) for first, second in PAIRS]
QUICK = [Layout("fsdp", 2, {"reshard": True}), MODEL_PARALLEL[0], MODEL_PARALLEL[2]]
"""The quick layouts: one with sharded parameters, one with divided layers, one with pipeline stages."""
# Four ranks on two cores take long; the tests of the mesh technique include a quick case.
ONE_EACH = [layout for layout in SWITCHED if layout.technique not in ("mesh", "fsdp_static")]

# Floating-point sums differ in order; AdamW divides by the gradient's size, and so amplifies small errors.
LARGEST_DIFFERENCE = {"sgd": 2e-7, "adamw": 1e-4}
LARGEST_LOSS_DIFFERENCE = 1e-6
GOLDEN_LOSSES = [5.712861, 5.694500, 5.676666, 5.655768, 5.639809]


def assert_trains_the_same(bench, job, layout, folder):
    trained, expected = bench.train(job, layout, folder), bench.reference(job)
    assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE[job.optimizer.name]
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=LARGEST_LOSS_DIFFERENCE)
    assert trained.outcome.result.metrics == pytest.approx(expected.outcome.result.metrics, abs=1e-5)


def case(layout, optimizer):
    """SGD reveals a wrong gradient scale, and runs with one layout of most techniques; `make test-full` runs all.

    With AdamW, `make test` trains two techniques after the switches below, and compares them with `single`.
    """
    marks = [] if optimizer is SGD and layout in ONE_EACH else [pytest.mark.full]
    return pytest.param(layout, optimizer, marks=marks, id=f"{layout}-{optimizer.name}")


@pytest.mark.parametrize(
    ("layout", "optimizer"), [case(layout, optimizer) for layout in LAYOUTS for optimizer in (SGD, ADAMW)]
)
def test_every_layout_trains_the_same_llama(bench, tmp_path, layout, optimizer):
    assert_trains_the_same(bench, bench.job(optimizer=optimizer), layout, tmp_path)


@pytest.mark.parametrize("model", matrix([GPT2, VIT], quick=[VIT], ids=["gpt2", "vit"]))
@pytest.mark.parametrize("layout", matrix([*PARALLEL, SPILLED], quick=QUICK[:1]))
def test_other_architectures_too(bench, tmp_path, layout, model):
    assert_trains_the_same(bench, bench.job(model), layout, tmp_path)


@pytest.mark.parametrize(
    "layout",
    matrix(
        [*PARALLEL, *MODEL_PARALLEL, SPILLED, Layout("fsdp", 2, {"reshard": False, "micro_batch": 2})],
        quick=QUICK[:1],
    ),
)
def test_clipping_uses_the_norm_of_the_whole_gradient(bench, tmp_path, layout):
    clipped = bench.job(clip_grad_norm=0.1)  # far below the norms of the first steps
    assert_trains_the_same(bench, clipped, layout, tmp_path)
    free = bench.reference(bench.job()).weights
    assert largest_difference(bench.reference(clipped).weights, free) > 1e-3


@pytest.mark.parametrize("layout", matrix([*PARALLEL, *MODEL_PARALLEL], quick=PARALLEL[2:3]))
def test_momentum_weight_decay_and_a_schedule(bench, tmp_path, layout):
    optimizer = replace(SGD, options={"momentum": 0.9, "weight_decay": 0.01})
    job = bench.job(optimizer=optimizer, schedule=ScheduleSpec(name="cosine", warmup_steps=2))
    assert_trains_the_same(bench, job, layout, tmp_path)


# A loss that needs whole sequences refuses divided ones.
@pytest.mark.parametrize(
    "layout", matrix([x for x in SWITCHED[1:] if x.technique != "context"], quick=[Layout("ddp", 2)])
)
def test_a_sum_and_count_loss_of_ones_own_with_uneven_rows(bench, tmp_path, layout):
    """The counts of ranks differ, so that averaging the ranks' means would train another model."""
    job = bench.job(loss="tests.integration.stubs:loss_of_some_tokens")
    assert_trains_the_same(bench, job, layout, tmp_path)


def test_the_first_losses_are_what_they_always_were(bench):
    """Detects a changed order of the data, changed initial weights or a changed loss, which no other test detects."""
    assert bench.reference(bench.job(optimizer=ADAMW)).losses == pytest.approx(GOLDEN_LOSSES, rel=0, abs=1e-4)


def test_training_moves_the_weights_and_lowers_the_loss(bench, tmp_path):
    """Without falling losses, the other tests of this file would hold for a trainer that does nothing."""
    job = bench.job(optimizer=ADAMW, num_steps=30)
    losses = bench.train(job, SINGLE, tmp_path).losses
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("layout", matrix(SWITCHED, quick=[QUICK[0]]))
def test_the_same_option_resumed_is_bit_equal(bench, tmp_path, layout):
    job = bench.job(optimizer=ADAMW)
    whole = bench.train(job, layout, tmp_path / "whole")
    first = bench.train(job, layout, tmp_path / "halves", last_step=3)
    second = bench.train(job, layout, tmp_path / "halves")
    assert (first.outcome.result.step, second.outcome.result.first_step) == (3, 3)
    assert first.losses + second.losses == whole.losses
    assert is_bit_equal(second.weights, whole.weights)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(ADAMW, id="adamw"),
        pytest.param(replace(SGD, options={"momentum": 0.9}), id="momentum", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(("before", "after"), matrix(PAIRS, quick=QUICK_PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}"))
def test_a_switch_carries_weights_and_optimizer_over(bench, tmp_path, before, after, optimizer):
    job = bench.job(optimizer=optimizer)
    bench.train(job, before, tmp_path, last_step=3)
    assert_trains_on_from(bench, job, after, tmp_path, first_step=3)


def test_a_checkpoint_of_four_ranks_is_read_by_two_and_by_one(bench, tmp_path):
    job = bench.job(optimizer=ADAMW)
    bench.train(job, Layout("fsdp", 4, {"reshard": True}), tmp_path, last_step=2)
    bench.train(job, Layout("fsdp", 2, {"reshard": False}), tmp_path, last_step=4)
    assert_trains_on_from(bench, job, SINGLE, tmp_path, first_step=4)


def assert_trains_on_from(bench, job, layout, folder, *, first_step):
    trained, expected = bench.train(job, layout, folder), bench.reference(job)
    assert trained.outcome.result.first_step == first_step
    assert largest_difference(trained.weights, expected.weights) <= 1e-5
    assert trained.losses == pytest.approx(expected.losses[first_step:], rel=0, abs=1e-5)


@pytest.mark.parametrize("layout", matrix(SWITCHED, quick=QUICK[:1]))
def test_bf16_trains_alike_but_not_as_fp32(bench, tmp_path, layout):
    job = bench.job(precision="bf16")
    losses, expected = bench.train(job, layout, tmp_path).losses, bench.reference(job).losses
    assert losses == pytest.approx(expected, rel=0, abs=2e-3)
    full = bench.reference(bench.job()).losses
    assert expected == pytest.approx(full, rel=0, abs=2e-2)
    assert expected != full


def test_batch_statistics_are_trained_undivided(bench, tmp_path):
    job = bench.job(RESNET)
    once = bench.reference(job)
    assert is_bit_equal(bench.train(job, SINGLE, tmp_path).weights, once.weights)
    technique = registry.load(SINGLE.path)
    assert list(technique.configs(job, bench.shape(1), bench.facts(job))) == [
        {"micro_batch": job.global_batch_size, "recompute": "none"}
    ]


@pytest.mark.parametrize("layout", PARALLEL, ids=str)
def test_what_dividing_would_change_is_refused_with_the_reason(bench, layout):
    def reason(job):
        return registry.load(layout.path).supports(job, bench.shape(2), bench.facts(job))

    assert reason(bench.job()) is None
    assert reason(bench.job(GPT2_WITH_DROPOUT)) is None
    assert "dividing a batch changes its gradients" in reason(bench.job(RESNET))
    assert "not a multiple of 2" in reason(bench.job(global_batch_size=7))


def test_every_technique_is_in_this_suite():
    ours = {name for name, path in registry.BUILTIN.items() if not isinstance(registry.load(path), BlackBox)}
    ours -= {"local", "expert"}  # they train no ordinary job: see test_local_updates.py, test_expert.py
    assert {layout.technique for layout in LAYOUTS} >= ours
    assert {layout.technique for layout in SWITCHED} >= ours
