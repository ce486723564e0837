"""What of sharded optimizers the conformance suite does not ask: who keeps what, and ranks with nothing to update."""

from pathlib import Path

import pytest

from techniques import DataSpec, ModelSpec, OptimizerSpec
from techniques.engine.checkpoint import CheckpointStore
from tests.integration.workbench import ADAMW, SINGLE, Layout, largest_difference


def test_each_rank_writes_the_optimizer_state_that_it_alone_has(bench, tmp_path):
    job = bench.job(optimizer=ADAMW)
    trained = bench.train(job, Layout("zero1", 2), tmp_path)
    manifest = CheckpointStore(Path(trained.order.checkpoint_dir)).newest().manifest
    moments = {name: stored.pieces for name, stored in manifest.tensors.items() if name.endswith("/exp_avg")}
    assert {len(pieces) for pieces in moments.values()} == {1}
    written_by = [piece.file for pieces in moments.values() for piece in pieces]
    assert sorted(set(written_by)) == ["rank-00000.safetensors", "rank-00001.safetensors"]


@pytest.mark.parametrize("layout", [Layout("zero1", 4)], ids=str)
def test_a_rank_without_a_parameter_of_its_own_helps_all_the_same(bench, tmp_path, layout):
    """Two parameters on four ranks."""
    job = bench.job(
        ModelSpec(factory="tests.integration.zero_models:linear"),
        data=DataSpec(factory="tests.integration.zero_models:points"),
        loss="tests.integration.zero_models:squared_error",
        optimizer=OptimizerSpec(name="adamw", lr=0.1),
        clip_grad_norm=1.0,
    )
    trained, expected = bench.train(job, layout, tmp_path), bench.train(job, SINGLE, tmp_path / "single")
    assert largest_difference(trained.weights, expected.weights) <= 1e-5
