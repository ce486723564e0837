"""Modules that an adapter trains whole: which modules are chosen, and that tied weights stay as they are."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ringmaster.techniques import Adapter, ModelSpec
from ringmaster.techniques.models.adapters import attach, own_leaves, sites, trained_names


@pytest.fixture(scope="module")
def llama():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes))


def gpt2():
    config = GPT2Config(vocab_size=10, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def saving(*names):
    return Adapter(rank=2, targets=("q_proj",), modules_to_save=names)


def test_modules_are_their_leaves(llama):
    found = own_leaves(llama, saving("lm_head", "mlp", "norm", "embed_tokens"))
    assert found == [
        "model.embed_tokens",
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.down_proj",
        "model.norm",
        "lm_head",
    ]
    assert own_leaves(llama, Adapter(rank=2)) == []


def test_what_mixes_samples_or_leaves_no_target_is_refused(llama):
    with pytest.raises(ValueError, match=r"all that its targets name is in its modules_to_save, self_attn"):
        sites(llama, saving("self_attn"))
    with pytest.raises(ValueError, match=r"wpe.* is of class Embedding"):
        own_leaves(gpt2(), Adapter(modules_to_save=("wpe",)))


def test_what_a_module_is_tied_to_stays_frozen():
    model = attach(gpt2(), Adapter(rank=2, targets=("c_attn",), modules_to_save=("lm_head",)), seed=0)
    assert trained_names(model) == {
        "transformer.h.0.attn.c_attn.lora_A.weight",
        "transformer.h.0.attn.c_attn.lora_B.weight",
        "lm_head.weight",
    }


@pytest.mark.parametrize(
    ("spec", "is_drawn"),
    [
        (ModelSpec(architecture="LlamaForCausalLM"), True),
        (ModelSpec(factory="here:model"), True),
        (ModelSpec(from_pretrained="org/base"), False),
        (ModelSpec(from_pretrained="org/base", config={"num_labels": 3}), True),
    ],
)
def test_a_fresh_head_follows_from_the_seed(spec, is_drawn):
    assert spec.is_drawn is is_drawn


def test_weights_that_are_used_in_another_way_than_by_the_modules_forward_are_refused():
    class ShiftedRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "norm": ShiftedRMSNorm(), "head": nn.Linear(4, 4)})
    for name, kind in (("out_proj", "NonDynamicallyQuantizableLinear"), ("norm", "ShiftedRMSNorm")):
        with pytest.raises(ValueError, match=f"{name}, which it trains as it is, is of class {kind}"):
            own_leaves(model, Adapter(targets=("head",), modules_to_save=(name,)))
