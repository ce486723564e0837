"""Differences between two JSON values, of which a page that has the first one makes the second one.

A patch is a list whose first item says what it does:
    ["=", value]                    the value is another one
    ["{", patches, removed keys]    an object: patches of its items by key, and keys that it has lost
    ["[", from, num removed, new items, patches]
                                    a list: items are replaced by others, and then some are patched, by place
"""

from __future__ import annotations

from typing import Any

Patch = list[Any]


def difference(before: Any, after: Any) -> Patch | None:
    """Returns the patch that makes `after` of `before`; None where they are equal."""
    if type(before) is type(after) and before == after:
        return None
    if isinstance(before, dict) and isinstance(after, dict):
        items = {key: difference(before[key], after[key]) if key in before else ["=", after[key]] for key in after}
        removed = [key for key in before if key not in after]
        return ["{", {key: patch for key, patch in items.items() if patch is not None}, removed]
    if isinstance(before, list) and isinstance(after, list):
        return _of_lists(before, after)
    return ["=", after]


def _of_lists(before: list[Any], after: list[Any]) -> Patch:
    if len(before) == len(after):
        num_same, num_removed, new = 0, 0, list[Any]()
    else:
        shorter = min(len(before), len(after))
        num_same = next((i for i in range(shorter) if before[i] != after[i]), shorter)
        last = next((i for i in range(shorter - num_same) if before[-1 - i] != after[-1 - i]), shorter - num_same)
        num_removed = len(before) - num_same - last
        new = after[num_same : len(after) - last]
    between = [*before[:num_same], *new, *before[num_same + num_removed :]]
    patches = {i: difference(one, other) for i, (one, other) in enumerate(zip(between, after, strict=True))}
    return ["[", num_same, num_removed, new, {i: patch for i, patch in patches.items() if patch is not None}]


def patched(value: Any, patch: Patch | None) -> Any:
    """Returns the value after a patch, as `page.js` does."""
    if patch is None:
        return value
    kind, *of = patch
    if kind == "=":
        return of[0]
    if kind == "{":
        patches, removed = of
        kept = {key: item for key, item in value.items() if key not in removed}
        return kept | {key: patched(value.get(key), each) for key, each in patches.items()}
    start, num_removed, new, patches = of
    items = [*value[:start], *new, *value[start + num_removed :]]
    return [patched(item, patches.get(i) or patches.get(str(i))) for i, item in enumerate(items)]
