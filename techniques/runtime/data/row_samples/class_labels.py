"""The classes of labelled rows: their names, and the number of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ringmaster.techniques.runtime.data.arrays import Array

MAX_CLASSES = 10_000


@dataclass(frozen=True, kw_only=True)
class ClassLabels:
    """The names of the classes, in the order of their numbers."""

    names: tuple[str, ...]

    def number(self, value: Any) -> int:
        """Returns the number of a class. Raises ValueError on an unknown one."""
        try:
            return self._numbers[_name(value)]
        except KeyError:
            shown = ", ".join(self.names[:10]) + (", ..." if len(self.names) > 10 else "")
            raise ValueError(
                f"label {value!r} is none of the classes {shown}. To fix: correct it, or add it to data.labels"
            ) from None

    def indicators(self, values: Iterable[Any]) -> Array:
        """Returns 1 for each class of a row with several labels, and 0 for the others: float32 [classes]."""
        found = np.zeros(len(self.names), dtype=np.float32)
        for value in values:
            if found[number := self.number(value)]:
                raise ValueError(
                    f"label {value!r} is twice among the labels of a row. To fix: list the classes of the row, each "
                    "once; not a 0 or 1 for each class"
                )
            found[number] = 1
        return found

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}


def class_labels(
    values: Iterable[tuple[Any, str]],
    *,
    named: Sequence[str],
    classes: Callable[[Any], Iterable[Any]],
    column: str,
) -> ClassLabels:
    """Returns the classes: the named ones, else those found in the labels of rows.

    Whole numbers are ordered by size, also where they are written as text; other names alphabetically. Where the
    smallest is 0, each whole number is the number of its class, also if not all occur.

    values: the label of each row, and its place in messages. classes: returns the classes in a label.

    Raises ValueError where a label is no class, or where there are more than MAX_CLASSES.
    """
    if named:
        return ClassLabels(names=tuple(named))
    found: set[str] = set()
    for value, where in values:
        for each in classes(value):
            if not _is_class(each):
                raise ValueError(
                    f"{where}: label {each!r} in column {column!r} is no class. To fix: give text or whole numbers, "
                    "or set data.kind to text-regression for other numbers"
                )
            found.add(_name(each))
        if len(found) > MAX_CLASSES:
            raise ValueError(
                f"{where}: column {column!r} has more than {MAX_CLASSES} different labels. To fix: name another "
                "label_column, or set data.kind to text-regression"
            )
    if not all(name.removeprefix("-").isdigit() for name in found):
        return ClassLabels(names=tuple(sorted(found)))
    numbers = sorted(map(int, found))
    if numbers and numbers[0] == 0 and numbers[-1] < MAX_CLASSES:
        numbers = list(range(numbers[-1] + 1))
    return ClassLabels(names=tuple(map(str, numbers)))


def _is_class(value: Any) -> bool:
    """Whether a label may be a class: text that is no fraction, or a whole number."""
    if isinstance(value, str):
        return bool(value.strip()) and re.fullmatch(r"[+-]?\d*\.\d*[1-9]\d*", value.strip()) is None
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _name(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, (int, float)) else str(value)
