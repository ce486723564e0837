"""Packing of several adapters' samples into one row, and attention that keeps the samples apart.

The sequences of all adapters are concatenated into one row, [1, tokens]. Their lengths may differ, and nothing is
padded. Operations on single tokens are unaffected. Attention reshapes the sequences of one length to [samples, length]
and runs the same kernel as a separate run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.training.fused.base.prefixes import Layers, seen


@dataclass(frozen=True, kw_only=True)
class Share:
    """One adapter's share of a batch.

    num_rows: the number of samples.
    length: the number of tokens of a sample; 1 if samples are not packed.
    num_before: the number of virtual tokens of a prefix before each sample.
    """

    num_rows: int
    length: int
    num_before: int = 0

    @property
    def size(self) -> int:
        """The number of rows of a matrix product."""
        return self.num_rows * self.length


@dataclass(frozen=True, kw_only=True)
class Block:
    """Tokens [start, stop) of the packed row: neighbouring samples of equal `length` and equal `num_before`."""

    start: int
    stop: int
    length: int
    num_before: int = 0

    @property
    def num_rows(self) -> int:
        """The number of samples."""
        return (self.stop - self.start) // self.length


def blocks_of(shares: Sequence[Share]) -> list[Block]:
    """The blocks of the shares: neighbours of equal length and equal `num_before` form one block."""
    blocks, start = [], 0
    for (length, num_before), same in groupby(shares, key=lambda share: (share.length, share.num_before)):
        stop = start + sum(share.size for share in same)
        blocks.append(Block(start=start, stop=stop, length=length, num_before=num_before))
        start = stop
    return blocks


def starts_of(shares: Sequence[Share]) -> list[int]:
    """The first row of each share."""
    return [0, *accumulate(share.size for share in shares)][:-1]


def packed_tokens(batches: Sequence[Tensor]) -> Tensor:
    """Concatenates each adapter's samples [rows, length] to [1, tokens]."""
    return torch.cat([batch.flatten() for batch in batches]).unsqueeze(0)


def positions_of(shares: Sequence[Share], device: torch.device) -> Tensor:
    """The position of each token in its sample, counted after the virtual tokens, [1, tokens]."""
    positions = [
        torch.arange(share.num_before, share.num_before + share.length, device=device).repeat(share.num_rows)
        for share in shares
    ]
    return torch.cat(positions).unsqueeze(0)


class PackedAttention:
    """Causal attention of each sample to itself and to its prefix: SDPA on blocks of samples of equal length.

    `attend` registers it with transformers under a unique name and sets that name as a model's implementation.
    blocks: the blocks of the current batch.
    prefixes: the prefix keys and values of each block that has a prefix, by the block's start.
    """

    def __init__(self) -> None:
        self.blocks: Sequence[Block] = ()
        self.prefixes: Mapping[int, Layers] = {}

    def attend(self, model: nn.Module) -> None:
        """Makes this the attention implementation of a transformers model."""
        from transformers import AttentionInterface

        name = f"ringmaster_packed_{id(self)}"
        AttentionInterface.register(name, self)
        model.set_attn_implementation(name)  # type: ignore[operator]

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Computes attention: [1, heads, tokens, dim] to [1, tokens, heads, dim]."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if mask is not None:
            raise ValueError("samples in one row are kept apart by attending to them one by one, not by a mask")
        out = []
        for block in self.blocks:
            q, k, v = (_rows(x, block) for x in (query, key, value))
            if block.num_before:
                keys, values = self.prefixes[block.start][module.layer_idx]  # type: ignore[index]
                k, v = (torch.cat([x.to(y.dtype), y], dim=-2) for x, y in ((keys, k), (values, v)))
                shape = {"num_before": block.num_before, "length": block.length, "num_rows": block.num_rows}
                attended, _ = sdpa_attention_forward(module, q, k, v, seen(**shape, device=q.device), **options)
            else:
                attended, _ = sdpa_attention_forward(module, q, k, v, None, **options)
            out.append(attended.flatten(0, 1))
        return (torch.cat(out) if len(out) > 1 else out[0]).unsqueeze(0), None


def _rows(packed: Tensor, block: Block) -> Tensor:
    """[1, heads, tokens, dim] to the block's [samples, heads, length, dim], with a separate run's memory layout."""
    rows = packed[0, :, block.start : block.stop]
    return rows.view(len(rows), -1, block.length, rows.shape[-1]).transpose(0, 1)
