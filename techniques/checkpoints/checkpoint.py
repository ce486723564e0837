"""Checkpoint store: the canonical state of a job at a step, readable by every technique at every world size.

    ROOT/latest                             the name of the newest folder, for users and tools
    ROOT/chain.json                         the states so far (`chain`)
    ROOT/step-00000030/manifest.json        tensors, their pieces, the files' sizes and SHA-256, the manifest's SHA-256
                       rank-00000.safetensors ...

Tensors have canonical names: `model/<parameter>` and `optimizer/<parameter>/<state>`. A rank writes the pieces that it
holds, each with its offset in the whole tensor; replicated pieces are written once. Reading copies the overlap of the
stored pieces with the regions of the reader's layout, so layouts and world sizes need not agree. No pickle is written
or read.

Saves are crash-safe. A save is written to a temporary place, synced, and then becomes visible at once (`storage`
describes how, on disks and in object stores). A folder without a whole manifest, or with a file that does not match the
manifest, is skipped, and the next older one is used.

Finished models lie in the same form below ROOT/model/, with their manifest written last, so that machines need no
common folder: the node that trains a job exports its model to a folder and stores it (`store_model`), and a machine
that needs the model and does not have the folder copies it from the store (`fetch_model`).
"""

import fcntl
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from ringmaster.codec import digest, from_json, to_json
from ringmaster.errors import CheckpointError, CheckpointNotFound, ModelNotFound, ObjectStoreUnavailable
from ringmaster.files import link_or_copy
from ringmaster.techniques.checkpoints.storage import (
    LATEST,
    MANIFEST,
    Block,
    CheckpointRoot,
    LocalStorage,
    place_of,
    sync_path,
)


@contextmanager
def publish(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, which replaces `folder` at the end; after an exception it does not.

    Only one writer may run at a time. An existing `folder` is replaced; for a moment in between, `folder` does not
    exist. A fault of the disk is raised as OSError, also where safetensors wraps it in an exception of its own.
    """
    from safetensors import SafetensorError

    aside = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)  # left by a writer that died
    aside.mkdir(parents=True)
    try:
        yield aside
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        number = isinstance(error, SafetensorError) and re.search(r"\(os error (\d+)\)", str(error))
        if not number:
            raise
        raise OSError(int(number[1]), str(error), str(folder)) from error
    for path in [*sorted(aside.rglob("*")), aside]:
        sync_path(path)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    sync_path(folder.parent)


def publish_once(folder: Path, write: Callable[[Path], object]) -> None:
    """Makes a folder where there is none: `write` is called with a temporary one, which then becomes `folder`.

    It is safe across processes: one writes, under a lock that ends with the process, and the others wait for it.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with publish(folder) as aside:
                write(aside)


FORMAT = 1

Agree = Callable[[bool], bool]
"""Returns whether all ranks pass True; also a barrier."""

WritePieces = Callable[[str], "RankPieces"]
"""Returns a rank's pieces, to be written into the file of the given name."""


@dataclass(frozen=True, kw_only=True)
class TensorPiece:
    """A part of a tensor: its offset in the whole, its shape, and the file that stores it under `key`."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointTensor:
    """A whole tensor's shape and safetensors dtype, and its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]


@dataclass(frozen=True, kw_only=True)
class RankPieces:
    """The pieces of tensors that a rank writes, and the content of their file; without tensors there is no file."""

    tensors: Mapping[str, CheckpointTensor]
    blocks: Iterable[Block] = ()


@dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """A file's size and SHA-256."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """The content of a checkpoint."""

    step: int
    tensors: Mapping[str, CheckpointTensor] = field(default_factory=dict)
    files: Mapping[str, CheckpointFile] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A readable checkpoint.

    name: the name of its folder in `place`.
    """

    place: CheckpointRoot
    name: str
    manifest: CheckpointManifest

    @property
    def location(self) -> str:
        """Its folder or URL."""
        return self.place.location(self.name)

    @property
    def folder(self) -> Path:
        """Its folder, for a checkpoint on a local disk."""
        return Path(self.location)


class CheckpointStore:
    """The checkpoints of one job, as seen by one of the ranks that read and write them together.

    root: a folder or an fsspec URL.
    attempt: an identifier that the ranks of one gang share, and that other gangs do not.
    passed_over: the newer folders that the last `newest` found to be incomplete or damaged.

    `save` does all steps of a save at once. Ranks that do other work meanwhile call `write_part` each. When all have
    returned, one rank calls `publish`, or `drop` where a rank has failed.
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
        """Returns the newest whole checkpoint, checked byte by byte; the ranks divide its files among them.

        `known_step` is a step of which a checkpoint was stored, or 0. If it is positive and no checkpoint of any step
        is found, not even a damaged one, CheckpointNotFound is raised: starting again from step 0 is a person's
        decision.
        """
        self.passed_over = []
        for name in reversed(self._place.names()):
            manifest = read_manifest(self._place, name)
            own = sorted(manifest.files)[self._rank :: self._num_ranks] if manifest else []
            whole = manifest is not None and all(_is_whole(self._place, name, file, manifest) for file in own)
            if self._agree(whole):
                assert manifest is not None
                return Checkpoint(place=self._place, name=name, manifest=manifest)
            self.passed_over.append(self._place.location(name))
        if known_step > 0 and not self.passed_over:
            raise CheckpointNotFound(
                f"a checkpoint of step {known_step} was stored in {self.root}, and this machine finds none. To fix: "
                "mount that folder here as on the other machines; where it was removed, train the job in a new run"
            )
        return None

    def whole(self, name: str) -> Checkpoint | None:
        """Returns the checkpoint in the folder `name`, or None where it is not whole. Called on one rank."""
        manifest = read_manifest(self._place, name)
        if manifest is None or not all(_is_whole(self._place, name, file, manifest) for file in manifest.files):
            return None
        return Checkpoint(place=self._place, name=name, manifest=manifest)

    def save(self, step: int, write_pieces: WritePieces, meta: Mapping[str, Any]) -> None:
        """Writes a checkpoint of `step`. All ranks call it together.

        Raises CheckpointError on every rank where any rank could not write; older checkpoints remain unchanged.
        """
        leads = self._rank == 0
        self._on_all_ranks(step, lambda: self._place.sweep() if leads else None)
        self._on_all_ranks(step, lambda: self.write_part(step, write_pieces))
        self._on_all_ranks(step, lambda: self.publish(step, meta) if leads else None)

    def write_part(self, step: int, write_pieces: WritePieces) -> None:
        """Writes this rank's pieces to the temporary place. Does not wait for other ranks. Raises OSError."""
        aside = self._aside(step)
        if self._rank == 0:
            self._place.sweep(but=aside)
        path = f"{aside}rank-{self._rank:05d}.safetensors"
        name = path.partition("/")[2]
        pieces, files = write_pieces(name), {}
        if pieces.tensors:
            files[name] = write_described(self._place, path, pieces.blocks)
        part = CheckpointManifest(step=step, tensors=pieces.tensors, files=files)
        self._place.write(self._part(step, self._rank), [json.dumps(to_json(part)).encode()])

    def publish(self, step: int, meta: Mapping[str, Any]) -> None:
        """Makes a checkpoint of the parts of all ranks, and removes old ones. Called on one rank. Raises OSError."""
        parts = []
        for rank in range(self._num_ranks):
            parts.append(from_json(CheckpointManifest, json.loads(self._place.read(self._part(step, rank)))))
        manifest = stored_manifest(_merge(parts, step, meta))
        name = folder_of(step)
        if self.whole(name) is not None:  # the step was trained again after a fault, with the same result
            self.drop(step)
        else:
            self._place.reveal(self._aside(step), name, manifest)
        retain(self._place, name, keep=self._keep)

    def drop(self, step: int) -> None:
        """Removes the parts that the ranks have written of an unpublished checkpoint."""
        self._place.drop(self._aside(step))

    def failed(self, step: int, fault: BaseException | None) -> CheckpointError:
        """Returns the error of a failed save; `fault` is this rank's, or None where another rank failed."""
        reason = f": {fault}" if fault is not None else " on another rank"
        return CheckpointError(f"checkpoint {folder_of(step)} could not be written under {self.root}{reason}")

    def _on_all_ranks(self, step: int, action: Callable[[], None]) -> None:
        """Runs `action` on every rank. If it fails on any, all ranks raise, and the written parts are removed."""
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
        return self._place.aside(folder_of(step), self._attempt)

    def _part(self, step: int, rank: int) -> str:
        return f"{self._aside(step)}part-{rank:05d}.json"


def retain(place: CheckpointRoot, name: str, *, keep: int) -> None:
    """Makes a checkpoint the latest one, and removes all but the last `keep` up to it."""
    place.write_whole(LATEST, name.encode())
    # Newer checkpoints were corrupt when this state was restored. They must not count as checkpoints to keep.
    for old in [known for known in place.names() if known <= name][:-keep]:
        place.remove(old)


def copy_checkpoint(root: str | Path, step: int, *, to: Path) -> None:
    """Copies a checkpoint into a folder of checkpoints. Raises CheckpointError where it is not whole."""
    place, name, target = place_of(root), folder_of(step), LocalStorage(to)
    checkpoint = CheckpointStore(root).whole(name)
    if checkpoint is None:
        raise CheckpointError(f"{place.location(name)} is damaged or gone")
    for file in (*checkpoint.manifest.files, MANIFEST):
        target.write(f"{name}/{file}", place.blocks(f"{name}/{file}"))


def link_checkpoint(root: Path, step: int, *, to: Path) -> None:
    """Makes a checkpoint stay in another folder although its job removes older ones: as links, else as copies.

    Raises CheckpointNotFound where it is gone.
    """
    name = folder_of(step)
    if (to / name).exists():
        return
    aside = to / f"{name}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        shutil.copytree(root / name, aside, copy_function=link_or_copy)
    except (OSError, shutil.Error) as error:
        raise CheckpointNotFound(f"the checkpoint of step {step} in {root} is gone: {error}") from error
    aside.rename(to / name)


def read_manifest(place: CheckpointRoot, name: str) -> CheckpointManifest | None:
    """Returns the manifest of a checkpoint's folder, or None where it is missing, unreadable, or not as written.

    A manifest that names files outside of its folder is rejected, as Ringmaster writes none. Raises
    ObjectStoreUnavailable where a store does not answer: the checkpoint may be whole.
    """
    try:
        value = json.loads(place.read(f"{name}/{MANIFEST}"))
        checksum = value.pop("sha256")
        manifest = from_json(CheckpointManifest, value)
        files = [*manifest.files, *(piece.file for stored in manifest.tensors.values() for piece in stored.pieces)]
        is_known = manifest.format == FORMAT and all(map(_is_within, files))
    except ObjectStoreUnavailable:
        raise
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    return manifest if is_known and checksum == digest(value, length=64) else None


def stored_manifest(manifest: CheckpointManifest) -> bytes:
    """Returns the content of a manifest's file, with its own SHA-256."""
    value = to_json(manifest)
    return json.dumps({"sha256": digest(value, length=64), **value}, indent=1).encode()


def _is_within(name: str) -> bool:
    """Returns whether a relative path stays inside its folder. Checkpoints of commands contain sub-folders."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _is_whole(place: CheckpointRoot, name: str, file: str, manifest: CheckpointManifest) -> bool:
    """Returns whether a file exists with the size and the checksum in the manifest. Raises ObjectStoreUnavailable."""
    value, num_bytes = sha256(), 0
    try:
        for block in place.blocks(f"{name}/{file}"):
            value.update(block)
            num_bytes += len(block)
    except ObjectStoreUnavailable:
        raise
    except OSError:
        return False
    return manifest.files[file] == CheckpointFile(num_bytes=num_bytes, sha256=value.hexdigest())


def folder_of(step: int) -> str:
    """Returns the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def _merge(parts: list[CheckpointManifest], step: int, meta: Mapping[str, Any]) -> CheckpointManifest:
    tensors: dict[str, CheckpointTensor] = {}
    for part in parts:
        for name, stored in part.tensors.items():
            known = tensors.get(name)
            pieces = (*known.pieces, *stored.pieces) if known else stored.pieces
            tensors[name] = CheckpointTensor(dtype=stored.dtype, shape=stored.shape, pieces=pieces)
    files = {name: stored for part in parts for name, stored in part.files.items()}
    return CheckpointManifest(step=step, tensors=tensors, files=files, meta=meta)


def write_described(place: CheckpointRoot, path: str, blocks: Iterable[Block]) -> CheckpointFile:
    """Writes a file; returns its size, and the checksum of the data before writing, to detect write errors too."""
    value, num_bytes = sha256(), 0

    def passing() -> Iterator[Block]:
        nonlocal num_bytes
        for block in blocks:
            value.update(block)
            num_bytes += len(block)
            yield block

    place.write(path, passing())
    return CheckpointFile(num_bytes=num_bytes, sha256=value.hexdigest())


def store_model(folder: Path, url: str) -> None:
    """Stores the files of a folder below a URL; what was there before is removed. Raises OSError."""
    place, name = _place_and_name(url)
    place.remove(name)
    local, files = LocalStorage(folder), dict[str, CheckpointFile]()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        path = file.relative_to(folder).as_posix()
        files[path] = write_described(place, f"{name}/{path}", local.blocks(path))
    place.write(f"{name}/{MANIFEST}", [stored_manifest(CheckpointManifest(step=0, files=files))])


def fetch_model(url: str, folder: Path) -> None:
    """Copies a stored model to `folder`, unless it is there; the processes of a machine do so once.

    Raises ModelNotFound, or OSError where the store or the disk fails.
    """

    def copy_files(aside: Path) -> None:
        place, name = _place_and_name(url)
        manifest = read_manifest(place, name)
        if manifest is None:
            raise ModelNotFound(
                f"the model in {folder} is not on this machine, and {url} does not hold it. To fix: share the folder "
                "between the machines"
            )
        for path, stored in manifest.files.items():
            LocalStorage(aside).write(path, _checked(place, f"{name}/{path}", stored))

    publish_once(folder, copy_files)


def _checked(place: CheckpointRoot, path: str, stored: CheckpointFile) -> Iterator[bytes]:
    value = sha256()
    for block in place.blocks(path):
        value.update(block)
        yield block
    if value.hexdigest() != stored.sha256:
        raise ModelNotFound(f"{place.location(path)} is damaged. To fix: train the job in a new run")


def _place_and_name(url: str) -> tuple[CheckpointRoot, str]:
    root, _, name = url.rpartition("/")
    return place_of(root), name
