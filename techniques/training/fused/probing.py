"""A probe of whether a model can take samples packed into one row, run once on a few tokens.

A model may mix tokens outside of its attention (state spaces, convolutions, linear attention), use its own attention,
or number its positions in another way. None of this raises an error: one adapter's rows would leak into another's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.models.adapters.attaching import CAUSAL
from ringmaster.techniques.training.fused.packing import PackedAttention, Share, blocks_of, packed_tokens, positions_of

# Two adapters: several samples each, of unequal lengths, with enough tokens to run the kernels of larger batches.
SHARES = (Share(num_rows=2, length=8), Share(num_rows=3, length=6))


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
            together = [_in_one_row(model, [tokens, second]) for tokens in (first, other)]
        except (TypeError, ValueError):  # its forward takes no positions, or its attention makes its own mask
            together = None
    if together is not None and _are_apart(together) and _are_as(together[0], alone):
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
    return is_causal and getattr(config, "_attn_implementation", None) == "sdpa" and sees_all


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


def _are_apart(together: list[list[Tensor]]) -> bool:
    """Whether the second adapter's logits are bitwise equal for different samples of the first adapter."""
    return torch.equal(together[0][1], together[1][1])


def _are_as(found: list[Tensor], alone: list[Tensor]) -> bool:
    """Whether the logits are equal up to rounding, which differs between kernels for different shapes."""
    return all(_is_near(x, y) for x, y in zip(found, alone, strict=True))


def _is_near(found: Tensor, alone: Tensor) -> bool:
    rounding: float = torch.finfo(alone.dtype).eps ** 0.5
    return bool((found - alone).abs().max() <= rounding * alone.abs().max())
