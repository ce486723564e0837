"""Reads the rows of text, JSONL, CSV and Parquet files one after another, each with its number."""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from ringmaster.techniques.runtime.data.files import FilePart, opened
from ringmaster.techniques.runtime.data.limits import MAX_ROW_BYTES, Expansion, lines_of, row_too_large

SUFFIXES = {".txt": "text", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
FORMATS = tuple(SUFFIXES.values())
CHARACTERS_PER_READ = 1 << 16
ROWS_PER_BATCH, BYTES_PER_READ = 1024, 1 << 20
BYTES_PER_BATCH, REPEATED_ROWS_PER_BATCH = 16 << 20, 64
# The most faults that are reported at once, and how many rows after the first fault are searched for others.
MAX_FAULTS, ROWS_AFTER_A_FAULT = 5, 100_000

# Once, as making one takes as long as a short row.
_PLAIN = json.JSONEncoder(default=str)
_TEXT = json.encoder.encode_basestring_ascii
_SORTED = json.JSONEncoder(sort_keys=True, default=str)


@dataclass(frozen=True)
class RowFault:
    """What is wrong with a row, and how to mend it."""

    place: str
    what: str
    remedy: str


class DataFault(ValueError):
    """Something is wrong with the data as a whole, and not with a single row."""


class FaultyRows(ValueError):
    """Some rows of a file are wrong; the message has the first few of them, each with its line."""

    def __init__(self, faults: Sequence[RowFault]) -> None:
        self.faults = tuple(faults)
        said = "; ".join(f"{fault.place} {fault.what}" for fault in faults)
        remedies = "; ".join(dict.fromkeys(fault.remedy for fault in faults))
        super().__init__(f"{said}. To fix: {remedies}")


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
    it, others are not read. Raises ValueError, with the file and the lines, where rows cannot be read.
    """
    if format_of(path, format) == "text":
        yield 1, "".join(read_text(path))
        return
    rows = rows_and_faults(path, format=format, columns=columns)
    for number, row in rows:
        if isinstance(row, RowFault):
            raise FaultyRows(first_faults(row, (found for _, found in rows)))
        yield number, row


def rows_and_faults(
    path: str, *, format: str | None = None, columns: Sequence[str] | None = None, part: FilePart | None = None
) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a file that is no text, with their numbers, and a `RowFault` for each wrong one.

    part: the lines that are read, for JSONL alone; None for all.
    """
    kind = format_of(path, format)
    with opened(path, part) as stream:
        try:
            if kind == "parquet":
                yield from _parquet(stream, path, columns)
            elif kind == "csv":
                yield from _csv(stream, path)
            else:
                yield from _jsonl(stream, path, first_line=1 if part is None else part.first_line)
        except UnicodeDecodeError as error:
            raise (_cannot_be_read(path, error) if kind == "parquet" else not_utf8(path)) from error
        except OSError as error:
            raise _cannot_be_read(path, error) from error


def first_faults(first: RowFault, others: Iterator[Any]) -> list[RowFault]:
    """Returns a fault and those among the rows that follow it soon, at most `MAX_FAULTS`."""
    searched = (found for found in islice(others, ROWS_AFTER_A_FAULT) if isinstance(found, RowFault))
    return [first, *islice(searched, MAX_FAULTS - 1)]


def read_text(path: str) -> Iterator[str]:
    r"""Yields the text of a file in pieces, with `\n` at the end of each line."""
    with opened(path) as stream:
        try:
            with io.TextIOWrapper(stream, encoding="utf-8") as text:
                while piece := text.read(CHARACTERS_PER_READ):
                    yield piece
        except UnicodeDecodeError as error:
            raise not_utf8(path) from error
        except OSError as error:
            raise _cannot_be_read(path, error) from error


def not_utf8(path: str) -> ValueError:
    """Returns what is to be raised for a text file with other bytes than UTF-8, with the first of them."""
    found: list[str] = []
    offset = 0
    with opened(path) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                found.append(f"line {number} at byte {offset + error.start} of the file (0x{line[error.start]:02x})")
            offset += len(line)
            if len(found) == MAX_FAULTS:
                break
    encoding = _marked_encoding(path)
    where = f"in {', '.join(found)}" if encoding is None else f"but {encoding}, by its byte order mark"
    remedy = f"convert it{', e.g. from Latin-1' if encoding is None else ''}"
    return ValueError(
        f"{path} cannot be read: it is not UTF-8 {where}. To fix: {remedy}: iconv -f {encoding or 'ISO-8859-1'} "
        f"-t UTF-8 {PurePosixPath(path).name} > converted"
    )


def _marked_encoding(path: str) -> str | None:
    """The encoding whose byte order mark a file begins with; None without one."""
    with opened(path) as stream:
        begin = stream.read(4)
    if begin.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    return "UTF-16" if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else None


class TextInPieces(ABC):
    """A text that is read when it is needed, a piece at a time."""

    @abstractmethod
    def pieces(self) -> Iterator[str]:
        """Yields the text in pieces. Raises ValueError where it cannot be read."""


class ContentHash:
    """The hash of a text's content that is given in parts; see `content_hash`."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def update(self, text: str) -> None:
        """Adds the next part."""
        self._sha.update(text.encode())

    def digest(self) -> bytes:
        """Returns 8 bytes."""
        return self._sha.digest()[:8]


def content_hash(content: Any) -> str:
    """Returns a hash of a row's content, which depends neither on its position nor on the order of its keys."""
    return hash_bytes(content).hex()


def hash_bytes(content: Any) -> bytes:
    """Returns the 8 bytes of `content_hash`; a `TextInPieces` has the hash of its text."""
    if isinstance(content, TextInPieces):
        found = ContentHash()
        for piece in content.pieces():
            found.update(piece)
        return found.digest()
    text = content if isinstance(content, str) else to_json_text(content, is_sorted=True)
    return hashlib.sha256(text.encode()).digest()[:8]


def to_json_text(content: Any, *, is_sorted: bool = False) -> str:
    """Returns what `json.dumps` returns for a row's content, its keys in their order or sorted."""
    if not isinstance(content, dict) or not all(type(value) is str for value in content.values()):
        return (_SORTED if is_sorted else _PLAIN).encode(content)
    # Texts alone, as most rows are: an encoder takes longer to begin than to encode them.
    items = sorted(content.items()) if is_sorted else content.items()
    return "{" + ", ".join([f"{_TEXT(name)}: {_TEXT(value)}" for name, value in items]) + "}"


def _cannot_be_read(path: str, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read: {error}. To fix: check the file")


def _jsonl(stream: BinaryIO, path: str, *, first_line: int) -> Iterator[tuple[int, Any]]:
    with io.TextIOWrapper(stream, encoding="utf-8") as lines:
        for number, line in lines_of(lines, path, first_line=first_line):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                yield number, RowFault(place, f"is no JSON: {error}", "one object a line")
                continue
            if isinstance(row, dict):
                yield number, row
            else:
                kind = "null" if row is None else f"a {type(row).__name__}"
                yield number, RowFault(place, f"is no JSON object but {kind}", 'write rows as {"text": ...}')


def _csv(stream: BinaryIO, path: str) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(MAX_ROW_BYTES)  # longer than the default of 128 KiB
    with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(line for _, line in lines_of(lines, path))
        try:
            _check_separator(reader.fieldnames or (), path)
            for row in reader:
                if None in row or None in row.values():
                    yield reader.line_num, _ragged(row, f"{path}, line {reader.line_num}")
                else:
                    yield reader.line_num, row
        except csv.Error as error:
            yield (
                reader.line_num,
                RowFault(f"{path}, line {reader.line_num}", f"is no CSV: {error}", "check its quotes"),
            )


def _check_separator(names: Sequence[str], path: str) -> None:
    """Raises ValueError where the header of a CSV file seems to be separated by another sign than commas."""
    separators = {"\t": "tabs", ";": "semicolons", "|": "vertical bars"}
    if found := next((sign for sign in separators if len(names) == 1 and sign in names[0]), None):
        raise ValueError(
            f"{path} has one column, {names[0]!r}, which seems to be separated by {separators[found]}. To fix: "
            f"separate values by commas, e.g. with pandas: read_csv(FILE, sep={found!r}).to_csv(OTHER, index=False)"
        )


def _ragged(row: Mapping[Any, Any], place: str) -> RowFault:
    num_columns = len(row) - (None in row)
    num_values = num_columns + len(row.get(None, ())) - sum(value is None for value in row.values())
    what = f"has another number of values than the header: {num_values} and not {num_columns}"
    return RowFault(place, what, "put quotes around values with commas")


def _parquet(stream: BinaryIO, path: str, columns: Sequence[str] | None) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} needs pyarrow. To fix: pip install pyarrow, or give JSONL") from error
    try:
        # A buffer makes it read column chunks in parts; by default it reads them whole.
        table = pyarrow.parquet.ParquetFile(stream, buffer_size=BYTES_PER_READ)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}. To fix: check the file") from error
    expansion = Expansion(path, num_stored_bytes=stream.seek(0, io.SEEK_END))
    there = [name for name in columns or () if name in table.schema_arrow.names]
    number = 0
    for group in range(table.num_row_groups):
        num_rows = _rows_per_batch(table.metadata.row_group(group), there, expansion)
        for batch in table.iter_batches(batch_size=num_rows, row_groups=[group], columns=there or None):
            expansion.add(batch.nbytes)
            for row in batch.to_pylist():
                number += 1
                if sum(len(value) for value in row.values() if isinstance(value, (str, bytes))) > MAX_ROW_BYTES:
                    raise row_too_large(f"{path}, row {number}")
                yield number, row


def _rows_per_batch(group: Any, columns: Sequence[str], expansion: Expansion) -> int:
    """Returns the number of rows of a row group of a Parquet file that are read at a time.

    A text that is stored once for many rows (`dictionary`) may be as long as all of the group is said to be. Raises
    ValueError where a column is compressed so much that reading it takes too much memory.
    """
    chunks = [group.column(i) for i in range(group.num_columns)]
    mine = [chunk for chunk in chunks if not columns or chunk.path_in_schema.partition(".")[0] in columns]
    for chunk in mine:  # whose pages, of any size, are decompressed as a whole
        expansion.check(chunk.total_uncompressed_size)
    num_bytes = sum(chunk.total_uncompressed_size for chunk in mine)
    num_rows = group.num_rows * BYTES_PER_BATCH // max(num_bytes, 1)
    if any("." in chunk.path_in_schema or chunk.has_dictionary_page for chunk in mine):
        longest = max(chunk.total_uncompressed_size for chunk in mine)
        num_rows = min(num_rows, max(BYTES_PER_BATCH // max(longest, 1), REPEATED_ROWS_PER_BATCH))
    return max(1, min(ROWS_PER_BATCH, num_rows))
