"""Keys and values of the tokens that sequences have so far, and attention of their next tokens to them.

The sequences of one prompt have one length, so their attention is one call of a kernel with no mask or padding: as
many numbers are summed up, and in the same order, as if they were alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

KeysAndValues = tuple[Tensor, Tensor]


class CachedSequences:
    """The sequences of one prompt.

    num_rows: the number of sequences. length: the number of their tokens with keys and values.
    capacity: the most tokens that they can have; 0 for rows that only fill up a batch, which see themselves alone.
    """

    def __init__(self, *, num_rows: int, capacity: int) -> None:
        self.num_rows, self.length, self._capacity = num_rows, 0, capacity
        self._layers: dict[int, KeysAndValues] = {}

    def extend(self, layer: int, keys: Tensor, values: Tensor, *, num_tokens: int) -> KeysAndValues:
        """Adds the keys and values of the next tokens; returns those that these attend to.

        keys, values: [1 or rows, heads, tokens, dim]; those of a prompt are of all rows.
        num_tokens: how many of the tokens are kept; the others are padding.
        """
        if not self._capacity:
            return keys, values
        if layer not in self._layers:
            shape = (self.num_rows, keys.shape[1], self._capacity, keys.shape[3])
            self._layers[layer] = (keys.new_empty(shape), values.new_empty(shape))
        stop = self.length + num_tokens
        for cache, new in zip(self._layers[layer], (keys, values), strict=True):
            cache[:, :, self.length : stop] = new[:, :, :num_tokens]
        if not self.length:
            return keys, values
        cached_keys, cached_values = self._layers[layer]
        return cached_keys[:, :, :stop], cached_values[:, :, :stop]

    def keep(self, rows: Sequence[int]) -> None:
        """Drops all other sequences."""
        if len(rows) == self.num_rows:
            return
        self.num_rows = len(rows)
        self._layers = {layer: (keys[list(rows)], values[list(rows)]) for layer, (keys, values) in self._layers.items()}


class CachedAttention:
    """Causal attention of the next tokens of sequences: of whole prompts, or of one token of each sequence.

    sequences: in the order of the packed row. shapes: (rows, tokens) of each in the packed row. nums: how many of the
    tokens are no padding.
    """

    def __init__(
        self, sequences: Sequence[CachedSequences], *, shapes: Sequence[tuple[int, int]], nums: Sequence[int]
    ) -> None:
        self._sequences, self._shapes, self._nums = sequences, shapes, nums

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        """Computes attention: [1, heads, tokens, dim] to [1, tokens, heads, dim]."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, start = [], 0
        for each, (rows, tokens), num in zip(self._sequences, self._shapes, self._nums, strict=True):
            stop = start + rows * tokens
            q, k, v = (
                x[0, :, start:stop].view(x.shape[1], rows, tokens, x.shape[3]).transpose(0, 1)
                for x in (query, key, value)
            )
            keys, values = each.extend(module.layer_idx, k, v, num_tokens=num)  # type: ignore[arg-type]
            attended, _ = sdpa_attention_forward(module, q, keys, values, None, **options)
            out.append(attended.flatten(0, 1))
            start = stop
        return torch.cat(out).unsqueeze(0), None

    def finish(self) -> None:
        """Counts the tokens, once every layer has had them."""
        for each, num in zip(self._sequences, self._nums, strict=True):
            each.length += num
