"""Content fingerprints of data sets, independent of the order of rows and their division into files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ringmaster.tasks.batch.data_schema import DatasetVersion
from ringmaster.tasks.datasets.catalogue import Entry
from ringmaster.techniques.data.files import matching
from ringmaster.techniques.data.manifest import ManifestBuilder
from ringmaster.techniques.data.rows import FileText, format_of, read_rows


@dataclass(frozen=True, kw_only=True)
class Content:
    """The content of a split. path: as the data set gives it. digest: of the rows."""

    path: str
    num_files: int
    num_rows: int
    digest: str


def rows_of_files(pattern: str, *, format: str | None) -> Iterator[tuple[str, int, Any]]:
    """Yields (file, number, row) of all files of a pattern; the row of a text file is not read yet.

    Raises ValueError if a file cannot be read.
    """
    found = matching(pattern)
    for path in map(found.path, found.names):
        if format_of(path, format) == "text":
            yield path, 1, FileText(path)
        else:
            for number, row in read_rows(path, format=format):
                yield path, number, row


def splits_of(files: DatasetVersion) -> Mapping[str, str]:
    """Returns the paths of a version by split; the key is "" for a version without splits."""
    return files.splits or {"": files.path or ""}


def contents(entry: Entry, version: str) -> dict[str, Content]:
    """Returns the content of each split of a version. Raises ValueError if a file cannot be read."""
    found = {}
    for split, path in splits_of(entry.versions[version]).items():
        pattern = entry.location(path)
        builder = ManifestBuilder()
        for _, _, row in rows_of_files(pattern, format=entry.dataset.format):
            builder.add(row, held_out=False)
        hashes = builder.built().rows["training"]
        num_files = len(matching(pattern).names)
        found[split] = Content(path=path, num_files=num_files, num_rows=len(hashes), digest=hashes.digest())
    return found


def fingerprint(found: Mapping[str, Content]) -> str:
    """Returns the combined digest of all splits."""
    if len(found) == 1:
        return next(iter(found.values())).digest
    text = " ".join(f"{split} {content.digest}" for split, content in sorted(found.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
