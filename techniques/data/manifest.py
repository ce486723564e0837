"""Manifest of a data set: the content hash of each row, by which a row can be traced to the models trained on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.arrays import SPLITS
from ringmaster.techniques.data.row_files import hash_bytes

FILE = "rows.json"
HASHES_PER_BLOCK = 65536


class Hashes(Sequence[str]):
    """Sorted hashes of 16 hexadecimal digits, 8 bytes each in memory. They equal a sequence of the same texts.

    values: as numbers, in any order.
    """

    def __init__(self, values: NDArray[np.uint64]) -> None:
        self._values = np.sort(values)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Returns hashes that are given as text."""
        return cls(np.fromiter((int(text, 16) for text in texts), dtype=np.uint64))

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self._texts(self._values[index]))
        return f"{int(self._values[index]):016x}"

    def __iter__(self) -> Iterator[str]:
        for block in self.blocks():
            yield from block

    def __contains__(self, text: object) -> bool:
        if not isinstance(text, str) or len(text) != 16:
            return False
        value = np.uint64(int(text, 16))
        place = int(np.searchsorted(self._values, value))
        return place < len(self) and self._values[place] == value

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Hashes):
            return np.array_equal(self._values, other._values)
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(str.__eq__, self, other))

    def __hash__(self) -> int:
        return hash(self._values.tobytes())

    def __repr__(self) -> str:
        return f"Hashes({len(self)})"

    def blocks(self) -> Iterator[list[str]]:
        """Yields the hashes as texts, some at a time."""
        for start in range(0, len(self), HASHES_PER_BLOCK):
            yield self._texts(self._values[start : start + HASHES_PER_BLOCK])

    def digest(self) -> str:
        """Returns a digest, which does not depend on the order of the rows."""
        sha = hashlib.sha256()
        for block in self.blocks():
            sha.update("".join(block).encode())
        return sha.hexdigest()[:16]

    @staticmethod
    def _texts(values: NDArray[np.uint64]) -> list[str]:
        whole = values.astype(">u8").tobytes().hex()
        return [whole[start : start + 16] for start in range(0, len(whole), 16)]


@dataclass(frozen=True, kw_only=True)
class RowManifest:
    """The content hashes of the rows of each split, "training" and "held_out", sorted; equal rows are all listed."""

    rows: Mapping[str, Hashes]

    @classmethod
    def of(cls, contents: Iterable[tuple[Any, bool]]) -> RowManifest:
        """Returns the manifest of contents, each with whether it is held out."""
        builder = ManifestBuilder()
        for content, held_out in contents:
            builder.add(content, held_out=held_out)
        return builder.built()

    def digest(self, split: str) -> str:
        """Returns a digest of the rows of a split, which does not depend on their order."""
        return self.rows[split].digest()

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, which `from_json` reads back."""
        return {split: {"digest": self.digest(split), "rows": list(rows)} for split, rows in self.rows.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Returns the manifest whose `to_json` is `value`."""
        return cls(rows={split: Hashes.of(value[split]["rows"]) for split in SPLITS if split in value})

    def write(self, folder: Path) -> None:
        """Stores the manifest in the folder of the prepared data: the JSON of `to_json`, written in blocks."""
        with (folder / FILE).open("w") as file:
            for number, (split, rows) in enumerate(self.rows.items()):
                file.write(f'{", " if number else "{"}"{split}": {{"digest": "{rows.digest()}", "rows": [')
                for place, block in enumerate(rows.blocks()):
                    file.write((", " if place else "") + json.dumps(block)[1:-1])
                file.write("]}")
            file.write("}")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Returns the manifest stored in a folder, or None where there is none."""
        try:
            return cls.from_json(json.loads((folder / FILE).read_text()))
        except FileNotFoundError:
            return None


class ManifestBuilder:
    """Collects the hashes of rows, 8 bytes each."""

    def __init__(self) -> None:
        self._hashes = {split: bytearray() for split in SPLITS}
        self._begun: hashlib._Hash | None = None

    def add(self, content: Any, *, held_out: bool, ends: bool = True) -> None:
        """Adds a row, or a part of its text. ends: whether the row ends with it."""
        if ends and self._begun is None:
            found = hash_bytes(content)
        else:
            self._begun = self._begun or hashlib.sha256()
            self._begun.update(content.encode())
            if not ends:
                return
            found, self._begun = self._begun.digest()[:8], None
        self._hashes["held_out" if held_out else "training"] += found

    def extend(self, hashes: NDArray[np.uint64], *, held_out: bool) -> None:
        """Adds rows by their hashes."""
        self._hashes["held_out" if held_out else "training"] += hashes.astype(">u8").tobytes()

    def hashes(self, split: str = "training") -> NDArray[np.uint64]:
        """Returns the hashes of a split in the order in which rows were added."""
        return np.frombuffer(bytes(self._hashes[split]), dtype=">u8").astype(np.uint64)

    def built(self) -> RowManifest:
        """Returns the manifest of all rows so far."""
        return RowManifest(rows={split: Hashes(self.hashes(split)) for split in SPLITS})
