"""Files that match a pattern, local or at any URL that fsspec reads (s3, gcs, https, memory, ...)."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, cast

from ringmaster.techniques.runtime.checkpoints.publish import publish
from ringmaster.techniques.runtime.data.prepared import stamp

# Metadata keys of stores that change with a file's content, the most reliable first.
STAMPS = ("ETag", "etag", "checksum", "md5Hash", "mtime", "LastModified", "last_modified", "created")


@dataclass(frozen=True, kw_only=True)
class Matched:
    """The files that match a pattern.

    root: the folder or URL above all wildcards.
    names: the paths of the files relative to root, in order.
    """

    root: str
    names: tuple[str, ...]

    def path(self, name: str) -> str:
        """Returns the whole path or URL of a file."""
        return f"{self.root.rstrip('/')}/{name}"

    def state(self) -> list[Any]:
        """Returns a JSON value that changes as soon as a file does, and is cheap to obtain."""
        if not is_url(self.root):
            return [(name, *stamp(Path(self.root, name))) for name in self.names]
        system, _ = _system(self.root)
        return [(name, _remote_stamp(system.info(self.path(name)))) for name in self.names]


def is_url(path: str) -> bool:
    """Returns whether fsspec is needed to read the path."""
    return "://" in path


def matching(pattern: str) -> Matched:
    """Returns the files that match a pattern. Raises ValueError where there is none, or its store cannot be read."""
    if is_url(pattern):
        return _remote(pattern)
    parts = Path(pattern).parts
    fixed = list(takewhile(lambda part: not any(sign in part for sign in "*?["), parts[:-1]))
    root, rest = Path(*fixed), str(Path(*parts[len(fixed) :]))
    found = sorted(file.relative_to(root).as_posix() for file in root.glob(rest) if file.is_file())
    if not found:
        is_folder = Path(pattern).is_dir()
        hint = f"name its files, e.g. {pattern}/*.jsonl" if is_folder else "check the glob, and where it starts"
        raise ValueError(f"path {pattern!r} matches no file (from {Path.cwd()}). To fix: {hint}")
    return Matched(root=str(root), names=tuple(found))


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Opens a file to read bytes. Raises ValueError where it cannot be read."""
    try:
        if is_url(path):
            system, inner = _system(path)
            with system.open(inner, "rb") as stream:
                yield cast(BinaryIO, stream)
        else:
            with Path(path).open("rb") as file:
                yield file
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}. To fix: check the file") from error


def local_copies(pattern: str, *, cache_dir: Path) -> str:
    """Returns a local pattern for the same files; a file at a URL is copied once for each state of it.

    The files of a pattern are links to these copies, so that a new file costs one copy.
    """
    if not is_url(pattern):
        return pattern
    found = matching(pattern)
    states = found.state()
    folder = cache_dir.absolute() / "files" / _key(pattern, states)
    if not folder.exists():
        copies = [_copied(found.path(name), state, folder.parent / "each") for (name, state) in states]
        with publish(folder) as aside:
            for name, copy in zip(found.names, copies, strict=True):
                target = aside / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.hardlink_to(copy)
    return str(folder / found.names[0]) if len(found.names) == 1 else str(folder / "**" / "*")


def _copied(url: str, state: Any, cache: Path) -> Path:
    """Returns the local copy of one file at a URL."""
    folder = cache / _key(url, state)
    if not folder.exists():
        with publish(folder) as aside, opened(url) as source, (aside / "copy").open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    return folder / "copy"


def _key(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _remote(pattern: str) -> Matched:
    system, inner = _system(pattern)
    try:
        if any(sign in inner for sign in "*?["):
            paths = sorted(path for path, info in system.glob(inner, detail=True).items() if info["type"] == "file")
        else:
            paths = [inner] if system.isfile(inner) else []
    except Exception as error:  # clients of stores raise anything: refused, unknown host, ...
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{pattern} cannot be read: {why}. To fix: check the URL, and who may read it") from error
    if not paths:
        raise ValueError(f"{pattern} matches no file. To fix: check the URL")
    inside = _above_wildcards(inner)
    names = tuple(path.removeprefix(inside).lstrip("/") for path in paths)
    # The root is taken from the URL, as the path in the store may lack the host.
    return Matched(root=_above_wildcards(pattern), names=names)


def _above_wildcards(path: str) -> str:
    """The folder above the file, or above the first part with a wildcard."""
    return "/".join(takewhile(lambda part: not any(sign in part for sign in "*?["), path.split("/")[:-1]))


def _system(url: str) -> tuple[Any, str]:
    """The store of a URL, and the path in it. Raises ValueError where the library for its protocol is missing."""
    from fsspec.core import url_to_fs

    try:
        system, inner = url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        protocol = url.partition("://")[0]
        raise ValueError(f"{url} cannot be read: {error}. To fix: install what fsspec needs for {protocol}") from error
    return system, str(inner)


def _remote_stamp(info: dict[str, Any]) -> list[str]:
    return [str(info.get("size")), *(str(info[key]) for key in STAMPS if info.get(key) is not None)][:2]
