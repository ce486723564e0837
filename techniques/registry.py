"""Registry of techniques: the built-in ones, and users' techniques from entry points or `register`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from ringmaster.techniques.dotted_names import resolve
from ringmaster.techniques.technique import Technique

ENTRY_POINT_GROUP = "ringmaster.techniques"

BUILTIN: dict[str, str] = {
    "single": "ringmaster.techniques.single:Single",
    "ddp": "ringmaster.techniques.ddp:Ddp",
    "zero1": "ringmaster.techniques.zero1:Zero1",
    "zero2": "ringmaster.techniques.zero2:Zero2",
    "fsdp": "ringmaster.techniques.fsdp:Fsdp",
    "fsdp_static": "ringmaster.techniques.fsdp_static:FsdpStatic",
    "tensor": "ringmaster.techniques.tensor:TensorParallel",
    "context": "ringmaster.techniques.context:Context",
    "pipeline": "ringmaster.techniques.pipeline:Pipeline",
    "mesh": "ringmaster.techniques.mesh:Mesh",
    "offload": "ringmaster.techniques.offload:Offload",
    "command": "ringmaster.techniques.command:Command",
    "rewrite": "ringmaster.techniques.rewrite:Rewrite",
}

GROUPS: dict[str, str] = {"shared_base": "ringmaster.techniques.shared_base:SharedBase"}
"""Techniques that train several jobs at once: known by name, but never tried on a single job."""

_registered: dict[str, str] = {}


def register(technique: type[Technique]) -> type[Technique]:
    """Makes a technique known to this process and its workers; usable as a class decorator.

    Raises:
        ValueError: Workers could not import the class, or another technique has the name.
    """
    if technique.__module__ == "__main__":
        raise ValueError(
            f"technique {technique.__qualname__} is defined in __main__, which worker processes cannot import. "
            "To fix: move it into a module beside your script and import it from there"
        )
    path = f"{technique.__module__}:{technique.__qualname__}"
    taken = _every().get(technique.name)
    if taken is not None and taken != path:
        raise ValueError(f"technique {technique.name!r} is {taken} already. To fix: choose another name")
    _registered[technique.name] = path
    return technique


def dotted_paths() -> dict[str, str]:
    """Returns the dotted path of the class of every technique that trains single jobs, by name.

    Built-in techniques cannot be shadowed.
    """
    return {name: path for name, path in _every().items() if name not in GROUPS}


def names() -> tuple[str, ...]:
    """Returns the names of all techniques, built-in ones first, including those that train groups."""
    return tuple(dict.fromkeys([*BUILTIN, *GROUPS, *_every()]))


def dotted_path(name: str) -> str:
    """Returns the dotted path of the class of technique `name`.

    Raises ValueError, with the known names, on an unknown one.
    """
    paths = _every()
    return find("technique", name, {known: paths[known] for known in names()})


def load(path: str) -> Technique:
    """Returns the technique at a dotted path "package.module:Class". Raises ValueError where there is none."""
    technique: Technique = make(Technique, path)
    return technique


def find(what: str, name: str, paths: Mapping[str, str]) -> str:
    """Returns the dotted path of the class with a name. Raises ValueError, with the known names, on an unknown one."""
    if name not in paths:
        close = get_close_matches(name, paths, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown {what} {name!r}: {hint}there are {', '.join(paths)}")
    return paths[name]


def make(base: type, path: str) -> Any:
    """Returns an object of the subclass of `base` at a dotted path. Raises ValueError where there is none."""
    found = resolve(path)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{path} is not a subclass of {base.__module__}.{base.__qualname__}")
    return found()


@cache
def installed(group: str) -> dict[str, str]:
    """Returns the dotted paths that installed distributions name as entry points of a group, by their names."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def _every() -> dict[str, str]:
    return {**_registered, **installed(ENTRY_POINT_GROUP), **BUILTIN, **GROUPS}
