"""Recomputation, tested by counting operators, independently of clock and allocator."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from ringmaster.techniques.training.recomputation import recompute_layers

TOKENS = torch.arange(32).view(2, 16)


class Counting(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def forward_backward(mode):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, use_cache=False))
    recompute_layers(model, mode)
    with Counting() as operators:
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return operators.counts, gradients


def test_products_are_computed_again_only_in_full():
    none, selective, full = (forward_backward(mode)[0]["mm"] for mode in ("none", "selective", "full"))
    assert selective == none < full


def test_what_is_cheap_is_computed_again():
    none, selective = (forward_backward(mode)[0] for mode in ("none", "selective"))
    assert selective["rsqrt"] > none["rsqrt"]  # the layers' norms
    assert selective["silu"] == 2 * none["silu"]
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert selective[attention] == none[attention] == 2


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_are_the_same_bit_by_bit(mode):
    assert torch.equal(forward_backward(mode)[1], forward_backward("none")[1])


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="there are none, selective, full"):
        recompute_layers(torch.nn.Linear(1, 1), "some")
