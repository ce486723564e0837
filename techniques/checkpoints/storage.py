"""Storage of checkpoints: a local folder, or any store that fsspec reaches by a URL (s3, gcs, memory, ...).

Both give the same guarantee: a folder with a whole manifest is a whole checkpoint. In a local folder, checkpoints are
written to a temporary folder, which is renamed. An object store has no rename, so pieces are written to their final
place under unique names, and the manifest, which alone makes them a checkpoint, is written after all of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, cast

from ringmaster.errors import ObjectStoreUnavailable
from ringmaster.extras import install_command

# Stores without folders. To make a folder there costs a request, and may create a bucket whose name is a mistake.
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "ocs", "r2", "memory"})

CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, on every machine that uses the store"


def is_url(path: str) -> bool:
    """Returns whether fsspec is needed to read the path."""
    return "://" in path


def open_store(url: str) -> tuple[Any, str]:
    """Returns the store of a URL, and the path in it; nothing is connected yet.

    Raises ValueError where the library for its protocol is missing, or refuses the URL.
    """
    from fsspec.core import url_to_fs

    try:
        store, path = url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        protocol = url.partition("://")[0]
        remedy = install_command("s3") if protocol in ("s3", "s3a") else f"install what fsspec needs for {protocol}"
        raise ValueError(f"{error}. To fix: {remedy}") from error
    return store, str(path)


@contextmanager
def store_errors() -> Iterator[None]:
    """Inside the context, every error of a store's library but FileNotFoundError becomes ObjectStoreUnavailable."""
    try:
        yield
    except (FileNotFoundError, ObjectStoreUnavailable):
        raise
    except Exception as error:  # the libraries of stores have no common base class: refused, unknown host, ...
        raise ObjectStoreUnavailable(_cause(error)) from error


def explained(error: OSError, url: str) -> str:
    """Returns the cause of an error inside `store_errors`, and what to do about it."""
    return f"{_cause(error)}. To fix: {_remedy(error, url)}"


def _cause(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _remedy(error: OSError, url: str) -> str:
    origin = error.__cause__ if isinstance(error, ObjectStoreUnavailable) and error.__cause__ is not None else error
    kind = type(origin).__name__  # by name, as the library need not be installed
    if kind in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
        return CREDENTIALS
    if kind in ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionClosedError", "InvalidEndpoint"):
        return f"check that the store runs, and its address: {_endpoint()}"
    if url.startswith("http"):
        return f"check the URL {url}"
    if isinstance(origin, FileNotFoundError):
        return f"create the bucket of {url}, or correct its name; the address of the store is {_endpoint()}"
    if isinstance(origin, PermissionError):
        return f"check the credentials, and that they may list, read, write and delete objects below {url}"
    return f"check the URL {url}, the credentials, and the address of the store: {_endpoint()}"


def _endpoint() -> str:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL"):
        if value := os.environ.get(name):
            return f"{name}={value}"
    return "that of the provider, as AWS_ENDPOINT_URL is not set"


MANIFEST = "manifest.json"
STEP = "step-????????"
LATEST = "latest"
READ_BYTES = 1 << 20

Block = bytes | memoryview


def place_of(root: str | Path) -> CheckpointRoot:
    """Returns the place at a path or URL. Raises ValueError where the library for its protocol is missing."""
    if isinstance(root, str) and is_url(root):
        protocol, _, path = root.partition("://")
        return LocalStorage(Path(path)) if protocol in ("file", "local") else UrlStorage(root)
    return LocalStorage(Path(root))


def checkpoint_steps(root: str | None) -> dict[int, str]:
    """Returns the names of the checkpoints under a root, by step; {} if there is no such place."""
    try:
        names = [] if root is None else place_of(root).names()
    except OSError:
        return {}
    return {int(name.rpartition("-")[2]): name for name in names}


def check_root(root: str) -> None:
    """Writes, reads, lists and removes a small file below a root of checkpoints.

    Raises ValueError, with the cause and a remedy, where that cannot be done.
    """
    place, name, content = place_of(root), f"check-{uuid.uuid4().hex}", b"written, and removed at once"
    try:
        place.write(f"{name}/{LATEST}", [content])
        is_same = place.read(f"{name}/{LATEST}") == content
        place.names()
        place.remove(name)
    except OSError as error:
        why = explained(error, root) if is_url(root) else f"{error}. To fix: check the folder, and who may write there"
        raise ValueError(f"checkpoints cannot be stored at {root}: {why}") from error
    if not is_same:
        raise ValueError(
            f"checkpoints cannot be stored at {root}: it does not return what was written. To fix: "
            "take a store that returns the newest content of a file as soon as it is written"
        )


def join_root(root: str | Path, *names: str) -> str:
    """Returns a place below another, as a path or URL."""
    return "/".join([str(root).rstrip("/"), *names]) if is_url(str(root)) else str(Path(root, *names))


class LocalStorage:
    """The folders of one job's checkpoints, in a local folder, where a rename is atomic. Paths are relative to it.

    Failures raise OSError: FileNotFoundError where a file does not exist.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def location(self, path: str) -> str:
        """Returns the full path or URL, to be shown."""
        return str(self._root / path)

    def names(self) -> list[str]:
        """Returns the names of checkpoint folders, the oldest first, without checking whether they are whole."""
        return sorted(folder.name for folder in self._root.glob(STEP))

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yields the content of a file."""
        with (self._root / path).open("rb") as stream:
            while block := stream.read(READ_BYTES):
                yield block

    def read(self, path: str) -> bytes:
        """Returns the content of a small file."""
        return (self._root / path).read_bytes()

    def aside(self, name: str, attempt: str) -> str:
        """Returns the prefix of the temporary paths of checkpoint `name`, before it is revealed.

        Each attempt has its own prefix, so that no file of a failed attempt gets into the next.
        """
        return f"{name}.{attempt}.tmp/"

    def write(self, path: str, blocks: Iterable[Block]) -> None:
        """Writes a file durably: after the call returns, a power cut cannot undo it."""
        file = self._root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as stream:
            for block in blocks:
                stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())

    def reveal(self, aside: str, name: str, manifest: bytes) -> None:
        """Turns the files under `aside` into checkpoint `name` atomically; the manifest names the files."""
        self.write(aside + MANIFEST, [manifest])
        for part in (self._root / aside).glob("part-*.json"):
            part.unlink()
        sync_path(self._root / aside)
        shutil.rmtree(self._root / name, ignore_errors=True)
        (self._root / aside).rename(self._root / name)
        sync_path(self._root)

    def write_whole(self, path: str, content: bytes) -> None:
        """Writes or replaces a small file atomically."""
        self.write(f"{path}.tmp", [content])
        (self._root / f"{path}.tmp").rename(self._root / path)

    def drop(self, aside: str) -> None:
        """Removes the files of an attempt."""
        shutil.rmtree(self._root / aside, ignore_errors=True)

    def sweep(self, *, but: str | None = None) -> None:
        """Removes the files of all unfinished attempts, except for `but`."""
        for left_over in self._root.glob("step-*.tmp"):
            if f"{left_over.name}/" != but:
                shutil.rmtree(left_over)

    def remove(self, name: str) -> None:
        """Removes a checkpoint."""
        shutil.rmtree(self._root / name)


def sync_path(path: Path) -> None:
    """Syncs a file or folder, so that a power cut cannot undo its writing."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class UrlStorage:
    """A prefix of an object store, where a file appears as a whole when it is closed, or not at all.

    Implements `CheckpointRoot`. Errors of the store's library are raised as ObjectStoreUnavailable, and files that do
    not exist as FileNotFoundError. Raises ValueError where the library for the URL's protocol is missing.
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
        # From byte 0, as a file without a range is looked up before it is read, and these are never empty.
        return self.read_range(path, 0)

    def read_range(self, path: str, start: int, end: int | None = None) -> bytes:
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

    def write_whole(self, path: str, content: bytes) -> None:  # noqa: D102
        self.write(path, [content])

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
        # The manifest is removed first, as without it the rest is not a checkpoint. `rm` would expand patterns.
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
                result = [str(path) for path in self._store.find(self._root, withdirs=True)]
            except FileNotFoundError:
                result = []
        steps: dict[str, list[str]] = {}
        for path in result:
            name, _, file = path.removeprefix(self._root).lstrip("/").partition("/")
            if PurePosixPath(name).match(STEP):
                steps.setdefault(name, []).extend([file] if file else [])
        return steps

    def _list(self, path: str) -> list[str]:
        self._store.invalidate_cache()
        with store_errors():
            try:
                result: list[Any] = self._store.ls(self._at(path), detail=False)
            except FileNotFoundError:
                return []
        return [str(name).rstrip("/").rpartition("/")[2] for name in result]


CheckpointRoot = LocalStorage | UrlStorage
