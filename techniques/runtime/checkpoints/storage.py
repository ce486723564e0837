"""Storage of checkpoints: a local folder, or any store that fsspec reaches by a URL (s3, gcs, memory, ...).

Both give the same guarantee: a folder with a whole manifest is a whole checkpoint. In a local folder, checkpoints are
written to a temporary folder, which is renamed. An object store has no rename, so pieces are written to their final
place under unique names, and the manifest, which alone makes them a checkpoint, is written after all of them.
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
    """The folders of one job's checkpoints. Paths are relative to it; failures raise OSError."""

    def location(self, path: str) -> str:
        """Returns the whole path or URL, for people."""

    def names(self) -> list[str]:
        """Returns the names of checkpoint folders, the oldest first, without checking whether they are whole."""

    def open(self, path: str) -> BinaryIO:
        """Opens a file for sequential reading."""

    def size(self, path: str) -> int:
        """Returns a file's size in bytes."""

    def aside(self, name: str, attempt: str) -> str:
        """Returns the prefix of the temporary paths of checkpoint `name`, before it is revealed.

        Each attempt has its own prefix, so that no file of a failed attempt gets into the next.
        """

    def write(self, path: str, blocks: Iterable[Block]) -> None:
        """Writes a file durably: after the call returns, a power cut cannot undo it."""

    def reveal(self, aside: str, name: str, manifest: bytes) -> None:
        """Turns the files under `aside` into checkpoint `name` atomically; the manifest names the files."""

    def point_latest(self, name: str) -> None:
        """Records the name of the newest checkpoint, for people and tools."""

    def drop(self, aside: str) -> None:
        """Removes the files of an attempt."""

    def sweep(self, *, but: str | None = None) -> None:
        """Removes the files of all unfinished attempts, except for `but`."""

    def remove(self, name: str) -> None:
        """Removes a checkpoint."""


def place_of(root: str | Path) -> Place:
    """Returns the place at a path or URL. Raises ValueError where the library for its protocol is missing."""
    if isinstance(root, str) and "://" in root:
        protocol, _, path = root.partition("://")
        return LocalPlace(Path(path)) if protocol in ("file", "local") else UrlPlace(root)
    return LocalPlace(Path(root))


def join_root(root: str | Path, *names: str) -> str:
    """Returns a place below another, as a path or URL."""
    return "/".join([str(root).rstrip("/"), *names]) if "://" in str(root) else str(Path(root, *names))


class LocalPlace:
    """A local folder, where a rename is atomic."""

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
    """A prefix of an object store, where a file appears as a whole when it is closed, or not at all.

    The store's own library (s3fs for s3) is used, with the credentials and settings that it finds.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        try:
            self._store, root = url_to_fs(url.rstrip("/"))
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"checkpoints cannot be stored at {url}: {error}. To fix: install what it names"
            ) from error
        self._url, self._root = url.rstrip("/"), root.rstrip("/")

    def location(self, path: str) -> str:  # noqa: D102
        return f"{self._url}/{path}"

    def names(self) -> list[str]:  # noqa: D102
        return sorted(name for name in self._list("") if Path(name).match(STEP))

    def open(self, path: str) -> BinaryIO:  # noqa: D102
        return cast(BinaryIO, self._store.open(self._at(path), "rb"))

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Returns the bytes of a file from `start` up to, but excluding, `end`."""
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
        for file in self._list(name):  # removes files of other attempts, and the ranks' descriptions of their parts
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
        # The manifest is removed first, as without it the rest is no checkpoint. `rm` would expand patterns.
        for file in sorted(self._list(name), key=lambda file: file != MANIFEST):
            self._remove(f"{name}/{file}")
        with contextlib.suppress(OSError):  # some stores have folders, and keep the empty one
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
