"""The tokens of single files under a given tokenizer, kept so that data with new files encodes only these.

Kept are the tokens of a file, or of a part of it, and of each row the number of tokens and its `RowFacts`. With a
tokenizer that is trained on the text, all tokens change when text is added, so nothing is kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.arrays import ColumnWriter, open_columns, read_slices
from ringmaster.techniques.data.encoding.documents import Document, documents_of
from ringmaster.techniques.data.encoding.encoders import Encoder, encoder_of
from ringmaster.techniques.data.encoding.progress import Progress
from ringmaster.techniques.data.encoding.token_writer import TokenWriter
from ringmaster.techniques.data.file_cache.chosen_files import (
    ChosenFile,
    chosen_files,
    manifest_of,
    needs_moments,
)
from ringmaster.techniques.data.file_cache.parts import KnownFile
from ringmaster.techniques.data.file_cache.row_facts import SPLIT, RowFacts, RowFactsBuilder
from ringmaster.techniques.data.file_cache.store import FileStore, content_of
from ringmaster.techniques.data.file_rows import DataFile, Reading, rows_of_file
from ringmaster.techniques.data.rows import format_of
from ringmaster.techniques.data.tokens import encoded, no_text
from ringmaster.techniques.interface.data_source import PreparedData, Row
from ringmaster.techniques.interface.job import DataSpec


@dataclass(frozen=True)
class FileTokens:
    """What is kept of a file. folder: with the column of tokens. num_tokens: of each row, [rows]."""

    file: DataFile
    folder: Path
    facts: RowFacts
    num_tokens: NDArray[np.int64]


def write_given(folder: Path, *, spec: DataSpec, reading: Reading, cache_dir: Path, where: str) -> PreparedData:
    """Writes the token samples of files under the given tokenizer into `folder`, and the manifest of named data.

    The samples are those of `write_tokens`. Files whose tokens are kept are only read for their digests.
    """
    assert spec.tokenizer is not None and spec.seq_len is not None
    encoder = encoder_of(spec, ())
    encoder.save(folder / "tokenizer")
    store = FileStore(cache_dir, settings={"kind": "tokens", "tokenizer": content_of(folder / "tokenizer")})
    reader = _TokenReader(store, spec=spec, reading=reading, encoder=encoder)
    files = chosen_files(spec, reader.read)
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


def _copy(chosen: ChosenFile[FileTokens], writer: TokenWriter) -> None:
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

    def __init__(self, store: FileStore, *, spec: DataSpec, reading: Reading, encoder: Encoder) -> None:
        self._store, self._spec, self._reading, self._encoder = store, spec, reading, encoder
        self._progress = Progress("encoding")

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
        return FileTokens(known.file, folder, RowFacts.read(folder), num_tokens)

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


def _recorded(rows: Iterator[Row], facts: RowFactsBuilder) -> Iterator[Document]:
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
