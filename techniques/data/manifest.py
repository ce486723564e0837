"""Manifest of a data set: the content hash of each row, by which a row can be traced to the models trained on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ringmaster.techniques.data.arrow_files import SPLITS
from ringmaster.techniques.data.row_files import content_hash

FILE = "rows.json"


@dataclass(frozen=True, kw_only=True)
class RowManifest:
    """The content hashes of the rows of each split, "training" and "held_out", sorted; equal rows are all listed."""

    rows: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, contents: Iterable[tuple[Any, bool]]) -> Self:
        """Returns the manifest of contents, each with whether it is held out."""
        rows: tuple[list[str], list[str]] = ([], [])
        for content, held_out in contents:
            rows[held_out].append(content_hash(content))
        return cls(rows={split: tuple(sorted(each)) for split, each in zip(SPLITS, rows, strict=True)})

    def digest(self, split: str) -> str:
        """Returns a digest of the rows of a split, which does not depend on their order."""
        return hashlib.sha256("".join(self.rows[split]).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, which `from_json` reads back."""
        return {split: {"digest": self.digest(split), "rows": list(rows)} for split, rows in self.rows.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Returns the manifest whose `to_json` is `value`."""
        return cls(rows={split: tuple(value[split]["rows"]) for split in SPLITS if split in value})

    def write(self, folder: Path) -> None:
        """Stores the manifest in the folder of the prepared data."""
        (folder / FILE).write_text(json.dumps(self.to_json()))

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Returns the manifest stored in a folder, or None where there is none."""
        try:
            return cls.from_json(json.loads((folder / FILE).read_text()))
        except FileNotFoundError:
            return None
