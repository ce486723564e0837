"""Module names in a Hugging Face class, read from its source code: takes milliseconds and imports no torch."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path

ASSIGNED = re.compile(r"^\s+self\.(\w+)\s*=\s*\S", re.MULTILINE)
LINEAR = re.compile(r"^\s+self\.(\w+)\s*=\s*(?:nn\.Linear|Conv1D)\(", re.MULTILINE)


def architecture_in(folder: Path) -> str | None:
    """Returns the model class that `save_pretrained` recorded in a folder, or None where none is recorded."""
    try:
        said = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return None
    names = said.get("architectures") if isinstance(said, dict) else None
    return str(names[0]) if isinstance(names, list) and names else None


@cache
def linear_names(architecture: str) -> frozenset[str] | None:
    """Returns the last components of the names of its linear modules, or None where its source shows none."""
    source = _source(architecture)
    names = frozenset(LINEAR.findall(source))
    return names or None


@cache
def attribute_names(architecture: str) -> frozenset[str]:
    """Returns the names of all attributes that its source assigns; every module's last name component is among them."""
    return frozenset(ASSIGNED.findall(_source(architecture)))


@cache
def _source(architecture: str) -> str:
    import transformers

    module = transformers._class_to_module.get(architecture)
    spec = importlib.util.find_spec("transformers")
    if module is None or spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).parent.joinpath(*module.split(".")).with_suffix(".py")
    return path.read_text(errors="replace") if path.is_file() else ""
