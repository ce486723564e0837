"""Exact dropout, including attention dropout, stochastic depth and LayerDrop: equal under every division of a batch."""

from dataclasses import replace

import pytest

from ringmaster.techniques import DataSpec, ModelSpec, registry
from ringmaster.techniques.data import prepare
from ringmaster.techniques.probing import probe
from ringmaster.techniques.training import trainer
from tests.integration.techniques.test_conformance import LARGEST_DIFFERENCE
from tests.integration.workbench import (
    ADAMW,
    GPT2_WITH_DROPOUT,
    SGD,
    SINGLE,
    Layout,
    is_bit_equal,
    largest_difference,
)
from tests.matrix import matrix

LAYERS = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
SIDES = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in {
    "layers": 2, "attention_heads": 4, "ffn_dim": 64,
}.items()}  # fmt: skip
RATES = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
T5 = ModelSpec(
    architecture="T5ForConditionalGeneration",
    config={
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "initializer_factor": 0.2,
    },
)
BERT = ModelSpec(architecture="BertForMaskedLM", config={**LAYERS, **RATES})
FAMILIES = {
    "bert": BERT,
    "gpt2": GPT2_WITH_DROPOUT,
    "t5": T5,
    "bart": ModelSpec(
        architecture="BartForConditionalGeneration",
        config={"d_model": 32, **SIDES, "attention_dropout": 0.1, "activation_dropout": 0.1},
    ),
    "deberta": ModelSpec(
        architecture="DebertaV2ForMaskedLM",
        config={**LAYERS, **RATES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    ),
    "swin": ModelSpec(
        architecture="SwinForImageClassification",
        config={"patch_size": 1, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
                "drop_path_rate": 0.3, **RATES},
    ),
}  # fmt: skip
DIVIDED = [
    Layout("single", 1, {"micro_batch": 3}),
    Layout("single", 1, {"recompute": "full"}),
    Layout("ddp", 2),
    Layout("ddp", 2, {"micro_batch": 1, "recompute": "selective"}),
    Layout("fsdp", 2, {"reshard": True, "micro_batch": 2, "recompute": "full"}),
    Layout("zero1", 2, {"micro_batch": 2}),
    Layout("zero2", 2, {"bucket_bytes": 1 << 14}),
    Layout("fsdp_static", 2, {"reshard": True}),
    Layout("offload", 1, {"num_slices": 2, "recompute": "full", "host_activations": True}),
]
CASES = [(family, layout, name) for family in FAMILIES for layout in DIVIDED for name in ("sgd", "adamw")]
QUICK = [
    ("bert", DIVIDED[4], "sgd"),  # on two ranks of DDP it is trained before a switch below
    *((family, DIVIDED[0], "sgd") for family in ("t5", "swin")),
]


def job_of(bench, family, **changes):
    job = bench.job(FAMILIES[family], **changes)
    return replace(job, data=DataSpec(source="digits")) if family == "swin" else job


def case_name(case):
    return f"{case[0]}-{case[1]}-{case[2]}"


@pytest.mark.parametrize(("family", "layout", "optimizer"), matrix(CASES, quick=QUICK, ids=case_name))
def test_every_division_drops_out_the_same(bench, tmp_path, family, layout, optimizer):
    job = job_of(bench, family, optimizer={"sgd": SGD, "adamw": ADAMW}[optimizer])
    trained, expected = bench.train(job, layout, tmp_path), bench.reference(job)
    assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE[optimizer]
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=2e-6)


def test_something_is_dropped(bench):
    """Without a difference, the other tests would hold for a dropout that does nothing."""
    none = replace(BERT, config={**BERT.config, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    with_dropout, without = (bench.reference(bench.job(model)) for model in (BERT, none))
    assert largest_difference(with_dropout.weights, without.weights) > 1e-3


@pytest.mark.parametrize("schedule", matrix(["gpipe", "1f1b", "zero_bubble", "interleaved"], quick=["1f1b"]))
@pytest.mark.parametrize("recompute", matrix(["none", "full"], quick=["full"]))
def test_the_stages_of_a_pipeline_too(bench, tmp_path, schedule, recompute):
    deep = replace(GPT2_WITH_DROPOUT, config={**GPT2_WITH_DROPOUT.config, "n_layer": 4})
    layout = Layout("pipeline", 2, {"micro_batch": 2, "schedule": schedule, "recompute": recompute})
    job = bench.job(deep)
    trained, expected = bench.train(job, layout, tmp_path), bench.reference(job)
    assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE["sgd"]


@pytest.mark.full
def test_layers_that_are_dropped_as_a_whole(bench, tmp_path):
    """One draw a step selects the dropped layers, whichever part of the model a rank computes."""
    bart = replace(FAMILIES["bart"], config={**FAMILIES["bart"].config, "encoder_layerdrop": 0.4})
    job = bench.job(bart)
    for layout in (DIVIDED[0], *DIVIDED[2:6]):
        trained = bench.train(job, layout, tmp_path / layout.technique)
        assert largest_difference(trained.weights, bench.reference(job).weights) <= LARGEST_DIFFERENCE["sgd"]


def test_a_switch_on_the_way_changes_nothing(bench, tmp_path):
    job = bench.job(BERT)
    bench.train(job, Layout("ddp", 2), tmp_path, last_step=3)
    trained = bench.train(job, Layout("single", 1, {"micro_batch": 2}), tmp_path)
    assert trained.outcome.result.first_step == 3
    assert largest_difference(trained.weights, bench.reference(job).weights) <= LARGEST_DIFFERENCE["sgd"]


def test_what_an_earlier_release_began_goes_on_as_it_began(bench, tmp_path, monkeypatch):
    """Old checkpoints do not record the scheme: dropout from torch's generator, seeded by rank and micro-batch."""
    monkeypatch.setattr(trainer, "draws_of", trainer.draws_of)  # the technique replaces it where it is loaded: here too
    job = bench.job(GPT2_WITH_DROPOUT)
    layout = Layout("tests.integration.stubs:DrawingAsBefore")
    whole = bench.train(job, layout, tmp_path / "whole")
    bench.train(job, layout, tmp_path / "halves", last_step=3)
    after = bench.train(job, SINGLE, tmp_path / "halves")
    assert is_bit_equal(after.weights, whole.weights)
    assert not is_bit_equal(after.weights, bench.reference(job).weights)


@pytest.mark.parametrize("layout", [Layout("tensor", 2), Layout("context", 2)], ids=str)
def test_layouts_that_know_no_masks_are_refused(bench, layout):
    llama = ModelSpec(architecture="LlamaForCausalLM", config={"attention_dropout": 0.1, **LAYERS})
    job = bench.job(llama)
    facts = bench.facts(job)
    assert facts.has_dropout
    assert "drops out" in registry.load(layout.path).supports(job, bench.shape(2), facts)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_a_loss_that_compares_samples_is_trained_by_what_keeps_a_batch_whole(bench, tmp_path, optimizer):
    job = bench.job(loss="tests.unit.probing.samples:contrast", optimizer=optimizer)
    layout = Layout("tensor", 2, {"micro_batch": 8, "sequence_parallel": False, "loss_parallel": False})
    facts = bench.facts(job)
    assert registry.load(layout.path).supports(job, bench.shape(2), facts) is None
    assert "several samples together" in registry.load(registry.dotted_path("ddp")).supports(job, bench.shape(2), facts)
    trained = bench.train(job, layout, tmp_path)
    # The loss multiplies similarities by five, and with them what gradients are rounded by.
    within = LARGEST_DIFFERENCE[optimizer.name] * (5 if optimizer.name == "sgd" else 1)
    assert largest_difference(trained.weights, bench.reference(job).weights) <= within


def test_compiled_dropout_keeps_its_batch_whole(bench):
    job = replace(bench.job(BERT, compile=True), data=DataSpec(factory="tests.unit.probing.samples:masked"))
    for name in ("ddp", "fsdp", "pipeline"):
        assert registry.load(registry.dotted_path(name)).supports(job, bench.shape(2), bench.facts(job))
    configs = list(registry.load(SINGLE.path).configs(job, bench.shape(1), bench.facts(job)))
    assert [config["micro_batch"] for config in configs] == [job.global_batch_size]


def test_a_users_data_set_may_draw_for_each_sample(bench, tmp_path):
    """Random augmentation of an image is an example: it is the same for every reader."""
    job = bench.job(
        ModelSpec(factory="tests.integration.stubs:dropping_line"),
        data=DataSpec(factory="tests.integration.stubs:noisy_points"),
        loss="tests.integration.stubs:squared_error",
    )
    for layout in (Layout("single", 1, {"micro_batch": 2}), Layout("ddp", 2)):
        trained = bench.train(job, layout, tmp_path / layout.technique)
        assert largest_difference(trained.weights, bench.reference(job).weights) <= LARGEST_DIFFERENCE["sgd"]


def test_the_probe_is_taken_once_for_jobs_that_are_alike(bench, tmp_path):
    masked = DataSpec(factory="tests.unit.probing.samples:masked")
    job = replace(bench.job(BERT), data=masked)
    data = prepare(job.data, cache_dir=bench.cache_dir)
    found = probe(job, data=data, cache_dir=tmp_path)
    written = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "probes").iterdir()}
    assert {name.partition("-")[0] for name in written} == {"step", "draws"}
    assert found.sites.draws
    assert not found.undivided
    assert probe(replace(job, name="other", seed=5), data=data, cache_dir=tmp_path) == found
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "probes").iterdir()} == written
