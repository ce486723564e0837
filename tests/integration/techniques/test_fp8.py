"""Products in fp8, emulated: equal under every technique, up to the rounding of bf16."""

from importlib.util import find_spec

import pytest

from ringmaster.features.fp8.job import Float8
from ringmaster.techniques import registry
from tests.integration.techniques.test_conformance import SWITCHED
from tests.integration.workbench import SINGLE, Layout, is_bit_equal
from tests.matrix import matrix

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="the extra torchao is not installed")

EMULATED = {"precision": "bf16", "features": (Float8(emulate=True),)}
WHOLE_LAYERS = [layout for layout in SWITCHED[1:] if registry.load(layout.path).whole_layers]
DIVIDED_BATCH = Layout("single", 1, {"micro_batch": 2, "recompute": "full"})


@pytest.mark.parametrize("layout", matrix([DIVIDED_BATCH, *WHOLE_LAYERS], quick=[DIVIDED_BATCH]))
def test_fp8_trains_alike_however_the_batch_is_divided(bench, tmp_path, layout):
    job = bench.job(**EMULATED)
    trained, expected = bench.train(job, layout, tmp_path), bench.reference(job)
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=1e-3)


def test_products_are_neither_those_of_bf16_nor_far_from_them(bench):
    fp8, half = bench.reference(bench.job(**EMULATED)), bench.reference(bench.job(precision="bf16"))
    assert not is_bit_equal(fp8.weights, half.weights)
    assert fp8.losses == pytest.approx(half.losses, rel=0, abs=1e-2)


@pytest.mark.full
def test_checkpoints_are_those_of_other_techniques(bench, tmp_path):
    job = bench.job(**EMULATED)
    bench.train(job, SINGLE, tmp_path, last_step=3)
    trained = bench.train(job, Layout("fsdp", 2, {"reshard": True}), tmp_path)
    assert trained.losses == pytest.approx(bench.reference(job).losses[3:], rel=0, abs=1e-3)


def test_a_cpu_is_refused_by_the_rank_too(bench, tmp_path):
    outcome = bench.train(bench.job(precision="bf16", features=(Float8(),)), SINGLE, tmp_path).outcome
    assert outcome.status == "invalid"
    assert "CPUs have no units for fp8" in outcome.message
