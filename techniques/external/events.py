"""The events that a command reports, as the lines of its report. docs/commands.md describes them for authors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from ringmaster.techniques.metric import checked_values
from ringmaster.techniques.processes.events import MOST_STEPS, OutcomeStatus
from ringmaster.text import printable_lines, storable

MOST_IN_LINE = 1_000_000  # bytes of an event
MOST_IN_TEXT = 4096  # characters of a value: a path of the longest kind
KINDS = (OutcomeStatus.OUT_OF_MEMORY, OutcomeStatus.INVALID, OutcomeStatus.CRASHED)


@dataclass(frozen=True, kw_only=True)
class CommandEvent:
    """An event of a command. NAME: the value of "event" in its line."""

    NAME: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class StepEvent(CommandEvent):
    """An event about a step: so many steps are done."""

    step: int


@dataclass(frozen=True, kw_only=True)
class TrainingStarted(StepEvent):
    """The command is about to take its first step."""

    NAME = "start"


@dataclass(frozen=True, kw_only=True)
class StepDone(StepEvent):
    """A step was done, in so many seconds."""

    NAME = "step"
    seconds: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(StepEvent):
    """A checkpoint lies in a folder."""

    NAME = "checkpoint"
    folder: str
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class CommandEvaluation(StepEvent):
    """The model was evaluated."""

    NAME = "metrics"
    metrics: Mapping[str, Any]
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelWritten(CommandEvent):
    """The finished model was exported."""

    NAME = "model"
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PeakMemory(CommandEvent):
    """The largest memory that the command has used on a device."""

    NAME = "memory"
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class PhaseBegun(CommandEvent):
    """A phase has begun in which the command may be silent for `patience_s` seconds."""

    NAME = "phase"
    phase: str
    patience_s: float


@dataclass(frozen=True, kw_only=True)
class CommandHeartbeat(CommandEvent):
    """The command is alive."""

    NAME = "beat"


@dataclass(frozen=True, kw_only=True)
class CommandFinished(StepEvent):
    """The command has done all steps that it was ordered."""

    NAME = "done"


@dataclass(frozen=True, kw_only=True)
class CommandStopped(StepEvent):
    """The command has stopped as it was asked to."""

    NAME = "preempted"


@dataclass(frozen=True, kw_only=True)
class CommandFailure(CommandEvent):
    """The command has failed. kind: one of `KINDS`, by default "crashed"."""

    NAME = "failed"
    message: str
    kind: str = OutcomeStatus.CRASHED


_CLASSES: Mapping[str, type[CommandEvent]] = {
    cls.NAME: cls
    for cls in (
        *(
            TrainingStarted,
            StepDone,
            CheckpointWritten,
            CommandEvaluation,
            ModelWritten,
            PeakMemory,
            PhaseBegun,
            CommandHeartbeat,
        ),
        *(CommandFinished, CommandStopped, CommandFailure),
    )
}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float),
    "str": (str,),
    "Mapping[str, Any]": (dict,),
}


def parse_event(line: bytes) -> CommandEvent:
    """Returns the event in a line. Raises ValueError, with the allowed events, on any other line."""
    text = line.decode(errors="replace")
    if len(line) > MOST_IN_LINE:
        raise ValueError(f"the command said {text[:200]!r} and more, {len(line)} bytes. To fix: at most {MOST_IN_LINE}")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the command said {text[:200]!r}, which is not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("event"), str) or content["event"] not in _CLASSES:
        raise ValueError(f"the command said {text[:200]!r}. To fix: give `event` one of {', '.join(_CLASSES)}")
    cls = _CLASSES[content["event"]]
    values = {}
    for each in fields(cls):
        is_needed = each.default is MISSING
        if is_needed and each.name not in content:
            raise ValueError(f"the command said {text[:200]!r} without {each.name!r}. To fix: say it too")
        if is_needed or content.get(each.name) is not None:
            try:
                values[each.name] = _checked(each.name, content[each.name], _TYPES[str(each.type)], cls)
            except ValueError as error:
                raise ValueError(f"the command said {text[:200]!r}, where {error}") from error
    return cls(**values)


def _checked(name: str, value: Any, types: tuple[type, ...], cls: type[CommandEvent]) -> Any:
    """Returns a field's value as an event of that class has it."""
    if not isinstance(value, types) or isinstance(value, bool):
        expected = " or ".join(each.__name__ for each in types)
        raise ValueError(f"{name!r} is no {expected}. To fix: make it one")
    if isinstance(value, dict):
        return checked_values(value, may_be_undefined=False)
    if isinstance(value, str):
        return printable_lines(value) if cls is CommandFailure else _plain_text(name, value)
    number: Any = value
    if name == "loss":  # one that is not finite has a remedy of its own
        return math.inf if isinstance(number, int) and abs(number) > MOST_STEPS else float(number)
    if not 0 <= number <= MOST_STEPS:  # nor NaN
        raise ValueError(f"{name!r} is no number from 0 to {MOST_STEPS}. To fix: make it one")
    return number


def _plain_text(name: str, value: str) -> str:
    if len(value) > MOST_IN_TEXT:
        raise ValueError(f"{name!r} has {len(value)} characters. To fix: at most {MOST_IN_TEXT}")
    if storable(value) != value or any(ord(character) < ord(" ") for character in value):
        raise ValueError(f"{name!r} has control characters, or halves of surrogate pairs. To fix: leave them out")
    return value
