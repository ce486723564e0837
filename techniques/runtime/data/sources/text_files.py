"""Documents of text, JSONL, CSV and Parquet files that a glob or a URL matches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.runtime.data.files import Matched, is_url, local_copies
from ringmaster.techniques.runtime.data.files import matching as matching_files
from ringmaster.techniques.runtime.data.manifest import Manifest
from ringmaster.techniques.runtime.data.prepared import PreparedData, Source
from ringmaster.techniques.runtime.data.rows import format_of, read_rows
from ringmaster.techniques.runtime.data.splits import held_out_keys, is_held_out
from ringmaster.techniques.runtime.data.tokens import Document, write_tokens
from ringmaster.techniques.runtime.data.windows import in_window, moment

Content = str | list[int]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a file.

    number: its number in the file, from 1.
    content: its text or token ids.
    """

    file: str
    number: int
    value: Any
    content: Content
    held_out: bool


def text_files(spec: DataSpec, *, cache_dir: Path) -> Source:
    """Returns the source of the documents in all files that `spec.path` and, if given, `spec.held_out_path` match.

    A text file is one document. In other files each row is one: its `text_column` has text or token ids (or its
    `input_ids`, if there is no such column). Without `held_out_path`, several files are split by file, and a single
    file by row. A single text file is split at the line where its held-out share begins. Files at URLs are copied into
    `cache_dir` when they are prepared.
    """
    assert spec.path is not None
    patterns = [pattern for pattern in (spec.path, spec.held_out_path) if pattern is not None]
    found = [_matching(pattern, spec.format) for pattern in patterns]

    def write(folder: Path) -> PreparedData:
        paths = [local_copies(pattern, cache_dir=cache_dir) for pattern in patterns]
        local = replace(spec, path=paths[0], held_out_path=paths[1] if len(paths) == 2 else None)
        where = f"path {spec.path!r}" if spec.name is None else f"data set {spec.name}"
        documents = partial(_documents, local)
        prepared = write_tokens(folder, spec=local, documents=documents, where=where)
        if spec.name is not None:
            Manifest.of((document.content, document.held_out) for document in documents()).write(folder)
        return prepared

    return Source(
        name=spec.name or spec.path,
        location=spec.path if is_url(spec.path) else str(Path(spec.path).absolute()),
        state=[entry for files in found for entry in files.state()],
        write=write,
    )


def rows_of(spec: DataSpec) -> Iterator[Row]:
    """Yields every row that a job reads, local or at a URL, before tokenisation, and whether it is held out.

    Raises ValueError where a file or a row cannot be read.
    """
    assert spec.path is not None
    yield from in_window(partial(_main_rows, spec), spec.window, moment_s=partial(_moment_s, spec.time_column))
    if spec.held_out_path is not None:
        files = _matching(spec.held_out_path, spec.format)
        for name in files.names:
            yield from _rows(files.path(name), spec, held_out=True)


def _documents(spec: DataSpec) -> Iterator[Document]:
    for row in rows_of(spec):
        yield Document(content=row.content, held_out=row.held_out)


def _main_rows(spec: DataSpec) -> Iterator[Row]:
    assert spec.path is not None
    files = _matching(spec.path, spec.format)
    if spec.held_out_path is not None:
        held_out = frozenset[str]()
    elif len(files.names) == 1:
        yield from _split_rows(files.path(files.names[0]), spec)
        return
    else:
        held_out = held_out_keys(files.names, share=spec.held_out)
    for name in files.names:
        yield from _rows(files.path(name), spec, held_out=name in held_out)


def matching(pattern: str, *, format: str | None = None) -> tuple[Path, list[str]]:
    """Returns the folder above all wildcards, and the names of the matching files relative to it.

    Raises ValueError where no file matches.
    """
    found = _matching(pattern, format)
    return Path(found.root), list(found.names)


def _matching(pattern: str, format: str | None) -> Matched:
    found = matching_files(pattern)
    for name in found.names:
        try:
            format_of(name, format)
        except ValueError as error:
            raise ValueError(f"path {pattern!r} matches files of unknown form: {error}") from None
    return found


def _split_rows(path: str, spec: DataSpec) -> Iterator[Row]:
    """The rows of a single file, with a share of them held out."""
    is_text = format_of(path, spec.format) == "text"
    for row in _rows(path, spec, held_out=False):
        if not is_text:
            key = row.content if isinstance(row.content, str) else json.dumps(row.content)
            yield replace(row, held_out=is_held_out(key, share=spec.held_out))
            continue
        text = row.value
        cut = round(len(text) * (1 - spec.held_out))
        cut = text.rfind("\n", 0, cut) + 1 or cut if spec.held_out else len(text)
        yield replace(row, content=text[:cut])
        if text[cut:]:
            yield replace(row, content=text[cut:], held_out=True)


def _rows(path: str, spec: DataSpec, *, held_out: bool) -> Iterator[Row]:
    # A named data set needs every column; otherwise Parquet reads only the columns in use.
    columns = None if spec.name is not None else (spec.text_column, "input_ids")
    is_text = format_of(path, spec.format) == "text"
    for number, value in read_rows(path, format=spec.format, columns=columns):
        content = value if is_text else _content(value, spec.text_column, where=f"{path}, line {number}")
        yield Row(file=path, number=number, value=value, content=content, held_out=held_out)


def _content(row: Any, column: str, *, where: str) -> Content:
    """The text or the token ids of a row."""
    content = row.get(column, row.get("input_ids")) if isinstance(row, Mapping) else None
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(token, int) for token in content):
        return content
    there = sorted(row) if isinstance(row, Mapping) else type(row).__name__
    raise ValueError(
        f"{where} has no text (nor input_ids) in column {column!r}; it has {there}. To fix: set text_column"
    )


def _moment_s(column: str | None, row: Row) -> float:
    where = f"{row.file}, line {row.number}"
    if column is None or not isinstance(row.value, Mapping):
        raise ValueError(f"{where}: a window of time needs a column with the time. To fix: set time_column")
    try:
        return moment(row.value.get(column))
    except ValueError as error:
        raise ValueError(f"{where}, column {column!r}: {error}") from None
