"""The batch of smaller models for one that breaks a limit: chains of pruning, recovery and quantization."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ringmaster.errors import InputError
from ringmaster.features.adaptation.structured_pruning import tensor_sources
from ringmaster.flows.retraining import shrinking
from ringmaster.tasks.retraining.policy import PromotionPolicy
from ringmaster.techniques import DataSpec, Job, ModelSpec

P99 = "latency/p99_s"
POLICY = PromotionPolicy(name="quick", significance=None, limits={P99: (-math.inf, 0.02)})
SIZES = {"vocab_size": 8, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 6}


def model(**changes):
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SIZES | changes))


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Plans the children of a small Llama, whose p99 is the argument."""
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    spec = ModelSpec(architecture="LlamaForCausalLM", config={**SIZES, "layer_types": list("abcdef")})
    job = Job(name="texts", model=spec, data=DataSpec(source="python-stdlib", seq_len=8), num_steps=7)
    training = SimpleNamespace(job=job)
    monkeypatch.setattr(shrinking, "RecordedTraining", SimpleNamespace(of=lambda home, node: training))
    monkeypatch.setattr(shrinking, "missing_extra", lambda extra, feature: None)
    home, node = SimpleNamespace(model_dir=lambda node: tmp_path), SimpleNamespace(label="texts/3")
    return lambda p99_s: shrinking.plan_children(home, node, POLICY, {P99: p99_s})


def test_a_model_is_pruned_taught_and_quantized_in_one_chain(plan):
    jobs = {job.name: job for job in plan(0.03).jobs}
    assert len(jobs) == 10
    uri = "models:/texts/3"
    for shape, size in (("3-layers", {"num_hidden_layers": 3}), ("24-wide", {"intermediate_size": 24})):
        pruned, student, quantized = (jobs[f"texts-{shape}{end}"] for end in ("-pruned", "", "-int8"))
        assert (pruned.base, pruned.adaptation.kind, pruned.num_steps) == (uri, "pruned", 0)
        assert (student.base, student.adaptation.teacher, student.num_steps) == (pruned.name, uri, 7)
        assert (quantized.base, quantized.adaptation.kind, quantized.num_steps) == (student.name, "quantized", 0)
        assert pruned.model == student.model == quantized.model
        tensor_sources(model(), model(**size))  # it is a part of the model
        assert size.items() <= student.model.config.items()
    assert jobs["texts-3-layers"].model.config["layer_types"] == list("acf"), "each layer keeps its kind"
    assert jobs["texts-24-wide"].model.config["layer_types"] == list("abcdef")
    assert jobs["texts-int8"].base == uri


def test_what_keeps_no_limit_by_its_size_is_not_trained(plan):
    names = {job.name for job in plan(0.5).jobs}  # a 28th of the time: not even one layer
    assert names == {"texts-int8"}


def test_without_torchao_no_child_is_quantized(plan, monkeypatch):
    monkeypatch.setattr(shrinking, "missing_extra", lambda extra, feature: f"{feature} needs {extra}")
    assert not [job.name for job in plan(0.03).jobs if job.adaptation.kind == "quantized"]
    with pytest.raises(InputError, match="not made smaller: quantization needs torchao"):
        plan(0.5)


def test_a_limit_that_no_smaller_model_keeps_is_told(plan, monkeypatch):
    monkeypatch.setattr(shrinking, "FAMILY", "memory")
    with pytest.raises(InputError, match="a smaller model would not mend it"):
        plan(0.03)
