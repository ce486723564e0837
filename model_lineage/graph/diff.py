"""Differences between two models: their tensors, and their recorded metadata. Needs numpy alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ringmaster.model_lineage.graph.snapshot import Node
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.model_lineage.tensors.layout import ITEM_BYTES, by_name, read_layout
from ringmaster.model_lineage.tensors.store import NUM_THREADS, WEIGHTS

BLOCK_ITEMS = 1 << 20  # compared at a time, so that large tensors need little memory
SAME, CHANGED, ADDED, REMOVED, RESHAPED = "same", "changed", "added", "removed", "reshaped"
BEHAVIOUR = "behaviour/"  # prefix of the metrics of behavioural tests
_NUMPY = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.uint8,
}  # fmt: skip
_NUMPY_BYTES: Mapping[int, type] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Pair = tuple[object, object]
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
    found: list[tuple[str, str, WeightTensor]] = []
    for path in sorted(folder.rglob(f"*{WEIGHTS}")):
        layout = read_layout(path)
        for part in layout.tensors:
            load = partial(layout.bytes_of, part)
            tensor = WeightTensor(dtype=part.dtype, shape=part.shape, load=load)
            found.append((path.relative_to(folder).as_posix(), part.name, tensor))
    return by_name(found)


def tensors_of_store(store: TensorStore, id: str) -> dict[str, WeightTensor]:
    """Returns the tensors of a stored model, with digests that reveal equal ones without reading.

    Raises TensorStoreError.
    """
    return {
        name: WeightTensor(
            dtype=stored.dtype, shape=stored.shape, load=partial(store.tensor, stored), digest=stored.digest
        )
        for name, stored in store.model(id).tensors.items()
    }


def tensor_changes(first: Mapping[str, WeightTensor], second: Mapping[str, WeightTensor]) -> list[TensorChange]:
    """Returns how each tensor of the second model differs from the first's, with tensors that only one has."""
    names = list(dict.fromkeys([*first, *second]))
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(lambda name: _change(name, first.get(name), second.get(name)), names))


def record_differences(first: Node, second: Node) -> dict[str, dict[str, Pair]]:
    """Returns the recorded differences as section -> key -> (first value, second value); None stands for no value."""
    metrics = [{k: v for k, v in n.metrics.items() if not k.startswith(BEHAVIOUR)} for n in (first, second)]
    behaviour = [{k: v for k, v in n.metrics.items() if k.startswith(BEHAVIOUR)} for n in (first, second)]
    data = [{f"{d.context}: {d.name}": d.digest for d in n.record.datasets} for n in (first, second)]
    origins = [{k: v for k, v in vars(n.record.origin).items() if v is not None} for n in (first, second)]
    sections: dict[str, Sequence[Mapping[str, object]]] = {
        "data": data,
        "hyperparameters": [first.params, second.params],
        "metrics": metrics,
        "behaviour": behaviour,
        "origin": origins,
    }
    found = {name: dict(_differing(pair[0], pair[1])) for name, pair in sections.items()}
    return {name: rows for name, rows in found.items() if rows}


def _differing(
    first: Mapping[str, object], second: Mapping[str, object]
) -> Iterator[tuple[str, tuple[object, object]]]:
    for key in dict.fromkeys([*first, *second]):
        if first.get(key) != second.get(key):
            yield key, (first.get(key), second.get(key))


def _change(name: str, first: WeightTensor | None, second: WeightTensor | None) -> TensorChange:
    there = second or first
    assert there is not None, "a name is of one of the two"
    said = partial(TensorChange, name=name, dtype=there.dtype, shape=there.shape)
    if first is None or second is None:
        return said(what=ADDED if first is None else REMOVED)
    if first.shape != second.shape:
        return said(what=RESHAPED)
    if first.dtype == second.dtype and first.digest is not None and first.digest == second.digest:
        return said(what=SAME)
    one, other = first.load(), second.load()
    if first.dtype == second.dtype and one == other:
        return said(what=SAME)
    if not all(each.dtype in _NUMPY or each.dtype == "BF16" for each in (first, second)):
        return said(what=CHANGED, share=_share_of_items(one, other, first.dtype) if len(one) == len(other) else None)
    return _measured(said, zip(_blocks(one, first.dtype), _blocks(other, second.dtype), strict=True))


def _measured(said: Callable[..., TensorChange], pairs: Iterator[tuple[Floats, Floats]]) -> TensorChange:
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
    return said(what=CHANGED, relative_l2=relative, largest=largest, share=changed / total if total else 0.0)


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
