"""What names the content of a data set: equal rows, in whatever order and however divided into files, are equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ringmaster.tasks.batch.data_schema import DatasetVersion
from ringmaster.tasks.datasets.catalogue import Entry
from ringmaster.techniques.engine.data.files import matching
from ringmaster.techniques.engine.data.rows import content_hash, read_rows


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a split has. path: as the data set says it. digest: of its rows."""

    path: str
    num_files: int
    num_rows: int
    digest: str


def rows_of_files(pattern: str, *, format: str | None) -> Iterator[tuple[str, int, Any]]:
    """(file, number, row) of all files of a pattern. Raises ValueError where one cannot be read."""
    found = matching(pattern)
    for name in found.names:
        for number, row in read_rows(found.path(name), format=format):
            yield found.path(name), number, row


def splits_of(files: DatasetVersion) -> Mapping[str, str]:
    """The paths of a version by split; "" for one that has none."""
    return files.splits or {"": files.path or ""}


def contents(entry: Entry, version: str) -> dict[str, Content]:
    """What a version has, by split. Raises ValueError where a file cannot be read."""
    found = {}
    for split, path in splits_of(entry.versions[version]).items():
        pattern = entry.location(path)
        hashes = sorted(content_hash(row) for _, _, row in rows_of_files(pattern, format=entry.dataset.format))
        digest = hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
        num_files = len(matching(pattern).names)
        found[split] = Content(path=path, num_files=num_files, num_rows=len(hashes), digest=digest)
    return found


def fingerprint(found: Mapping[str, Content]) -> str:
    """The name of all splits together."""
    if len(found) == 1:
        return next(iter(found.values())).digest
    text = " ".join(f"{split} {content.digest}" for split, content in sorted(found.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
