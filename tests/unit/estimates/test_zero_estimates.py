"""The memory that sharding saves, as techniques estimate it before any trial."""

import pytest

from ringmaster.features.local_updates.job import LocalUpdates
from ringmaster.techniques import DataSpec, Job, ModelSpec, OptimizerSpec, registry
from ringmaster.techniques.estimates.time_estimate import MAX_CONFIGS
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.technique import GangShape

P = 1_000_000_000
FACTS = ModelFacts(
    num_parameters=P,
    parameter_bytes=4 * P,
    largest_layer_bytes=4 * P // 20,
    num_layers=20,
    has_dropout=False,
)
GANG = GangShape(kind="gpu", num_devices=8, memory_bytes=80 << 30)
JOB = Job(
    name="large",
    model=ModelSpec(architecture="LlamaForCausalLM"),
    data=DataSpec(source="python-stdlib"),
    optimizer=OptimizerSpec(name="adamw"),
    global_batch_size=64,
    num_steps=1,
)
BUCKETS = 3 * (32 << 20)


def needs(name, *, job=JOB, **config):
    return registry.load(registry.dotted_path(name)).estimate_memory(job, GANG, {"micro_batch": 8, **config}, FACTS)


def test_what_is_divided_is_counted_once_over_the_devices():
    assert needs("ddp") == 16 * P
    assert needs("zero1") == 8 * P + 8 * P // 8
    assert needs("zero2", bucket_bytes=32 << 20) == 4 * P + 12 * P // 8 + BUCKETS
    assert needs("fsdp", reshard=True) == 16 * P // 8 + 2 * FACTS.largest_layer_bytes


def test_each_local_worker_has_weights_and_optimizer_state_of_its_own():
    def local(**changes):
        return needs("local", job=JOB.with_features(LocalUpdates(sync_every=8, **changes)))

    assert local(workers=8) == 16 * P + 4 * P
    assert local(workers=32, outer_momentum=0.9) == 16 * P + 3 * 12 * P + 8 * P


def test_gradients_that_wait_for_the_last_micro_batch_are_whole():
    sharded = needs("zero2", bucket_bytes=32 << 20, micro_batch=2, every_micro_batch=True)
    assert sharded == needs("zero2", bucket_bytes=32 << 20)
    assert needs("zero2", bucket_bytes=32 << 20, micro_batch=2) == sharded + 4 * P


@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp", "fsdp_static"])
def test_all_configs_are_few_enough_to_be_listed_and_the_last_needs_least(name):
    technique = registry.load(registry.dotted_path(name))
    configs = list(technique.configs(JOB, GANG, FACTS))
    assert 1 < len(configs) <= MAX_CONFIGS
    assert len({tuple(sorted(config.items())) for config in configs}) == len(configs)
    estimates = [technique.estimate_memory(JOB, GANG, config, FACTS) for config in configs]
    assert estimates[-1] == min(estimates)
    assert configs[0]["recompute"] == "none"
    assert configs[-1]["recompute"] == "full"
