"""Freezing of parameters by glob patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

MOST_LISTED = 5


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes the parameters that `patterns` match, in place: as in a .gitignore, the last matching pattern decides.

    A pattern that begins with "!" takes parameters out again. Raises ValueError where a pattern matches no parameter,
    where nothing is frozen or nothing is left to train, and where only one of the names of a shared parameter matches.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for i, pattern in enumerate(patterns):
        glob = pattern.removeprefix("!")
        if not any(fnmatchcase(name, glob) for name, _ in named):
            names = [name for name, _ in named]
            raise ValueError(f"freeze[{i}]: {pattern!r} matches no parameter. To fix: {resembling(glob, names)}")
    first: dict[int, tuple[str, bool]] = {}
    for name, parameter in named:
        frozen = _is_frozen(name, patterns)
        other, was = first.setdefault(id(parameter), (name, frozen))
        if was != frozen:
            raise ValueError(
                f"freeze: {other} and {name} are one weight, and only one of the names is frozen. "
                "To fix: freeze both names, or neither"
            )
        parameter.requires_grad_(parameter.requires_grad and not frozen)
    if not any(is_frozen for _, is_frozen in first.values()):
        raise ValueError(f"freeze: {list(patterns)} freezes nothing. To fix: remove it, or begin it with '*'")
    if not any(parameter.requires_grad for _, parameter in named):
        raise ValueError(
            f"freeze: {list(patterns)} leaves no parameter to train. "
            f"To fix: take some out again, such as '!{named[-1][0]}'"
        )


def resembling(pattern: str, names: Iterable[str]) -> str:
    """Returns the remedy for a pattern that matches none of `names`: those that resemble it."""
    names = list(dict.fromkeys(names))
    literal = max(pattern.split("*"), key=len)
    near = [name for name in names if literal.strip(".") and literal.strip(".") in name]
    near = near or get_close_matches(literal, names, n=MOST_LISTED, cutoff=0.4)
    listed = (near or [*names[:2], *names[-2:]])[:MOST_LISTED]
    return f"match names such as {', '.join(listed)}"


def _is_frozen(name: str, patterns: Sequence[str]) -> bool:
    matching = [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("!"))]
    return bool(matching) and not matching[-1].startswith("!")
