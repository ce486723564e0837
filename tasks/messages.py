"""Helpers that quote the content of files in messages: on one line, shortened, and limited in number."""

from __future__ import annotations

from collections.abc import Sequence

MOST_FAULTS = 50


def listed(faults: Sequence[object], *, between: str = "\n") -> str:
    """Joins the first `MOST_FAULTS` faults as text, and states how many more there are."""
    said = [str(fault) for fault in faults[:MOST_FAULTS]]
    if num_more := len(faults) - len(said):
        said.append(f"and {num_more:,} more")
    return between.join(said)


def printable(text: str) -> str:
    """Returns `text` on one line, with escapes for control characters and characters that a terminal cannot show."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, most: int) -> str:
    """Returns `text`, cut to `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
