"""Attention over tokens that are divided over devices.

The ranks exchange heads for tokens, or gather keys and values. Sources: Jacobs et al., DeepSpeed Ulysses
(arXiv:2309.14509), section 3.1; Llama Team, The Llama 3 Herd of Models (arXiv:2407.21783), section 3.3.2, context
parallelism.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

ULYSSES, ALL_GATHER = "ulysses", "all_gather"
CHUNKS_A_DEVICE = 2


def attend_across(model: nn.Module, group: dist.ProcessGroup, *, exchange: str) -> None:
    """Makes the attention of a Hugging Face decoder cover the tokens of all ranks of `group`.

    Each forward must then get the rank's tokens, those at `positions`, with explicit `position_ids`.
    """
    from transformers import AttentionInterface

    attend = {ULYSSES: _swapping_heads, ALL_GATHER: _gathering_keys}[exchange]
    name = f"ringmaster_{exchange}"
    AttentionInterface.register(name, partial(attend, group=group))
    model.set_attn_implementation(name)  # type: ignore[operator]


def positions(rank: int, num_ranks: int, seq_len: int, *, exchange: str) -> Tensor:
    """Returns the positions, in a sequence of `seq_len` tokens, that a rank holds, shape [seq_len / num_ranks].

    They are consecutive where heads are exchanged. Where keys are gathered, they are two chunks, one from either end of
    the sequence: late tokens attend to more keys than early ones, so that all ranks have equally much to do.
    """
    if exchange == ULYSSES:
        return torch.arange(seq_len).chunk(num_ranks)[rank]
    chunks = torch.arange(seq_len).chunk(CHUNKS_A_DEVICE * num_ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def _swapping_heads(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, group: Any, **options: Any
) -> tuple[Tensor, None]:
    """Exchanges all heads of some tokens, [rows, heads, tokens / n, dim], for some heads of all tokens, and back."""
    query, key, value = (_swap(x, group, split=1, join=2) for x in (query, key, value))
    out = _attention(module, query, key, value, **options)
    return _swap(out, group, split=2, join=1).transpose(1, 2).contiguous(), None


def _gathering_keys(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, group: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention of each rank's queries, in two chunks, to the keys and values of all tokens up to theirs."""
    num_ranks, rank = group.size(), group.rank()
    num_chunks = CHUNKS_A_DEVICE * num_ranks
    chunk = query.shape[2] // CHUNKS_A_DEVICE
    gathered = _Gather.apply(torch.stack([key, value]), group)  # type: ignore[no-untyped-call]
    # Puts [ranks, 2, rows, heads, tokens, dim] into the order of the sequence.
    parts = [part for of_rank in gathered for part in of_rank.chunk(CHUNKS_A_DEVICE, dim=3)]
    order = [i for r in range(num_ranks) for i in (r, num_chunks - 1 - r)]
    keys, values = torch.cat([parts[order.index(i)] for i in range(num_chunks)], dim=3)
    out = []
    for queries, at in zip(query.chunk(CHUNKS_A_DEVICE, dim=2), (rank, num_chunks - 1 - rank), strict=True):
        end = (at + 1) * chunk
        out.append(_attention(module, queries, keys[:, :, :end], values[:, :, :end], **options))
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> Tensor:
    """Causal attention of the last tokens, [rows, heads, tokens, dim], to all up to them, in the fastest kernel."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    causal: dict[str, Any] = {"is_causal": True}
    if sliding_window is not None and sliding_window < num_keys:
        back = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None] - torch.arange(
            num_keys, device=query.device
        )
        causal = {"attn_mask": (back >= 0) & (back < sliding_window)}
    elif num_queries != num_keys:
        causal = {"attn_mask": causal_lower_right(num_queries, num_keys)}
    return scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=query.shape[1] != key.shape[1], **causal
    )


class _Gather(torch.autograd.Function):
    """All-gather: [...] of each rank into [ranks, ...] on all. Backward sums the ranks' gradients of each part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        every = part.new_empty(group.size(), *part.shape)
        dist.all_gather_into_tensor(every.flatten(0, 1), part.contiguous(), group=group)
        return every

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (every,) = gradients
        own = torch.empty_like(every[0])
        dist.reduce_scatter_tensor(own, every.contiguous().flatten(0, 1), group=ctx.group)
        return own, None


class _Exchange(torch.autograd.Function):
    """All-to-all: sends part i of [ranks, ...] to rank i. Backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        got = torch.empty_like(parts)
        dist.all_to_all_single(got, parts, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (got,) = gradients
        parts = torch.empty_like(got)
        dist.all_to_all_single(parts, got.contiguous(), group=ctx.group)
        return parts, None


def _swap(x: Tensor, group: Any, *, split: int, join: int) -> Tensor:
    """Divides `x` along `split` over the ranks, and concatenates the parts of all ranks along `join`."""
    parts = torch.stack(x.chunk(group.size(), dim=split))
    got: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return torch.cat(got.unbind(), dim=join)
