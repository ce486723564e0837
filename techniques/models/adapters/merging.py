"""Merging of adapters into the weights of the modules that they adapt."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from ringmaster.techniques.models.adapters.modules import (
    LORA,
    PREFIX,
    SCALED_INPUT,
    SCALED_OUTPUT,
    LoraConv1D,
    LoraLinear,
)

PLAIN = {adapted: plain for kinds in (SCALED_INPUT, SCALED_OUTPUT) for plain, adapted in kinds.items()}
LORA_PLAIN = {adapted: plain for plain, adapted in LORA.items()}
INPUTS = tuple(SCALED_INPUT.values())


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Merges the adapters of linear modules into their weights, in place: W <- W + s B A, or l W, or W l.

    Raises ValueError for a prefix, which cannot be expressed as weights, and where another module shares a weight.
    """
    if PREFIX in model._parameters:
        raise ValueError("adapter: a prefix cannot be merged into weights. To fix: take what it is on as base")
    _check_untied(model)
    for module in model.modules():
        kind = type(module)
        if isinstance(module, (LoraLinear, LoraConv1D)):
            product = module.lora_B.weight @ module.lora_A.weight * module.scaling
            weight = module.weight
            assert isinstance(weight, Tensor)
            weight += product if isinstance(module, LoraLinear) else product.T
            del module.lora_A, module.lora_B
            module.__class__ = LORA_PLAIN[kind]  # type: ignore[assignment]
        elif kind in PLAIN:
            _scale(module, by_input=isinstance(module, INPUTS), is_transposed=not isinstance(module, nn.Linear))
            del module.ia3_l
            module.__class__ = PLAIN[kind]
    _note_own_head(model)
    return model.requires_grad_(True)


def _note_own_head(model: nn.Module) -> None:
    """Marks a head that was saved whole as untied, so that loading the model does not tie it to the embedding again."""
    config, heads = getattr(model, "config", None), getattr(model, "get_output_embeddings", lambda: None)
    head = heads()
    if head is not None and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = head.weight is model.get_input_embeddings().weight  # type: ignore[operator,union-attr]


def _check_untied(model: nn.Module) -> None:
    """Raises ValueError where another module shares an adapted weight, as merging would change that module too."""
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for name, module in model.named_modules():
        is_adapted = type(module) in PLAIN or type(module) in LORA_PLAIN
        if is_adapted and any(holders[id(p)] > 1 for p in module.parameters(recurse=False)):
            raise ValueError(
                f"adapter: {name}, which it adapts, shares its weight with another module, and merged into one it "
                "would change both. To fix: take what it is on as base, or adapt other targets, or a model whose "
                "embeddings are not tied"
            )


def _scale(module: nn.Module, *, by_input: bool, is_transposed: bool) -> None:
    """Multiplies the weight, and in the output case the bias, by the factors.

    The weight is [out, in], or [in, out] where `is_transposed`.
    """
    weight, factors, bias = module.weight, module.ia3_l, getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    assert isinstance(factors, Tensor)
    flat = factors.flatten()
    weight *= flat if by_input != is_transposed else flat.unsqueeze(1)
    if bias is not None and not by_input:
        bias *= flat
