"""The place of one job's checkpoints: what a store of them can do, and the names of files and folders there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

MANIFEST = "manifest.json"
STEP = "step-????????"
LATEST = "latest"
READ_BYTES = 1 << 20

Block = bytes | memoryview


class Place(Protocol):
    """The folders of one job's checkpoints. Paths are relative to it.

    Failures raise OSError: FileNotFoundError where a file does not exist, ObjectStoreUnavailable where a store does not
    answer or refuses, so that nothing is known about the file.
    """

    def location(self, path: str) -> str:
        """Returns the whole path or URL, for people."""

    def names(self) -> list[str]:
        """Returns the names of checkpoint folders, the oldest first, without checking whether they are whole."""

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yields the content of a file."""

    def read(self, path: str) -> bytes:
        """Returns the content of a small file."""

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
