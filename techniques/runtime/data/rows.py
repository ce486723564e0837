"""Reads the rows of text, JSONL, CSV and Parquet files one after another, each with its number."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from ringmaster.techniques.runtime.data.files import opened

SUFFIXES = {".txt": "text", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
FORMATS = tuple(SUFFIXES.values())


def format_of(path: str, given: str | None = None) -> str:
    """Returns the format of a file: `given`, or that of its suffix. Raises ValueError on others."""
    suffix = PurePosixPath(path).suffix
    found = given or SUFFIXES.get(suffix)
    if found is None:
        raise ValueError(
            f"{path} ends in {suffix or 'nothing'}. To fix: name files that end in {', '.join(SUFFIXES)}, or give "
            f"their format: {', '.join(FORMATS)}"
        )
    return found


def read_rows(
    path: str, *, format: str | None = None, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a file, local or at a URL, with their numbers from 1.

    A row is a mapping, or the whole text of a text file. columns: the columns that are needed; where the format allows
    it, others are not read. Raises ValueError, with the file and the line, where a row cannot be read.
    """
    with opened(path) as stream:
        try:
            kind = format_of(path, format)
            if kind == "parquet":
                yield from _parquet(stream, path, columns)
            else:
                yield from READERS[kind](stream, path)
        except (UnicodeDecodeError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}. To fix: check the file") from error


def content_hash(content: Any) -> str:
    """Returns a hash of a row's content, which depends neither on its position nor on the order of its keys."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text(stream: BinaryIO, path: str) -> Iterator[tuple[int, Any]]:
    yield 1, stream.read().decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def _jsonl(stream: BinaryIO, path: str) -> Iterator[tuple[int, Any]]:
    with io.TextIOWrapper(stream, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}. To fix: one object a line") from error
            yield number, row


def _csv(stream: BinaryIO, path: str) -> Iterator[tuple[int, Any]]:
    with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(
                    f"{path}, line {reader.line_num} has another number of values than the header. "
                    "To fix: put quotes around values with commas"
                )
            yield reader.line_num, row


def _parquet(stream: BinaryIO, path: str, columns: Sequence[str] | None) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} needs pyarrow. To fix: pip install pyarrow, or give JSONL") from error
    try:
        table = pyarrow.parquet.ParquetFile(stream)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}. To fix: check the file") from error
    number = 0
    there = [name for name in columns or () if name in table.schema_arrow.names]
    for batch in table.iter_batches(columns=there or None):
        for row in batch.to_pylist():
            number += 1
            yield number, row


# Parquet is read separately, as it can read single columns.
READERS: Mapping[str, Callable[[BinaryIO, str], Iterator[tuple[int, Any]]]] = {
    "text": _text,
    "jsonl": _jsonl,
    "csv": _csv,
}
