"""The rows that a job reads of files of which something is kept: those in its window, and their splits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.file_cache.parts import KnownFile, known_files
from ringmaster.techniques.data.file_cache.row_facts import RowFacts
from ringmaster.techniques.data.file_rows import DataFile, held_out_files, main_files
from ringmaster.techniques.data.manifest import Manifest, ManifestBuilder
from ringmaster.techniques.data.rows import FaultyRows, RowFault
from ringmaster.techniques.data.windows import DAY_S, moment
from ringmaster.techniques.interface.job import DataSpec


class Kept(Protocol):
    """What is kept of a file."""

    @property
    def file(self) -> DataFile:
        """The file, or a part of one."""

    @property
    def facts(self) -> RowFacts:
        """The facts of its rows."""


K = TypeVar("K", bound=Kept)


@dataclass(frozen=True, kw_only=True)
class ChosenFile(Generic[K]):
    """What is kept of a file, which rows of it are read, and which rows are held out: [rows] each."""

    kept: K
    wanted: NDArray[np.bool_]
    held_out: NDArray[np.bool_]


def chosen_files(spec: DataSpec, read: Callable[[KnownFile, bool], K]) -> list[ChosenFile[K]]:
    """Returns the files of a spec, in order, with the rows that are read.

    read: returns what is kept of a file; called with the file, and whether a window chooses among its rows.

    Raises FaultyRows with the first wrong rows, those of `spec.path` and of `spec.held_out_path` together.
    """
    faults: list[RowFault] = []

    def known(files: Sequence[DataFile]) -> Iterator[KnownFile]:
        for file in files:
            yield from known_files(file, format=spec.format)

    def kept_of(files: Sequence[DataFile], *, is_windowed: bool) -> list[K]:
        try:
            return [read(each, is_windowed) for each in known(files)]
        except FaultyRows as error:
            faults.extend(error.faults)
            return []

    main = kept_of(main_files(spec), is_windowed=bool(spec.window))
    others = kept_of(held_out_files(spec), is_windowed=False)
    if faults:
        raise FaultyRows(faults)
    wanted = [*_in_window([each.facts for each in main], spec), *(np.ones(len(each.facts), bool) for each in others)]
    return [
        ChosenFile(kept=kept, wanted=rows, held_out=kept.facts.are_held_out(kept.file, spec))
        for kept, rows in zip((*main, *others), wanted, strict=True)
    ]


def manifest_of(files: Sequence[ChosenFile[K]]) -> Manifest:
    """Returns the manifest of the rows that are read."""
    manifest = ManifestBuilder()
    for each in files:
        for held_out in (False, True):
            rows = each.wanted & (each.held_out == held_out)
            manifest.extend(each.kept.facts.hashes[rows], held_out=held_out)
    return manifest.built()


def needs_moments(spec: DataSpec) -> bool:
    """Returns whether the window asks for the times of rows."""
    return any((spec.window or {}).get(key) is not None for key in ("last_days", "since", "until"))


def _in_window(facts: Sequence[RowFacts], spec: DataSpec) -> list[NDArray[np.bool_]]:
    """Which rows of each file lie in the window; see `windows.in_window`."""
    window = spec.window or {}
    num_rows = [len(each) for each in facts]
    if (num_last := window.get("last_rows")) is not None:
        first = sum(num_rows) - int(num_last)
        starts = np.cumsum([0, *num_rows])
        return [np.arange(start, start + num) >= first for start, num in zip(starts, num_rows, strict=False)]
    if not needs_moments(spec):
        return [np.ones(num, bool) for num in num_rows]
    first_s, last_s = moment(window.get("since"), -math.inf), moment(window.get("until"), math.inf)
    if (days := window.get("last_days")) is not None:
        newest_s = max((float(each.moments.max()) for each in facts if len(each)), default=0.0)
        first_s = newest_s - days * DAY_S
    return [(first_s <= each.moments) & (each.moments < last_s) for each in facts]
