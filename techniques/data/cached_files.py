"""What was prepared from single files, kept so that data with new files or new lines reads only these.

A JSONL file is divided after every `PART_BYTES`, at the end of a line. Lines that are added at its end change its last
part alone. Other files are one part: a CSV file may have line ends in quotes, and Parquet is read by columns. Of each
row of a part `RowFacts` are kept, from which windows and splits are chosen (`selected_files`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ringmaster.codec import digest
from ringmaster.techniques.checkpoints.checkpoint import publish
from ringmaster.techniques.data.arrays import open_columns
from ringmaster.techniques.data.file_patterns import FilePart
from ringmaster.techniques.data.file_rows import (
    DAY_S,
    DataFile,
    held_out_files,
    main_files,
    moment_of,
    split_key,
    time_limits,
)
from ringmaster.techniques.data.manifest import ManifestBuilder, RowManifest
from ringmaster.techniques.data.row_files import RowError, RowErrors, format_of
from ringmaster.techniques.data.stored_source import locked
from ringmaster.techniques.data_source import Row
from ringmaster.techniques.job import DataSpec

PART_BYTES = 1 << 25


@dataclass(frozen=True)
class KnownFile:
    """A file, or a part of one, and a digest of its bytes."""

    file: DataFile
    digest: str


def known_files(file: DataFile, *, format: str | None) -> Iterator[KnownFile]:
    """Yields the parts of a local file, in order. They are read, once, for their digests."""
    if format_of(file.path, format) == "jsonl":
        yield from _lines(file)
        return
    with Path(file.path).open("rb") as stream:
        yield KnownFile(file, hashlib.file_digest(stream, "sha256").hexdigest())


def _lines(file: DataFile) -> Iterator[KnownFile]:
    first_line, start = 1, 0
    with Path(file.path).open("rb") as stream:
        while read := stream.read(PART_BYTES) + stream.readline():
            part = FilePart(start=start, stop=start + len(read), first_line=first_line)
            yield KnownFile(replace(file, part=part), hashlib.sha256(read).hexdigest())
            # As lines of text are counted: `\r` and `\r\n` end one too.
            first_line += read.count(b"\n") + read.count(b"\r") - read.count(b"\r\n")
            start = part.stop


SPLIT = "training"  # columns belong to a split; in what is kept, all rows are in one


@dataclass(frozen=True)
class RowFacts:
    """Facts of the rows of a file, [rows] each.

    hashes: of the contents. positions: between 0 and 2**64, by which a share is held out. held_out: 1 where a row is
    held out whatever its position is. moments: seconds since the epoch; NaN where no window asks for the time.
    """

    hashes: NDArray[np.uint64]
    positions: NDArray[np.uint64]
    held_out: NDArray[np.uint8]
    moments: NDArray[np.float64]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the facts that are kept in a folder."""
        columns = open_columns(folder, SPLIT)
        return cls(*(np.array(columns[name]) for name in ("hashes", "positions", "held_out", "moments")))

    def __len__(self) -> int:
        return len(self.hashes)

    def are_held_out(self, file: DataFile, spec: DataSpec) -> NDArray[np.bool_]:
        """Returns which rows are held out; where a share of them is, by their content as `splits.is_held_out` does."""
        if file.held_out is not None:
            return np.full(len(self), file.held_out)
        if format_of(file.path, spec.format) == "text":
            return self.held_out.astype(bool)
        return self.positions.astype(np.float64) / 2.0**64 < spec.held_out


class RowFactsBuilder:
    """Collects the facts of rows. with_moments: whether a window asks for their times."""

    def __init__(self, *, with_moments: bool, time_column: str | None) -> None:
        self._with_moments, self._time_column = with_moments, time_column
        self._moments, self._held_out, self._positions = array("d"), array("B"), bytearray()
        self._manifest = ManifestBuilder()

    def add_row(self, row: Row) -> None:
        """Begins a row. Raises ValueError where it has no time, and a window asks for it."""
        self._moments.append(moment_of(row, column=self._time_column) if self._with_moments else math.nan)
        self._held_out.append(row.held_out)

    def add_content(self, content: Any, *, ends: bool = True) -> None:
        """Adds the content of a row, or a part of its text. ends: whether the row ends with it."""
        self._manifest.add(content, held_out=False, ends=ends)
        if not isinstance(content, str):
            self._positions += hashlib.sha256(split_key(content).encode()).digest()[:8]

    def columns(self) -> dict[str, NDArray[Any]]:
        """Returns the columns of all rows."""
        hashes = self._manifest.hashes()
        return {
            "hashes": hashes,
            "positions": np.frombuffer(bytes(self._positions), dtype=">u8").astype(np.uint64)
            if self._positions
            else hashes,  # of a text, both are the same
            "held_out": np.array(self._held_out, dtype=np.uint8),
            "moments": np.array(self._moments, dtype=np.float64),
        }


# Incremented whenever the same file would be kept in another way than before.
FORMAT = 3
DAYS_KEPT = 14
# Where a tokenizer was loaded from, in its tokenizer_config.json.
PLACES = frozenset({"name_or_path", "is_local", "local_files_only"})


class FileStore:
    """The folders `tokens/KEY` of a cache. settings: a JSON value of what their content depends on besides the file."""

    def __init__(self, cache_dir: Path, *, settings: Any) -> None:
        self._folder = cache_dir.absolute() / "tokens"
        self._settings = settings

    def folder_of(self, key: Any, write: Callable[[Path], object]) -> Path:
        """Returns the folder of a key, a JSON value. It is written by `write` if it is not kept."""
        folder = self._folder / digest({"format": FORMAT, "settings": self._settings, "key": key})
        if not folder.exists():
            with locked(folder.with_suffix(".lock")):
                if not folder.exists():
                    with publish(folder) as aside:
                        write(aside)
        os.utime(folder)
        return folder

    def remove_unused(self) -> None:
        """Removes what no preparation has asked for in `DAYS_KEPT`."""
        oldest_s = time.time() - DAYS_KEPT * DAY_S
        for folder in self._folder.iterdir() if self._folder.exists() else ():
            if folder.is_dir() and folder.suffix != ".tmp" and folder.stat().st_mtime < oldest_s:
                shutil.rmtree(folder, ignore_errors=True)
                folder.with_suffix(".lock").unlink(missing_ok=True)


def content_of(tokenizer: Path) -> str:
    """Returns a digest of a tokenizer that was saved, which does not depend on where it was loaded from."""
    sha = hashlib.sha256()
    for path in sorted(tokenizer.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            if path.name == "tokenizer_config.json":
                config = json.loads(content)
                content = json.dumps({key: config[key] for key in sorted(config) if key not in PLACES}).encode()
            sha.update(f"{path.name} {len(content)} ".encode() + content)
    return sha.hexdigest()


@dataclass(frozen=True, kw_only=True)
class CachedFile:
    """What is kept of a file, or of a part of one. folder: where it is kept. facts: of its rows."""

    file: DataFile
    folder: Path
    facts: RowFacts


K = TypeVar("K", bound=CachedFile)


@dataclass(frozen=True, kw_only=True)
class SelectedFile(Generic[K]):
    """What is kept of a file, which rows of it are read, and which rows are held out: [rows] each."""

    kept: K
    wanted: NDArray[np.bool_]
    held_out: NDArray[np.bool_]


def selected_files(spec: DataSpec, read: Callable[[KnownFile, bool], K]) -> list[SelectedFile[K]]:
    """Returns the files of a spec, in order, with the rows that are read.

    read: returns what is kept of a file; called with the file, and whether a window chooses among its rows.

    Raises RowErrors with the first wrong rows, those of `spec.path` and of `spec.held_out_path` together.
    """
    faults: list[RowError] = []

    def kept_of(files: Sequence[DataFile], *, is_windowed: bool) -> list[K]:
        try:
            return [read(each, is_windowed) for file in files for each in known_files(file, format=spec.format)]
        except RowErrors as error:
            faults.extend(error.faults)
            return []

    main = kept_of(main_files(spec), is_windowed=bool(spec.window))
    others = kept_of(held_out_files(spec), is_windowed=False)
    if faults:
        raise RowErrors(faults)
    wanted = [*_in_window([each.facts for each in main], spec), *(np.ones(len(each.facts), bool) for each in others)]
    return [
        SelectedFile(kept=kept, wanted=rows, held_out=kept.facts.are_held_out(kept.file, spec))
        for kept, rows in zip((*main, *others), wanted, strict=True)
    ]


def manifest_of(files: Sequence[SelectedFile[K]]) -> RowManifest:
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
    """Which rows of each file lie in the window; see `file_rows.in_window`."""
    window = spec.window or {}
    num_rows = [len(each) for each in facts]
    if (num_last := window.get("last_rows")) is not None:
        first = sum(num_rows) - int(num_last)
        starts = np.cumsum([0, *num_rows])
        return [np.arange(start, start + num) >= first for start, num in zip(starts, num_rows, strict=False)]
    if not needs_moments(spec):
        return [np.ones(num, bool) for num in num_rows]
    first_s, last_s = time_limits(window, moments=(float(each.moments.max()) for each in facts if len(each)))
    return [(first_s <= each.moments) & (each.moments < last_s) for each in facts]
