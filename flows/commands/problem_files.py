"""Files of planning problems and plans, whose faults are named with the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster.errors import InputError
from ringmaster.tasks.files import text_of

if TYPE_CHECKING:
    from ringmaster.tasks.planning import Plan, Problem

MAX_BYTES = 200_000_000
"""Of a problem or a plan: 10,000 jobs of 100 options are half of that."""


def read_problem(path: Path) -> Problem:
    """Reads a problem. Raises InputError with every fault of the file."""
    from ringmaster.errors import ProblemError
    from ringmaster.tasks.planning import Problem

    try:
        return Problem.from_json(_read(path))
    except ProblemError as error:
        raise InputError([f"{path}: {fault}" for fault in error.faults]) from None


def read_plan(path: Path) -> Plan:
    """Reads a plan. Raises InputError where the file has none."""
    from ringmaster.tasks.planning import Plan

    try:
        return Plan.from_json(_read(path))
    except ValueError as error:
        raise InputError([f"{path}: {error}"]) from None


def write_text(path: Path, text: str) -> None:
    """Writes text with a line break at its end. Raises InputError where that is impossible."""
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError([f"{path}: {error.strerror}"]) from None


def _read(path: Path) -> Any:
    try:
        return json.loads(text_of(path, max_bytes=MAX_BYTES))
    except OSError as error:
        raise InputError([f"{path}: {error.strerror}"]) from None
    except (ValueError, RecursionError) as error:
        raise InputError([f"{path}: not JSON: {error}"]) from None
