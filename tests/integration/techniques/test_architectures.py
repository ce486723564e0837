"""Architectures: which of them train exactly under which technique, and the refusals of the others."""

import pytest

from ringmaster.techniques import ModelSpec, registry
from tests.integration.techniques.test_conformance import SWITCHED, assert_trains_the_same
from tests.integration.workbench import Layout
from tests.matrix import matrix

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
DECODERS = {
    "Qwen2ForCausalLM": {},  # biases
    "Qwen3ForCausalLM": {"head_dim": 16},  # norms of attention heads
    "MistralForCausalLM": {"sliding_window": 8},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Phi3ForCausalLM": {"pad_token_id": 0},  # fused projections
    "GemmaForCausalLM": {"head_dim": 16},  # scaled embeddings
}
ONE_EACH = [  # run on every change: each combines a special feature of a model with one of a technique
    ("MixtralForCausalLM", Layout("fsdp", 2, {"reshard": True})),
    ("MixtralForCausalLM", Layout("zero2", 2, {"bucket_bytes": 1 << 14})),
    ("MixtralForCausalLM", Layout("pipeline", 2, {"micro_batch": 4, "schedule": "1f1b"})),
    ("MistralForCausalLM", Layout("context", 2, {"micro_batch": 8, "exchange": "all_gather", "sharded": False})),
    ("Qwen3ForCausalLM", SWITCHED[[x.technique for x in SWITCHED].index("tensor")]),
    ("Phi3ForCausalLM", Layout("pipeline", 2, {"micro_batch": 2, "schedule": "gpipe", "recompute": "selective"})),
]
REFUSED = {  # pairs of architecture and technique that are refused, with a part of the message
    ("MixtralForCausalLM", "tensor"): "does not know how to divide",
    ("Phi3ForCausalLM", "tensor"): "qkv_proj",
    ("GemmaForCausalLM", "pipeline"): "does not know how to cut GemmaForCausalLM",
    ("GemmaForCausalLM", "context"): "it knows",
}
TAKEN = [
    (architecture, layout)
    for layout in SWITCHED
    for architecture in DECODERS
    if layout.technique not in ("single", "mesh") and (architecture, layout.technique) not in REFUSED
]


def spec(architecture):
    return ModelSpec(architecture=architecture, config={**SIZES, **DECODERS[architecture]})


def reason(bench, job, layout):
    return registry.load(layout.path).supports(job, bench.shape(layout.num_devices), bench.facts(job))


@pytest.mark.parametrize(("architecture", "layout"), matrix(ONE_EACH, quick=ONE_EACH[::2]))
def test_what_a_model_has_of_its_own_is_trained_exactly(bench, tmp_path, architecture, layout):
    assert_trains_the_same(bench, bench.job(spec(architecture)), layout, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("architecture", "layout"), TAKEN, ids=str)
def test_every_kind_under_every_technique_that_takes_it(bench, tmp_path, architecture, layout):
    job = bench.job(spec(architecture), techniques=(layout.technique,))
    assert reason(bench, job, layout) is None
    assert_trains_the_same(bench, job, layout, tmp_path)


@pytest.mark.parametrize(("architecture", "technique"), REFUSED)
def test_what_is_not_known_is_refused_in_words(bench, architecture, technique):
    layout = next(x for x in SWITCHED if x.technique == technique)
    assert REFUSED[architecture, technique] in reason(bench, bench.job(spec(architecture)), layout)
