"""Content-addressed files: written once, never changed, and verified at every read."""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ringmaster.errors import TensorObjectError
from ringmaster.model_lineage.tensors.planes import Packed, needs_parent, pack, unpack

DEEPEST = 4  # the longest chain of differences; each link costs another read
_DIGEST_BYTES = 32
_HEAD_BYTES = 4 + 1 + _DIGEST_BYTES
_MAGIC = b"RMT1"
_NOBODY = bytes(_DIGEST_BYTES)


def digest_of(content: memoryview | bytes) -> str:
    """Returns the name of some content: its SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


class Objects:
    """The objects under `root`. Several processes may use them: a file appears complete or not at all."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, content: memoryview, *, item_bytes: int, parent: str | None = None) -> str:
        """Stores content (items of `item_bytes` each), as a difference to the object `parent` if that is smaller.

        Returns the digest. An object that exists is not written again. Raises TensorObjectError if the parent is
        damaged.
        """
        digest = digest_of(content)
        if digest in self:
            return digest
        depth = 0 if parent is None else self.depth(parent) + 1
        is_deep = depth > DEEPEST
        packed = pack(content, item_bytes=item_bytes, parent=None if parent is None or is_deep else self.get(parent))
        self._write(digest, packed, parent=parent, depth=depth)
        return digest

    def get(self, digest: str) -> memoryview:
        """Returns the content of that digest. Raises TensorObjectError if it is missing or damaged.

        A parent needs no verification of its own: if it were damaged, the result would have another digest.
        """
        content = self._unpacked(digest)
        if digest_of(content) != digest:
            parent = self.parent(digest)
            if parent is not None:
                self._needed(parent, digest, self.get)  # raises for the parent if that is the damaged one
            raise TensorObjectError(f"object {digest} is damaged: its content has another digest")
        return content

    def parent(self, digest: str) -> str | None:
        """Returns the object that this one is a difference to, or None."""
        head, data = self._read(digest)
        return head[5:].hex() if needs_parent(data) else None

    def depth(self, digest: str) -> int:
        """Returns the number of objects that must be read before this one."""
        return self._read(digest)[0][4]

    def size(self, digest: str) -> int:
        """Returns the size of the object's file in bytes."""
        return self._path(digest).stat().st_size

    def remove(self, digest: str) -> None:
        """Deletes an object."""
        self._path(digest).unlink(missing_ok=True)

    def __contains__(self, digest: str) -> bool:
        return self._path(digest).exists()

    def __iter__(self) -> Iterator[str]:
        for path in sorted(self.root.glob("??/*")):
            if not path.name.startswith("."):
                yield path.parent.name + path.name

    def _unpacked(self, digest: str) -> memoryview:
        """Returns the content of that digest without verifying it."""
        head, data = self._read(digest)
        parent = self._needed(head[5:].hex(), digest, self._unpacked) if needs_parent(data) else None
        try:
            return unpack(data, parent=parent)
        except ValueError as error:
            raise TensorObjectError(f"object {digest} is damaged: {error}") from error

    def _needed(self, parent: str, digest: str, read: Callable[[str], memoryview]) -> memoryview:
        try:
            return read(parent)
        except TensorObjectError as error:
            raise TensorObjectError(f"object {digest} cannot be read without another one: {error}") from error

    def _path(self, digest: str) -> Path:
        return self.root / digest[:2] / digest[2:]

    def _read(self, digest: str) -> tuple[bytes, memoryview]:
        try:
            with self._path(digest).open("rb") as file:
                mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            raise TensorObjectError(f"object {digest} is not in {self.root}") from None
        except ValueError:  # nothing to map
            raise TensorObjectError(f"object {digest} is damaged: it is empty") from None
        head = bytes(mapped[:_HEAD_BYTES])
        if len(mapped) <= _HEAD_BYTES or head[:4] != _MAGIC:
            raise TensorObjectError(f"object {digest} is damaged: it does not begin as objects do")
        return head, mapped[_HEAD_BYTES:]

    def _write(self, digest: str, packed: Packed, *, parent: str | None, depth: int) -> None:
        head = _MAGIC + bytes([depth if packed.needs_parent else 0])
        head += bytes.fromhex(parent) if packed.needs_parent and parent is not None else _NOBODY
        write_once(self._path(digest), head, packed.data)


def write_once(path: Path, *parts: bytes) -> None:
    """Writes a file that is synced before it gets its name; an existing file of that name is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise
