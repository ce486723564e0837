"""Streaming readers of logged predictions; a log may be larger than memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
BATCH_ROWS = 4096  # of a Parquet file, in memory at a time


class Log:
    """The rows of a JSONL or Parquet file of logged predictions. num_read: the number of rows read so far.

    Iteration raises ValueError at an invalid row.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.num_read = path, 0

    def __iter__(self) -> Iterator[Row]:
        read = _parquet if self._path.suffix == ".parquet" else _jsonl
        for row in read(self._path):
            self.num_read += 1
            yield row


def largest_probability(row: Row) -> float | None:
    """Returns the largest of a row's probabilities; None if it has none, or if one of them is not a number."""
    values = row.get("probabilities")
    if not isinstance(values, (list, tuple)) or not values or not all(map(is_number, values)):
        return None
    most: float = max(values)
    return most


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
        raise ValueError(f"{path} is no Parquet file: {error}. To fix: check the file") from error


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
        raise ValueError(f"{where} is no JSON: {error}. To fix: one object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where} is no JSON object. To fix: one object a line, such as {{"prediction": 3}}')
    return row
