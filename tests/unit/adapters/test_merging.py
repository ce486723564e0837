"""A model with a merged adapter computes the same as with the adapter attached to its base."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ringmaster.techniques import Adapter
from ringmaster.techniques.models.adapter_modules import merge
from ringmaster.techniques.models.adapters import attach, trained_names

TOKENS = torch.arange(24).reshape(2, 12)


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=40
    )
    return LlamaForCausalLM(config).eval()


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, bos_token_id=0)).eval()


def stirred(model, adapter):
    """Attaches an adapter, and moves its trained weights away from their first values."""
    attach(model, adapter, seed=1)
    torch.manual_seed(2)
    names = trained_names(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("adapter", [Adapter(rank=3, rank_stabilised=True), Adapter(kind="ia3")], ids=["lora", "ia3"])
def test_a_merged_adapter_gives_the_same_logits_without_modules_of_its_own(make, adapter):
    model = stirred(make(), adapter)
    beside = model(TOKENS).logits
    merge(model)
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in make().named_parameters()}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.allclose(model(TOKENS).logits, beside, atol=2e-6)
    assert not torch.allclose(make()(TOKENS).logits, beside, atol=1e-2)


def test_a_head_of_its_own_on_a_tied_base_is_not_tied_again_by_whoever_loads_the_model():
    own = merge(stirred(gpt2(), Adapter(rank=2, modules_to_save=("lm_head",))))
    assert not torch.equal(own.lm_head.weight, own.transformer.wte.weight)
    assert not own.config.tie_word_embeddings
    assert merge(stirred(gpt2(), Adapter(rank=2))).config.tie_word_embeddings


def test_a_prefix_cannot_be_merged():
    with pytest.raises(ValueError, match="a prefix cannot be merged"):
        merge(stirred(llama(), Adapter(kind="prefix", num_virtual_tokens=3)))


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_a_head_that_is_tied_to_the_embedding_is_merged_into_a_weight_of_its_own(kind):
    feedforward = () if kind == "lora" else ("lm_head",)
    model = stirred(gpt2(), Adapter(kind=kind, targets=("c_attn", "lm_head"), feedforward=feedforward))
    before, embedding = model(TOKENS).logits, model.transformer.wte.weight.clone()
    merge(model)
    assert torch.allclose(model(TOKENS).logits, before, atol=1e-5)
    assert torch.equal(model.transformer.wte.weight, embedding)
    assert not model.config.tie_word_embeddings


def test_a_weight_that_two_modules_share_cannot_be_merged_into():
    """Merging into one layer would also change the other."""
    model = gpt2()
    model.transformer.h[1].mlp.c_fc.weight = model.transformer.h[0].mlp.c_fc.weight
    stirred(model, Adapter(targets=("h.0.mlp.c_fc",)))
    before = model(TOKENS).logits
    with pytest.raises(ValueError, match=r"h.0.mlp.c_fc, which it adapts, shares its weight .*To fix"):
        merge(model)
    assert torch.equal(model(TOKENS).logits, before)
