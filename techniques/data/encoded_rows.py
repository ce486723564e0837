"""Rows that were encoded, file by file, and kept: data with new files or new lines encodes only these.

A JSONL file is divided after every `BLOCK_BYTES`, at the end of a line. Lines that are added at its end change its last
part alone. Other files are one part: a CSV file may have line ends in quotes, and Parquet is read by columns. A part is
two Arrow files: `samples.arrow` with what was encoded, and `rows.arrow` with what is known of each row, from which
windows, splits and manifests are made without reading the file again.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ringmaster.codec import digest
from ringmaster.techniques.checkpoints.checkpoint import publish_once
from ringmaster.techniques.data.arrow_files import SPLITS, Table, read_table, texts_column
from ringmaster.techniques.data.file_patterns import FileRange
from ringmaster.techniques.data.file_rows import (
    DAY_S,
    DataFile,
    RowReading,
    data_files,
    moment_of,
    needs_moments,
    rows_in_window,
    rows_of_file,
)
from ringmaster.techniques.data.row_files import RowError, RowErrors, content_hash, format_of, hash_and_position
from ringmaster.techniques.data_source import Row
from ringmaster.techniques.job_specs import DataSpec

BLOCK_BYTES = 1 << 25
SAMPLES, ROWS = "samples.arrow", "rows.arrow"
MANIFEST = "rows.json"
WRITTEN = "has_written_special_tokens"
"""What is known of each row by this name: whether special tokens are in its texts, and plain text there."""
# Incremented whenever the same rows would be encoded or kept in another way than before.
FORMAT = 7
DAYS_KEPT = 14
# Where a tokenizer was loaded from, in its tokenizer_config.json.
PLACES = frozenset({"name_or_path", "is_local", "local_files_only"})


def known_files(file: DataFile, *, format: str | None) -> Iterator[tuple[DataFile, str]]:
    """Yields the parts of a local file, in order, and a digest of the bytes of each. They are read once for this."""
    if format_of(file.path, format) != "jsonl":
        with Path(file.path).open("rb") as stream:
            yield file, hashlib.file_digest(stream, "sha256").hexdigest()
        return
    first_line, start = 1, 0
    with Path(file.path).open("rb") as stream:
        while read := stream.read(BLOCK_BYTES) + stream.readline():
            block = FileRange(start=start, stop=start + len(read), first_line=first_line)
            yield replace(file, lines=block), hashlib.sha256(read).hexdigest()
            # As lines of text are counted: `\r` and `\r\n` end one too.
            first_line += read.count(b"\n") + read.count(b"\r") - read.count(b"\r\n")
            start = block.stop


@dataclass(frozen=True)
class RowBlock:
    """Rows that are encoded together.

    rows: returns them. key: identifies them where their encoding is kept. path: of their file, in messages. held_out:
    whether they are; None where `by_position` selects a share of them, or each row defines it. is_windowed: whether a
    window chooses among them; then a row of which no sample can be made matters only if it is chosen.
    """

    rows: Callable[[], Iterator[Row]]
    key: Any = None
    path: str = ""
    held_out: bool | None = None
    by_position: bool = False
    is_windowed: bool = False


def blocks_of_files(spec: DataSpec, reading: RowReading) -> Iterator[RowBlock]:
    """Yields the rows of all files of a spec in parts, with what identifies the rows and how they are read."""
    for files, is_windowed in zip(data_files(spec), (bool(spec.window), False), strict=True):
        for file, content in (known for each in files for known in known_files(each, format=spec.format)):
            form = format_of(file.path, spec.format)
            is_cut = file.held_out is None and form == "text"
            time_column = spec.time_column if is_windowed and needs_moments(spec.window) else None
            read = file if is_cut else replace(file, held_out=False)
            yield RowBlock(
                rows=lambda read=read: rows_of_file(read, spec, reading),  # type: ignore[misc]
                key=[content, form, time_column, spec.held_out if is_cut else None],
                path=file.path,
                held_out=file.held_out,
                by_position=file.held_out is None and not is_cut,
                is_windowed=is_windowed,
            )


def row_facts(rows: Sequence[Row], block: RowBlock, spec: DataSpec) -> dict[str, Any]:
    """Returns what is known of some rows of a part, as columns.

    Their numbers in their files, the hashes of their contents, their positions between 0 and 2**64, by which a share is
    held out; whether they are held out otherwise; their times in seconds since the epoch, if a window requires them.

    Raises ValueError where a row has no time, and a window asks for it.
    """
    hashes = np.zeros((len(rows), 2), np.uint64)
    if block.key is not None or spec.name is not None:
        numbers = b"".join(chain.from_iterable(hash_and_position(row.content) for row in rows))
        hashes = np.frombuffer(numbers, dtype=">u8").astype(np.uint64).reshape(-1, 2)
    moments = [math.nan] * len(rows)
    if block.is_windowed and needs_moments(spec.window):
        moments = [moment_of(row, column=spec.time_column) for row in rows]
    return {
        "number": np.array([row.number for row in rows], dtype=np.int64),
        "file": texts_column([None if row.file == block.path else row.file for row in rows]),
        "hash": hashes[:, 0],
        "position": hashes[:, 1],
        "held_out": np.array([row.held_out for row in rows], dtype=np.uint8),
        "moment": np.array(moments, dtype=np.float64),
    }


@dataclass
class EncodedBlock:
    """The encoded rows of a part, in a folder. wanted, held_out: which rows are read, and are held out: [rows] each."""

    block: RowBlock
    folder: Path
    wanted: NDArray[np.bool_] = field(init=False)
    held_out: NDArray[np.bool_] = field(init=False)

    @cached_property
    def facts(self) -> Table:
        """What is known of each row."""
        return read_table(self.folder / ROWS)

    def column(self, name: str) -> NDArray[Any]:
        """Returns numbers that are known of each row, [rows]."""
        result: NDArray[Any] = self.facts[name].to_numpy()
        return result

    def __len__(self) -> int:
        return int(self.facts.num_rows)

    def place(self, row: int) -> tuple[str, int]:
        """Returns the file of a row, and its number there."""
        return self.facts["file"][row].as_py() or self.block.path, self.facts["number"][row].as_py()

    def split(self, split: str) -> NDArray[np.bool_]:
        """Returns which rows are read for a split."""
        chosen: NDArray[np.bool_] = self.wanted & (self.held_out == (split == "held_out"))
        return chosen

    def divide(self, spec: DataSpec) -> None:
        """Finds which rows are held out; where a share of them is, by their content as `is_held_out` does."""
        self.wanted = np.ones(len(self), bool)
        self.held_out = np.full(len(self), self.block.held_out is True)
        if self.block.by_position:
            self.held_out = np.asarray(self.column("position").astype(np.float64) / 2.0**64 < spec.held_out)
        elif self.block.held_out is None:
            self.held_out = self.column("held_out").astype(bool)


def notes_on_written(blocks: Sequence[EncodedBlock]) -> tuple[str, ...]:
    """Returns what users should know of rows whose texts have special tokens, if there are any."""
    num_rows = sum(int(each.column(WRITTEN)[each.wanted].sum()) for each in blocks)
    what = "row has" if num_rows == 1 else "rows have"
    note = f"{num_rows:,} {what} special tokens of the tokenizer in a text, where they are read as plain text"
    return (note,) if num_rows else ()


@dataclass(frozen=True, kw_only=True)
class RowManifest:
    """The content hashes of the rows of each split, "training" and "held_out", sorted; equal rows are all listed."""

    rows: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, contents: Iterable[tuple[Any, bool]]) -> Self:
        """Returns the manifest of contents, each with whether it is held out."""
        rows: tuple[list[str], list[str]] = ([], [])
        for content, held_out in contents:
            rows[held_out].append(content_hash(content))
        return cls(rows={split: tuple(sorted(each)) for split, each in zip(SPLITS, rows, strict=True)})

    @classmethod
    def of_blocks(cls, blocks: Sequence[EncodedBlock]) -> Self:
        """Returns the manifest of the rows that are read of parts."""
        rows: dict[str, tuple[str, ...]] = {}
        for split in SPLITS:
            hashes = np.sort(np.concatenate([each.column("hash")[each.split(split)] for each in blocks]))
            text = hashes.astype(">u8").tobytes().hex()
            rows[split] = tuple(text[start : start + 16] for start in range(0, len(text), 16))
        return cls(rows=rows)

    def digest(self, split: str) -> str:
        """Returns a digest of the rows of a split, which does not depend on their order."""
        return hashlib.sha256("".join(self.rows[split]).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, which `from_json` reads back."""
        return {split: {"digest": self.digest(split), "rows": list(rows)} for split, rows in self.rows.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Returns the manifest whose `to_json` is `value`."""
        return cls(rows={split: tuple(value[split]["rows"]) for split in SPLITS if split in value})

    def write(self, folder: Path) -> None:
        """Stores the manifest in the folder of the prepared data."""
        (folder / MANIFEST).write_text(json.dumps(self.to_json()))

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Returns the manifest stored in a folder, or None where there is none."""
        try:
            return cls.from_json(json.loads((folder / MANIFEST).read_text()))
        except FileNotFoundError:
            return None


@contextmanager
def encoded_blocks(
    blocks: Iterator[RowBlock],
    spec: DataSpec,
    write: Callable[..., object],
    *,
    folder: Path,
    cache_dir: Path | None,
    settings: Any,
) -> Iterator[list[EncodedBlock]]:
    """Yields parts, in order, with the rows that are read; those that are not kept are encoded by `write`.

    They are kept in folders `encoded/KEY` of a cache; without one, they are in `folder` until the context ends. Then
    the manifest of data with a name is written there.

    settings: a JSON value of what their content depends on besides the rows.

    Raises RowErrors with the first wrong rows, those of `spec.path` and of `spec.held_out_path` together.
    """
    cache, aside = cache_dir and cache_dir.absolute() / "encoded", folder / "encoded"
    result: list[EncodedBlock] = []
    faults: dict[bool, tuple[RowError, ...]] = {}
    for number, block in enumerate(blocks):
        is_evaluated = block.held_out is True
        if is_evaluated in faults:
            continue
        try:
            if cache is None:
                (aside / str(number)).mkdir(parents=True)
                write(aside / str(number), block=block)
                result.append(EncodedBlock(block, aside / str(number)))
            else:
                kept = cache / digest({"format": FORMAT, "settings": settings, "key": block.key})
                publish_once(kept, partial(write, block=block))
                os.utime(kept)
                result.append(EncodedBlock(block, kept))
        except RowErrors as error:
            faults[is_evaluated] = error.faults
    if faults:
        raise RowErrors([fault for each in faults.values() for fault in each])
    if cache is not None:
        _remove_unused(cache)
    for each in result:
        each.divide(spec)
    windowed = [each for each in result if each.block.is_windowed]
    chosen = rows_in_window([each.column("moment") for each in windowed], spec.window)
    for each, wanted in zip(windowed, chosen, strict=True):
        each.wanted = wanted
    yield result
    if spec.name is not None:
        RowManifest.of_blocks(result).write(folder)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_unused(cache: Path) -> None:
    """Removes what no preparation has asked for in `DAYS_KEPT`."""
    oldest_s = time.time() - DAYS_KEPT * DAY_S
    for folder in cache.iterdir() if cache.exists() else ():
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
