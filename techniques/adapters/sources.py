"""Which modules a Hugging Face class is made of, read from its source: costs milliseconds and imports no torch."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path

ASSIGNED = re.compile(r"^\s+self\.(\w+)\s*=\s*\S", re.MULTILINE)
LINEAR = re.compile(r"^\s+self\.(\w+)\s*=\s*(?:nn\.Linear|Conv1D)\(", re.MULTILINE)


def architecture_in(folder: Path) -> str | None:
    """The class of the model that `save_pretrained` wrote there, None where nothing says it."""
    try:
        said = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return None
    names = said.get("architectures") if isinstance(said, dict) else None
    return str(names[0]) if isinstance(names, list) and names else None


@cache
def linear_names(architecture: str) -> frozenset[str] | None:
    """The last words of the names of its linear modules, None where its source does not tell."""
    source = _source(architecture)
    names = frozenset(LINEAR.findall(source))
    return names or None


@cache
def attribute_names(architecture: str) -> frozenset[str]:
    """Whatever the modules of its source are made of; no module's name has another last word."""
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
