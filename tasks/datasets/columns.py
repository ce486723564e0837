"""Checks that rows have the declared columns; reports the first violation of each column and counts the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringmaster.tasks.batch.faults import got
from ringmaster.techniques.data.file_rows import moment

WORDS = {
    "text": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "time": "a time, such as 2026-01-31T12:00:00Z",
    "tokens": "a list of token ids",
}


@dataclass(kw_only=True)
class WrongColumn:
    """Rows that violate the declaration of a column. where: the file and line of the first one."""

    column: str
    where: str
    message: str
    num_rows: int = 1

    def __str__(self) -> str:
        others = f" (and {self.num_rows - 1} rows more)" if self.num_rows > 1 else ""
        return f"{self.where}: column {self.column!r} {self.message}{others}"


@dataclass
class ColumnCheck:
    """Checks the rows of some files. columns: types by name, see `tasks.batch.field_types.COLUMN_TYPES`."""

    columns: Mapping[str, str]
    is_text: bool = False  # CSV: every value is text and is parsed as its declared type
    wrong: dict[str, WrongColumn] = field(default_factory=dict)

    def look(self, row: Any, *, file: str, number: int) -> None:
        """Checks a row and records its faults."""
        if not isinstance(row, Mapping):
            self._note("*", f"{file}, line {number}", f"cannot be checked: the row is no object, {got(row)}")
            return
        for column, said in self.columns.items():
            if message := self._fault(row, column, said):
                self._note(column, f"{file}, line {number}", message)

    def faults(self) -> Iterable[WrongColumn]:
        """Returns the faults found, one per column."""
        return self.wrong.values()

    def _fault(self, row: Mapping[str, Any], column: str, said: str) -> str:
        kind, may_lack = said.removesuffix("?"), said.endswith("?")
        value = row.get(column)
        if value is None or (self.is_text and value == "" and kind != "text"):
            if may_lack:
                return ""
            return "is null" if column in row else f"is missing; the row has {', '.join(sorted(row))}"
        return "" if kind == "any" or self._is(kind, value) else f"must be {WORDS[kind]}, {got(value)}"

    def _is(self, kind: str, value: Any) -> bool:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        match kind:
            case "text":
                return isinstance(value, str)
            case "integer":
                return (is_number and float(value).is_integer()) or (self.is_text and _reads(int, value))
            case "number":
                return is_number or (self.is_text and _reads(float, value))
            case "boolean":
                return isinstance(value, bool) or (self.is_text and str(value).lower() in ("true", "false"))
            case "tokens":
                return isinstance(value, list) and all(isinstance(token, int) for token in value)
        return _reads(moment, value)

    def _note(self, column: str, where: str, message: str) -> None:
        if column in self.wrong:
            self.wrong[column].num_rows += 1
        else:
            self.wrong[column] = WrongColumn(column=column, where=where, message=message)


def _reads(read: Any, value: Any) -> bool:
    try:
        read(value)
    except ValueError:
        return False
    return True
