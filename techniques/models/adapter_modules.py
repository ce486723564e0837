"""Modules with adapters: linear layers with low-rank summands or factors, and models with a prefix.

An adapted module keeps its name, its weights and their names, and gets further parameters: `q_proj.weight` stays, and
`q_proj.lora_A.weight` and `q_proj.lora_B.weight` are added. So the files of a base still match, and techniques that
find modules by name still find them.

Sources: Hu et al., LoRA (arXiv:2106.09685), section 4.1; Kalajdzievski, rsLoRA (arXiv:2312.03732); Liu et al., (IA)3
(arXiv:2205.05638), section 3.3; Li and Liang, Prefix-Tuning (arXiv:2101.00190), section 4.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.pytorch_utils import Conv1D

from ringmaster.techniques.models.peft_format import PREFIX


def scaling(*, rank: int, alpha: float, rank_stabilised: bool) -> float:
    """Returns the factor of a low-rank product: alpha / r, or rank-stabilised alpha / sqrt(r)."""
    return alpha / math.sqrt(rank) if rank_stabilised else alpha / rank


class _Lora(nn.Module):
    """y = W x + b + s B A x, with A [rank, in] and B [out, rank]; computed in this order."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scaling: float
    is_off = False

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = super().forward(x)
        if self.is_off:
            return base
        product: Tensor = self.lora_B(self.lora_A(x)) * self.scaling
        return base + product


class LoraLinear(_Lora, nn.Linear):
    """A linear layer with a low-rank summand."""


class LoraConv1D(_Lora, Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, whose weight is [in, out], with a low-rank summand."""


class _ScaledOutput(nn.Module):
    """y = l * (W x + b), with l [out, 1]."""

    ia3_l: nn.Parameter
    is_off = False

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = super().forward(x)
        if self.is_off:
            return base
        return base * self.ia3_l.flatten()


class _ScaledInput(nn.Module):
    """y = W (l * x) + b, with l [1, in]."""

    ia3_l: nn.Parameter
    is_off = False

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = super().forward(x if self.is_off else x * self.ia3_l.flatten())
        return base


class ScaledOutputLinear(_ScaledOutput, nn.Linear):
    """A linear layer with scaled outputs."""


class ScaledOutputConv1D(_ScaledOutput, Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, whose weight is [in, out], with scaled outputs."""


class ScaledInputLinear(_ScaledInput, nn.Linear):
    """A linear layer with scaled inputs."""


class ScaledInputConv1D(_ScaledInput, Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, whose weight is [in, out], with scaled inputs."""


LORA: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: LoraLinear, Conv1D: LoraConv1D}
SCALED_OUTPUT: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: ScaledOutputLinear, Conv1D: ScaledOutputConv1D}
SCALED_INPUT: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: ScaledInputLinear, Conv1D: ScaledInputConv1D}


def features(module: nn.Module) -> tuple[int, int]:
    """Returns (in, out) of a linear module of a class that can be adapted."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    first, second = weight.shape
    return (first, second) if isinstance(module, Conv1D) else (second, first)


def empty_linear(num_in: int, num_out: int) -> nn.Linear:
    """Returns a linear layer without bias, on the meta device; the weight's values are assigned later."""
    return nn.Linear(num_in, num_out, bias=False, device="meta")


class PrefixLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's learned keys and values, [rows, heads, virtual tokens, dim], before those of the tokens.

    The layer stores nothing of the tokens, so that a forward may be repeated, as recomputation does.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the prefix, followed by those given."""
        keys = torch.cat([self.keys.to(key_states.dtype), key_states], dim=-2)
        return keys, torch.cat([self.values.to(value_states.dtype), value_states], dim=-2)


def prefix_cache(embeddings: Tensor, *, num_rows: int, num_heads: int, head_dim: int) -> DynamicCache:
    """Returns every layer's prefix for `num_rows` sequences.

    `embeddings` is [virtual tokens, layers * 2 * heads * head_dim].
    """
    num_tokens = embeddings.shape[0]
    parts = embeddings.view(num_tokens, -1, 2, num_heads, head_dim).permute(1, 2, 3, 0, 4)
    cache = DynamicCache()
    cache.layers = [PrefixLayer(*(x.expand(num_rows, *x.shape) for x in layer)) for layer in parts]
    return cache


class PrependPrefix:
    """Forward pre-hook of a causal language model that passes its prefix as the keys and values of earlier tokens."""

    def __init__(self, *, num_heads: int, head_dim: int) -> None:
        self._num_heads, self._head_dim = num_heads, head_dim
        self.is_off = False

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Adds the prefix, and an attention mask that covers it, to the keyword arguments."""
        if self.is_off:
            return args, kwargs
        embeddings = model._parameters[PREFIX]
        assert embeddings is not None
        tokens = args[0] if args else kwargs["input_ids"]
        cache = prefix_cache(embeddings, num_rows=len(tokens), num_heads=self._num_heads, head_dim=self._head_dim)
        added: dict[str, Any] = {"past_key_values": cache, "use_cache": False}
        if (mask := kwargs.get("attention_mask")) is not None:
            seen = mask.new_ones(len(tokens), embeddings.shape[0])
            added["attention_mask"] = torch.cat([seen, mask], dim=1)
        return args, {**kwargs, **added}


def switchable(model: nn.Module) -> list[Any]:
    """Returns the parts of an adapter that can be switched off by their attribute `is_off`.

    Without them, the model computes as it did before the adapter was attached.
    """
    modules = list(model.modules())
    hooks = [hook for module in modules for hook in module._forward_pre_hooks.values()]
    kinds = (_Lora, _ScaledOutput, _ScaledInput, PrependPrefix)
    return [part for part in [*modules, *hooks] if isinstance(part, kinds)]


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
