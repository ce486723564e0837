"""Exact jobs: weights, losses and metrics have the same bits on any number of devices, whatever happens meanwhile."""

import random
from dataclasses import replace
from itertools import product

import pytest

from ringmaster.codec import to_json
from ringmaster.techniques import Adapter, DataSpec, EvaluationSpec, OptimizerSpec, ScheduleSpec, registry
from ringmaster.techniques.checkpoints.chain import read_chain
from ringmaster.techniques.data import prepare
from ringmaster.techniques.estimates.job_preflight import preflight_job
from ringmaster.techniques.preflight_result import Preflight, PreflightOrder
from ringmaster.techniques.processes.gang_events import Steps
from ringmaster.techniques.technique import GangShape
from tests.integration.losses.test_losses import PREFERENCES, TINY, UNPAIRED
from tests.integration.techniques.test_architectures import spec
from tests.integration.techniques.test_exact_dropout import FAMILIES
from tests.integration.workbench import (
    ADAMW,
    LLAMA,
    SGD,
    VIT,
    Layout,
    is_bit_equal,
    largest_difference,
)
from tests.matrix import matrix
from tests.unit.profiling.solos import FACTS

CHUNK = 4
SINGLE = Layout("single", 1, {"micro_batch": CHUNK})
LAYOUTS = [
    Layout("ddp", 2, {"micro_batch": CHUNK}),
    Layout("ddp", 4, {"micro_batch": CHUNK, "recompute": "full"}),
    Layout("zero1", 2, {"micro_batch": CHUNK}),
    Layout("zero2", 2, {"micro_batch": CHUNK, "bucket_bytes": 1 << 14}),
    Layout("zero2", 4, {"micro_batch": CHUNK, "bucket_bytes": 1 << 13}),
    Layout("fsdp", 2, {"micro_batch": CHUNK, "reshard": True}),
    Layout("fsdp", 4, {"micro_batch": CHUNK, "reshard": False, "recompute": "full"}),
    Layout("fsdp_static", 2, {"micro_batch": CHUNK, "reshard": True}),
    Layout("offload", 1, {"micro_batch": CHUNK, "num_slices": 2}),
    Layout("offload", 1, {"micro_batch": CHUNK, "num_slices": 2, "recompute": "full", "host_activations": True}),
]
PIPELINES = [
    Layout("pipeline", 2, {"micro_batch": CHUNK, "schedule": "1f1b"}),
    Layout("pipeline", 2, {"micro_batch": CHUNK, "schedule": "gpipe", "recompute": "full"}),
]
EIGHT = [
    Layout("ddp", 8, {"micro_batch": 2}),
    Layout("zero1", 8, {"micro_batch": 2}),
    Layout("zero2", 8, {"micro_batch": 2, "bucket_bytes": 1 << 13}),
    Layout("fsdp", 8, {"micro_batch": 2, "reshard": True}),
]
MODELS = {"llama": LLAMA, "vit": VIT, "mixtral": spec("MixtralForCausalLM"), **FAMILIES}
OPTIMIZERS = {
    "adamw": ADAMW,
    "momentum": replace(SGD, options={"momentum": 0.9, "weight_decay": 0.01}),
    "lion": OptimizerSpec(name="lion", lr=1e-3, options={"weight_decay": 0.1}),
    "adafactor": OptimizerSpec(name="adafactor", lr=1e-2),
    "muon": OptimizerSpec(name="muon", lr=1e-2),
}
OTHERS = {
    "plain": {},
    "clipped": {"clip_grad_norm": 0.1},
    "bf16": {"precision": "bf16"},
    "bf16-params": {"precision": "bf16-params"},
    "lora": {"adapter": Adapter(rank=4, dropout=0.1)},
    "scheduled": {"schedule": ScheduleSpec(name="cosine", warmup_steps=2), "clip_grad_norm": 1.0},
}


def drawn_jobs(number):
    """Draws jobs such that every family, optimizer and setting occurs."""
    draw = random.Random(20261126)
    columns = []
    for each in (MODELS, OPTIMIZERS, OTHERS):
        names = [name for _ in range(number) for name in each][:number]
        columns.append(draw.sample(names, number))
    return list(zip(*columns, strict=True))


def exact_job(bench, model="llama", optimizer="adamw", other="plain", **changes):
    plain = {
        "optimizer": OPTIMIZERS[optimizer],
        "global_batch_size": 16,
        "exact_chunk": CHUNK,
        "evaluation": EvaluationSpec(max_batches=3, metrics=("loss", "accuracy")),
        **OTHERS[other],
    }
    job = bench.job(MODELS[model], exact=True, **{**plain, **changes})
    return replace(job, data=DataSpec(source="digits")) if model == "swin" else job


def reference(bench, job, folder):
    return bench.train(job, SINGLE, folder / "single")


def assert_same_bits(trained, expected):
    difference = largest_difference(trained.weights, expected.weights)
    assert is_bit_equal(trained.weights, expected.weights), f"{trained.order.technique}: {difference}"
    assert trained.losses == expected.losses[-len(trained.losses) :]
    assert trained.outcome.result.metrics == expected.outcome.result.metrics
    assert last_state(trained) == last_state(expected)


def last_state(trained):
    """Returns the digests of weights and optimizer state after the last step."""
    chain = read_chain(trained.order.checkpoint_dir)
    assert chain.links[-1].step == trained.order.job.total_steps
    return chain.links[-1].tensors


JOBS = drawn_jobs(14)
GPT2 = ("gpt2", "adamw", "clipped")


# Machines of other sizes, which are compared above, have other layouts, too.
@pytest.mark.full
def test_a_job_has_the_same_bits_under_other_layouts(bench, tmp_path):
    job = exact_job(bench, "bert", "adamw", "scheduled")
    expected = reference(bench, job, tmp_path)
    for layout in (LAYOUTS[2], LAYOUTS[5]):
        assert_same_bits(bench.train(job, layout, tmp_path / layout.technique), expected)


@pytest.mark.parametrize(("model", "optimizer", "other"), matrix(JOBS, quick=[], ids="-".join))
def test_drawn_jobs_have_the_same_bits_under_all_layouts(bench, tmp_path, model, optimizer, other):
    job = exact_job(bench, model, optimizer, other)
    expected = reference(bench, job, tmp_path)
    whole_tensors = optimizer in ("adafactor", "muon")
    for number, layout in enumerate(LAYOUTS):
        if bench.num_gpus and layout.technique == "offload":  # its optimizer runs on cores
            continue
        if not (whole_tensors and layout.technique == "zero2"):
            assert_same_bits(bench.train(job, layout, tmp_path / str(number)), expected)


@pytest.mark.parametrize(
    ("other", "layout"),
    matrix(product(OTHERS, PIPELINES), quick=[("clipped", PIPELINES[0])], ids=lambda pair: str(pair)),
)
def test_pipelines_too(bench, tmp_path, layout, other):
    job = exact_job(bench, other=other)
    assert_same_bits(bench.train(job, layout, tmp_path / "pipeline"), reference(bench, job, tmp_path))


# The loss is compared under FSDP in test_losses.py, and exact jobs under FSDP where machines of all sizes are.
@pytest.mark.parametrize("layout", matrix([x for x in LAYOUTS if x.num_devices > 1], quick=[]))
@pytest.mark.parametrize("adapter", [None, Adapter(rank=4)])
@pytest.mark.parametrize(("loss", "data"), [("dpo", PREFERENCES), ("kto", UNPAIRED)], ids=["dpo", "kto"])
def test_losses_with_a_reference(bench, tmp_path, layout, adapter, loss, data):
    changes = {"loss": loss, "data": data, "adapter": adapter, "evaluation": EvaluationSpec(max_batches=2)}
    job = replace(exact_job(bench, other="clipped", **changes), model=TINY)
    assert_same_bits(bench.train(job, layout, tmp_path / "layout"), reference(bench, job, tmp_path))


def test_without_exact_the_bits_differ(bench, tmp_path):
    """Without this, the tests above would hold for any training."""
    job = replace(exact_job(bench), exact=False)
    one = bench.train(job, Layout("single", 1, {"micro_batch": 16}), tmp_path / "one")
    other = bench.train(job, LAYOUTS[0], tmp_path / "other")
    assert not is_bit_equal(one.weights, other.weights)


@pytest.mark.parametrize(("model", "optimizer", "other"), matrix([GPT2, *JOBS], quick=[], ids="-".join))
def test_switches_and_kills_leave_no_trace(bench, tmp_path, model, optimizer, other):
    job = exact_job(bench, model, optimizer, other, num_steps=12)
    expected = reference(bench, job, tmp_path)
    folder, draw = tmp_path / "switched", random.Random(model)
    layouts = [x for x in LAYOUTS if x.technique != "zero2" or optimizer not in ("adafactor", "muon")]
    layouts = [x for x in layouts if not bench.num_gpus or x.technique != "offload"]
    route = [*draw.sample(layouts, 4), SINGLE]

    def kill(gang, event):
        if isinstance(event, Steps):
            gang.kill()

    for number, layout in enumerate(route, start=1):
        bench.train(job, layout, folder, last_step=2 * number)
        killed = bench.train(job, layout, folder, on_event=kill)
        assert killed.outcome.status != "done"
    trained = bench.train(job, draw.choice(layouts), folder)
    assert trained.outcome.result.first_step == 2 * len(route)
    assert_same_bits(trained, expected)


@pytest.mark.full
@pytest.mark.parametrize("layout", EIGHT, ids=str)
@pytest.mark.parametrize("model", ["llama", "t5"])
def test_eight_ranks_too(bench, tmp_path, layout, model):
    job = exact_job(bench, model, other="clipped", exact_chunk=2)
    expected = bench.train(job, Layout("single", 1, {"micro_batch": 2}), tmp_path / "single")
    assert_same_bits(bench.train(job, layout, tmp_path / "eight"), expected)


def chosen_on(bench, job, num_devices):
    """Returns the job as a machine with so many devices would train it, and the layouts that it would choose from."""
    layouts = []
    for name in ("single", "ddp", "fsdp"):
        order = PreflightOrder(
            jobs=(job,),
            shapes=tuple(bench.shape(n) for n in range(1, num_devices + 1)),
            techniques={name: registry.dotted_path(name)},
            cache_dir=str(bench.cache_dir),
        )
        found = preflight_job(job, order)
        first = {each.num_devices: each for each in reversed(found.candidates)}
        layouts += [Layout(name, number, dict(each.config)) for number, each in first.items()]
    return found.settled(job), layouts


@pytest.mark.parametrize(
    ("global_batch_size", "chunk", "largest_gang"),
    matrix([(16, 4, 4), (32, 4, 8), (12, 6, 2), (24, 6, 4), (15, 15, 1), (3, 3, 1)], quick=[(12, 6, 2)]),
)
def test_machines_of_all_sizes_give_the_same_bits(bench, tmp_path, global_batch_size, chunk, largest_gang):
    plain = replace(exact_job(bench, other="clipped"), exact_chunk=None, global_batch_size=global_batch_size)
    allowed = {(1, None), (2, (1,)), (2, (2,)), (4, None), (8, None), (8, (2, 8))}
    trained = {}
    for machine, num_devices in sorted(allowed, key=str):
        job, layouts = chosen_on(bench, replace(plain, num_devices=num_devices), machine)
        assert job.exact_chunk == chunk
        for layout in layouts:
            if str(layout) not in trained:
                folder = tmp_path / str(len(trained))
                trained[str(layout)] = layout.num_devices, bench.train(replace(job, num_devices=None), layout, folder)
    (_, expected), *others = trained.values()
    for _, other in others:
        assert_same_bits(other, expected)
    assert max(number for number, _ in trained.values()) == largest_gang


def test_a_chunk_that_fits_no_device_is_refused_and_not_made_smaller(bench):
    job = replace(exact_job(bench), exact_chunk=None, num_devices=(1,))
    small = GangShape(kind="cpu", num_devices=1, memory_bytes=1 << 10)
    order = PreflightOrder(
        jobs=(job,),
        shapes=(small,),
        techniques={"single": registry.dotted_path("single")},
        cache_dir=str(bench.cache_dir),
    )
    found = preflight_job(job, order)
    assert found.candidates == ()
    whole = next(refusal for refusal in found.refusals if refusal.config is None)
    assert whole.is_too_large
    assert "in chunks of 4 samples (exact_chunk sets the chunk)" in whole.reason
    assert {refusal.config["micro_batch"] for refusal in found.refusals if refusal.config} == {4}


def test_a_job_that_has_begun_keeps_its_chunk(bench):
    """Earlier releases chose chunks by the devices of a node; a run that is resumed has recorded its own."""
    job = replace(exact_job(bench), exact_chunk=None)
    data = prepare(job.data, cache_dir=bench.cache_dir)
    begun = Preflight(job=job.name, data=to_json(data), facts=FACTS, candidates=(), refusals=(), exact_chunk=8)
    resumed, layouts = chosen_on(bench, begun.settled(job), 2)
    assert resumed.exact_chunk == 8
    assert {layout.config["micro_batch"] for layout in layouts} == {8}


def test_a_checkpoint_of_other_chunks_is_refused(bench, tmp_path):
    job = exact_job(bench)
    bench.train(job, SINGLE, tmp_path, last_step=2)
    outcome = bench.train(job, Layout("ddp", 2, {"micro_batch": 8}), tmp_path).outcome
    assert "in chunks of 4 samples, and not of 8. To fix: set exact_chunk: 4" in outcome.message
