"""Where each adapter's rows are in a shared batch, and attention that keeps them apart.

Sequences of all adapters lie one behind the other in one long row, [1, tokens]: lengths need not agree, and nothing is
padded. What works on tokens one by one does not notice; attention takes the sequences of one length together, as rows
of their own again, through the same kernel as in a separate run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.engine.fused.prefixes import Layers, seen


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one adapter has of a batch: `num_rows` samples of `length` tokens (1 where samples are not packed).

    num_before: virtual tokens of a prefix before them.
    """

    num_rows: int
    length: int
    num_before: int = 0

    @property
    def size(self) -> int:
        """Rows of a product."""
        return self.num_rows * self.length


@dataclass(frozen=True, kw_only=True)
class Block:
    """Neighbouring samples of one length, behind as many virtual tokens: tokens [start, stop) of the packed row."""

    start: int
    stop: int
    length: int
    num_before: int = 0

    @property
    def num_rows(self) -> int:
        """Samples."""
        return (self.stop - self.start) // self.length


def blocks_of(shares: Sequence[Share]) -> list[Block]:
    """The shares' samples, neighbours of one length together."""
    blocks, start = [], 0
    for (length, num_before), same in groupby(shares, key=lambda share: (share.length, share.num_before)):
        stop = start + sum(share.size for share in same)
        blocks.append(Block(start=start, stop=stop, length=length, num_before=num_before))
        start = stop
    return blocks


def starts_of(shares: Sequence[Share]) -> list[int]:
    """Where each share begins."""
    return [0, *accumulate(share.size for share in shares)][:-1]


def packed_tokens(batches: Sequence[Tensor]) -> Tensor:
    """Samples [rows, length] of each adapter as [1, tokens]."""
    return torch.cat([batch.flatten() for batch in batches]).unsqueeze(0)


def positions_of(shares: Sequence[Share], device: torch.device) -> Tensor:
    """The position of each token in its sample, [1, tokens]."""
    positions = [
        torch.arange(share.num_before, share.num_before + share.length, device=device).repeat(share.num_rows)
        for share in shares
    ]
    return torch.cat(positions).unsqueeze(0)


class PackedAttention:
    """Causal attention of each sample to itself, and to its prefix: SDPA, on blocks of samples of one length.

    Registered with transformers under a name of its own, by which a model is told to attend.
    prefixes: of each block that has any, by its start.
    """

    def __init__(self) -> None:
        self.blocks: Sequence[Block] = ()
        self.prefixes: Mapping[int, Layers] = {}

    def attend(self, model: nn.Module) -> None:
        """Makes a model of transformers attend so from now on."""
        from transformers import AttentionInterface

        name = f"ringmaster_packed_{id(self)}"
        AttentionInterface.register(name, self)
        model.set_attn_implementation(name)  # type: ignore[operator]

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """[1, heads, tokens, dim] to [1, tokens, heads, dim]."""
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
    """[1, heads, tokens, dim] to the block's [samples, heads, length, dim], laid out as a separate run has them."""
    rows = packed[0, :, block.start : block.stop]
    return rows.view(len(rows), -1, block.length, rows.shape[-1]).transpose(0, 1)
