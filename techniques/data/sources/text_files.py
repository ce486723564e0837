"""Text for language models: documents of text, JSONL, CSV and Parquet files that a glob or a URL matches.

With a given tokenizer, the tokens of single files are kept, so that data with new files encodes only these. With a
tokenizer that is trained on the text, all tokens change when text is added, so nothing is kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.arrays import ColumnWriter, open_columns, read_slices
from ringmaster.techniques.data.cached_files import (
    SPLIT,
    CachedFile,
    FileStore,
    KnownFile,
    RowFacts,
    RowFactsBuilder,
    SelectedFile,
    content_of,
    manifest_of,
    needs_moments,
    selected_files,
)
from ringmaster.techniques.data.file_rows import DataFile, RowReading, preparation_of_files, rows_of_file, rows_of_files
from ringmaster.techniques.data.row_files import format_of
from ringmaster.techniques.data.row_kind import check_keys
from ringmaster.techniques.data.stored_source import Preparation, StoredSource, TextProgress
from ringmaster.techniques.data.tokens import (
    Encoder,
    TextDocument,
    TokenWriter,
    documents_of,
    encoded,
    encoder_of,
    no_text,
    write_tokens,
)
from ringmaster.techniques.data_source import PreparedData, Row
from ringmaster.techniques.job import DataSpec

Content = str | list[int]
KTO_COLUMNS = frozenset({"prompt", "completion", "label"})
NO_KTO = (
    "has a prompt, a completion and a label, as for KTO, a loss that there is not. To fix: keep the rows whose label "
    "is true, and set data.kind to completion; or make rows of prompt, chosen and rejected, for dpo, orpo or simpo"
)


class TextFiles(StoredSource):
    """The documents in all files that `spec.path` and, if given, `spec.held_out_path` match.

    A text file is one document. In other files each row is one: its `text_column` has text or token ids (or its
    `input_ids`, if there is no such column).
    """

    name = "language-modeling"
    reads = ("path",)

    def check(self, spec: DataSpec) -> None:
        """Refuses keys that are not read, and options, as text has none."""
        check_keys(spec, kind=self.name, columns=("text",), has_classes=False)
        if spec.path is not None and spec.kwargs:
            raise ValueError(
                f"data: kind {self.name} has no option {min(spec.kwargs)!r}. To fix: remove kwargs, or set data.kind"
            )

    def preparation(self, spec: DataSpec, *, cache_dir: Path) -> Preparation:
        """Returns how the documents become one stream of tokens, which is cut into samples."""
        return preparation_of_files(
            spec,
            cache_dir=cache_dir,
            rows=self.rows,
            write=partial(_write, cache_dir),
            identity_of=self.identity_of,
        )

    def rows(self, spec: DataSpec) -> Iterator[Row]:
        """Yields every row before tokenisation; its content is its text, a `FileText` or its token ids."""
        return rows_of_files(spec, reading_of(spec))


def reading_of(spec: DataSpec) -> RowReading:
    """Returns what is read of a row of text."""
    return RowReading(columns=(spec.text_column, "input_ids"), content=partial(_content, column=spec.text_column))


def _write(cache_dir: Path, folder: Path, spec: DataSpec, where: str) -> PreparedData:
    reading = reading_of(spec)

    def documents() -> Iterator[TextDocument]:
        return documents_of(rows_of_files(spec, reading))

    if spec.tokenizer is not None and spec.seq_len is not None and _has_text(spec, reading):
        return write_given(folder, spec=spec, reading=reading, cache_dir=cache_dir, where=where)
    return write_tokens(folder, spec=spec, documents=documents, where=where, with_manifest=spec.name is not None)


def _has_text(spec: DataSpec, reading: RowReading) -> bool:
    """Whether the first row is text, and not the ids of tokens, which no tokenizer encodes."""
    row = next(rows_of_files(replace(spec, window=None), reading), None)
    return row is not None and not isinstance(row.content, list)


def _content(row: Any, where: str, *, column: str) -> Content:
    """The text or the token ids of a row."""
    content = row.get(column, row.get("input_ids")) if isinstance(row, Mapping) else None
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(token, int) for token in content):
        return content
    if not isinstance(row, Mapping) or (column not in row and "input_ids" not in row):
        if isinstance(row, Mapping) and row.keys() >= KTO_COLUMNS:
            raise ValueError(f"{where} {NO_KTO}")
        there = sorted(row) if isinstance(row, Mapping) else type(row).__name__
        what = f"has no text (nor input_ids) in column {column!r}; it has {there}"
        raise ValueError(f"{where} {what}. To fix: set text_column")
    read = column if column in row else "input_ids"
    found = "it is null" if content is None else f"it is of type {type(content).__name__}"
    raise ValueError(f"{where} has no text in column {read!r}: {found}. To fix: give it a text, or remove the row")


@dataclass(frozen=True, kw_only=True)
class FileTokens(CachedFile):
    """The kept tokens of a file. folder: with the column of tokens. num_tokens: of each row, [rows]."""

    num_tokens: NDArray[np.int64]


def write_given(folder: Path, *, spec: DataSpec, reading: RowReading, cache_dir: Path, where: str) -> PreparedData:
    """Writes the token samples of files under the given tokenizer into `folder`, and the manifest of named data.

    The samples are those of `write_tokens`. Files whose tokens are kept are only read for their digests.
    """
    assert spec.tokenizer is not None and spec.seq_len is not None
    encoder = encoder_of(spec, ())
    encoder.save(folder / "tokenizer")
    store = FileStore(cache_dir, settings={"kind": "tokens", "tokenizer": content_of(folder / "tokenizer")})
    reader = _TokenReader(store, spec=spec, reading=reading, encoder=encoder)
    files = selected_files(spec, reader.read)
    if not any(each.wanted.any() for each in files):
        raise no_text(spec, where=where)
    with ColumnWriter(folder) as columns:
        writer = TokenWriter(
            columns, seq_len=spec.seq_len, vocab_size=encoder.vocab_size, end_of_text_id=encoder.end_of_text_id
        )
        for each in files:
            _copy(each, writer)
        writer.flush()
    if spec.name is not None:
        manifest_of(files).write(folder)
    store.remove_unused()
    return writer.described(folder, spec=spec, where=where)


def _copy(chosen: SelectedFile[FileTokens], writer: TokenWriter) -> None:
    """Appends the tokens of the chosen rows to their splits; neighbours of one split at once."""
    kept = chosen.kept
    if not len(chosen.wanted):
        return
    ends = np.cumsum(kept.num_tokens)
    kinds = np.where(chosen.wanted, chosen.held_out.astype(np.int8), 2)
    last = np.flatnonzero(np.append(np.diff(kinds) != 0, True))
    stops = ends[last]
    starts = np.concatenate(([0], stops[:-1]))
    wanted = np.flatnonzero(kinds[last] != 2)
    ranges = ((int(starts[each]), int(stops[each])) for each in wanted)
    for number, ids in read_slices(kept.folder, SPLIT, "input_ids", ranges):
        writer.append(ids, held_out=bool(kinds[last[wanted[number]]]))


class _TokenReader:
    """Returns the tokens of files: those that a store keeps, or else those that it encodes."""

    def __init__(self, store: FileStore, *, spec: DataSpec, reading: RowReading, encoder: Encoder) -> None:
        self._store, self._spec, self._reading, self._encoder = store, spec, reading, encoder
        self._progress = TextProgress("encoding")

    def read(self, known: KnownFile, is_windowed: bool) -> FileTokens:
        """Returns the tokens of a file. is_windowed: whether a window chooses among its rows."""
        spec, with_moments = self._spec, is_windowed and needs_moments(self._spec)
        form = format_of(known.file.path, spec.format)
        is_cut = known.file.held_out is None and form == "text"
        key = {
            "file": known.digest,
            "read_as": [form, spec.text_column],
            "time_column": spec.time_column if with_moments else None,
            "cut": spec.held_out if is_cut else None,
        }
        file = known.file if is_cut else replace(known.file, held_out=False)
        folder = self._store.folder_of(key, lambda aside: self._write(aside, file, with_moments=with_moments))
        num_tokens = np.array(open_columns(folder, SPLIT)["num_tokens"])
        return FileTokens(file=known.file, folder=folder, facts=RowFacts.read(folder), num_tokens=num_tokens)

    def _write(self, folder: Path, file: DataFile, *, with_moments: bool) -> None:
        facts = RowFactsBuilder(with_moments=with_moments, time_column=self._spec.time_column)
        dtype = np.uint16 if self._encoder.vocab_size <= 1 << 16 else np.uint32
        num_tokens, num_of_this = array("q"), 0
        with ColumnWriter(folder) as columns:
            columns.append_stream(SPLIT, "input_ids", np.empty(0, dtype), row_len=1)
            writer = TokenWriter(columns, seq_len=1, vocab_size=self._encoder.vocab_size)
            documents = _recorded(rows_of_file(file, self._spec, self._reading), facts)
            for document, ids in encoded(documents, self._encoder, self._progress):
                writer.append(ids, held_out=False)
                num_of_this += len(ids)
                if document.ends:
                    num_tokens.append(num_of_this)
                    num_of_this = 0
            writer.flush()
            columns.append(SPLIT, {**facts.columns(), "num_tokens": np.array(num_tokens, dtype=np.int64)})


def _recorded(rows: Iterator[Row], facts: RowFactsBuilder) -> Iterator[TextDocument]:
    """Yields the documents of rows, one row after another."""

    def seen() -> Iterator[Row]:
        for row in rows:
            if isinstance(row.content, list):
                raise ValueError(
                    f"{row.file}, line {row.number} has token ids, and the first row has text. To fix: give all rows "
                    f"as one of the two"
                )
            facts.add_row(row)
            yield row

    for document in documents_of(seen()):
        facts.add_content(document.content, ends=document.ends)
        yield document
