"""Where checkpoints are kept: in a local folder, or in any store that fsspec reaches by a URL (s3, gcs, memory, ...).

Both keep one promise: a folder that names a whole manifest is whole. A local folder is written aside and renamed. A
store of objects knows no rename: pieces go to their last place under names of their own, and the manifest, which
alone makes them a checkpoint, is written after all of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

MANIFEST = "manifest.json"
STEP = "step-????????"
LATEST = "latest"

Block = bytes | memoryview


class Place(Protocol):
    """The folders of one job's checkpoints. Paths are relative to it; what fails raises OSError."""

    def location(self, path: str) -> str:
        """The whole path or URL, for people."""

    def names(self) -> list[str]:
        """The folders of checkpoints, the oldest first; whether they are whole is not looked at."""

    def open(self, path: str) -> BinaryIO:
        """A file to read from its start to its end."""

    def size(self, path: str) -> int:
        """A file's bytes."""

    def aside(self, name: str, attempt: str) -> str:
        """What the paths begin with of all that is written for the checkpoint `name` before it is revealed.

        Attempts have names of their own, so that nothing of one that failed gets into the next.
        """

    def write(self, path: str, blocks: Iterable[Block]) -> None:
        """A file that a power cut cannot undo any more when this returns."""

    def reveal(self, aside: str, name: str, manifest: bytes) -> None:
        """Makes what was written under `aside` the checkpoint `name`, at once; the manifest names its files."""

    def point_latest(self, name: str) -> None:
        """Names the newest checkpoint, for people and tools."""

    def drop(self, aside: str) -> None:
        """Removes what an attempt wrote."""

    def sweep(self, *, but: str | None = None) -> None:
        """Removes what attempts left that came to no end, all but `but`."""

    def remove(self, name: str) -> None:
        """Removes a checkpoint."""


def place_of(root: str | Path) -> Place:
    """The place that a path or URL names. Raises ValueError where the library for its protocol is missing."""
    if isinstance(root, str) and "://" in root:
        protocol, _, path = root.partition("://")
        return LocalPlace(Path(path)) if protocol in ("file", "local") else UrlPlace(root)
    return LocalPlace(Path(root))


def join_root(root: str | Path, *names: str) -> str:
    """A place below another, as a path or URL."""
    return "/".join([str(root).rstrip("/"), *names]) if "://" in str(root) else str(Path(root, *names))


class LocalPlace:
    """A folder, where a rename is atomic."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def location(self, path: str) -> str:  # noqa: D102
        return str(self._root / path)

    def names(self) -> list[str]:  # noqa: D102
        return sorted(folder.name for folder in self._root.glob(STEP))

    def open(self, path: str) -> BinaryIO:  # noqa: D102
        return (self._root / path).open("rb")

    def size(self, path: str) -> int:  # noqa: D102
        return (self._root / path).stat().st_size

    def aside(self, name: str, attempt: str) -> str:  # noqa: D102
        return f"{name}.{attempt}.tmp/"

    def write(self, path: str, blocks: Iterable[Block]) -> None:  # noqa: D102
        file = self._root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as stream:
            for block in blocks:
                stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())

    def reveal(self, aside: str, name: str, manifest: bytes) -> None:  # noqa: D102
        self.write(aside + MANIFEST, [manifest])
        for part in (self._root / aside).glob("part-*.json"):
            part.unlink()
        _sync_folder(self._root / aside)
        shutil.rmtree(self._root / name, ignore_errors=True)
        (self._root / aside).rename(self._root / name)
        _sync_folder(self._root)

    def point_latest(self, name: str) -> None:  # noqa: D102
        self.write(f"{LATEST}.tmp", [name.encode()])
        (self._root / f"{LATEST}.tmp").rename(self._root / LATEST)

    def drop(self, aside: str) -> None:  # noqa: D102
        shutil.rmtree(self._root / aside, ignore_errors=True)

    def sweep(self, *, but: str | None = None) -> None:  # noqa: D102
        for left_over in self._root.glob("step-*.tmp"):
            if f"{left_over.name}/" != but:
                shutil.rmtree(left_over)

    def remove(self, name: str) -> None:  # noqa: D102
        shutil.rmtree(self._root / name)


class UrlPlace:
    """A prefix of a store of objects, where a file appears whole or not at all when it is closed.

    Its library is the store's own (s3fs for s3), with credentials and settings where that looks for them.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        try:
            self._store, root = url_to_fs(url.rstrip("/"))
        except (ImportError, ValueError) as error:
            raise ValueError(f"checkpoints cannot be kept at {url}: {error}. To fix: install what it names") from error
        self._url, self._root = url.rstrip("/"), root.rstrip("/")

    def location(self, path: str) -> str:  # noqa: D102
        return f"{self._url}/{path}"

    def names(self) -> list[str]:  # noqa: D102
        return sorted(name for name in self._list("") if Path(name).match(STEP))

    def open(self, path: str) -> BinaryIO:  # noqa: D102
        return cast(BinaryIO, self._store.open(self._at(path), "rb"))

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """The bytes of a file from `start` to `end`, and no others."""
        return cast(bytes, self._store.cat_file(self._at(path), start=start, end=end))

    def size(self, path: str) -> int:  # noqa: D102
        self._store.invalidate_cache()
        return int(self._store.size(self._at(path)))

    def aside(self, name: str, attempt: str) -> str:  # noqa: D102
        return f"{name}/{attempt}-"

    def write(self, path: str, blocks: Iterable[Block]) -> None:  # noqa: D102
        self._store.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)  # stores without folders do nothing
        with self._store.open(self._at(path), "wb") as stream:
            for block in blocks:
                stream.write(block)

    def reveal(self, aside: str, name: str, manifest: bytes) -> None:  # noqa: D102
        prefix = aside.partition("/")[2]
        self.write(f"{name}/{MANIFEST}", [manifest])
        for file in self._list(name):  # of other attempts, and what the ranks told of theirs
            if file != MANIFEST and (not file.startswith(prefix) or file.endswith(".json")):
                self._remove(f"{name}/{file}")

    def point_latest(self, name: str) -> None:  # noqa: D102
        self.write(LATEST, [name.encode()])

    def drop(self, aside: str) -> None:  # noqa: D102
        name, _, prefix = aside.partition("/")
        for file in self._list(name):
            if file.startswith(prefix):
                self._remove(f"{name}/{file}")

    def sweep(self, *, but: str | None = None) -> None:  # noqa: D102
        kept = but.partition("/")[0] if but else None
        for name in self.names():
            if name != kept and MANIFEST not in self._list(name):
                self.remove(name)

    def remove(self, name: str) -> None:  # noqa: D102
        # The manifest first: without it there is no checkpoint, whatever is left. Not by `rm`, which expands patterns.
        for file in sorted(self._list(name), key=lambda file: file != MANIFEST):
            self._remove(f"{name}/{file}")
        with contextlib.suppress(OSError):  # where there are folders, an empty one is left
            self._store.rmdir(self._at(name))

    def _remove(self, path: str) -> None:
        self._store.rm_file(self._at(path))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _list(self, path: str) -> list[str]:
        self._store.invalidate_cache()
        try:
            found: list[Any] = self._store.ls(self._at(path), detail=False)
        except FileNotFoundError:
            return []
        return [str(name).rstrip("/").rpartition("/")[2] for name in found]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
