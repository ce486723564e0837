"""Model assertions: predicates over predictions and what is known of their inputs, after training and in production.

A row is a mapping, as a line of a log has it: `prediction`, `probabilities`, whatever else was logged. `confidence` is
the largest of its probabilities where it is not logged itself. With Kang et al., Model Assertions for Monitoring and
Improving ML Models (MLSys 2020), for the words.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.evaluation.scores import Scores
from tasks.evaluation.suite import ASSERTED, AssertionEntry
from techniques.dotted import resolve

MAX_EXAMPLES = 5
MAX_CHARACTERS = 160

Row = Mapping[str, Any]
Failing = Iterator[tuple[int, str]]
"""The numbers of rows that fail, and what is wrong with each."""


@dataclass(frozen=True, kw_only=True)
class AssertionResult:
    """What came of an assertion. num_rows: that it looked at. examples: of failures, in words. why: of the whole."""

    assertion: str
    kind: str
    num_rows: int
    num_failures: int
    max_failures: float
    passed: bool
    why: str = ""
    examples: tuple[str, ...] = ()


def check(assertions: Sequence[AssertionEntry], rows: Sequence[Row]) -> list[AssertionResult]:
    """Every assertion over the rows, in their order. What none of the rows has is no pass."""
    return [_checked(assertion, rows) for assertion in assertions]


def rows_of(scores: Scores) -> list[dict[str, Any]]:
    """What a model said of rows, as a log in production would have it."""
    named: dict[str, Any] = {
        "prediction": scores.predictions,
        "probabilities": scores.probabilities,
        "log_probability": scores.log_probabilities,
        "num_tokens": scores.num_tokens,
        **scores.columns,
    }
    if scores.loss_sums is not None and scores.loss_counts is not None:
        counts = scores.loss_counts
        named["loss"] = [s / c if c else math.nan for s, c in zip(scores.loss_sums, counts, strict=True)]
    lists = {name: getattr(v, "tolist", lambda v=v: v)() for name, v in named.items() if v is not None}
    return [{name: values[i] for name, values in lists.items()} for i in range(scores.num_rows)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL or Parquet file of logged predictions. Raises ValueError where one cannot be read."""
    if path.suffix == ".parquet":
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]

        try:
            rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise ValueError(f"{path} is no Parquet file: {error}. To fix: check the file") from error
        return rows
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}. To fix: name a JSONL or Parquet file") from error
    return [_object(line, f"{path}, line {i}") for i, line in enumerate(lines, start=1) if line.strip()]


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Lets predicates be found beside their file, behind everything else, as workers find a user's factories."""
    entry = str(folder.resolve())
    sys.path.append(entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON: {error}. To fix: one object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where} is no JSON object. To fix: one object a line, such as {{"prediction": 3}}')
    return row


def _checked(assertion: AssertionEntry, rows: Sequence[Row]) -> AssertionResult:
    kind = next(key for key in ASSERTED if getattr(assertion, key) is not None)
    chosen = [
        (number, row)
        for number, row in enumerate(rows, start=1)
        if all(row.get(key) == value for key, value in assertion.where.items())
    ]
    failing = list(_KINDS[kind](assertion, chosen))
    is_whole = kind == "share"
    passed = bool(chosen) and (not failing if is_whole else len(failing) <= assertion.max_failures * len(chosen) + 1e-9)
    return AssertionResult(
        assertion=assertion.name,
        kind=kind,
        num_rows=len(chosen),
        num_failures=len(failing),
        max_failures=0.0 if is_whole else assertion.max_failures,
        passed=passed,
        why="" if chosen else "there are no rows to look at",
        examples=tuple(
            said if is_whole else f"row {number}: {said}"[:MAX_CHARACTERS] for number, said in failing[:MAX_EXAMPLES]
        ),
    )


def _finite(assertion: AssertionEntry, rows: Iterable[tuple[int, Row]]) -> Failing:
    for number, row in rows:
        for field in assertion.finite or ():
            value = _value(row, field)
            if value is None:
                yield number, f"has no {field}"
                break
            if not all(_is_finite(v) for v in (value if isinstance(value, (list, tuple)) else [value])):
                yield number, f"{field} is {value}"
                break


def _range(assertion: AssertionEntry, rows: Iterable[tuple[int, Row]]) -> Failing:
    bounds = assertion.range
    assert bounds is not None
    low = -math.inf if bounds.min is None else bounds.min
    high = math.inf if bounds.max is None else bounds.max
    for number, row in rows:
        value = _value(row, bounds.field)
        values = value if isinstance(value, (list, tuple)) and value else [value]
        if not all(_is_number(v) and low <= v <= high for v in values):  # NaN is in no range
            yield number, f"has no {bounds.field}" if value is None else f"{bounds.field} is {value}"


def _share(assertion: AssertionEntry, rows: Sequence[tuple[int, Row]]) -> Failing:
    share = assertion.share
    assert share is not None
    if rows:
        found = sum(_value(row, share.field) == share.value for _, row in rows) / len(rows)
        if not share.min <= found <= share.max:
            yield 0, f"{share.field} {share.value} has {found:.1%} of the rows, not {share.min:.1%} to {share.max:.1%}"


def _consistent(assertion: AssertionEntry, rows: Iterable[tuple[int, Row]]) -> Failing:
    """Those that say something else than most of their group."""
    told = assertion.consistent
    assert told is not None
    for group in _groups(rows, told.by):
        values = [json.dumps(_value(row, told.field), default=str) for _, row in group]
        most = Counter(values).most_common(1)[0][0]
        for (number, _), value in zip(group, values, strict=True):
            if value == "null":
                yield number, f"has no {told.field}"
            elif value != most:
                yield number, f"{told.field} is {value}, and of most in its group {most}"


def _steady(assertion: AssertionEntry, rows: Iterable[tuple[int, Row]]) -> Failing:
    """Numbers that jump; of other values, those that flicker: another one before and after, which are the same."""
    told = assertion.steady
    assert told is not None
    for group in _groups(rows, told.by):
        values = [_value(row, told.field) for _, row in group]
        for i in range(1, len(values)):
            number, value, before = group[i][0], values[i], values[i - 1]
            if told.max_change is not None:
                if not (_is_number(value) and _is_number(before) and abs(value - before) <= told.max_change):
                    yield number, f"{told.field} went from {before} to {value}"
            elif i + 1 < len(values) and before == values[i + 1] != value:
                yield number, f"{told.field} is {value} between two {before}"


def _predicate(assertion: AssertionEntry, rows: Iterable[tuple[int, Row]]) -> Failing:
    assert assertion.predicate is not None
    holds: Callable[[Row], Any] = resolve(assertion.predicate)
    for number, row in rows:
        try:
            right = bool(holds(row))
        except (KeyError, TypeError, ValueError, IndexError, ArithmeticError, AttributeError) as error:
            yield number, f"{assertion.predicate} raised {type(error).__name__}: {error}"
            continue
        if not right:
            yield number, f"{assertion.predicate} says no"


def _groups(rows: Iterable[tuple[int, Row]], by: str | None) -> list[list[tuple[int, Row]]]:
    groups: dict[str, list[tuple[int, Row]]] = defaultdict(list)
    for number, row in rows:
        groups["" if by is None else json.dumps(row.get(by), default=str)].append((number, row))
    return list(groups.values())


def _value(row: Row, field: str) -> Any:
    if field == "confidence" and field not in row:
        values = row.get("probabilities")
        return max(values) if isinstance(values, (list, tuple)) and values and all(map(_is_number, values)) else None
    return row.get(field)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


_KINDS: Mapping[str, Callable[[AssertionEntry, list[tuple[int, Row]]], Failing]] = {
    "finite": _finite,
    "range": _range,
    "share": _share,
    "consistent": _consistent,
    "steady": _steady,
    "predicate": _predicate,
}
