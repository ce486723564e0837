"""Switches between all pairs of techniques by checkpoints, and division along three axes at once on eight ranks."""

import shutil

import pytest

from tests.integration.techniques.test_conformance import (
    PLAIN_MESH,
    SWITCHED,
    assert_trains_on_from,
    assert_trains_the_same,
)
from tests.integration.workbench import ADAMW, SGD, Layout

pytestmark = pytest.mark.full
STEP = 3


@pytest.fixture(scope="module", params=SWITCHED, ids=str)
def halfway(request, bench, tmp_path_factory):
    """The folder of a job that a layout trained half-way; each layout trains once for all tests that resume from it."""
    folder = tmp_path_factory.mktemp("halfway")
    bench.train(bench.job(optimizer=ADAMW), request.param, folder, last_step=STEP)
    return folder


@pytest.mark.parametrize("layout", SWITCHED, ids=str)
def test_every_technique_goes_on_from_every_other(bench, tmp_path, halfway, layout):
    shutil.copytree(halfway / "checkpoints", tmp_path / "checkpoints")
    assert_trains_on_from(bench, bench.job(optimizer=ADAMW), layout, tmp_path, first_step=STEP)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout("mesh", 8, {"micro_batch": 2, "pp": 2, "dp_shard": 2, "tp": 2, **PLAIN_MESH}),
        Layout("mesh", 8, {"micro_batch": 2, "pp": 1, "dp_shard": 4, "tp": 2, **PLAIN_MESH}),
        Layout("fsdp", 8, {"reshard": True, "num_replicas": 2}),
        Layout("zero2", 8, {"bucket_bytes": 1 << 12}),
    ],
    ids=str,
)
def test_eight_ranks_train_the_same(bench, tmp_path, layout, optimizer):
    assert_trains_the_same(bench, bench.job(optimizer=optimizer), layout, tmp_path)


def test_eight_ranks_read_what_two_wrote_and_write_what_one_reads(bench, tmp_path):
    job = bench.job(optimizer=ADAMW)
    bench.train(job, Layout("pipeline", 2, {"micro_batch": 4, "schedule": "1f1b"}), tmp_path, last_step=2)
    mesh = Layout("mesh", 8, {"micro_batch": 2, "pp": 2, "dp_shard": 2, "tp": 2, **PLAIN_MESH})
    bench.train(job, mesh, tmp_path, last_step=4)
    assert_trains_on_from(bench, job, Layout("single"), tmp_path, first_step=4)
