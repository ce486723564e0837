"""What makes data unfit to train on: rows on both sides, and labels that are all the same."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ringmaster.techniques.data.arrow_files import Array, columns_in, split_file
from ringmaster.techniques.data.file_patterns import MatchedFiles, matching
from ringmaster.techniques.data.row_files import hash_bytes
from ringmaster.techniques.data_source import DataSource, PreparedData, Row
from ringmaster.techniques.job import DataSpec
from ringmaster.techniques.metric import IGNORED


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


class SplitRows:
    """The hashes and places of the rows of both splits, 21 bytes a row.

    identity: returns what equal rows have in common. num_rows: by whether they are held out.
    """

    def __init__(self, rows: Iterable[Row], *, identity: Callable[[Row], Any]) -> None:
        files: dict[str, int] = {}
        hashes, held_out, of_file, numbers = bytearray(), array("b"), array("I"), array("Q")
        for row in rows:
            hashes += hash_bytes(identity(row))
            held_out.append(row.held_out)
            of_file.append(files.setdefault(row.file, len(files)))
            numbers.append(row.number)
        self._hashes, self._held_out = np.frombuffer(bytes(hashes), dtype=np.uint64), np.array(held_out, dtype=bool)
        self._names, self._files, self._numbers = list(files), of_file, numbers
        num_held_out = int(self._held_out.sum())
        self.num_rows = {False: len(held_out) - num_held_out, True: num_held_out}

    def leaks(self) -> LeakedRows | None:
        """Returns the evaluated rows that are trained on, or None."""
        trained = np.flatnonzero(~self._held_out)
        leaked = np.flatnonzero(self._held_out & np.isin(self._hashes, self._hashes[trained]))
        if not len(leaked):
            return None
        like = trained[self._hashes[trained] == self._hashes[leaked[0]]][0]
        places = self._place(int(leaked[0])), self._place(int(like))
        return LeakedRows(len(leaked), places, are_all=len(leaked) == self.num_rows[True])

    def _place(self, index: int) -> str:
        return f"{self._names[self._files[index]]}, line {self._numbers[index]}"


def with_leaks(prepared: PreparedData, spec: DataSpec, source: DataSource) -> PreparedData:
    """Returns the description of data with what is wrong where rows are trained on and evaluated on.

    It is a fault where the spec names the files to evaluate on. Where whole files are held out of those that it names,
    it is for people to know: they may not be able to change it.
    """
    if spec.held_out_path is not None and (same := _same_file(spec)) is not None:
        fault = f"held_out_path {spec.held_out_path!r} has the same rows as path: it names {same}, too"
        remedy = "name other files in held_out_path, or leave it out: a share of the rows is then held out"
    elif leaks := SplitRows(source.rows(spec) or (), identity=source.identity_of(spec)).leaks():
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


def _local_files(files: MatchedFiles) -> Iterator[tuple[tuple[int, int], str]]:
    for path in map(files.path, files.names):
        stat = Path(path).stat()
        yield (stat.st_dev, stat.st_ino), path


def distinct_labels(folder: Path, split: str) -> set[tuple[float, ...]]:
    """Returns the labels of the samples of a split that differ, with the numbers of several classes in one.

    Of numbers to predict, these are the smallest and the largest.
    """
    result: set[tuple[float, ...]] = set()
    for rows, _ in columns_in(split_file(folder, split), "labels"):
        if rows.ndim > 2:
            return set()
        if rows.ndim == 2:
            result |= {tuple(np.flatnonzero(each).tolist()) for each in np.unique(rows, axis=0)}
        elif rows.dtype.kind == "f":
            result = {(value,) for value in (min((*result, (rows.min(),)))[0], max((*result, (rows.max(),)))[0])}
        else:
            result |= {(int(each),) for each in np.unique(rows[rows != IGNORED])}
    return result


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
    return all((values == values[:, :1]).all() for values, _ in columns_in(split_file(folder, "training"), "input_ids"))


def are_samples_equal(folder: Path) -> bool:
    """Returns whether all samples of tokens to train on are the same."""
    first: Array | None = None
    for values, lengths in columns_in(split_file(folder, "training"), "input_ids"):
        assert lengths is not None
        if first is None:
            first = values[: lengths[0]]
        if (lengths != len(first)).any() or (values.reshape(-1, *first.shape) != first).any():
            return False
    return True
