"""Prefixes of keys and values before those of the tokens; each adapter's prefix precedes only its own samples.

Source: Li and Liang, Prefix-Tuning (arXiv:2101.00190), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.models.adapters.modules import PrefixLayer, prefix_cache
from ringmaster.techniques.models.adapters.peft_format import kv_shape

Layers = list[tuple[Tensor, Tensor]]
"""The keys and values of each layer, [samples, heads, virtual tokens, dim]."""


@dataclass(frozen=True, kw_only=True)
class Prefixed:
    """An adapter's prefix and the number of samples that it precedes.

    embeddings: the prefix, [virtual tokens, layers * 2 * heads * dim].
    num_rows: the number of samples.
    """

    embeddings: Tensor
    num_rows: int


def layers_of(model: nn.Module, prefixed: Sequence[Prefixed]) -> Layers:
    """Concatenates the keys and values of neighbouring prefixes with equal numbers of virtual tokens."""
    num_heads, head_dim = kv_shape(model.config)
    caches = [
        prefix_cache(each.embeddings, num_rows=each.num_rows, num_heads=num_heads, head_dim=head_dim)
        for each in prefixed
    ]
    if len(caches) == 1:
        return [(layer.keys, layer.values) for layer in caches[0].layers]
    by_layer = zip(*(cache.layers for cache in caches), strict=True)
    return [(torch.cat([x.keys for x in same]), torch.cat([x.values for x in same])) for same in by_layer]


def cache_of(layers: Layers) -> Any:
    """A transformers cache that holds the prefix as the keys and values of earlier tokens."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    cache.layers = [PrefixLayer(keys, values) for keys, values in layers]
    return cache


def seen(*, num_before: int, length: int, num_rows: int, device: torch.device) -> Tensor:
    """The boolean mask of the keys that each token attends to, [samples, 1, tokens, virtual and other tokens]."""
    mask = torch.ones(length, num_before + length, dtype=torch.bool, device=device).tril(diagonal=num_before)
    return mask.expand(num_rows, 1, length, num_before + length)
