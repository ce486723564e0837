"""Local updates: the result depends on the job alone, bit by bit, wherever its workers run and whatever happens."""

from dataclasses import replace

import pytest
import torch

from ringmaster.features.local_updates.job import LocalUpdates
from ringmaster.features.local_updates.trainer import WORKERS
from ringmaster.features.warm_start.job import WarmStart
from ringmaster.techniques import Adapter, EvaluationSpec, OptimizerSpec, ScheduleSpec, registry
from ringmaster.techniques.checkpoints.chain import read_chain
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.processes.gang_events import Steps
from tests.integration.workbench import (
    ADAMW,
    GPT2_WITH_DROPOUT,
    LLAMA,
    SGD,
    VIT,
    Layout,
    is_bit_equal,
    largest_difference,
)
from tests.matrix import matrix

WORKERS_OF_JOB, SIZE, NUM_STEPS = 4, 16, 8
AVERAGING = LocalUpdates(workers=WORKERS_OF_JOB, sync_every=3)
MOMENTUM = LocalUpdates(workers=WORKERS_OF_JOB, sync_every=3, outer_lr=0.7, outer_momentum=0.9, warmup_steps=2)
OPTIMIZERS = {
    "adamw": ADAMW,
    "momentum": replace(SGD, options={"momentum": 0.9}),
    "sgd": SGD,
    "muon": OptimizerSpec(name="muon", lr=1e-2),
}
MODELS = {"llama": LLAMA, "gpt2": GPT2_WITH_DROPOUT, "vit": VIT}
OTHERS = {
    "plain": {},
    "clipped": {"clip_grad_norm": 0.1, "schedule": ScheduleSpec(name="cosine", warmup_steps=2)},
    "bf16": {"precision": "bf16"},
    "lora": {"adapter": Adapter(rank=4, dropout=0.1)},
    "chunks": {"exact_chunk": 2},
}


def layout(num_devices, job, **config):
    chunk = job.exact_chunk or job.global_batch_size // job.num_workers
    return Layout("local", num_devices, {"micro_batch": chunk, **config})


def local_job(bench, spec=AVERAGING, *, model="llama", optimizer="adamw", other="plain", **changes):
    plain = {
        "optimizer": OPTIMIZERS[optimizer],
        "global_batch_size": SIZE,
        "num_steps": NUM_STEPS,
        "evaluation": EvaluationSpec(max_batches=2),
        **OTHERS[other],
    }
    return bench.job(MODELS[model], features=(spec,), **{**plain, **changes})


def assert_same_bits(trained, expected):
    difference = largest_difference(trained.weights, expected.weights)
    assert is_bit_equal(trained.weights, expected.weights), difference
    assert trained.losses == expected.losses[-len(trained.losses) :]
    assert trained.outcome.result.metrics == expected.outcome.result.metrics
    assert last_state(trained) == last_state(expected)


def last_state(trained):
    """Returns the digests of all tensors after the last step, those of the workers included."""
    return read_chain(trained.order.checkpoint_dir).links[-1].tensors


CASES = [
    ("llama", "adamw", "clipped", 2),
    ("llama", "adamw", "lora", 4),
    ("llama", "muon", "chunks", 4),
    ("gpt2", "adamw", "bf16", 2),
    ("gpt2", "momentum", "plain", 4),
    ("gpt2", "muon", "clipped", 2),
    ("vit", "sgd", "chunks", 2),
    ("vit", "adamw", "plain", 4),
]


# One rank and two are compared where checkpoints inside of rounds are.
@pytest.mark.parametrize("spec", [MOMENTUM, AVERAGING], ids=lambda s: f"{s.outer_momentum}")
@pytest.mark.parametrize(("model", "optimizer", "other", "num_ranks"), matrix(CASES, quick=[]))
def test_workers_end_alike_on_any_number_of_ranks(bench, tmp_path, spec, model, optimizer, other, num_ranks):
    job = local_job(bench, spec, model=model, optimizer=optimizer, other=other)
    expected = bench.train(job, layout(1, job), tmp_path / "1")
    assert_same_bits(bench.train(job, layout(num_ranks, job, recompute="full"), tmp_path / "2"), expected)


def test_the_definition(bench, tmp_path):
    """The formula of `LocalUpdates`, with the steps of plain jobs as those of the workers.

    One worker on the whole batch takes the steps of a plain job until the first round ends.
    """
    spec = LocalUpdates(workers=1, sync_every=3, outer_lr=0.5)
    job = local_job(bench, spec, optimizer="sgd", num_steps=3)
    plain = job.without(LocalUpdates)
    trained = bench.train(job, layout(1, job), tmp_path / "local").weights
    at_end = bench.train(plain, Layout("single"), tmp_path / "plain").weights
    first = bench.train(replace(plain, optimizer=replace(SGD, lr=1e-30)), Layout("single"), tmp_path / "first").weights
    for name, weight in trained.items():
        assert torch.allclose(weight, first[name] + 0.5 * (at_end[name] - first[name]), rtol=0, atol=1e-7)


def test_a_round_of_one_step_of_sgd_is_a_synchronous_step(bench, tmp_path):
    job = local_job(bench, replace(AVERAGING, sync_every=1), optimizer="sgd", num_steps=4)
    trained = bench.train(job, layout(2, job), tmp_path / "local")
    expected = bench.train(job.without(LocalUpdates), Layout("ddp", 2), tmp_path / "ddp")
    assert largest_difference(trained.weights, expected.weights) <= 1e-6
    apart = local_job(bench, replace(AVERAGING, sync_every=4), optimizer="adamw", num_steps=4)
    ends = bench.train(apart, layout(2, apart), tmp_path / "apart")
    synchronous = bench.train(apart.without(LocalUpdates), Layout("ddp", 2), tmp_path / "adamw")
    assert largest_difference(ends.weights, synchronous.weights) > 1e-5


@pytest.mark.parametrize("ends", matrix(range(1, NUM_STEPS), quick=[4]))
def test_checkpoints_inside_and_at_the_end_of_rounds(bench, tmp_path, ends):
    """Warm-up of two steps, rounds of three: 4 is inside a round, 5 ends one."""
    job = local_job(bench, MOMENTUM, other="clipped")
    expected = bench.train(job, layout(1, job), tmp_path / "once")
    bench.train(job, layout(2, job), tmp_path / "twice", last_step=ends)
    stored = CheckpointStore(tmp_path / "twice" / "checkpoints").newest().manifest.tensors
    inside = [name for name in stored if name.startswith(WORKERS) and "/model/" in name]
    assert bool(inside) == (ends in (3, 4, 6, 7))
    assert_same_bits(bench.train(job, layout(1, job), tmp_path / "twice"), expected)


@pytest.mark.full
def test_switches_and_kills_leave_no_trace(bench, tmp_path):
    job = local_job(bench, MOMENTUM, model="gpt2", other="clipped", num_steps=12)
    expected = bench.train(job, layout(1, job), tmp_path / "once")
    folder = tmp_path / "switched"

    def kill(gang, event):
        if isinstance(event, Steps):
            gang.kill()

    for number, num_devices in enumerate([4, 1, 2, 4, 2], start=1):
        bench.train(job, layout(num_devices, job), folder, last_step=2 * number)
        assert bench.train(job, layout(num_devices, job), folder, on_event=kill).outcome.status != "done"
    trained = bench.train(job, layout(1, job), folder)
    assert trained.outcome.result.first_step == 10
    assert_same_bits(trained, expected)


def test_a_plain_checkpoint_goes_on_locally_and_not_the_other_way_round(bench, tmp_path):
    job = local_job(bench)
    plain = job.without(LocalUpdates)
    bench.train(plain, Layout("single"), tmp_path / "plain", last_step=3)
    start = WarmStart(checkpoints=str(tmp_path / "plain" / "checkpoints"), step=3)
    clone = replace(job, name="clone").with_features(start)
    once = bench.train(clone, layout(1, job), tmp_path / "one")
    assert_same_bits(bench.train(clone, layout(2, job), tmp_path / "two"), once)
    start = WarmStart(checkpoints=str(tmp_path / "one" / "checkpoints"), step=NUM_STEPS)
    back = replace(plain, name="back", num_steps=10, features=(start,))
    outcome = bench.train(back, Layout("single"), tmp_path / "back").outcome
    assert "has a state for each worker of local updates. To fix: give job back the local_updates" in outcome.message


def test_only_local_trains_such_jobs_and_only_them(bench):
    job = local_job(bench)
    facts, shape = bench.facts(job), bench.shape(2)
    local = registry.load(registry.dotted_path("local"))
    assert local.supports(job, shape, facts) is None
    assert local.supports(job, bench.shape(3), facts) == "4 workers cannot be divided by 3 devices"
    assert local.supports(job.without(LocalUpdates), shape, facts) == "local is for jobs with local_updates"
    assert [config["micro_batch"] for config in local.configs(job, shape, facts)] == [4, 4, 4]
