"""Files in parts that are known by their content, so that what is prepared from a part can be kept.

A JSONL file is divided after every `PART_BYTES`, at the end of a line. Lines that are added at its end change its last
part alone. Other files are one part: a CSV file may have line ends in quotes, and Parquet is read by columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ringmaster.techniques.data.file_rows import DataFile
from ringmaster.techniques.data.files import FilePart
from ringmaster.techniques.data.rows import format_of

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
