"""Components that models share (a tower, an embedding, a frozen stem), found by equal tensors or named by users."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from ringmaster.model_lineage.tensors import StoredModel
from ringmaster.model_lineage.tensors.layout import ITEM_BYTES
from ringmaster.model_lineage.tensors.lists import StoredTensor

SMALLEST_SHARE = 0.01  # the minimum fraction of a model's bytes; equal biases and norms are not a component


@dataclass(frozen=True, kw_only=True)
class SharedPart:
    """A part that two models share under the same name, or that a user has named.

    name: the name of the module or of a range of numbered modules, such as "model.layers.0-3".
    digest: the digest of the part's tensors and their names within it; equal parts have equal digests in all models.
    is_named: whether a user named the part.
    """

    name: str
    digest: str
    num_tensors: int
    num_bytes: int
    is_named: bool = False


@dataclass
class _Module:
    """A module of two models: its submodules, and whether all of its tensors are equal in both."""

    below: dict[str, _Module] = field(default_factory=dict)
    tensor: StoredTensor | None = None  # the tensor of a leaf, if it is equal in both
    is_alike: bool = True


def shared_parts(first: StoredModel, second: StoredModel) -> list[SharedPart]:
    """Returns the largest modules whose tensors are all equal in two models; none if the whole models are equal."""
    root = _modules(first, second)
    if root.is_alike:
        return []
    total = sum(_num_bytes(tensor) for tensor in first.tensors.values())
    parts = [_part(name, modules) for name, modules in _largest(root, ())]
    return [part for part in parts if part.num_bytes >= SMALLEST_SHARE * total]


def named_part(model: StoredModel, name: str, *, prefix: str) -> SharedPart:
    """Returns the part that a user names `name`: all tensors of `prefix`, the name of a module or a parameter.

    Models that have it under other prefixes have the same part if name and tensors are equal. Raises ValueError if the
    model has no such tensor.
    """
    found = {
        full.removeprefix(prefix).removeprefix("."): tensor
        for full, tensor in sorted(model.tensors.items())
        if is_within(full, prefix)
    }
    if not found:
        there = ", ".join(sorted({full.partition(".")[0] for full in model.tensors})[:8])
        raise ValueError(f"component {name}: no parameter is within {prefix!r}. To fix: begin with one of {there}")
    part = _of(name, [(f"{name}:{below}", tensor) for below, tensor in found.items()])
    return replace(part, is_named=True)


def is_within(name: str, prefix: str) -> bool:
    """Whether a module or parameter is `prefix` or below it."""
    return name == prefix or name.startswith(f"{prefix}.")


def _modules(first: StoredModel, second: StoredModel) -> _Module:
    one, other = first.tensors, second.tensors
    root = _Module()
    for name in sorted(one.keys() | other.keys()):
        is_alike = name in one and name in other and one[name] == other[name]
        at = root
        at.is_alike &= is_alike
        for word in name.split("."):
            at = at.below.setdefault(word, _Module())
            at.is_alike &= is_alike
        at.tensor = one.get(name) if is_alike else None
    return root


def _largest(module: _Module, path: tuple[str, ...]) -> Iterator[tuple[str, Sequence[tuple[str, _Module]]]]:
    """Yields (name, modules) of the largest equal parts below a module; consecutive numbered modules form one part."""
    alike = [(word, below) for word, below in module.below.items() if below.is_alike]
    numbered = sorted((int(word), below) for word, below in alike if word.isdecimal())
    for _, grouped in groupby(enumerate(numbered), lambda entry: entry[1][0] - entry[0]):
        run = [pair for _, pair in grouped]
        first, last = run[0][0], run[-1][0]
        word = str(first) if first == last else f"{first}-{last}"
        yield ".".join((*path, word)), [(str(number), below) for number, below in run]
    for word, below in alike:
        if not word.isdecimal():
            yield ".".join((*path, word)), [(word, below)]
    for word, below in module.below.items():
        if not below.is_alike:
            yield from _largest(below, (*path, word))


def _part(name: str, modules: Sequence[tuple[str, _Module]]) -> SharedPart:
    return _of(name, [entry for word, module in modules for entry in _leaves(module, word)])


def _of(name: str, tensors: Sequence[tuple[str, StoredTensor]]) -> SharedPart:
    """Returns the part of these tensors, which are given with their names within it."""
    said = [[below, tensor.dtype, list(tensor.shape), tensor.digest] for below, tensor in tensors]
    return SharedPart(
        name=name,
        digest=hashlib.sha256(json.dumps(said).encode()).hexdigest(),
        num_tensors=len(tensors),
        num_bytes=sum(_num_bytes(tensor) for _, tensor in tensors),
    )


def _leaves(module: _Module, path: str) -> Iterator[tuple[str, StoredTensor]]:
    if module.tensor is not None:
        yield path, module.tensor
    for word, below in sorted(module.below.items()):
        yield from _leaves(below, f"{path}.{word}")


def _num_bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES.get(tensor.dtype, 1)
