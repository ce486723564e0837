"""FSDP's config keys: each variant trains what `single` trains, with checkpoints that every technique reads."""

from dataclasses import replace

import pytest

from ringmaster.techniques import registry
from ringmaster.techniques.data import prepare
from ringmaster.techniques.estimates.time_estimate import MAX_CONFIGS
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.technique import GangShape
from tests.integration.workbench import ADAMW, GPT2, SGD, SINGLE, Layout, is_bit_equal, largest_difference
from tests.matrix import matrix

HYBRID = Layout("fsdp", 4, {"reshard": True, "num_replicas": 2})
OFFLOAD = Layout("fsdp", 2, {"reshard": True, "offload": True})
AHEAD = Layout("fsdp", 2, {"reshard": True, "prefetch": 2})
VARIANTS = [HYBRID, OFFLOAD, AHEAD]
MOMENTUM = replace(SGD, options={"momentum": 0.9})
CLIPPED = {"clip_grad_norm": 0.1}


@pytest.mark.parametrize("layout", matrix(VARIANTS, quick=[HYBRID, OFFLOAD]))
@pytest.mark.parametrize("optimizer", matrix([MOMENTUM, ADAMW], quick=[MOMENTUM], ids=["sgd", "adamw"]))
def test_trains_the_same_and_clips_by_the_norm_of_the_whole_gradient(bench, tmp_path, layout, optimizer):
    job = bench.job(optimizer=optimizer, **CLIPPED)
    trained, expected = bench.train(job, layout, tmp_path), bench.reference(job)
    tolerance = {"sgd": 2e-7, "adamw": 1e-4}[optimizer.name]
    assert largest_difference(trained.weights, expected.weights) <= tolerance
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("layout", [HYBRID, OFFLOAD], ids=str)
def test_with_accumulation_recomputation_and_tied_weights(bench, tmp_path, layout):
    job = bench.job(GPT2)
    config = {**layout.config, "micro_batch": 1, "recompute": "full"}
    trained = bench.train(job, replace(layout, config=config), tmp_path)
    assert largest_difference(trained.weights, bench.reference(job).weights) <= 2e-7


@pytest.mark.full
@pytest.mark.parametrize("layout", [HYBRID, OFFLOAD], ids=str)
def test_resumed_is_bit_equal(bench, tmp_path, layout):
    job = bench.job(optimizer=ADAMW)
    whole = bench.train(job, layout, tmp_path / "whole")
    bench.train(job, layout, tmp_path / "halves", last_step=3)
    assert is_bit_equal(bench.train(job, layout, tmp_path / "halves").weights, whole.weights)


@pytest.mark.full
def test_a_checkpoint_goes_from_one_to_the_next(bench, tmp_path):
    job = bench.job(optimizer=ADAMW)
    for last_step, layout in enumerate([SINGLE, HYBRID, OFFLOAD, Layout("ddp", 2)], start=1):
        bench.train(job, layout, tmp_path, last_step=last_step)
    trained = bench.train(job, HYBRID, tmp_path)
    assert trained.outcome.result.first_step == 4
    assert largest_difference(trained.weights, bench.reference(job).weights) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout("fsdp", 2, {"reshard": True}), HYBRID], ids=str)
def test_static_buffers_change_no_bit(bench, tmp_path, layout):
    job = bench.job(optimizer=ADAMW, **CLIPPED)
    plain, static = (
        bench.train(job, replace(layout, technique=name), tmp_path / name) for name in ("fsdp", "fsdp_static")
    )
    assert is_bit_equal(plain.weights, static.weights)


@pytest.mark.parametrize("reshard", matrix([False, True], quick=[True]))
def test_after_the_first_step_no_buffer_is_allocated(bench, tmp_path, reshard):
    config = {"reshard": reshard, "micro_batch": 2, "recompute": "full"}
    layout = Layout("tests.integration.techniques.zero_models:SteadyFsdpStatic", 2, config)
    assert bench.train(bench.job(), layout, tmp_path).outcome.status == "done"


def test_which_knobs_are_tried_where(bench):
    job = bench.job()
    technique, facts = (
        registry.load(SINGLE.path),
        model_facts(job.model, data=prepare(job.data, cache_dir=bench.cache_dir)),
    )
    technique = registry.load(HYBRID.path)

    def knobs(**shape):
        gang = GangShape(memory_bytes=1 << 33, **shape)
        configs = list(technique.configs(job, gang, facts))
        for config in configs:
            technique.mesh_shape(gang, config)
        assert len(configs) <= MAX_CONFIGS, "the last resort is the last in the list, and must be on it"
        return {key for config in configs for key in config} - {"micro_batch", "recompute", "reshard"}

    assert knobs(kind="cpu", num_devices=2) == set()
    assert knobs(kind="cpu", num_devices=4) == {"num_replicas"}
    assert knobs(kind="gpu", num_devices=2) == {"prefetch", "offload"}
    assert knobs(kind="gpu", num_devices=8, num_nodes=2) == {"num_replicas", "prefetch", "offload"}


def test_each_knob_says_what_memory_it_takes(bench):
    job = bench.job(optimizer=ADAMW)
    technique, facts = (
        registry.load(HYBRID.path),
        model_facts(job.model, data=prepare(job.data, cache_dir=bench.cache_dir)),
    )

    def needs(**knobs):
        return technique.estimate_memory(job, bench.shape(8), {"reshard": True, **knobs}, facts)

    assert needs(offload=True) < needs() < needs(num_replicas=2) < needs(num_replicas=4)
    assert needs(num_replicas=2) - needs() == facts.num_parameters * 16 // 8
    assert needs(prefetch=2) >= needs()


def test_groups_of_unequal_size_are_refused(bench):
    with pytest.raises(ValueError, match="4 devices cannot be divided into 3"):
        registry.load(HYBRID.path).mesh_shape(bench.shape(4), {"num_replicas": 3})


def facts_of(bench, job):
    return model_facts(job.model, data=prepare(job.data, cache_dir=bench.cache_dir))
