"""Counts words: a package of one's own, which only the environment of its job has."""

from collections import Counter
from collections.abc import Iterable


def counted(lines: Iterable[str]) -> Counter[str]:
    """Returns how often each word is in some lines."""
    return Counter(word for line in lines for word in line.lower().split())
