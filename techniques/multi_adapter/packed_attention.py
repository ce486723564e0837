"""Packing of several adapters' samples into one row, and attention that keeps the samples apart.

The sequences of all adapters are concatenated into one row, [1, tokens]. Their lengths may differ, and nothing is
padded. Operations on single tokens are unaffected. Attention reshapes the sequences of one length to [samples, length]
and runs the same kernel as a separate run. An adapter's prefix of keys and values precedes only its own samples (Li and
Liang, Prefix-Tuning, arXiv:2101.00190, section 4).

A model may mix tokens outside of its attention (state spaces, convolutions, linear attention), use its own attention,
or number its positions in another way. None of this raises an error: one adapter's rows would leak into another's. So
`packed_attention` tries the model once on a few tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.compat.transformers import attention_of
from ringmaster.techniques.models.adapter_modules import PrefixLayer, prefix_cache
from ringmaster.techniques.models.adapters import CAUSAL
from ringmaster.techniques.models.peft_format import kv_shape

PrefixLayers = list[tuple[Tensor, Tensor]]
"""The keys and values of each layer, [samples, heads, virtual tokens, dim]."""


@dataclass(frozen=True, kw_only=True)
class BatchShare:
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
class TokenBlock:
    """Tokens [start, stop) of the packed row: neighbouring samples of equal `length` and equal `num_before`."""

    start: int
    stop: int
    length: int
    num_before: int = 0

    @property
    def num_rows(self) -> int:
        """The number of samples."""
        return (self.stop - self.start) // self.length


def blocks_of(shares: Sequence[BatchShare]) -> list[TokenBlock]:
    """The blocks of the shares: neighbours of equal length and equal `num_before` form one block."""
    blocks, start = [], 0
    for (length, num_before), same in groupby(shares, key=lambda share: (share.length, share.num_before)):
        stop = start + sum(share.size for share in same)
        blocks.append(TokenBlock(start=start, stop=stop, length=length, num_before=num_before))
        start = stop
    return blocks


def starts_of(shares: Sequence[BatchShare]) -> list[int]:
    """The first row of each share."""
    return [0, *accumulate(share.size for share in shares)][:-1]


def packed_tokens(batches: Sequence[Tensor]) -> Tensor:
    """Concatenates each adapter's samples [rows, length] to [1, tokens]."""
    return torch.cat([batch.flatten() for batch in batches]).unsqueeze(0)


def positions_of(shares: Sequence[BatchShare], device: torch.device) -> Tensor:
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
    replacement: computes the attention of the current batch in place of this, as of sequences with cached keys.
    """

    def __init__(self) -> None:
        self.blocks: Sequence[TokenBlock] = ()
        self.prefixes: Mapping[int, PrefixLayers] = {}
        self.replacement: Callable[..., tuple[Tensor, None]] | None = None

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
        if self.replacement is not None:
            return self.replacement(module, query, key, value, **options)
        out = []
        for block in self.blocks:
            q, k, v = (_rows(x, block) for x in (query, key, value))
            seen = None
            if block.num_before:
                keys, values = self.prefixes[block.start][module.layer_idx]  # type: ignore[index]
                k, v = (torch.cat([x.to(y.dtype), y], dim=-2) for x, y in ((keys, k), (values, v)))
                seen = prefix_mask(block, q.device)
            attended, _ = sdpa_attention_forward(module, q, k, v, seen, **options)
            out.append(attended.flatten(0, 1))
        return (torch.cat(out) if len(out) > 1 else out[0]).unsqueeze(0), None


def _rows(packed: Tensor, block: TokenBlock) -> Tensor:
    """[1, heads, tokens, dim] to the block's [samples, heads, length, dim], with a separate run's memory layout."""
    rows = packed[0, :, block.start : block.stop]
    return rows.view(len(rows), -1, block.length, rows.shape[-1]).transpose(0, 1)


# Two adapters: several samples each, of unequal lengths, with enough tokens to run the kernels of larger batches.
SHARES = (BatchShare(num_rows=2, length=8), BatchShare(num_rows=3, length=6))


def packed_attention(model: nn.Module) -> PackedAttention | None:
    """Installs and returns attention for packed samples; returns None, with the model unchanged, if it cannot pack."""
    if not _may_pack(model):
        return None
    first, other, second = _samples(model)
    packed = PackedAttention()
    packed.blocks = blocks_of(SHARES)
    with torch.no_grad():
        alone = [model(input_ids=tokens, use_cache=False).logits for tokens in (first, second)]
        packed.attend(model)
        try:
            logits = [_in_one_row(model, [tokens, second]) for tokens in (first, other)]
        except (TypeError, ValueError):  # its forward takes no positions, or its attention makes its own mask
            logits = None
    # Another first adapter leaves the second one's logits bit for bit; kernels for other shapes may round differently.
    if logits is not None and torch.equal(logits[0][1], logits[1][1]) and all(map(_is_near, logits[0], alone)):
        return packed
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    return None


def _may_pack(model: nn.Module) -> bool:
    """Whether the model is a causal language model whose layers all attend, by SDPA, to all previous tokens."""
    config: Any = getattr(model, "config", None)
    is_causal = type(model).__name__.endswith(CAUSAL) and not getattr(config, "is_encoder_decoder", False)
    sees_all = getattr(config, "sliding_window", None) is None and set(getattr(config, "layer_types", None) or ()) <= {
        "full_attention"
    }
    return is_causal and attention_of(config) == "sdpa" and sees_all


def _samples(model: nn.Module) -> list[Tensor]:
    """Random samples: the first adapter's, different ones in their place, and the second adapter's."""
    num_tokens: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    draw = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    return [
        torch.randint(num_tokens, (share.num_rows, share.length), generator=draw).to(device)
        for share in (SHARES[0], *SHARES)
    ]


def _in_one_row(model: nn.Module, samples: list[Tensor]) -> list[Tensor]:
    tokens = packed_tokens(samples)
    logits = model(input_ids=tokens, position_ids=positions_of(SHARES, tokens.device), use_cache=False).logits[0]
    pieces = logits.split([share.size for share in SHARES])
    return [x.view(share.num_rows, share.length, -1) for x, share in zip(pieces, SHARES, strict=True)]


def _is_near(result: Tensor, alone: Tensor) -> bool:
    rounding: float = torch.finfo(alone.dtype).eps ** 0.5
    return bool((result - alone).abs().max() <= rounding * alone.abs().max())


@dataclass(frozen=True, kw_only=True)
class BatchPrefix:
    """An adapter's prefix and the number of samples that it precedes.

    embeddings: the prefix, [virtual tokens, layers * 2 * heads * dim].
    num_rows: the number of samples.
    """

    embeddings: Tensor
    num_rows: int


def prefix_layers(model: nn.Module, prefixed: Sequence[BatchPrefix]) -> PrefixLayers:
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


def prefix_as_cache(layers: PrefixLayers) -> Any:
    """A transformers cache that holds the prefix as the keys and values of earlier tokens."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    cache.layers = [PrefixLayer(keys, values) for keys, values in layers]
    return cache


def prefix_mask(block: TokenBlock, device: torch.device) -> Tensor:
    """The boolean mask of the keys that each token attends to, [samples, 1, tokens, virtual and other tokens]."""
    shape = (block.length, block.num_before + block.length)
    mask = torch.ones(shape, dtype=torch.bool, device=device).tril(diagonal=block.num_before)
    return mask.expand(block.num_rows, 1, *shape)
