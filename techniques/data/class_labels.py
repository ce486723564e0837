"""The classes of labelled rows: their names, the number of each, and samples from which nothing can be learnt."""

import json
import math
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np

from ringmaster.errors import DataError
from ringmaster.techniques.data.arrow_files import Array, columns_in, split_file
from ringmaster.techniques.data_source import shown
from ringmaster.techniques.metric import IGNORED

MAX_CLASSES = 10_000
UNLABELLED = "-1"
"""The number that in some data sets marks a row without a label; in others it is a class."""
MISSING_VALUES = frozenset({"#N/A", "#NA", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"})
"""Texts that `pandas.read_csv` reads as missing values; as the names of classes they may be meant so."""
LOOK_ALIKES = str.maketrans("АВЕЅІЈКМНОРСТУХасеһіјорѕухԁΑΒΕΖΗΙΚΜΝΟΡΤΥΧο", "ABESIJKMHOPCTYXacehijopsyxdABEZHIKMNOPTYXo")
"""Letters of Cyrillic and Greek, with the Latin ones that look the same."""


class ClassLabels:
    """Classes and their numbers. names: in the order of the numbers."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._are_lists: bool | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their numbers."""
        return tuple(self._numbers)

    def number(self, value: Any) -> int:
        """Returns the number of a class. Raises ValueError on an unknown one."""
        check_labelled(value)
        try:
            return self._numbers[as_class_name(value)]
        except KeyError:
            raise ValueError(
                f"label {value!r} is not one of the classes {shown(self.names)}. To fix: correct it, or add it to "
                "data.labels"
            ) from None

    def encode(self, value: Any) -> Any:
        """Returns the number of a class, or an indicator for each class where a label is a list of them.

        Raises ValueError where a class is unknown, or some labels are lists and others are not.
        """
        is_list = isinstance(value, (list, tuple))
        if self._are_lists is None:
            self._are_lists = is_list
        if is_list != self._are_lists:
            raise ValueError(
                f"label {value!r:.80} is {'a' if is_list else 'not a'} list, and that of the first row is "
                f'{"none" if is_list else "one"}. To fix: write all labels as lists, such as ["drama"], or none'
            )
        return self.indicators(value) if is_list else self.number(value)

    def indicators(self, values: Iterable[Any]) -> Array:
        """Returns 1 for each class of a row with several labels, and 0 for the others: float32 [classes]."""
        result = np.zeros(len(self._numbers), dtype=np.float32)
        for value in values:
            if result[number := self.number(value)]:
                raise ValueError(
                    f"label {value!r} is twice among the labels of a row. To fix: list the classes of the row, each "
                    "once; not a 0 or 1 for each class"
                )
            result[number] = 1
        return result


class DiscoveredClasses(ClassLabels):
    """Classes that are found in the labels of rows, and numbered as they come.

    column: the labels' column, in messages. classes: returns the classes in a label.
    """

    def __init__(self, *, column: str, classes: Callable[[Any], Iterable[Any]]) -> None:
        super().__init__()
        self._column, self._classes = column, classes

    def add(self, value: Any) -> list[int]:
        """Returns the numbers of the classes in a label. Raises ValueError where it has none, or there are too many."""
        numbers = []
        for each in self._classes(value):
            if isinstance(each, str) and (known := self._numbers.get(each)) is not None:
                numbers.append(known)
                continue
            check_labelled(each)
            if not _is_class(each):
                raise ValueError(
                    f"label {each!r} in column {self._column!r} is not a class. To fix: give text or whole numbers, "
                    "or set data.kind to text-regression for other numbers"
                )
            numbers.append(self._numbers.setdefault(as_class_name(each), len(self._numbers)))
        check_number(len(self._numbers), column=self._column)
        return numbers


def read_number(value: Any) -> float:
    """Returns a number, or the one that a text holds as in a CSV file; NaN for all else.

    `float` alone would also read true, 1_000, the bytes of a text, and the digits of other scripts.
    """
    is_text = isinstance(value, str)
    if isinstance(value, bool) or not (_NUMBER.fullmatch(value) if is_text else isinstance(value, Number)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # complex and other numbers that no float holds
        return math.nan


_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)


def check_labelled(value: Any) -> None:
    """Raises ValueError where a value means a missing label, or cannot be the name of a class."""
    if not isinstance(value, str):
        if value == IGNORED:
            raise ValueError(f"label {IGNORED} means no label. To fix: add the label, or remove the row")
        return
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"label {value!r:.80} has half of a surrogate pair, which is not a character. To fix: write it as UTF-8"
        ) from None


def as_list(value: Any) -> Any:
    """Returns the list that a text holds as JSON, as in a CSV file; other values as they are.

    Raises ValueError where a text looks like a list, and is none.
    """
    if not isinstance(value, str) or "[" not in value or re.fullmatch(r"\s*\[.*\]\s*", value, re.DOTALL) is None:
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        if re.search(r"[',\"]", value) is None:  # a name in brackets
            return value
        raise ValueError(
            f'{value[:30]!r} looks like a list, but is not valid JSON. To fix: write it as ["drama", "war"], in CSV '
            'with each quote doubled: "[""drama"", ""war""]"'
        ) from None


def with_class_names(row: dict[str, Any], classes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns a row with the names of classes in place of the numbers that `datasets` has for them.

    classes: the names of the classes, by column.
    """
    return row | {name: _class_name(row[name], names) for name, names in classes.items() if name in row}


def _class_name(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_class_name(each, names) for each in value]
    if isinstance(value, int) and value < 0:  # `ClassLabel` has -1 where there is no label
        return IGNORED
    return names[value] if isinstance(value, int) and value < len(names) else value


def check_number(num_classes: int, *, column: str) -> None:
    """Raises DataError where there are more than MAX_CLASSES."""
    if num_classes > MAX_CLASSES:
        raise DataError(
            f"column {column!r} has more than {MAX_CLASSES} different labels. To fix: name another label_column, or "
            "set data.kind to text-regression"
        )


def check_no_indicators(labels: ClassLabels, *, column: str) -> None:
    """Raises ValueError where the classes in lists of labels are 0 and 1, as where a list has one for each class."""
    if set(labels.names) in ({"0", "1"}, {"false", "true"}):
        raise ValueError(
            f"column {column!r} has lists of {' and '.join(labels.names)}, which could be one for each class. To fix: "
            "list the names of the classes of each row; or, if these are the names, set data.labels to them"
        )


def in_order(names: Collection[str]) -> ClassLabels:
    """Returns the classes that were found, with their final numbers.

    Whole numbers are ordered by size, also where they are written as text; other names alphabetically. Where the
    smallest is 0, each whole number is the number of its class, also if not all occur.
    """
    if not all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", name) for name in names):  # as numbers are written; 007 is a name
        return ClassLabels(sorted(names))
    numbers = sorted(map(int, names))
    if numbers and numbers[0] == 0 and numbers[-1] < MAX_CLASSES:
        numbers = list(range(numbers[-1] + 1))
    return ClassLabels(map(str, numbers))


def without_variants(names: Collection[str]) -> set[str]:
    """Returns names without those that differ from another one in the white space around them alone."""
    result: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (name != name.strip(), name)):
        result.setdefault(name.strip(), name)
    return set(result.values())


def notes_on(labels: ClassLabels, *, trained: Collection[int], are_learnt: bool) -> Iterator[str]:
    """Yields what users should know of classes. trained: the numbers of those of rows to train on."""
    if unseen := [name for number, name in enumerate(labels.names) if number not in trained]:
        yield f"classes without a row to train on: {shown(unseen)}"
    if not are_learnt:
        return
    by_case, by_form = dict[str, list[str]](), dict[str, list[str]]()
    for name in labels.names:
        by_case.setdefault(name.casefold(), []).append(name)
        by_form.setdefault(_form(name), []).append(name)
    if alike := [name for names in by_case.values() if len(names) > 1 for name in names]:
        yield f"classes that differ in case alone: {shown(alike)}"
    forms = [names for names in by_form.values() if len({name.casefold() for name in names}) > 1]
    if alike := [ascii(name) for names in forms for name in names]:
        yield (
            "classes that differ in how they are written alone (the form of a number, Unicode's form, blanks, "
            f"characters that are not seen, or letters of other scripts that look the same): {shown(alike)}"
        )
    parts = {name: [part.strip() for part in re.split(r"[,;|]", name)] for name in labels.names}
    if several := [name for name, each in parts.items() if len(each) > 1 and not parts.keys().isdisjoint(each)]:
        yield f"classes that may be several in one text, to be written as a list: {shown(several)}"
    if missing := [name for name in labels.names if name in MISSING_VALUES]:
        yield f"classes that pandas reads as missing values, and that are learnt as the others are: {shown(missing)}"
    if {UNLABELLED, "0"}.issubset(labels.names) and all(map(str.isdecimal, {*labels.names} - {UNLABELLED})):
        yield (
            f"the class {UNLABELLED} is learnt as the others are; some data sets, such as SNLI, have it in rows "
            "without a label"
        )


def _form(name: str) -> str:
    """Names in a form that is equal for names that read alike: without case, Unicode's form, unseen characters, blanks,
    and the scripts of letters."""
    seen = (each for each in unicodedata.normalize("NFKC", name) if unicodedata.category(each) != "Cf")
    visible = " ".join("".join(seen).split()).translate(LOOK_ALIKES)
    text = unicodedata.normalize("NFKC", visible.casefold())
    text = {"true": "1", "false": "0"}.get(text, text)  # as some programs write the one, and some the other
    value = read_number(text) if len(text) <= MAX_DIGITS else math.nan
    # What is 0 as a float may have millions of digits as a fraction.
    return text if not math.isfinite(value) else str(Fraction(text)) if value else "0"


MAX_DIGITS = 1000  # of numbers that are compared by their values; more take long


def _is_class(value: Any) -> bool:
    """Whether a label may be a class: text that is not a fraction, or a whole number."""
    if isinstance(value, str):
        return bool(value.strip()) and re.fullmatch(r"[+-]?\d*\.\d*[1-9]\d*", value.strip()) is None
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def as_class_name(value: Any) -> str:
    """Returns the name of a class: text as it is, whole numbers as text, and true and false."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


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
