"""The most bytes that a data file, or a row of it, may have in memory: here alone, for all formats.

A file of 100 kB may decompress to gigabytes, and a line may be as long as its file. Rows are read one after another, so
the number of rows is not limited.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

MAX_ROW_BYTES = 64 * 2**20
"""The largest row: a line of JSONL, a row of Parquet, or an image."""
MAX_EXPANSION, LEAST_EXPANDED_BYTES = 200, 2**28
"""A compressed file's rows have at most so many times its bytes, where they have more than `LEAST_EXPANDED_BYTES`."""
MAX_TOKENIZER_BYTES = 2**28
"""The largest `tokenizer.json`; those of a quarter of a million tokens have 35 MB."""


def row_too_large(place: str) -> ValueError:
    """Returns what is to be raised for a row of more than `MAX_ROW_BYTES`."""
    return ValueError(
        f"{place} has more than {MAX_ROW_BYTES / 2**20:.0f} MiB, which is the most that a row may have. To fix: divide "
        "it into several rows; for a text of many lines, give a .txt file, which is read in pieces"
    )


def check_tokenizer(folder: Path) -> None:
    """Raises ValueError where the tokenizer in a folder is larger than `MAX_TOKENIZER_BYTES`."""
    for file in folder.glob("*.json"):
        if file.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ValueError(
                f"{file} has {file.stat().st_size / 2**20:,.0f} MiB, and the files of a tokenizer have at most "
                f"{MAX_TOKENIZER_BYTES / 2**20:.0f}. To fix: check the file"
            )


class Expansion:
    """Counts the bytes that a compressed file becomes, and refuses a file that becomes too many of them.

    num_stored_bytes: the size of the file.
    """

    def __init__(self, path: str, *, num_stored_bytes: int) -> None:
        self._path, self._num_stored_bytes = path, num_stored_bytes
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Adds bytes that were decompressed. Raises ValueError where they are too many for the file."""
        self._num_bytes += num_bytes
        self.check(self._num_bytes)

    def check(self, num_bytes: int) -> None:
        """Raises ValueError where so many bytes are too many for the file."""
        if num_bytes > max(LEAST_EXPANDED_BYTES, MAX_EXPANSION * self._num_stored_bytes):
            raise ValueError(
                f"{self._path} has {self._num_stored_bytes:,} bytes and decompresses to {num_bytes / 2**20:,.0f} MiB "
                f"or more; {LEAST_EXPANDED_BYTES / 2**20:.0f} MiB, or {MAX_EXPANSION} times the file, are allowed. To "
                "fix: check what wrote it; store values that are not repeated so often, or give JSONL"
            )


def lines_of(text: io.TextIOWrapper, path: str, *, first_line: int = 1) -> Iterator[tuple[int, str]]:
    """Yields the lines of a text with their numbers. Raises ValueError on one of more than `MAX_ROW_BYTES` characters.

    A longer line is not read to its end.
    """
    number = first_line
    while line := text.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES:
            raise row_too_large(f"{path}, line {number}")
        yield number, line
        number += 1
