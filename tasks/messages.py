"""How messages quote what a file holds: on one line, short, and not more of them than a person reads."""

from __future__ import annotations

from collections.abc import Sequence

MOST_FAULTS = 50


def listed(faults: Sequence[object], *, between: str = "\n") -> str:
    """The first faults in words, and how many more there are."""
    said = [str(fault) for fault in faults[:MOST_FAULTS]]
    if num_more := len(faults) - len(said):
        said.append(f"and {num_more:,} more")
    return between.join(said)


def printable(text: str) -> str:
    """`text` on one line, with escapes for what a terminal would obey or could not show."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, most: int) -> str:
    """At most so many characters of `text`."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
