import dataclasses

import pytest
from torch import nn

from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.models.layers import layer_names
from tests.unit.models.conftest import FOUR, GPT2, IMAGES, LLAMA, TOKENS


@pytest.mark.parametrize(("spec", "data"), FOUR)
def test_facts_say_what_the_built_model_is(spec, data):
    model = build_model(spec, data=data, seed=0)
    facts = model_facts(spec, data=data)
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())
    assert facts.parameter_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert facts.num_layers == len(layer_names(model)) == 2
    largest = max(sum(p.numel() for p in model.get_submodule(name).parameters()) for name in layer_names(model))
    assert 4 * largest <= facts.largest_layer_bytes < facts.parameter_bytes


def test_dropout_is_noticed():
    facts = {spec.architecture: model_facts(spec, data=data) for spec, data in FOUR}
    assert [name for name, fact in facts.items() if fact.has_dropout] == [GPT2.architecture]
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    assert not model_facts(dataclasses.replace(GPT2, config={**GPT2.config, **none}), data=TOKENS).has_dropout
    functional = dataclasses.replace(LLAMA, config={**LLAMA.config, "attention_dropout": 0.1})
    assert model_facts(functional, data=TOKENS).has_dropout


def test_experts_are_noticed_where_there_are_several():
    config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    mixture = ModelSpec(architecture="MixtralForCausalLM", config={**config, "num_local_experts": 2})
    assert model_facts(mixture, data=TOKENS).has_experts
    assert not any(model_facts(spec, data=data).has_experts for spec, data in FOUR)


def test_layers_are_named_in_order():
    names = {spec.architecture: layer_names(build_model(spec, data=data, seed=0)) for spec, data in FOUR}
    assert names == {
        "LlamaForCausalLM": ("model.layers.0", "model.layers.1"),
        "GPT2LMHeadModel": ("transformer.h.0", "transformer.h.1"),
        "ViTForImageClassification": ("vit.layers.0", "vit.layers.1"),
        "ResNetForImageClassification": ("resnet.encoder.stages.0", "resnet.encoder.stages.1"),
    }


def test_layers_of_a_users_model(users):
    assert layer_names(build_model(ModelSpec(factory=f"{users}:tied"), data=TOKENS, seed=0)) == (
        "blocks.0", "blocks.1", "blocks.2",
    )  # fmt: skip
    assert layer_names(build_model(ModelSpec(factory=f"{users}:stack"), data=TOKENS, seed=0)) == ("0", "2")
    assert layer_names(nn.Linear(2, 2)) == ()
    inner = nn.ModuleList([nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]), nn.ReLU()])
    assert layer_names(nn.Sequential(inner)) == ("0.0.0", "0.0.1")


def test_facts_of_a_users_model(users):
    tied = model_facts(ModelSpec(factory=f"{users}:tied", kwargs={"dropout": 0.5}), data=TOKENS)
    assert (tied.num_parameters, tied.num_layers, tied.has_dropout) == (16 * 8 + 3 * 72, 3, True)
    assert tied.largest_layer_bytes == 4 * 16 * 8
    assert model_facts(ModelSpec(factory=f"{users}:looks"), data=IMAGES).num_parameters == 3


def test_facts_cost_no_memory_for_weights():
    """70 billion parameters are counted on a machine that could not hold them."""
    big = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    facts = model_facts(ModelSpec(architecture="LlamaForCausalLM", config=big), data=TOKENS)
    assert facts.num_parameters > 60e9
    assert facts.num_layers == 80
