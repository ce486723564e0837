"""Rows by group, stored on disk, as a log may have as many groups as rows."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

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
