"""Sharded optimizers beyond the conformance suite: which rank stores which state, and ranks with nothing to update."""

from pathlib import Path

import pytest

from ringmaster.techniques import DataSpec, ModelSpec, OptimizerSpec
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from tests.integration.workbench import ADAMW, SINGLE, Layout, is_bit_equal, largest_difference
from tests.matrix import matrix

ZERO2 = {"bucket_bytes": 1 << 12}
EVERY_MICRO_BATCH = Layout("zero2", 2, {"bucket_bytes": 1 << 10, "micro_batch": 1, "every_micro_batch": True})
DECAYING = OptimizerSpec(name="adamw", lr=0.01, options={"weight_decay": 0.1})
MOMENTUM = OptimizerSpec(name="sgd", lr=0.01, options={"weight_decay": 0.1, "momentum": 0.9})


def points_job(bench, model, **changes):
    return bench.job(
        ModelSpec(factory=f"tests.integration.techniques.zero_models:{model}"),
        data=DataSpec(factory="tests.integration.techniques.zero_models:points"),
        loss="tests.integration.techniques.zero_models:squared_error",
        **changes,
    )


def stored(trained):
    """Returns the tensors in the manifest of the newest checkpoint, by name."""
    return CheckpointStore(Path(trained.order.checkpoint_dir)).newest().manifest.tensors


@pytest.mark.parametrize("layout", [Layout("zero1", 2), Layout("zero2", 2, ZERO2)], ids=str)
def test_the_ranks_share_the_writing_of_the_optimizer_state(bench, tmp_path, layout):
    trained = bench.train(bench.job(optimizer=ADAMW), layout, tmp_path)
    moments = [tensor.pieces for name, tensor in stored(trained).items() if name.endswith("/exp_avg")]
    assert {len(pieces) for pieces in moments} == {1}
    assert {pieces[0].file for pieces in moments} == {"rank-00000.safetensors", "rank-00001.safetensors"}


@pytest.mark.parametrize("layout", matrix([Layout("zero1", 4), Layout("zero2", 4, ZERO2)], quick=[Layout("zero1", 4)]))
def test_a_rank_with_nothing_to_update_helps_all_the_same(bench, tmp_path, layout):
    """Two parameters, of 64 weights and of one, on four ranks."""
    job = points_job(bench, "linear", optimizer=DECAYING, clip_grad_norm=1.0)
    trained = bench.train(job, layout, tmp_path)
    assert largest_difference(trained.weights, bench.reference(job).weights) <= 1e-5


@pytest.mark.parametrize("optimizer", matrix([DECAYING, MOMENTUM], quick=[DECAYING], ids=["adamw", "momentum"]))
@pytest.mark.parametrize(
    "layout",
    matrix(
        [
            Layout("zero2", 2, {"bucket_bytes": 1 << 10}),
            Layout("zero2", 2, {"bucket_bytes": 1 << 20, "micro_batch": 1}),
            EVERY_MICRO_BATCH,
            Layout("zero2", 4, {"bucket_bytes": 1 << 14}),
        ],
        quick=[EVERY_MICRO_BATCH],
    ),
)
def test_weights_without_a_gradient_stay_as_they_are(bench, tmp_path, layout, optimizer):
    """A zero gradient instead of a missing one would apply weight decay and continue with earlier moments."""
    job = points_job(bench, "uneven", optimizer=optimizer, clip_grad_norm=1.0)
    trained, expected = bench.train(job, layout, tmp_path), bench.reference(job)
    assert largest_difference(trained.weights, expected.weights) <= 1e-5
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=1e-5)
    assert set(stored(trained)) == set(stored(expected))


@pytest.mark.full
def test_what_was_trained_unevenly_goes_on_under_others(bench, tmp_path):
    job = points_job(bench, "uneven", optimizer=DECAYING)
    halfway = bench.train(job, Layout("zero2", 4, ZERO2), tmp_path, last_step=2)
    assert not any("/never." in name for name in stored(halfway) if name.startswith("optimizer/"))
    bench.train(job, SINGLE, tmp_path, last_step=3)
    trained = bench.train(job, Layout("zero2", 2, ZERO2), tmp_path)
    assert trained.outcome.result.first_step == 3
    assert largest_difference(trained.weights, bench.reference(job).weights) <= 1e-5


def test_overlap_changes_nothing_but_when(bench, tmp_path):
    job = bench.job(optimizer=ADAMW, clip_grad_norm=0.1)
    one, other = (
        bench.train(job, Layout("zero2", 2, {**ZERO2, "overlap": overlap}), tmp_path / str(overlap))
        for overlap in (True, False)
    )
    assert is_bit_equal(one.weights, other.weights)


@pytest.mark.full
def test_a_checkpoint_is_read_at_every_world_size(bench, tmp_path):
    job = bench.job(optimizer=ADAMW)
    route = [
        Layout("zero1", 4),
        Layout("zero2", 2, ZERO2),
        Layout("zero2", 4, ZERO2),
        Layout("fsdp", 2, {"reshard": True}),
    ]
    for last_step, layout in enumerate(route, start=1):
        bench.train(job, layout, tmp_path, last_step=last_step)
    trained = bench.train(job, Layout("zero1", 2), tmp_path)
    assert trained.outcome.result.first_step == 4
    assert largest_difference(trained.weights, bench.reference(job).weights) <= 1e-5
