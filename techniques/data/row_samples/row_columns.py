"""The columns of rows that a kind of data reads, by their roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from ringmaster.techniques.data.files import matching
from ringmaster.techniques.data.rows import read_rows
from ringmaster.techniques.interface.job import DataSpec


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The column of each role. roles: all roles, also optional ones that no column has."""

    columns: Mapping[str, str]
    roles: tuple[str, ...]
    optional: frozenset[str]

    @classmethod
    def find(
        cls,
        roles: Mapping[str, Sequence[str]],
        *,
        named: Mapping[str, str | None],
        optional: frozenset[str],
        there: Sequence[str],
        where: str,
    ) -> Self:
        """Finds the column of each role: the named one, else the first of the usual ones that is there.

        where: what messages call the data.

        Raises ValueError where a role that is not optional has no column, with all such roles.
        """
        found, missing = {}, []
        for role, usual in roles.items():
            name = named.get(role)
            column = name if name is not None else next((each for each in usual if each in there), None)
            if column is not None and column in there:
                found[role] = column
            elif name is not None or role not in optional:
                missing.append(f"{role}_column" if name is None else f"{role}_column {name!r}")
        if missing:
            raise ValueError(
                f"{where} has no column for {', '.join(missing)}; its rows have "
                f"{', '.join(sorted(there)) or 'no columns'}. "
                f"To fix: set {missing[0].split()[0]} to one of them"
            )
        return cls(columns=found, roles=tuple(roles), optional=optional)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(dict.fromkeys(self.columns.values()))

    def content(self, row: Any, where: str) -> dict[str, Any]:
        """Returns what is read of a row, by column. Raises ValueError where the row lacks a column or its value."""
        if not isinstance(row, Mapping):
            raise ValueError(f"{where} has no columns. To fix: give JSONL, CSV or Parquet")
        for name in self._required:
            if row.get(name) is None:
                said = (
                    f"has no column {name!r}; it has {sorted(row)}" if name not in row else f"has no value in {name!r}"
                )
                raise ValueError(f"{where} {said}. To fix: add the value, or remove the row")
        return {name: row.get(name) for name in self.names}

    @cached_property
    def _required(self) -> frozenset[str]:
        return frozenset(column for role, column in self.columns.items() if role not in self.optional)

    def by_role(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of a row by role, with None for roles that it lacks."""
        return {role: content.get(column) for role, column in self._column_of_role}

    @cached_property
    def _column_of_role(self) -> tuple[tuple[str, str], ...]:
        return tuple((role, self.columns.get(role, "")) for role in self.roles)


def columns_of_files(spec: DataSpec, *, kind: str) -> tuple[str, ...]:
    """Returns the columns of the first row of a spec's files.

    Raises ValueError where files cannot be read, are empty, or have no columns.
    """
    assert spec.path is not None
    found = matching(spec.path)
    for name in found.names:
        for _, row in read_rows(found.path(name), format=spec.format):
            if not isinstance(row, Mapping):
                raise ValueError(
                    f"{found.path(name)} has no columns. To fix: give JSONL, CSV or Parquet for kind {kind}"
                )
            return tuple(row)
    raise ValueError(f"path {spec.path!r} holds no row. To fix: check the files")
