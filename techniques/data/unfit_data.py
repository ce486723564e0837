"""What makes data unfit to train on: rows on both sides, and labels that are all the same."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.arrays import Array, ColumnReader, open_columns
from ringmaster.techniques.data.file_patterns import MatchedFiles, matching
from ringmaster.techniques.data.row_files import hash_bytes
from ringmaster.techniques.data_source import PreparedData, Row
from ringmaster.techniques.job import DataSpec
from ringmaster.techniques.metric import IGNORED

ROWS_PER_CALL = 1 << 16


@dataclass(frozen=True)
class LeakedRows:
    """Evaluated rows whose content is trained on. first: the place of the first of them, and of its like."""

    num_rows: int
    first: tuple[str, str]
    are_all: bool = False

    @property
    def fault(self) -> tuple[str, str]:
        """What is wrong, and how to mend it."""
        number = "1 row" if self.num_rows == 1 else f"{'all ' if self.are_all else ''}{self.num_rows} rows"
        place, like = self.first
        return (
            f"{number} of the evaluation split are among those that are trained on, the first at {place}, which is "
            f"{like}",
            "take them out of one of the two: what was trained on says nothing in an evaluation",
        )


@dataclass(frozen=True)
class RowPlaces:
    """The hashes and places of rows, 20 bytes each."""

    _hashes: bytearray = field(default_factory=bytearray)
    _files: array[int] = field(default_factory=lambda: array("I"))
    _numbers: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, row: Row, identity: Any, *, file: int) -> None:
        """Adds a row. identity: what equal rows have in common. file: the number of its file."""
        self._hashes.extend(hash_bytes(identity))
        self._files.append(file)
        self._numbers.append(row.number)

    def __len__(self) -> int:
        return len(self._files)

    def hashes(self) -> NDArray[np.uint64]:
        """Returns the hashes, [rows]."""
        return np.frombuffer(bytes(self._hashes), dtype=np.uint64)

    def place(self, index: int, names: list[str]) -> str:
        """Returns the place of a row for messages."""
        return f"{names[self._files[index]]}, line {self._numbers[index]}"


@dataclass(frozen=True)
class SplitRows:
    """The rows of both splits. names: of the files."""

    training: RowPlaces
    held_out: RowPlaces
    names: list[str]

    @classmethod
    def of(cls, rows: Iterable[Row], *, identity: Callable[[Row], Any]) -> SplitRows:
        """Collects rows, which are not kept themselves. identity: returns what equal rows have in common."""
        numbers: dict[str, int] = {}
        training, held_out = RowPlaces(), RowPlaces()
        for row in rows:
            file = numbers.setdefault(row.file, len(numbers))
            (held_out if row.held_out else training).add(row, identity(row), file=file)
        return cls(training, held_out, list(numbers))

    def leaks(self) -> LeakedRows | None:
        """Returns the evaluated rows that are trained on, or None."""
        trained, evaluated = self.training.hashes(), self.held_out.hashes()
        leaked = np.flatnonzero(np.isin(evaluated, trained))
        if not len(leaked):
            return None
        like = int(np.flatnonzero(trained == evaluated[leaked[0]])[0])
        places = self.held_out.place(int(leaked[0]), self.names), self.training.place(like, self.names)
        return LeakedRows(len(leaked), places, are_all=len(leaked) == len(evaluated))


def with_leaks(
    prepared: PreparedData, spec: DataSpec, rows: Callable[[], Iterable[Row]], *, identity: Callable[[Row], Any]
) -> PreparedData:
    """Returns the description of data with what is wrong where rows are trained on and evaluated on.

    It is a fault where the spec names the files to evaluate on. Where whole files are held out of those that it names,
    it is for people to know: they may not be able to change it.
    """
    if spec.held_out_path is not None and (same := _same_file(spec)) is not None:
        fault = f"held_out_path {spec.held_out_path!r} has the same rows as path: it names {same}, too"
        remedy = "name other files in held_out_path, or leave it out: a share of the rows is then held out"
    elif leaks := SplitRows.of(rows(), identity=identity).leaks():
        fault, remedy = leaks.fault
    else:
        return prepared
    if spec.held_out_path is None:
        return replace(prepared, notes=(*prepared.notes, fault))
    return replace(prepared, training_faults=(*prepared.training_faults, f"{fault}. To fix: {remedy}"))


def _same_file(spec: DataSpec) -> str | None:
    """A file to evaluate on that is also one to train on, by whatever path; None where there is none."""
    assert spec.path is not None and spec.held_out_path is not None
    trained = {key for key, _ in _local_files(matching(spec.path))}
    return next((path for key, path in _local_files(matching(spec.held_out_path)) if key in trained), None)


def _local_files(found: MatchedFiles) -> Iterator[tuple[tuple[int, int], str]]:
    for path in map(found.path, found.names):
        stat = Path(path).stat()
        yield (stat.st_dev, stat.st_ino), path


def distinct_labels(folder: Path, split: str) -> set[tuple[float, ...]]:
    """Returns the labels of the samples of a split that differ, with the numbers of several classes in one.

    Of numbers to predict, these are the smallest and the largest.
    """
    columns = open_columns(folder, split)
    name = next((name for name in ("labels", "labels.values") if name in columns), None)
    found: set[tuple[float, ...]] = set()
    if name is None or columns[name].ndim > 2:
        return found
    for rows in _parts(folder, split, name, num_rows=len(columns[name])):
        if rows.ndim == 2:
            found |= {tuple(np.flatnonzero(each).tolist()) for each in np.unique(rows, axis=0)}
        elif rows.dtype.kind == "f":
            found = {(value,) for value in (min((*found, (rows.min(),)))[0], max((*found, (rows.max(),)))[0])}
        else:
            found |= {(int(each),) for each in np.unique(rows[rows != IGNORED])}
    return found


def constant_fault(labels: Iterable[str], *, num_rows: int, column: str) -> str:
    """Returns what is wrong where all rows to train on have the same label, which may be several classes."""
    names = [*labels]
    return (
        f"all {num_rows} rows to train on have the label{'s' if len(names) != 1 else ''} {', '.join(names) or 'none'} "
        f"in column {column!r}, so that there is nothing to learn. To fix: add rows with another one, or name another "
        "label_column"
    )


def are_pairs_equal(folder: Path) -> bool:
    """Returns whether both rows of tokens are equal in all samples to train on."""
    name = "input_ids.values"
    num_tokens = len(open_columns(folder, "training")[name])
    return all((part == part[:, :1]).all() for part in _parts(folder, "training", name, num_rows=num_tokens))


def are_samples_equal(folder: Path) -> bool:
    """Returns whether all samples of tokens to train on are the same."""
    name = "input_ids.values"
    columns = open_columns(folder, "training")
    lengths = np.unique(np.diff(columns["input_ids.ends"], prepend=0))
    if len(lengths) != 1:
        return False
    length = int(lengths[0])
    first = ColumnReader(folder, "training").rows(name, 0, length)
    parts = _parts(folder, "training", name, num_rows=len(columns[name]), size=length * max(ROWS_PER_CALL // length, 1))
    return all((part.reshape(-1, *first.shape) == first).all() for part in parts)


def _parts(folder: Path, split: str, name: str, *, num_rows: int, size: int = ROWS_PER_CALL) -> Iterator[Array]:
    reader = ColumnReader(folder, split)
    for start in range(0, num_rows, size):
        yield reader.rows(name, start, min(start + size, num_rows))
