"""The canonical state of a job at a step, readable by every technique at every world size, and safe against crashes.

    ROOT/latest                             the name of the newest folder, for people and tools
    ROOT/step-00000030/manifest.json        tensors, their pieces, the files' sizes and SHA-256, its own
                       rank-00000.safetensors ...

Tensors bear canonical names: `model/<parameter>` and `optimizer/<parameter>/<state>`. A rank writes the pieces that it
holds, each with its offset in the whole; replicated ones are written once. Reading copies the overlap of the pieces
with what the reader's layout wants, so that layouts and world sizes need not agree. No pickle is written or read.

A save goes to a folder beside, is synced, and becomes visible by one rename; a folder without a whole manifest, or with
a file that does not match it, is passed over and the one before it is used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from techniques.values import digest, from_json, to_json

MANIFEST = "manifest.json"
FORMAT = 1

Agree = Callable[[bool], bool]
"""Whether all ranks say yes; also a barrier."""


WritePieces = Callable[[Path], "Mapping[str, StoredTensor]"]
"""Writes a rank's pieces into a file and says what they are (none: no file)."""


class CheckpointError(OSError):
    """A checkpoint cannot be written (disk) or none can be read (corrupt)."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a tensor: where it starts in the whole, its shape, and the file that holds it under `key`."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A whole tensor's shape and safetensors dtype, and the pieces that make it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file's size and SHA-256."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A readable checkpoint on disk."""

    folder: Path
    manifest: Manifest


class CheckpointStore:
    """The checkpoints of one job, seen by one rank of those that read and write together.

    passed_over: the newer folders that the last `newest` found not to be whole.
    """

    def __init__(self, root: Path, *, rank: int = 0, num_ranks: int = 1, agree: Agree = bool, keep: int = 2) -> None:
        self.root = root
        self._rank, self._num_ranks, self._agree, self._keep = rank, num_ranks, agree, keep
        self.passed_over: list[Path] = []

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, checked byte by byte; its files are shared out among the ranks."""
        self.passed_over = []
        for folder in sorted(self.root.glob("step-????????"), reverse=True):
            manifest = read_manifest(folder)
            mine = sorted(manifest.files)[self._rank :: self._num_ranks] if manifest else []
            whole = manifest is not None and all(is_whole(folder / name, manifest.files[name]) for name in mine)
            if self._agree(whole):
                assert manifest is not None
                return Checkpoint(folder=folder, manifest=manifest)
            self.passed_over.append(folder)
        return None

    def save(self, step: int, write_pieces: WritePieces, meta: Mapping[str, Any]) -> None:
        """Writes a checkpoint of `step`. All ranks call it together.

        Raises CheckpointError on every rank where any could not write; the checkpoints before stay as they were.
        """
        aside = self.root / f"step-{step:08d}.tmp"
        leads = self._rank == 0
        self._together(aside, lambda: self._prepare(aside) if leads else None)
        self._together(aside, lambda: self._write_part(aside, step, write_pieces))
        self._together(aside, lambda: self._publish(aside, step, meta) if leads else None)

    def _together(self, aside: Path, action: Callable[[], None]) -> None:
        """Does it on every rank; where one fails, all fail, and what was written aside gives its room back."""
        fault: OSError | None = None
        try:
            action()
        except OSError as error:
            fault = error
        if self._agree(fault is None):
            return
        if self._rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        reason = f": {fault}" if fault is not None else " on another rank"
        raise CheckpointError(f"checkpoint {aside.stem} could not be written under {self.root}{reason}")

    def _prepare(self, aside: Path) -> None:
        for left_over in self.root.glob("step-????????.tmp"):
            shutil.rmtree(left_over)
        aside.mkdir(parents=True)

    def _write_part(self, aside: Path, step: int, write_pieces: WritePieces) -> None:
        file = aside / f"rank-{self._rank:05d}.safetensors"
        tensors = write_pieces(file)
        files = {file.name: _sync_and_describe(file)} if file.exists() else {}
        part = Manifest(step=step, tensors=tensors, files=files)
        _write_synced(aside / f"part-{self._rank:05d}.json", json.dumps(to_json(part)))

    def _publish(self, aside: Path, step: int, meta: Mapping[str, Any]) -> None:
        parts = sorted(aside.glob("part-*.json"))
        assert len(parts) == self._num_ranks
        manifest = _merge([from_json(Manifest, json.loads(part.read_text())) for part in parts], step, meta)
        said = to_json(manifest)
        _write_synced(aside / MANIFEST, json.dumps({"sha256": digest(said, length=64), **said}, indent=1))
        for part in parts:
            part.unlink()
        _sync_folder(aside)
        final = self.root / f"step-{step:08d}"
        if _is_whole_checkpoint(final):  # the same step, trained again after a fault: the same state
            shutil.rmtree(aside)
        else:
            shutil.rmtree(final, ignore_errors=True)
            aside.rename(final)
        _sync_folder(self.root)
        _write_synced(self.root / "latest.tmp", final.name)
        (self.root / "latest.tmp").rename(self.root / "latest")
        # Newer ones were passed over when this state was restored: they are corrupt, and must not crowd out whole ones.
        up_to_here = [folder for folder in sorted(self.root.glob("step-????????")) if folder.name <= final.name]
        for old in up_to_here[: -self._keep]:
            shutil.rmtree(old)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint folder, or None where it is missing, not readable, or not what was written."""
    try:
        said = json.loads((folder / MANIFEST).read_text())
        checksum = said.pop("sha256")
        manifest = from_json(Manifest, said)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None
    return manifest if checksum == digest(said, length=64) and manifest.format == FORMAT else None


def is_whole(file: Path, stored: StoredFile) -> bool:
    """Whether a file is there with the size and the checksum that the manifest tells."""
    try:
        if file.stat().st_size != stored.num_bytes:
            return False
        return _checksum(file) == stored.sha256
    except OSError:
        return False


def _is_whole_checkpoint(folder: Path) -> bool:
    manifest = read_manifest(folder)
    return manifest is not None and all(is_whole(folder / name, file) for name, file in manifest.files.items())


def _merge(parts: list[Manifest], step: int, meta: Mapping[str, Any]) -> Manifest:
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for name, stored in part.tensors.items():
            known = tensors.get(name)
            pieces = (*known.pieces, *stored.pieces) if known else stored.pieces
            tensors[name] = StoredTensor(dtype=stored.dtype, shape=stored.shape, pieces=pieces)
    files = {name: stored for part in parts for name, stored in part.files.items()}
    return Manifest(step=step, tensors=tensors, files=files, meta=meta)


def _checksum(file: Path) -> str:
    value = sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            value.update(block)
    return value.hexdigest()


def _sync_and_describe(file: Path) -> StoredFile:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return StoredFile(num_bytes=file.stat().st_size, sha256=_checksum(file))


def _write_synced(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
