"""Checkpoints under a prefix of an object store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any, cast

from ringmaster.techniques.checkpoints.place import LATEST, MANIFEST, READ_BYTES, STEP, Block
from ringmaster.techniques.checkpoints.remote_store import OBJECT_STORES, open_store, store_errors


class UrlPlace:
    """A prefix of an object store, where a file appears as a whole when it is closed, or not at all.

    Implements `Place`. Errors of the store's library are raised as ObjectStoreUnavailable, and files that do not
    exist as FileNotFoundError. Raises ValueError where the library for the URL's protocol is missing.
    """

    def __init__(self, url: str) -> None:
        try:
            self._store, root = open_store(url.rstrip("/"))
        except ValueError as error:
            raise ValueError(f"checkpoints cannot be stored at {url}: {error}") from error
        self._url, self._root = url.rstrip("/"), root.rstrip("/")
        self._has_folders = url.partition("://")[0] not in OBJECT_STORES

    def location(self, path: str) -> str:  # noqa: D102
        return f"{self._url}/{path}"

    def names(self) -> list[str]:  # noqa: D102
        return sorted(name for name in self._list("") if PurePosixPath(name).match(STEP))

    def blocks(self, path: str) -> Iterator[bytes]:  # noqa: D102
        with store_errors(), self._store.open(self._at(path), "rb") as stream:
            while block := stream.read(READ_BYTES):
                yield block

    def read(self, path: str) -> bytes:  # noqa: D102
        with store_errors():
            # From byte 0, as a file without a range is looked up before it is read, and these are never empty.
            return cast(bytes, self._store.cat_file(self._at(path), start=0))

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Returns the bytes of a file from `start` up to, but excluding, `end`, or its end."""
        with store_errors():
            return cast(bytes, self._store.cat_file(self._at(path), start=start, end=end))

    def aside(self, name: str, attempt: str) -> str:  # noqa: D102
        return f"{name}/{attempt}-"

    def write(self, path: str, blocks: Iterable[Block]) -> None:  # noqa: D102
        with store_errors():
            if self._has_folders:
                self._store.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
            stream = self._store.open(self._at(path), "wb")
        try:
            for block in blocks:
                with store_errors():
                    stream.write(block)
        finally:
            with store_errors():
                stream.close()

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
        for name, files in self._steps().items():
            if name != kept and MANIFEST not in files:
                self._remove_all(name, files)

    def remove(self, name: str) -> None:  # noqa: D102
        self._remove_all(name, self._list(name))

    def _remove_all(self, name: str, files: Iterable[str]) -> None:
        # The manifest is removed first, as without it the rest is no checkpoint. `rm` would expand patterns.
        for file in sorted(files, key=lambda file: file != MANIFEST):
            self._remove(f"{name}/{file}")
        if self._has_folders:
            with contextlib.suppress(OSError):  # not every one of them keeps an empty folder
                self._store.rmdir(self._at(name))

    def _remove(self, path: str) -> None:
        with store_errors():
            self._store.rm_file(self._at(path))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _steps(self) -> dict[str, list[str]]:
        """Returns the files of each checkpoint's folder, whole or not, by one request for a thousand of them."""
        self._store.invalidate_cache()
        with store_errors():
            try:
                found = [str(path) for path in self._store.find(self._root, withdirs=True)]
            except FileNotFoundError:
                found = []
        steps: dict[str, list[str]] = {}
        for path in found:
            name, _, file = path.removeprefix(self._root).lstrip("/").partition("/")
            if PurePosixPath(name).match(STEP):
                steps.setdefault(name, []).extend([file] if file else [])
        return steps

    def _list(self, path: str) -> list[str]:
        self._store.invalidate_cache()
        with store_errors():
            try:
                found: list[Any] = self._store.ls(self._at(path), detail=False)
            except FileNotFoundError:
                return []
        return [str(name).rstrip("/").rpartition("/")[2] for name in found]
