"""A base computes the same for several adapters at once as for each, whatever its architecture."""

import copy

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from ringmaster.techniques.multi_adapter.adapter_batches import AdapterBatch
from ringmaster.techniques.multi_adapter.adapter_runs import AdapterModules
from ringmaster.techniques.multi_adapter.multi_adapter_base import MultiAdapterBase

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STATE_SPACE = {
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "num_key_value_heads": 2,
}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def opt():
    """A model whose head calls a part of its decoder, and so cannot be given hidden states."""
    narrow = {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}
    return OPTForCausalLM(OPTConfig(**SMALL, **narrow))


def roberta():
    """A model whose positions start after that of padding."""
    return RobertaForCausalLM(RobertaConfig(**SMALL, **NO_DROPOUT, is_decoder=True))


def falcon():
    """A model with its own implementation of attention."""
    return FalconForCausalLM(FalconConfig(**SMALL, alibi=False))


def bamba():
    """A model with a state space over all tokens of a row."""
    return BambaForCausalLM(BambaConfig(**SMALL, **STATE_SPACE))


def lfm2():
    """A model with convolutions over the tokens of a row."""
    return Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"], num_key_value_heads=2))


@pytest.mark.parametrize(
    ("make", "packs"),
    [(llama, True), (opt, True), (roberta, False), (falcon, False), (bamba, False), (lfm2, False)],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_samples_of_several_adapters_say_what_they_say_alone(make, packs):
    torch.manual_seed(0)
    model = make().eval()
    draw = torch.Generator().manual_seed(1)
    samples = [torch.randint(3, 60, shape, generator=draw) for shape in ((2, 16), (3, 16), (2, 12))]
    stem = MultiAdapterBase(copy.deepcopy(model))
    with torch.no_grad():
        together = stem.forward(
            [AdapterBatch(adapter_modules=AdapterModules(), inputs={"input_ids": tokens}) for tokens in samples]
        )
        for tokens, found in zip(samples, together, strict=True):
            assert torch.equal(found.logits, model(input_ids=tokens).logits)
    assert stem.packs is packs


def test_the_head_of_a_llama_is_computed_by_itself():
    """Holds also where the first token is padding, whose embedding is zero."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0))
    assert MultiAdapterBase(model)._head is not None
    assert MultiAdapterBase(opt())._head is None
