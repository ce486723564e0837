"""The tokens of single files under a given tokenizer, kept so that data with new files encodes only these.

A file is known by its inode, size and time of change. Kept are its tokens and, for each row, the number of tokens, the
hash of the content, and the time where a window asks for it. Splits and windows are chosen from these. Files that no
preparation has asked for in `DAYS_KEPT` are removed. With a tokenizer that is trained on the text, all tokens change
when text is added, so nothing is kept.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.interface.data_source import PreparedData, Row
from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.interface.values import digest
from ringmaster.techniques.runtime.checkpoints.publish import publish
from ringmaster.techniques.runtime.data.arrays import ColumnWriter, open_columns, read_slices
from ringmaster.techniques.runtime.data.encoding.documents import Document, documents_of
from ringmaster.techniques.runtime.data.encoding.encoders import Encoder, encoder_of
from ringmaster.techniques.runtime.data.encoding.token_writer import TokenWriter
from ringmaster.techniques.runtime.data.file_rows import (
    DataFile,
    Reading,
    held_out_files,
    main_files,
    moment_of,
    rows_of_file,
)
from ringmaster.techniques.runtime.data.manifest import ManifestBuilder
from ringmaster.techniques.runtime.data.prepared import locked
from ringmaster.techniques.runtime.data.rows import format_of
from ringmaster.techniques.runtime.data.tokens import encoded, no_text
from ringmaster.techniques.runtime.data.windows import DAY_S, moment

# Incremented whenever the same file would be kept in another way than before.
FORMAT = 1
DAYS_KEPT = 14
SPLIT = "training"  # columns belong to a split; here all rows are in one


@dataclass(frozen=True)
class FileTokens:
    """What is kept of a file. folder: with the column of tokens. The other fields are [rows].

    num_tokens: of each row. hashes: of the contents. held_out: 1 where a row is held out whatever its hash is.
    moments: seconds since the epoch; NaN where no window asks for the time.
    """

    folder: Path
    num_tokens: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    held_out: NDArray[np.int64]
    moments: NDArray[np.float64]


def write_given(folder: Path, *, spec: DataSpec, reading: Reading, cache_dir: Path, where: str) -> PreparedData:
    """Writes the token samples of files under the given tokenizer into `folder`, and the manifest of named data.

    The samples are those of `write_tokens`. Files whose tokens are kept are not read.
    """
    assert spec.tokenizer is not None and spec.seq_len is not None
    encoder = encoder_of(spec, ())
    encoder.save(folder / "tokenizer")
    store = _Store(cache_dir, spec=spec, reading=reading, encoder=encoder, tokenizer=folder / "tokenizer")
    main, others = main_files(spec), held_out_files(spec)
    kept = [store.tokens_of(file, with_moments=_needs_moments(spec)) for file in main]
    kept += [store.tokens_of(file, with_moments=False) for file in others]
    chosen = [*_in_window(kept[: len(main)], spec), *(np.ones(len(each.hashes), bool) for each in kept[len(main) :])]
    if not any(rows.any() for rows in chosen):
        raise no_text(spec, where=where)
    manifest = ManifestBuilder()
    with ColumnWriter(folder) as columns:
        writer = TokenWriter(
            columns, seq_len=spec.seq_len, vocab_size=encoder.vocab_size, end_of_text_id=encoder.end_of_text_id
        )
        for file, each, rows in zip((*main, *others), kept, chosen, strict=True):
            held_out = _held_out(file, each, spec)
            _copy(each, rows, held_out, writer)
            for side in (False, True):
                manifest.extend(each.hashes[rows & (held_out == side)], held_out=side)
        writer.flush()
    if spec.name is not None:
        manifest.built().write(folder)
    store.remove_unused()
    return writer.described(folder, spec=spec, where=where)


def _held_out(file: DataFile, kept: FileTokens, spec: DataSpec) -> NDArray[np.bool_]:
    """Which rows are held out; by the hash of its content as `splits.is_held_out` does where a share of rows is."""
    if file.held_out is not None:
        return np.full(len(kept.hashes), file.held_out)
    if format_of(file.path, spec.format) == "text":
        return kept.held_out.astype(bool)
    return kept.hashes.astype(np.float64) / 2.0**64 < spec.held_out


def _in_window(kept: Sequence[FileTokens], spec: DataSpec) -> list[NDArray[np.bool_]]:
    """Which rows of each file lie in the window; see `windows.in_window`."""
    window = spec.window or {}
    num_rows = [len(each.hashes) for each in kept]
    if (num_last := window.get("last_rows")) is not None:
        ends = np.cumsum(num_rows, dtype=np.int64)
        first = int(ends[-1]) - int(num_last)
        starts = ends - num_rows
        return [np.arange(start, end) >= first for start, end in zip(starts, ends, strict=True)]
    if not _needs_moments(spec):
        return [np.ones(num, bool) for num in num_rows]
    first_s, last_s = moment(window.get("since"), -math.inf), moment(window.get("until"), math.inf)
    if (days := window.get("last_days")) is not None:
        newest_s = max((float(each.moments.max()) for each in kept if len(each.moments)), default=0.0)
        first_s = newest_s - days * DAY_S
    return [(first_s <= each.moments) & (each.moments < last_s) for each in kept]


def _needs_moments(spec: DataSpec) -> bool:
    return any((spec.window or {}).get(key) is not None for key in ("last_days", "since", "until"))


def _copy(kept: FileTokens, rows: NDArray[np.bool_], held_out: NDArray[np.bool_], writer: TokenWriter) -> None:
    """Appends the tokens of the chosen rows to their splits; neighbours of one split at once."""
    if not len(rows):
        return
    ends = np.cumsum(kept.num_tokens)
    kinds = np.where(rows, held_out.astype(np.int8), 2)
    last = np.flatnonzero(np.append(np.diff(kinds) != 0, True))
    stops = ends[last]
    starts = np.concatenate(([0], stops[:-1]))
    wanted = np.flatnonzero(kinds[last] != 2)
    ranges = ((int(starts[each]), int(stops[each])) for each in wanted)
    for number, ids in read_slices(kept.folder, SPLIT, "input_ids", ranges):
        writer.append(ids, held_out=bool(kinds[last[wanted[number]]]))


class _Store:
    """The folders `tokens/KEY` of a cache, one for each state of a file, and what of it is read and how."""

    def __init__(self, cache_dir: Path, *, spec: DataSpec, reading: Reading, encoder: Encoder, tokenizer: Path) -> None:
        self._folder = cache_dir.absolute() / "tokens"
        self._spec, self._reading, self._encoder = spec, reading, encoder
        self._tokenizer = _content_of(tokenizer)

    def tokens_of(self, file: DataFile, *, with_moments: bool) -> FileTokens:
        """Returns the tokens of a file, which is read if they are not kept."""
        folder = self._folder / self._key(file, with_moments=with_moments)
        if not folder.exists():
            with locked(folder.with_suffix(".lock")):
                if not folder.exists():
                    with publish(folder) as aside:
                        self._write(aside, file, with_moments=with_moments)
        os.utime(folder)
        columns = open_columns(folder, SPLIT)
        fields = {name: np.array(columns[name]) for name in ("num_tokens", "hashes", "held_out", "moments")}
        return FileTokens(folder, **fields)

    def remove_unused(self) -> None:
        """Removes what no preparation has asked for in `DAYS_KEPT`."""
        oldest_s = time.time() - DAYS_KEPT * DAY_S
        for folder in self._folder.iterdir():
            if folder.is_dir() and folder.suffix != ".tmp" and folder.stat().st_mtime < oldest_s:
                shutil.rmtree(folder, ignore_errors=True)
                folder.with_suffix(".lock").unlink(missing_ok=True)

    def _key(self, file: DataFile, *, with_moments: bool) -> str:
        state, spec = Path(file.path).stat(), self._spec
        is_cut = file.held_out is None and format_of(file.path, spec.format) == "text"
        return digest(
            {
                "format": FORMAT,
                "file": [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns],
                "read_as": [format_of(file.path, spec.format), spec.text_column],
                "tokenizer": self._tokenizer,
                "time_column": spec.time_column if with_moments else None,
                "cut": spec.held_out if is_cut else None,
            }
        )

    def _write(self, folder: Path, file: DataFile, *, with_moments: bool) -> None:
        rows = _Rows(with_moments=with_moments, time_column=self._spec.time_column)
        dtype = np.uint16 if self._encoder.vocab_size <= 1 << 16 else np.uint32
        with ColumnWriter(folder) as columns:
            columns.append_stream(SPLIT, "input_ids", np.empty(0, dtype), row_len=1)
            writer = TokenWriter(columns, seq_len=1, vocab_size=self._encoder.vocab_size)
            documents = rows.seen(rows_of_file(file, self._spec, self._reading))
            for document, ids in encoded(documents, self._encoder):
                writer.append(ids, held_out=False)
                rows.add(len(ids), ends=document.ends)
            writer.flush()
            columns.append(SPLIT, rows.columns())


class _Rows:
    """Collects what is kept of each row beside its tokens."""

    def __init__(self, *, with_moments: bool, time_column: str | None) -> None:
        self._with_moments, self._time_column = with_moments, time_column
        self._num_tokens, self._num_of_this = array("q"), 0
        self._moments, self._held_out = array("d"), array("q")
        self._manifest = ManifestBuilder()

    def seen(self, rows: Iterator[Row]) -> Iterator[Document]:
        """Yields the documents of rows, one row after another."""
        for document in documents_of(map(self._row, rows)):
            self._manifest.add(document.content, held_out=False, ends=document.ends)
            yield document

    def _row(self, row: Row) -> Row:
        if isinstance(row.content, list):
            raise ValueError(
                f"{row.file}, line {row.number} has token ids, and the first row has text. To fix: give all rows as "
                f"one of the two"
            )
        self._moments.append(moment_of(row, column=self._time_column) if self._with_moments else math.nan)
        self._held_out.append(row.held_out)
        return row

    def add(self, num_tokens: int, *, ends: bool) -> None:
        """Adds the tokens of a piece of a row."""
        self._num_of_this += num_tokens
        if ends:
            self._num_tokens.append(self._num_of_this)
            self._num_of_this = 0

    def columns(self) -> dict[str, NDArray[Any]]:
        """Returns the columns of all rows."""
        return {
            "num_tokens": np.array(self._num_tokens, dtype=np.int64),
            "hashes": self._manifest.hashes(),
            "held_out": np.array(self._held_out, dtype=np.int64),
            "moments": np.array(self._moments, dtype=np.float64),
        }


def _content_of(tokenizer: Path) -> str:
    """A digest of a tokenizer that was saved, without files that may name where it came from."""
    sha = hashlib.sha256()
    for path in sorted(tokenizer.rglob("*")):
        if path.is_file() and path.name != "tokenizer_config.json":
            sha.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return sha.hexdigest()
