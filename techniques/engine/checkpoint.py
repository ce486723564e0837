"""The canonical state of a job at a step, readable by every technique at every world size, and safe against crashes.

    ROOT/latest                             the name of the newest folder, for people and tools
    ROOT/step-00000030/manifest.json        tensors, their pieces, the files' sizes and SHA-256, its own
                       rank-00000.safetensors ...

Tensors bear canonical names: `model/<parameter>` and `optimizer/<parameter>/<state>`. A rank writes the pieces that it
holds, each with its offset in the whole; replicated ones are written once. Reading copies the overlap of the pieces
with what the reader's layout wants, so that layouts and world sizes need not agree. No pickle is written or read.

A save is written aside, synced, and becomes visible at once (`places` says how, on disks and in stores of objects); a
folder without a whole manifest, or with a file that does not match it, is passed over and the one before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from ringmaster.techniques.engine.places import MANIFEST, Block, Place, place_of
from ringmaster.techniques.values import digest, from_json, to_json

FORMAT = 1
READ_BYTES = 1 << 20

Agree = Callable[[bool], bool]
"""Whether all ranks say yes; also a barrier."""

WritePieces = Callable[[str], "Pieces"]
"""A rank's pieces, to be written into the file of that name."""


class CheckpointError(OSError):
    """A checkpoint cannot be written (disk) or none can be read (corrupt)."""


class MissingCheckpoint(OSError):
    """Checkpoints that were kept are nowhere to be seen: their folder is perhaps not mounted on this machine."""


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
class Pieces:
    """What a rank writes: its pieces of tensors (none: no file), and the content of the file that holds them."""

    tensors: Mapping[str, StoredTensor]
    blocks: Iterable[Block] = ()


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
    """A readable checkpoint; name: of its folder in `place`."""

    place: Place
    name: str
    manifest: Manifest

    @property
    def location(self) -> str:
        """Its folder or URL."""
        return self.place.location(self.name)

    @property
    def folder(self) -> Path:
        """Its folder, of one on a local disk."""
        return Path(self.location)


class CheckpointStore:
    """The checkpoints of one job, seen by one rank of those that read and write together.

    root: a folder or an fsspec URL. attempt: a word that the ranks of one gang share and others do not.
    passed_over: the newer folders that the last `newest` found not to be whole.

    `save` does all of a save at once. Where ranks do other work meanwhile they call `write_part` each, and when all
    have returned, one of them `publish`, or `drop` where one has failed.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        agree: Agree = bool,
        keep: int = 2,
        attempt: str = "0",
    ) -> None:
        self.root, self._place = root, place_of(root)
        self._rank, self._num_ranks, self._agree, self._keep = rank, num_ranks, agree, keep
        self._attempt = attempt
        self.passed_over: list[str] = []

    def newest(self, *, known_step: int = 0) -> Checkpoint | None:
        """The newest checkpoint that is whole, checked byte by byte; its files are shared out among the ranks.

        known_step: of which a checkpoint was kept. Raises MissingCheckpoint where there is none at all, not even a
        damaged one, of any step; beginning again from nothing is for a person to decide.
        """
        self.passed_over = []
        for name in reversed(self._place.names()):
            manifest = read_manifest(self._place, name)
            mine = sorted(manifest.files)[self._rank :: self._num_ranks] if manifest else []
            whole = manifest is not None and all(self._is_whole(name, file, manifest) for file in mine)
            if self._agree(whole):
                assert manifest is not None
                return Checkpoint(place=self._place, name=name, manifest=manifest)
            self.passed_over.append(self._place.location(name))
        if known_step > 0 and not self.passed_over:
            raise MissingCheckpoint(
                f"a checkpoint of step {known_step} was kept in {self.root}, and this machine sees none there. To fix: "
                "mount that folder here as on the other machines; where it was removed, train the job in a new run"
            )
        return None

    def whole(self, name: str) -> Checkpoint | None:
        """The checkpoint in the folder of that name, None where it is not whole. By one rank."""
        manifest = read_manifest(self._place, name)
        if manifest is None or not all(self._is_whole(name, file, manifest) for file in manifest.files):
            return None
        return Checkpoint(place=self._place, name=name, manifest=manifest)

    def save(self, step: int, write_pieces: WritePieces, meta: Mapping[str, Any]) -> None:
        """Writes a checkpoint of `step`. All ranks call it together.

        Raises CheckpointError on every rank where any could not write; the checkpoints before stay as they were.
        """
        leads = self._rank == 0
        self._together(step, lambda: self._place.sweep() if leads else None)
        self._together(step, lambda: self.write_part(step, write_pieces))
        self._together(step, lambda: self.publish(step, meta) if leads else None)

    def write_part(self, step: int, write_pieces: WritePieces) -> None:
        """Writes what this rank holds, aside. Needs no other rank. Raises OSError."""
        aside = self._aside(step)
        if self._rank == 0:
            self._place.sweep(but=aside)
        path = f"{aside}rank-{self._rank:05d}.safetensors"
        name = path.partition("/")[2]
        pieces, files = write_pieces(name), {}
        if pieces.tensors:
            files[name] = _write_described(self._place, path, pieces.blocks)
        part = Manifest(step=step, tensors=pieces.tensors, files=files)
        self._place.write(self._part(step, self._rank), [json.dumps(to_json(part)).encode()])

    def publish(self, step: int, meta: Mapping[str, Any]) -> None:
        """Makes the parts that all ranks have written a checkpoint, and drops old ones. On one rank. Raises OSError."""
        parts = []
        for rank in range(self._num_ranks):
            with self._place.open(self._part(step, rank)) as stream:
                parts.append(from_json(Manifest, json.loads(stream.read())))
        said = to_json(_merge(parts, step, meta))
        manifest = json.dumps({"sha256": digest(said, length=64), **said}, indent=1).encode()
        name = _folder(step)
        if self.whole(name) is not None:  # the same step, trained again after a fault: the same state
            self.drop(step)
        else:
            self._place.reveal(self._aside(step), name, manifest)
        self._place.point_latest(name)
        # Newer ones were passed over when this state was restored: they are corrupt, and must not crowd out whole ones.
        for old in [known for known in self._place.names() if known <= name][: -self._keep]:
            self._place.remove(old)

    def drop(self, step: int) -> None:
        """Removes what the ranks have written of a checkpoint that is not to be."""
        self._place.drop(self._aside(step))

    def failed(self, step: int, fault: BaseException | None) -> CheckpointError:
        """What to raise or tell where a save failed; fault: of this rank, None where it was another's."""
        reason = f": {fault}" if fault is not None else " on another rank"
        return CheckpointError(f"checkpoint {_folder(step)} could not be written under {self.root}{reason}")

    def _together(self, step: int, action: Callable[[], None]) -> None:
        """Does it on every rank; where one fails, all fail, and what was written aside gives its room back."""
        fault: OSError | None = None
        try:
            action()
        except OSError as error:
            fault = error
        if self._agree(fault is None):
            return
        if self._rank == 0:
            self.drop(step)
        raise self.failed(step, fault)

    def _aside(self, step: int) -> str:
        return self._place.aside(_folder(step), self._attempt)

    def _part(self, step: int, rank: int) -> str:
        return f"{self._aside(step)}part-{rank:05d}.json"

    def _is_whole(self, name: str, file: str, manifest: Manifest) -> bool:
        return _is_whole(self._place, f"{name}/{file}", manifest.files[file])


def read_manifest(place: Place, name: str) -> Manifest | None:
    """The manifest of a checkpoint's folder, or None where it is missing, not readable, or not what was written.

    One that names files outside of its folder was not written by us.
    """
    try:
        with place.open(f"{name}/{MANIFEST}") as stream:
            said = json.loads(stream.read())
        checksum = said.pop("sha256")
        manifest = from_json(Manifest, said)
        is_of_its_folder = all(_is_within(file) for file in _files_of(manifest))
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    if not is_of_its_folder:
        return None
    return manifest if checksum == digest(said, length=64) and manifest.format == FORMAT else None


def _files_of(manifest: Manifest) -> Iterator[str]:
    yield from manifest.files
    yield from (piece.file for stored in manifest.tensors.values() for piece in stored.pieces)


def _is_within(name: str) -> bool:
    """Whether it leads to a file of the folder that it is relative to. Checkpoints of commands have folders within."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _is_whole(place: Place, path: str, stored: StoredFile) -> bool:
    """Whether a file is there with the size and the checksum that the manifest tells."""
    try:
        if place.size(path) != stored.num_bytes:
            return False
        value = sha256()
        with place.open(path) as stream:
            while block := stream.read(READ_BYTES):
                value.update(block)
    except OSError:
        return False
    return value.hexdigest() == stored.sha256


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def _merge(parts: list[Manifest], step: int, meta: Mapping[str, Any]) -> Manifest:
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for name, stored in part.tensors.items():
            known = tensors.get(name)
            pieces = (*known.pieces, *stored.pieces) if known else stored.pieces
            tensors[name] = StoredTensor(dtype=stored.dtype, shape=stored.shape, pieces=pieces)
    files = {name: stored for part in parts for name, stored in part.files.items()}
    return Manifest(step=step, tensors=tensors, files=files, meta=meta)


def _write_described(place: Place, path: str, blocks: Iterable[Block]) -> StoredFile:
    """Writes a file and says its size and checksum: of what was meant, so that a fault on its way is found too."""
    value, num_bytes = sha256(), 0

    def passing() -> Iterator[Block]:
        nonlocal num_bytes
        for block in blocks:
            value.update(block)
            num_bytes += len(block)
            yield block

    place.write(path, passing())
    return StoredFile(num_bytes=num_bytes, sha256=value.hexdigest())
