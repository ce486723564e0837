"""Values that are measured once for each machine, and kept as JSON files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

from ringmaster.codec import from_json, to_json

T = TypeVar("T")


def kept(cls: type[T], file: Path) -> T | None:
    """Returns the value in a file; None where there is none, or one that cannot be read: it is measured again."""
    try:
        return from_json(cls, json.loads(file.read_text()))
    except (OSError, ValueError):  # a power failure may leave an empty file
        return None


def keep(value: Any, file: Path) -> None:
    """Writes a value into a file. A reader sees the old or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(to_json(value)))
    aside.replace(file)
