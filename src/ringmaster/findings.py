"""Faults in the values of a file before its lines are known: rules yield them, and files place them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ringmaster.text import shortened

Location = tuple[str | int, ...]
"""The path of a value in a batch file: keys and positions, such as ("jobs", 3, "optimizer", "lr")."""
Raw = Mapping[str, Any]
"""The plain values of a section of a file, whose types need not be checked yet."""


@dataclass(frozen=True)
class Finding:
    """A fault before its file is known. `line` is given only if it differs from the line of the place."""

    place: Location
    message: str
    remedy: str
    line: int | None = None


def findings_where(*rules: tuple[object, Location, str, str]) -> Iterator[Finding]:
    """Yields the faults of the rules, each (whether it is broken, place, message, remedy), that are broken."""
    return (Finding(place, message, remedy) for is_broken, place, message, remedy in rules if is_broken)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Returns a mapping as it is, and an empty one for any other value, which the schema refuses."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: Any) -> list[Any]:
    """Returns a list as it is, and an empty one for any other value, which the schema refuses."""
    return value if isinstance(value, list) else []


def are_counts(*values: Any) -> bool:
    """Whether all values are whole numbers of at least 1."""
    return all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in values)


def got(value: object) -> str:
    """Returns the part of a message that quotes the value found."""
    match value:
        case None:
            return "got nothing"
        case bool():
            return f"got {str(value).lower()}"
        case dict():
            return "got a mapping"
        case list() | tuple():
            return "got a list"
    return f"got {shortened(repr(value), 60)}"
