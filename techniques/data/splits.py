"""Selects the samples held out for evaluation, by hash, so that new data moves no old sample to the other split."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from ringmaster.techniques.data.rows import FileText


def is_held_out(key: str, *, share: float) -> bool:
    """Returns whether `key` falls into the held-out `share` (0..1) of all keys."""
    return _position(key) < share


def held_out_keys(keys: Sequence[str], *, share: float) -> frozenset[str]:
    """Returns those of several keys that are held out, by hash.

    If share > 0 and there are two keys or more, each split gets at least one.
    """
    ranked = sorted(set(keys), key=_position)
    count = sum(is_held_out(key, share=share) for key in ranked)
    if share > 0 and len(ranked) > 1:
        count = min(max(count, 1), len(ranked) - 1)
    return frozenset(ranked[:count])


def split_text(text: FileText, *, share: float) -> tuple[FileText, FileText | None]:
    """Returns the training part of a whole file and its held-out `share`, which begins with a line; None if empty."""
    if not share:
        return text, None
    length = sum(map(len, text.pieces()))
    end = round(length * (1 - share))
    line = place = 0
    for piece in replace(text, stop=end).pieces():
        line = place + found + 1 if (found := piece.rfind("\n")) >= 0 else line
        place += len(piece)
    cut = line or end
    return replace(text, stop=cut), replace(text, start=cut) if cut < length else None


def _position(key: str) -> float:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
