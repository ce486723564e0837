"""Storage of checkpoints: a local folder, or any store that fsspec reaches by a URL (s3, gcs, memory, ...).

Both give the same guarantee: a folder with a whole manifest is a whole checkpoint. In a local folder, checkpoints are
written to a temporary folder, which is renamed. An object store has no rename, so pieces are written to their final
place under unique names, and the manifest, which alone makes them a checkpoint, is written after all of them.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from ringmaster.techniques.checkpoints.place import LATEST, MANIFEST, READ_BYTES, STEP, Block, Place
from ringmaster.techniques.checkpoints.remote_store import explained, is_url
from ringmaster.techniques.checkpoints.url_place import UrlPlace


def place_of(root: str | Path) -> Place:
    """Returns the place at a path or URL. Raises ValueError where the library for its protocol is missing."""
    if isinstance(root, str) and is_url(root):
        protocol, _, path = root.partition("://")
        return LocalPlace(Path(path)) if protocol in ("file", "local") else UrlPlace(root)
    return LocalPlace(Path(root))


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


class LocalPlace:
    """A local folder, where a rename is atomic."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def location(self, path: str) -> str:  # noqa: D102
        return str(self._root / path)

    def names(self) -> list[str]:  # noqa: D102
        return sorted(folder.name for folder in self._root.glob(STEP))

    def blocks(self, path: str) -> Iterator[bytes]:  # noqa: D102
        with (self._root / path).open("rb") as stream:
            while block := stream.read(READ_BYTES):
                yield block

    def read(self, path: str) -> bytes:  # noqa: D102
        return (self._root / path).read_bytes()

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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
