"""Which samples are held out for evaluation: by hash, so that new data moves none of the old."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def is_held_out(key: str, *, share: float) -> bool:
    """Whether what `key` names falls into the held-out `share` (0..1) of all keys."""
    return _position(key) < share


def held_out_keys(keys: Sequence[str], *, share: float) -> frozenset[str]:
    """The held-out ones of several keys: by hash, and one at least on either side where share > 0."""
    ranked = sorted(set(keys), key=_position)
    count = sum(is_held_out(key, share=share) for key in ranked)
    if share > 0 and len(ranked) > 1:
        count = min(max(count, 1), len(ranked) - 1)
    return frozenset(ranked[:count])


def _position(key: str) -> float:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
