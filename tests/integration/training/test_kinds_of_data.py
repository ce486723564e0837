"""Samples of different lengths, with uneven numbers of labelled tokens: every technique trains what `single` trains."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from ringmaster.techniques import Adapter, registry
from ringmaster.techniques.data import open_data, width_of
from ringmaster.techniques.data.samples import sampler_of
from ringmaster.techniques.processes.order import TRAIN, TRIAL
from ringmaster.techniques.processes.ranks import alone
from ringmaster.techniques.training.fused.group_requirements import grouping_obstacle
from ringmaster.techniques.training.trainer import WARM_UP_STEPS, Trainer
from tests.integration.groups.test_shared_base import group_of, run
from tests.integration.kinds import BERT, MODELS, VARIANTS, job_of
from tests.integration.techniques.test_conformance import (
    LARGEST_DIFFERENCE,
    MODEL_PARALLEL,
    PARALLEL,
    PLAIN_MESH,
    SPILLED,
    assert_trains_the_same,
)
from tests.integration.workbench import ADAMW, SINGLE, Layout, is_bit_equal, largest_difference, weights_in
from tests.matrix import matrix

DECODERS = ("chat", "completion")

DATA_PARALLEL = [
    Layout("single", 1, {"micro_batch": 3}),
    Layout("ddp", 2, {"micro_batch": 3}),
    *PARALLEL,
    SPILLED,
]
CASES = [(kind, layout) for kind in MODELS for layout in DATA_PARALLEL] + [
    (kind, layout)
    for kind in DECODERS
    for layout in MODEL_PARALLEL
    if kind == "chat" or layout.technique in ("context", "pipeline")  # GPT-2's layers are not divided
]
CASES += [
    ("packed", Layout("tensor", 2, {"micro_batch": 4, "sequence_parallel": True, "loss_parallel": True})),
    ("packed", Layout("mesh", 4, {"micro_batch": 4, "pp": 1, "dp_shard": 2, "tp": 2, **PLAIN_MESH})),
    ("packed", Layout("ddp", 2, {"recompute": "full"})),
    ("packed", Layout("ddp", 2, {"recompute": "selective"})),
    ("grouped", Layout("pipeline", 2, {"micro_batch": 2, "schedule": "1f1b"})),
]
QUICK = [
    ("seq2seq", Layout("fsdp", 2, {"reshard": True})),
    ("chat", MODEL_PARALLEL[1]),
    ("packed", Layout("ddp", 2, {"micro_batch": 3})),
]
assert MODEL_PARALLEL[1].technique == "context"


@pytest.fixture(scope="module")
def job(bench, tmp_path_factory):
    """A function job(kind, **changes) that returns a tiny job."""
    return partial(_job, bench, tmp_path_factory.mktemp("kinds"))


def _job(bench, folder, kind, **changes):
    return job_of(bench, kind, folder, **changes)


@pytest.mark.parametrize(("kind", "layout"), matrix(CASES, quick=QUICK, ids=lambda case: f"{case[0]}-{case[1]}"))
def test_samples_of_different_lengths_train_the_same(bench, job, tmp_path, kind, layout):
    assert reason(bench, job(kind, techniques=(layout.technique,)), layout) is None
    assert_trains_the_same(bench, job(kind), layout, tmp_path)


def reason(bench, job, layout):
    return registry.load(layout.path).supports(job, bench.shape(layout.num_devices), bench.facts(job))


def test_a_trial_takes_the_steps_of_training(bench, job, tmp_path):
    """All of its steps are as wide as those of training, so that what it measures holds there."""

    def widths(purpose):
        order = bench.order(job("completion"), SINGLE, tmp_path / purpose, purpose=purpose)
        trainer = Trainer(order, registry.load(SINGLE.path), alone(torch.device("cpu")), beat=lambda: None)
        found = []
        hook = trainer.model.register_forward_pre_hook(
            lambda _module, _args, inputs: found.append(inputs["input_ids"].shape[1]), with_kwargs=True
        )
        for _ in range(WARM_UP_STEPS + 2):
            trainer.step()
        hook.remove()
        return found

    assert widths(TRIAL) == widths(TRAIN)
    assert len(set(widths(TRAIN))) > 1


def test_variants_train_another_model(bench, job):
    """Otherwise the cases above would test nothing but the kinds themselves."""
    for variant, (kind, _) in VARIANTS.items():
        assert bench.reference(job(variant)).losses[0] != pytest.approx(bench.reference(job(kind)).losses[0], abs=1e-4)


@pytest.mark.parametrize("layout", matrix(PARALLEL, quick=[]))
def test_dropout_of_padded_samples_too(bench, job, tmp_path, layout):
    model = replace(MODELS["token-classification"], config={**BERT, "hidden_dropout_prob": 0.1})
    assert_trains_the_same(bench, job("token-classification", model=model), layout, tmp_path)


def test_padding_to_one_length_trains_the_same_up_to_rounding(bench, job):
    narrow, wide = (
        bench.reference(job("completion", data=replace(job("completion").data, padding=padding)))
        for padding in ("longest", "max_length")
    )
    assert narrow.losses == pytest.approx(wide.losses, rel=1e-6, abs=0)  # rounding in float32
    assert largest_difference(narrow.weights, wide.weights) <= 1e-6
    training, _ = open_data(job("completion").data, cache_dir=bench.cache_dir)
    sampler = sampler_of(job("completion"), training)
    widths = [width_of(training, sampler.indices(step), multiple_of=8) for step in range(len(narrow.losses))]
    assert min(widths) < training.width  # otherwise nothing would have been padded to another length


@pytest.mark.parametrize("kind", matrix(MODELS, quick=["chat"]))
def test_training_goes_on_from_a_checkpoint(bench, job, tmp_path, kind):
    resumed, layout = job(kind, optimizer=ADAMW), Layout("fsdp", 2, {"reshard": True})
    whole = bench.train(resumed, layout, tmp_path / "whole")
    bench.train(resumed, layout, tmp_path / "halves", last_step=3)
    assert is_bit_equal(bench.train(resumed, layout, tmp_path / "halves").weights, whole.weights)
    bench.train(resumed, layout, tmp_path / "switched", last_step=2)
    switched, expected = bench.train(resumed, SINGLE, tmp_path / "switched"), bench.reference(resumed)
    assert switched.losses == pytest.approx(expected.losses[2:], rel=0, abs=1e-5)
    assert largest_difference(switched.weights, expected.weights) <= LARGEST_DIFFERENCE["adamw"]


def test_a_group_pads_samples_as_a_separate_run_does(bench, job, tmp_path):
    """Otherwise its steps cost as if each batch had the longest sample of all."""
    base = bench.reference(job("completion")).order.model_dir
    adapted = job("completion", base="stem", adapter=Adapter(rank=4))
    _, (member,) = group_of(bench, [adapted], tmp_path, weights_from=base)
    training, held_out = open_data(adapted.data, cache_dir=bench.cache_dir)
    sampler = sampler_of(adapted, training)
    for member.next_step in range(adapted.num_steps):
        width = width_of(training, sampler.indices(member.next_step), multiple_of=8)
        assert member.batch()["input_ids"].shape[1] == width
    widths = [batch["input_ids"].shape[1] for batch, _ in member.held_out()]
    assert min(widths) < held_out.width


@pytest.mark.parametrize("kind", matrix((*DECODERS, "text-classification", "causal-classifier"), quick=[]))
def test_adapters_of_one_base_train_together_as_alone(bench, job, tmp_path, kind):
    """Samples are padded to the longest of a batch in both, also where the batches of a group differ in length."""
    base = bench.reference(job(kind)).order.model_dir
    lora = job(kind, base="stem", adapter=Adapter(rank=4), optimizer=replace(ADAMW, lr=0.01))
    jobs = [
        replace(lora, name="one"),
        replace(lora, name="two", seed=1, global_batch_size=4),
        replace(lora, name="clipped", seed=2, clip_grad_norm=0.01),
    ]
    assert grouping_obstacle(jobs, bench.facts(lora)) is None
    group, members = group_of(bench, jobs, tmp_path / "group", weights_from=base)
    losses = run(group, members)
    metrics = group.evaluate(members)
    for one, member in zip(jobs, members, strict=True):
        member.save(member.order.checkpoint_dir)
        member.export(Path(member.order.model_dir), member.order.checkpoint_dir)
        by_itself = bench.train(one, SINGLE, tmp_path / one.name, weights_from=base)
        assert losses[one.name] == pytest.approx(by_itself.losses, rel=0, abs=1e-5)
        weights = weights_in(tmp_path / "group" / one.name / "model")
        assert largest_difference(weights, by_itself.weights) <= LARGEST_DIFFERENCE["adamw"]
        assert metrics[one.name] == pytest.approx(by_itself.outcome.result.metrics, abs=1e-5)
