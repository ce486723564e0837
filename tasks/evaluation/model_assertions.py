"""Model assertions: predicates over predictions and their inputs, after training and on production logs.

A row is a mapping, like a line of a log: `prediction`, `probabilities`, and whatever else was logged. `confidence` is
the largest probability unless it is logged itself. The terms follow Kang et al., Model Assertions for Monitoring and
Improving ML Models (MLSys 2020).

Rows are read once and sequentially, and every assertion checks each row, so a log may be larger than memory. The values
of row groups are stored in a table on disk.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import sqlite3
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from ringmaster.registry import resolve
from ringmaster.tasks.evaluation.scores import Scores
from ringmaster.tasks.evaluation.suite import ASSERTED, AssertionEntry

MAX_EXAMPLES = 5
MAX_CHARACTERS = 160


@dataclass(frozen=True, kw_only=True)
class AssertionResult:
    """The result of an assertion.

    num_rows: the number of rows checked.
    why: a reason that concerns all rows.
    examples: messages about some of the failed rows.
    """

    assertion: str
    kind: str
    num_rows: int
    num_failures: int
    max_failures: float
    passed: bool
    why: str = ""
    examples: tuple[str, ...] = ()


class AssertionCheck(ABC):
    """The check of one assertion, fed row by row."""

    @abstractmethod
    def see(self, number: int, row: Row) -> str | None:
        """Returns the fault of a row, if it shows without later rows."""

    def late(self) -> Iterator[tuple[int, str]]:
        """Yields the numbers and faults of further failing rows, after all rows have been fed."""
        return iter(())


def check(assertions: Sequence[AssertionEntry], rows: Iterable[Row]) -> list[AssertionResult]:
    """Checks every assertion over the rows, in row order. An assertion that applies to no row does not pass."""
    watches = [_Watch(assertion) for assertion in assertions]
    for number, row in enumerate(rows, start=1):
        for watch in watches:
            watch.see(number, row)
    return [watch.result() for watch in watches]


def rows_of(scores: Scores) -> list[dict[str, Any]]:
    """Returns a model's outputs as rows, in the form of a production log."""
    named: dict[str, Any] = {
        "prediction": scores.predictions,
        "probabilities": scores.probabilities,
        "log_probability": scores.log_probabilities,
        "num_tokens": scores.num_tokens,
        **scores.columns,
    }
    if "loss_sums" in scores.sums:
        named["loss"] = scores.rows("loss").by_row
    lists = {name: getattr(v, "tolist", lambda v=v: v)() for name, v in named.items() if v is not None}
    return [{name: values[i] for name, values in lists.items()} for i in range(scores.num_rows)]


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Context manager that appends a folder to the import path, to find predicates as users' factories are found."""
    entry = str(folder.resolve())
    sys.path.append(entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


class _Watch:
    """One assertion over the rows selected by its `where`; stores the number of failures, and the first ones."""

    def __init__(self, assertion: AssertionEntry) -> None:
        self._assertion = assertion
        self._kind = next(key for key in ASSERTED if getattr(assertion, key) is not None)
        self._look = _KINDS[self._kind](assertion)
        self._num_rows = self._num_failures = 0
        self._examples: list[tuple[int, str]] = []

    def see(self, number: int, row: Row) -> None:
        if any(row.get(key) != value for key, value in self._assertion.where.items()):
            return
        self._num_rows += 1
        if (text := self._look.see(number, row)) is not None:
            self._num_failures += 1
            if len(self._examples) < MAX_EXAMPLES:
                self._examples.append((number, text))

    def result(self) -> AssertionResult:
        num_late = 0

        def late() -> Iterator[tuple[int, str]]:
            nonlocal num_late
            for num_late, failure in enumerate(self._look.late(), start=1):  # noqa: B007 - counted for `num_failures`
                yield failure

        examples = heapq.nsmallest(MAX_EXAMPLES, itertools.chain(self._examples, late()))
        num_failures = self._num_failures + num_late
        is_whole = self._kind == "share"
        allowed = 0.0 if is_whole else self._assertion.max_failures
        return AssertionResult(
            assertion=self._assertion.name,
            kind=self._kind,
            num_rows=self._num_rows,
            num_failures=num_failures,
            max_failures=allowed,
            passed=bool(self._num_rows) and num_failures <= allowed * self._num_rows + 1e-9,
            why="" if self._num_rows else "there are no rows to check",
            examples=tuple(value if is_whole else f"row {n}: {value}"[:MAX_CHARACTERS] for n, value in examples),
        )


@dataclass(frozen=True)
class _ByRow(AssertionCheck):
    """An assertion that checks each row on its own."""

    wrong: Callable[[Row], str | None]

    def see(self, number: int, row: Row) -> str | None:
        return self.wrong(row)


def _finite(assertion: AssertionEntry) -> AssertionCheck:
    fields = assertion.finite or ()

    def wrong(row: Row) -> str | None:
        for field in fields:
            value = _value(row, field)
            if value is None:
                return f"has no {field}"
            if not all(
                is_number(v) and math.isfinite(v) for v in (value if isinstance(value, (list, tuple)) else [value])
            ):
                return f"{field} is {value}"
        return None

    return _ByRow(wrong)


def _range(assertion: AssertionEntry) -> AssertionCheck:
    bounds = assertion.range
    assert bounds is not None
    low = -math.inf if bounds.min is None else bounds.min
    high = math.inf if bounds.max is None else bounds.max

    def wrong(row: Row) -> str | None:
        value = _value(row, bounds.field)
        values = value if isinstance(value, (list, tuple)) and value else [value]
        if all(is_number(v) and low <= v <= high for v in values):  # NaN is in no range
            return None
        return f"has no {bounds.field}" if value is None else f"{bounds.field} is {value}"

    return _ByRow(wrong)


def _predicate(assertion: AssertionEntry) -> AssertionCheck:
    name = assertion.predicate
    assert name is not None

    # A predicate is user code and may raise any error, AssertionError included, also when its module is imported. The
    # error is a fault of this assertion only; the other assertions and the retraining run continue.
    try:
        holds: Callable[[Row], Any] = resolve(name)
    except Exception as error:  # noqa: BLE001 - user code: its error is reported for every row
        text = f"{name} cannot be had: {type(error).__name__}: {error}"
        return _ByRow(lambda row: text)

    def wrong(row: Row) -> str | None:
        try:
            return None if holds(row) else f"{name} returns false"
        except Exception as error:  # noqa: BLE001 - user code: its error is reported as this row's fault
            return f"{name} raised {type(error).__name__}: {error}"

    return _ByRow(wrong)


class _Share(AssertionCheck):
    """Checks the fraction of rows that have a value."""

    def __init__(self, assertion: AssertionEntry) -> None:
        assert assertion.share is not None
        self._share = assertion.share
        self._num_rows = self._num_matching = 0

    def see(self, number: int, row: Row) -> None:
        self._num_rows += 1
        self._num_matching += bool(_value(row, self._share.field) == self._share.value)

    def late(self) -> Iterator[tuple[int, str]]:
        share = self._share
        if self._num_rows and not share.min <= (result := self._num_matching / self._num_rows) <= share.max:
            yield 0, f"{share.field} {share.value} has {result:.1%} of the rows, not {share.min:.1%} to {share.max:.1%}"


class _GroupCheck(AssertionCheck):
    """Compares the values of the rows of a group, once all rows are there."""

    def __init__(self, assertion: AssertionEntry) -> None:
        entry = assertion.consistent or assertion.steady
        assert entry is not None
        self._entry, self._groups = entry, RowGroups()

    def see(self, number: int, row: Row) -> None:
        group = None if self._entry.by is None else row.get(self._entry.by)
        self._groups.add(number, group, _value(row, self._entry.field))


class _ConsistencyCheck(_GroupCheck):
    """Finds rows whose value differs from the most frequent value of their group."""

    def late(self) -> Iterator[tuple[int, str]]:
        field = self._entry.field
        for number, value, most in self._groups.unlike_most():
            yield (
                number,
                f"has no {field}" if value == "null" else f"{field} is {value}, and of most in its group {most}",
            )


class _StabilityCheck(_GroupCheck):
    """Finds numbers that jump, and other values that flicker: different from equal neighbours before and after."""

    def late(self) -> Iterator[tuple[int, str]]:
        field, most = self._entry.field, getattr(self._entry, "max_change", None)
        for rows in self._groups.each():
            if most is not None:
                for (_, before), (number, value) in itertools.pairwise(rows):
                    if not (is_number(value) and is_number(before) and abs(value - before) <= most):
                        yield number, f"{field} went from {before} to {value}"
                continue
            for ((_, before), (number, value)), (_, (_, after)) in itertools.pairwise(itertools.pairwise(rows)):
                if before == after != value:
                    yield number, f"{field} is {value} between two {before}"


def _value(row: Row, field: str) -> Any:
    if field == "confidence" and field not in row:
        return largest_probability(row)
    return row.get(field)


_KINDS: Mapping[str, Callable[[AssertionEntry], AssertionCheck]] = {
    "finite": _finite,
    "range": _range,
    "share": _Share,
    "consistent": _ConsistencyCheck,
    "steady": _StabilityCheck,
    "predicate": _predicate,
}


AT_ONCE = 5000  # rows buffered in memory

_UNLIKE_MOST = """
    WITH counted AS (SELECT of, value, count(*) AS num, min(number) AS first FROM said GROUP BY of, value),
         ranked AS (SELECT of, value, row_number() OVER (PARTITION BY of ORDER BY num DESC, first) AS rank FROM counted)
    SELECT said.number, said.value, ranked.value FROM said JOIN ranked ON ranked.of = said.of AND ranked.rank = 1
    WHERE said.value != ranked.value OR said.value = 'null'
"""


class RowGroups:
    """The value and the group of each row. SQLite moves its data to a temporary file once they are large."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect("", isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = OFF")
        self._connection.execute("CREATE TABLE said (of TEXT, number INTEGER, value TEXT)")
        self._waiting: list[tuple[str, int, str]] = []

    def add(self, number: int, group: Any, value: Any) -> None:
        """Adds a row with its number; group and value are stored as JSON, anything else as text."""
        self._waiting.append((json.dumps(group, default=str), number, json.dumps(value, default=str)))
        if len(self._waiting) >= AT_ONCE:
            self._write()

    def unlike_most(self) -> Iterator[tuple[int, str, str]]:
        """Yields (number, value, most frequent value of the group) as JSON for rows that differ from it or have null.

        Among equally frequent values, the one seen first counts.
        """
        self._write()
        yield from self._connection.execute(_UNLIKE_MOST)

    def each(self) -> Iterator[Iterator[tuple[int, Any]]]:
        """Yields each group's rows as (number, value), in order."""
        self._write()
        rows = self._connection.execute("SELECT of, number, value FROM said ORDER BY of, number")
        for _, group in itertools.groupby(rows, key=itemgetter(0)):
            yield ((number, json.loads(value)) for _, number, value in group)

    def _write(self) -> None:
        self._connection.execute("BEGIN")
        self._connection.executemany("INSERT INTO said VALUES (?, ?, ?)", self._waiting)
        self._connection.execute("COMMIT")
        self._waiting.clear()


Row = Mapping[str, Any]
BATCH_ROWS = 4096  # of a Parquet file, in memory at a time


class Log:
    """The rows of a JSONL or Parquet file of logged predictions. num_read: the number of rows read so far.

    Iteration raises ValueError at an invalid row.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.num_read = path, 0

    def __iter__(self) -> Iterator[Row]:
        for row in (_parquet if self._path.suffix == ".parquet" else _jsonl)(self._path):
            self.num_read += 1
            yield row


def largest_probability(row: Row) -> float | None:
    """Returns the largest of a row's probabilities; None if it has none, or if one of them is not a number."""
    values = row.get("probabilities")
    if not isinstance(values, (list, tuple)) or not values or not all(map(is_number, values)):
        return None
    return float(max(values))


def is_number(value: Any) -> bool:
    """Whether a logged value is a number; true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise ValueError(f"{path} is not a Parquet file: {error}. To fix: check the file") from error


def _jsonl(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _object(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}. To fix: name a JSONL or Parquet file") from error


def _object(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}. To fix: one object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where} is not a JSON object. To fix: one object a line, such as {{"prediction": 3}}')
    return row
