"""Which rows a data set was made of: the hash of each row's content, so that a row's way into a model can be told."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ringmaster.techniques.engine.data.arrays import SPLITS
from ringmaster.techniques.engine.data.rows import content_hash

FILE = "rows.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content hashes of the rows of each split, "training" and "held_out", sorted; equal rows stand once each."""

    rows: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, contents: Iterable[tuple[Any, bool]]) -> Self:
        """Of contents, and whether each of them is held out."""
        found: dict[str, list[str]] = {split: [] for split in SPLITS}
        for content, held_out in contents:
            found["held_out" if held_out else "training"].append(content_hash(content))
        return cls(rows={split: tuple(sorted(hashes)) for split, hashes in found.items()})

    def digest(self, split: str) -> str:
        """Names the rows of a split, in whatever order they stand."""
        return hashlib.sha256("".join(self.rows[split]).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return {split: {"digest": self.digest(split), "rows": list(rows)} for split, rows in self.rows.items()}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Self:
        """The manifest whose `to_json` is `said`."""
        return cls(rows={split: tuple(part["rows"]) for split, part in said.items()})

    def write(self, folder: Path) -> None:
        """Keeps it beside what was prepared."""
        (folder / FILE).write_text(json.dumps(self.to_json()))

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """What is kept there; None where nothing is."""
        try:
            return cls.from_json(json.loads((folder / FILE).read_text()))
        except FileNotFoundError:
            return None
