"""Helpers that quote the content of files in messages: shortened, and limited in number."""

from __future__ import annotations

from collections.abc import Sequence

MOST_FAULTS = 50


def first_of(faults: Sequence[object]) -> list[str]:
    """Returns the first `MOST_FAULTS` faults as text, followed by how many more there are."""
    said = [str(fault) for fault in faults[:MOST_FAULTS]]
    num_more = len(faults) - len(said)
    return [*said, f"and {num_more:,} more"] if num_more else said


def listed(faults: Sequence[object], *, between: str = "\n") -> str:
    """Joins what `first_of` returns."""
    return between.join(first_of(faults))


def shortened(text: str, most: int) -> str:
    """Returns `text`, cut to `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
