"""Comparison of two models' tensors: what differs, and which components (a tower, a frozen stem) they share."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmaster.model_lineage.tensors import StoredModel, TensorStore
from ringmaster.model_lineage.tensors.model_files import ITEM_BYTES, ModelTensor, by_name, read_layout
from ringmaster.model_lineage.tensors.references import WEIGHTS
from ringmaster.model_lineage.tensors.store import NUM_THREADS

BLOCK_ITEMS = 1 << 20  # compared at a time, so that large tensors need little memory
SAME, CHANGED, ADDED, REMOVED, RESHAPED = "same", "changed", "added", "removed", "reshaped"
_NUMPY = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.uint8,
}  # fmt: skip
_NUMPY_BYTES: Mapping[int, type] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class WeightTensor:
    """A tensor that is loaded on demand. digest: the digest of its bytes, if known without reading them."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], memoryview]
    digest: str | None = None

    @property
    def num_values(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class TensorChange:
    """How a tensor differs from the one of the same name in another model.

    what: one of SAME, CHANGED, ADDED, REMOVED, RESHAPED.
    relative_l2: the L2 norm of the difference divided by that of the first tensor.
    largest: the largest absolute difference.
    share: the fraction of the elements that differ, 0 to 1.

    The figures are None if the tensors cannot be compared, e.g. because their shapes differ. For a dtype that numpy
    does not support, only `share` is given.
    """

    name: str
    what: str
    dtype: str
    shape: tuple[int, ...]
    relative_l2: float | None = None
    largest: float | None = None
    share: float | None = None


def tensors_of_folder(folder: Path) -> dict[str, WeightTensor]:
    """Returns the tensors of a model's safetensors files by name; repeated names are prefixed with their file's path.

    Raises ValueError on a file that is truncated or not safetensors.
    """
    result: list[tuple[str, str, WeightTensor]] = []
    for path in sorted(folder.rglob(f"*{WEIGHTS}")):
        layout = read_layout(path)
        for component in layout.tensors:
            load = partial(layout.bytes_of, component)
            tensor = WeightTensor(dtype=component.dtype, shape=component.shape, load=load)
            result.append((path.relative_to(folder).as_posix(), component.name, tensor))
    return by_name(result)


def tensors_of_store(store: TensorStore, id: str) -> dict[str, WeightTensor]:
    """Returns the tensors of a stored model, with digests that reveal equal ones without reading.

    Raises TensorStoreError.
    """
    return {
        name: WeightTensor(
            dtype=stored.dtype, shape=stored.shape, load=partial(store.content, stored.digest), digest=stored.digest
        )
        for name, stored in store.model(id).tensors.items()
    }


def tensor_changes(first: Mapping[str, WeightTensor], second: Mapping[str, WeightTensor]) -> list[TensorChange]:
    """Returns how each tensor of the second model differs from the first's, with tensors that only one has."""
    names = list(dict.fromkeys([*first, *second]))
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(lambda name: _change(name, first.get(name), second.get(name)), names))


def _change(name: str, first: WeightTensor | None, second: WeightTensor | None) -> TensorChange:
    there = second or first
    assert there is not None, "a name is of one of the two"
    value = partial(TensorChange, name=name, dtype=there.dtype, shape=there.shape)
    if first is None or second is None:
        return value(what=ADDED if first is None else REMOVED)
    if first.shape != second.shape:
        return value(what=RESHAPED)
    if first.dtype == second.dtype and first.digest is not None and first.digest == second.digest:
        return value(what=SAME)
    one, other = first.load(), second.load()
    if first.dtype == second.dtype and one == other:
        return value(what=SAME)
    if not all(each.dtype in _NUMPY or each.dtype == "BF16" for each in (first, second)):
        return value(what=CHANGED, share=_share_of_items(one, other, first.dtype) if len(one) == len(other) else None)
    return _measured(value, zip(_blocks(one, first.dtype), _blocks(other, second.dtype), strict=True))


def _measured(change_of: Callable[..., TensorChange], pairs: Iterator[tuple[Floats, Floats]]) -> TensorChange:
    squares, base, largest, changed, total = 0.0, 0.0, 0.0, 0, 0
    for one, other in pairs:
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity show in the figures
            apart = other - one
            squares += float(apart @ apart)
            base += float(one @ one)
            largest = float(np.maximum(largest, np.max(np.abs(apart), initial=0.0)))
        changed += int(np.count_nonzero((one != other) & ~(np.isnan(one) & np.isnan(other))))
        total += len(one)
    relative = math.sqrt(squares / base) if base else math.inf if squares else 0.0
    return change_of(what=CHANGED, relative_l2=relative, largest=largest, share=changed / total if total else 0.0)


def _blocks(content: memoryview, dtype: str) -> Iterator[Floats]:
    """Yields the values in blocks, as float64."""
    raw = np.frombuffer(content, np.uint16 if dtype == "BF16" else _NUMPY[dtype])
    for start in range(0, max(len(raw), 1), BLOCK_ITEMS):
        block = raw[start : start + BLOCK_ITEMS]
        if dtype == "BF16":  # bfloat16 is the upper half of a float32
            block = (block.astype(np.uint32) << 16).view(np.float32)
        yield block.astype(np.float64)


def _share_of_items(one: memoryview, other: memoryview, dtype: str) -> float:
    kind = _NUMPY_BYTES[ITEM_BYTES.get(dtype, 1)]
    return float(np.mean(np.frombuffer(one, kind) != np.frombuffer(other, kind))) if len(one) else 0.0


SMALLEST_SHARE = 0.01  # the minimum fraction of a model's bytes; equal biases and norms are not a component


@dataclass(frozen=True, kw_only=True)
class CommonComponent:
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


def common_components(first: StoredModel, second: StoredModel) -> list[CommonComponent]:
    """Returns the largest modules whose tensors are all equal in two models; none if the whole models are equal.

    Equal modules whose names are consecutive numbers are one part.
    """
    one, other = first.tensors, second.tensors
    words_of = {name: tuple(name.split(".")) for name in one.keys() | other.keys()}
    alike = {words: one[name] for name, words in words_of.items() if name in one and one[name] == other.get(name)}
    if len(alike) == len(words_of):
        return []
    unlike = {words[:k] for words in words_of.values() if words not in alike for k in range(1, len(words) + 1)}
    modules: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for words in sorted(alike):
        if largest := next((words[:k] for k in range(1, len(words) + 1) if words[:k] not in unlike), None):
            modules.setdefault(largest, []).append(words)
    components = []
    for _, grouped in groupby(enumerate(sorted(modules, key=_order)), lambda entry: _run_of(*entry)):
        run = [module for _, module in grouped]
        *parent, word = run[0]
        name = ".".join((*parent, word if len(run) == 1 else f"{word}-{run[-1][-1]}"))
        within = [(".".join(words[len(parent) :]), alike[words]) for module in run for words in modules[module]]
        components.append(_of(name, within))
    total = sum(tensor.num_bytes for tensor in one.values())
    return [component for component in components if component.num_bytes >= SMALLEST_SHARE * total]


def _order(module: tuple[str, ...]) -> tuple[Any, ...]:
    """Returns what sorts modules by their parents, numbered ones by their numbers and before others."""
    *parent, word = module
    return parent, not word.isdecimal(), int(word) if word.isdecimal() else 0, word


def _run_of(place: int, module: tuple[str, ...]) -> tuple[Any, ...]:
    """Returns what the modules of one run have in common, of which the one at `place` has one."""
    *parent, word = module
    return (*parent, int(word) - place) if word.isdecimal() else module


def named_component(model: StoredModel, name: str, *, prefix: str) -> CommonComponent:
    """Returns the part that a user names `name`: all tensors of `prefix`, the name of a module or a parameter.

    Models that have it under other prefixes have the same part if name and tensors are equal. Raises ValueError if the
    model has no such tensor.
    """
    result = {
        full.removeprefix(prefix).removeprefix("."): tensor
        for full, tensor in sorted(model.tensors.items())
        if is_within(full, prefix)
    }
    if not result:
        there = ", ".join(sorted({full.partition(".")[0] for full in model.tensors})[:8])
        raise ValueError(f"component {name}: no parameter is within {prefix!r}. To fix: begin with one of {there}")
    component = _of(name, [(f"{name}:{below}", tensor) for below, tensor in result.items()])
    return replace(component, is_named=True)


def is_within(name: str, prefix: str) -> bool:
    """Whether a module or parameter is `prefix` or below it."""
    return name == prefix or name.startswith(f"{prefix}.")


def _of(name: str, tensors: Sequence[tuple[str, ModelTensor]]) -> CommonComponent:
    """Returns the part of these tensors, which are given with their names within it."""
    lines = [[below, tensor.dtype, list(tensor.shape), tensor.digest] for below, tensor in tensors]
    return CommonComponent(
        name=name,
        digest=hashlib.sha256(json.dumps(lines).encode()).hexdigest(),
        num_tensors=len(tensors),
        num_bytes=sum(tensor.num_bytes for _, tensor in tensors),
    )
