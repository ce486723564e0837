"""Faults of a batch file, each with place, line, message and remedy, reported all at once."""

from dataclasses import dataclass

from ringmaster.text import printable, shortened

MOST_PLACE, MOST_SAID = 200, 1000
"""The printed length in characters of a place, and of a message or a remedy; keys in a file may have any length."""

Place = tuple[str | int, ...]
"""The path of a value in a batch file: keys and positions, such as ("jobs", 3, "optimizer", "lr")."""


def place_text(place: Place) -> str:
    """Formats `place` for display: jobs[3].optimizer.lr."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True)
class Fault:
    """A fault. `place` is empty for the whole file; `line` is None if there is no file.

    Prints as `mixed.yaml:12: jobs[3].optimizer.lr: must be greater than 0, got -1. To fix: ...`, on one line whatever
    characters the file holds.
    """

    place: str
    line: int | None
    message: str
    remedy: str
    file: str = ""

    def __str__(self) -> str:
        source = ":".join(str(part) for part in (self.file, self.line) if part)
        where = ": ".join(part for part in (source, shortened(self.place, MOST_PLACE)) if part)
        what = f"{shortened(self.message, MOST_SAID)}. To fix: {shortened(self.remedy, MOST_SAID)}."
        return printable(f"{where}: {what}" if where else what)


@dataclass(frozen=True)
class Finding:
    """A fault before its file is known. `line` is given only if it differs from the line of the place."""

    place: Place
    message: str
    remedy: str
    line: int | None = None


def got(value: object) -> str:
    """Returns the part of a message that quotes the value found."""
    if value is None:
        return "got nothing"
    if isinstance(value, bool):
        return f"got {str(value).lower()}"
    if isinstance(value, dict):
        return "got a mapping"
    if isinstance(value, (list, tuple)):
        return "got a list"
    return f"got {shortened(repr(value), 60)}"
