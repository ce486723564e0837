"""Things by name: what Ringmaster has itself, and what installed distributions add as entry points.

Techniques, losses, metrics, data sources, engines and objectives of plans have one `Registry` each. A thing is named
by its dotted name "package.module:name", by which another process finds it too.
"""

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from ringmaster.compat.python import parse_source
from ringmaster.features import current_module


@dataclass(frozen=True, kw_only=True)
class Registry:
    """Dotted names of things by the names that users write. Built-in things come first, and cannot be replaced.

    kind: what is registered, for messages.
    entry_point_group: the entry points by which installed distributions add more.
    builtin: the dotted names of what Ringmaster has.
    registered: those that this process has added.
    """

    kind: str
    entry_point_group: str
    builtin: Mapping[str, str]
    registered: dict[str, str] = field(default_factory=dict)

    def paths(self) -> dict[str, str]:
        """Returns all dotted names, by name, built-in ones first."""
        return {**self.builtin, **self.registered, **installed(self.entry_point_group), **self.builtin}

    def path(self, name: str) -> str:
        """Returns the dotted name of a thing. Raises ValueError, with the known names, on an unknown one."""
        # Entry points are searched for other names only: that takes a tenth of a second, in each rank.
        return self.builtin[name] if name in self.builtin else find(self.kind, name, self.paths())

    def installed_path(self, name: str) -> str | None:
        """Returns the dotted name of a thing that is not built in, whose code may change; None for built-in ones."""
        return None if name in self.builtin else self.path(name)

    def load(self, name: str, base: type) -> Any:
        """Returns the class with a name.

        Raises ValueError where the name is unknown, or leads to no subclass of `base` of that name.
        """
        path = self.path(name)
        result = subclass(base, path)
        if result.name != name:
            what = f"{self.kind} {result.name!r} ({path})"
            raise ValueError(f"entry point {name!r} has the {what}. To fix: give both one name")
        return result


@dataclass(frozen=True)
class InstalledEntry:
    """An entry point of an installed distribution."""

    distribution: str
    name: str
    value: str


UNNAMED = "an unnamed distribution"
"""What stands for the name of a distribution without metadata."""


def installed_entries(entry_point_group: str) -> tuple[InstalledEntry, ...]:
    """Returns the entry points of a group, of all installed distributions by their names; each once."""
    entries = entry_points(group=entry_point_group)
    every = dict.fromkeys(InstalledEntry(_distribution_of(each), each.name, each.value) for each in entries)
    return tuple(sorted(every, key=lambda entry: entry.distribution))


def _distribution_of(entry: EntryPoint) -> str:
    with suppress(FileNotFoundError):  # raised by the package importlib_metadata, which other libraries import
        return (entry.dist and entry.dist.name) or UNNAMED
    return UNNAMED


@cache
def installed(entry_point_group: str) -> dict[str, str]:
    """Returns the dotted names of `installed_entries` by the names of these; the first where several have one name."""
    entries = installed_entries(entry_point_group)
    names = dict.fromkeys(entry.name for entry in entries)
    return {**names, **{entry.name: entry.value for entry in reversed(entries)}}


def find(kind: str, name: str, paths: Mapping[str, str]) -> str:
    """Returns the dotted name of a thing. Raises ValueError, with the known names, on an unknown one."""
    if name not in paths:
        close = difflib.get_close_matches(name, paths, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown {kind} {name!r}: {hint}there are {', '.join(paths)}")
    return paths[name]


def subclass(base: type, path: str) -> Any:
    """Returns the subclass of `base` that has a dotted name. Raises ValueError where there is none."""
    result = resolve(path)
    if not (isinstance(result, type) and issubclass(result, base)):
        raise ValueError(f"{path} is not a subclass of {base.__module__}.{base.__qualname__}")
    return result


def resolve(dotted: str) -> Any:
    """Returns the object that "package.module:name" names; `name` may be nested ("module:Class.method").

    Raises ValueError, with a remedy, where the name is malformed, is not found, or is in `__main__`, which no other
    process can import. Errors that importing the module raises are propagated.
    """
    module_name, colon, path = dotted.partition(":")
    if not colon or not module_name or not path:
        raise ValueError(f"{dotted!r} is not a dotted name. To fix: write package.module:function")
    if module_name == "__main__":
        raise ValueError(
            f"{dotted!r} is defined in the script that was started, where no worker process can find it. "
            f"To fix: move {path} into a module of its own next to the batch file, and name it MODULE:{path}"
        )
    result = _import(module_name, dotted=dotted)
    for part in path.split("."):
        if not hasattr(result, part):
            close = difflib.get_close_matches(part, [name for name in dir(result) if not name.startswith("_")])
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise ValueError(f"{dotted!r}: module {module_name!r} has no {path!r}{hint}")
        result = getattr(result, part)
    return result


def source_digest(target: Any) -> str | None:
    """Returns the digest of the `source_files` of a function or class; None where it is compiled, without one."""
    target = inspect.unwrap(target)
    try:
        file = inspect.getsourcefile(target)
    except TypeError:
        return None
    if not file:
        return None
    files = source_files(Path(file), module=target.__module__)
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()


def source_files(file: Path, *, module: str) -> list[Path]:
    """Returns the source file of a module, and those of the modules of the same project that it imports, also by these.

    They are found in the text of import statements, anywhere in a file, and are below the folder that holds the
    module's top-level package. Of installed distributions, and of Ringmaster, it is the file alone: a new release has
    a new version.
    """
    root = file.parents[min(module.count(".") + (file.name == "__init__.py"), len(file.parents) - 1)]
    result = [file]
    if module.partition(".")[0] in OF_RELEASE or INSTALLED.intersection(file.parts):
        return result
    for each in result:  # which grows
        package = each.relative_to(root).parts[:-1]
        names = {name[:end] for name in _imported(each, package) for end in range(1, len(name) + 1)}
        paths = (root.joinpath(*name) for name in sorted(names))
        files = (path for name in paths for path in (name.with_suffix(".py"), name / "__init__.py") if path.is_file())
        result += [path for path in files if path not in result]
    return result


INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of the folders of installed distributions."""
OF_RELEASE = frozenset({__name__.partition(".")[0], *sys.stdlib_module_names})
"""Packages that change with a release alone."""


def _imported(file: Path, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields the parts of the names that a file imports: of modules, or of what is in them."""
    try:
        tree = parse_source(file.read_bytes())
    except (SyntaxError, ValueError):  # importing it raises the same error
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            yield from ((*base, *filter(None, (node.module or "").split(".")), alias.name) for alias in node.names)


def _import(module_name: str, *, dotted: str) -> Any:
    module_name = current_module(module_name)
    try:
        if module_name not in sys.modules:
            _drop_stale_bytecode(module_name)
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing import inside the user's module is propagated; only a missing module becomes a ValueError.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{dotted!r}: there is no module {error.name!r}. To fix: put it next to the batch file, "
            f"or install the package that has it"
        ) from error


def _drop_stale_bytecode(module_name: str) -> None:
    """Removes the compiled form of a module that is older than its source file.

    Python compares the size and the modification time of the source, which copies and archives set.
    """
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.cached is None or spec.origin is None:
        return
    with suppress(OSError):  # not compiled yet, or another's folder
        if Path(spec.cached).stat().st_ctime_ns < Path(spec.origin).stat().st_ctime_ns:
            Path(spec.cached).unlink()
