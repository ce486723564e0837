"""The tensor store: models in a folder, as lists of files whose tensors are content-addressed objects.

Equal tensors are stored once. A model's id is the digest of its list, so equal models are one. Stored data never
change, so writers need no lock against each other; only `gc` deletes, and it waits for the writers. The owners of a
model are marked beside it, so that several lineages can share a folder: a model is deleted with its last owner.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from ringmaster.errors import TensorObjectError, TensorStoreError
from ringmaster.model_lineage.tensors.model_files import (
    MappedTensorFile,
    ModelFile,
    ModelTensor,
    StoredModel,
    TensorPart,
    files_in,
    files_of,
    full_name,
    odd_tensors,
    plain_layout,
    read_layout,
)
from ringmaster.model_lineage.tensors.objects import Objects, digest_of, write_once

NUM_THREADS = min(8, os.cpu_count() or 1)  # hashing, zstd and numpy release the GIL
WEIGHTS = ".safetensors"
SOMEBODY = "somebody"  # owner of models from before owners were marked; never dropped


class TensorStore:
    """The models under a folder; several processes may use it concurrently."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects = Objects(folder / "objects")

    def add(
        self,
        model_dir: Path,
        *,
        parent: str | None = None,
        owner: str | None = None,
        only: Callable[[str], bool] | None = None,
    ) -> StoredModel:
        """Stores the model in a folder; tensors that a parent has too are stored as differences if that is smaller.

        parent: the id of a model in the store.
        owner: the name that owns the model until `gc` drops it; a model without any owner is never deleted.
        only: whether a file of that relative name belongs to the model; None where all do.

        Raises TensorStoreError if a file is damaged or lies outside of the folder, or if the parent does not exist. A
        failed call leaves nothing of the model behind.
        """
        related = {} if parent is None else self.model(parent).tensors
        layouts = _layouts(model_dir, only or bool)
        try:
            return self._added(layouts, related, owner=owner)
        except BaseException:
            with suppress(TensorStoreError, OSError):  # damage or another writer; the next `gc` cleans up
                self.gc(drop=(), waits=False)
            raise

    def _added(
        self, layouts: Mapping[str, MappedTensorFile], related: Mapping[str, ModelTensor], *, owner: str | None
    ) -> StoredModel:
        with self._locked(fcntl.LOCK_SH), ThreadPoolExecutor(NUM_THREADS) as pool:
            files = tuple(self._add_file(name, layout, related, pool) for name, layout in layouts.items())
            content = json.dumps([asdict(file) for file in files], sort_keys=True).encode()
            model = StoredModel(id=digest_of(content)[:32], files=files)
            self._begin_owners()
            if owner is not None:
                mark = self._owners(model.id) / owner
                mark.parent.mkdir(exist_ok=True)
                mark.touch()
            if not self._path(model.id).exists():
                write_once(self._path(model.id), content)
        return model

    def restore(self, id: str, folder: Path) -> None:
        """Writes the files of a model into a folder, bit for bit; each appears complete or not at all.

        Raises TensorStoreError if something is missing or damaged. Nothing is written under its name then, and a folder
        that was created is removed.
        """
        model = self.model(id)
        with (
            _made(folder),
            TemporaryDirectory(dir=folder, prefix=".restoring-") as aside,
            ThreadPoolExecutor(NUM_THREADS) as pool,
        ):
            for number, file in enumerate(model.files):
                with (Path(aside) / str(number)).open("wb") as out:
                    for content in pool.map(self._content, file.digests):
                        out.write(content)
                    out.flush()
                    os.fsync(out.fileno())
            for number, file in enumerate(model.files):
                target = folder / file.path
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.parent.resolve().is_relative_to(folder.resolve()):
                    raise TensorStoreError(f"{target} leads out of {folder}, by a link. To fix: name a new folder")
                (Path(aside) / str(number)).replace(target)

    def model(self, id: str) -> StoredModel:
        """Returns a stored model. Raises TensorStoreError if there is none of that id, or if its list is damaged."""
        try:
            content = self._path(id).read_bytes()
        except (OSError, ValueError):
            raise TensorStoreError(f"there is no model {id!r} in {self.folder}; it has {len(self.ids())}") from None
        try:
            if digest_of(content)[:32] != id:
                raise ValueError("its content has another digest")
            return StoredModel(id=id, files=files_in(json.loads(content)))
        except (ValueError, RecursionError) as error:
            raise TensorStoreError(f"the list of model {id} is damaged: {error}. {self._remedy}") from error

    def ids(self) -> list[str]:
        """Returns the ids of all stored models."""
        return sorted(path.stem for path in (self.folder / "models").glob("*.json"))

    def disown(self, owner: str) -> None:
        """Removes `owner` from all models; other owners stay."""
        for mark in (self.folder / "owners").glob(f"*/{owner}"):
            mark.unlink(missing_ok=True)

    def owners(self) -> set[str]:
        """Returns the owners of all models."""
        return {mark.name for mark in (self.folder / "owners").glob("*/*")}

    def tensor(self, stored: ModelTensor) -> memoryview:
        """Returns the bytes of a tensor. Raises TensorStoreError if they are missing or damaged."""
        return self._content(stored.digest)

    def size_bytes(self, ids: Collection[str] | None = None) -> int:
        """Returns the bytes on disk that the given models need together; None stands for all models."""
        models = [self.model(id) for id in (self.ids() if ids is None else ids)]
        needed = self._with_parents({digest for model in models for digest in model.digests})
        return sum(self.objects.size(digest) for digest in needed) + sum(
            self._path(model.id).stat().st_size for model in models
        )

    def gc(self, *, drop: Collection[str], waits: bool = True) -> int:
        """Drops owners, then the models that nobody else owns, and every object that no remaining model needs.

        waits: whether to wait for writers; otherwise raises BlockingIOError if there are any. Returns the number of
        bytes freed. Raises TensorStoreError, without deleting anything, if damage makes it impossible to determine what
        is needed.
        """
        gone = set(drop)
        with self._locked(fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB):
            self._begin_owners()
            marks = {id: {mark.name for mark in self._owners(id).glob("*")} for id in self.ids()}
            dropped = [id for id, owners in marks.items() if owners and owners <= gone]
            left = set(marks) - set(dropped)
            needed = self._with_parents({digest for id in left for digest in self.model(id).digests})
            freed = sum(self._path(id).stat().st_size for id in dropped)
            for id in dropped:  # before its marks: without marks it would stay forever
                self._path(id).unlink()
            for mark in [mark for mark in self.folder.glob("owners/*/*") if mark.name in gone]:
                mark.unlink()
                with suppress(OSError):  # others own the model
                    mark.parent.rmdir()
            for digest in [digest for digest in self.objects if digest not in needed]:
                freed += self.objects.size(digest)
                self.objects.remove(digest)
        return freed

    def fsck(self) -> list[str]:
        """Reads all objects and models; returns messages about damaged ones, and the models that these affect."""
        damaged: dict[str, str] = {}
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            for digest, fault in pool.map(self._fault, list(self.objects)):
                if fault:
                    damaged[digest] = fault
        faults = [f"{fault}" for fault in damaged.values()]
        for id in self.ids():
            try:
                model = self.model(id)
            except TensorStoreError as error:
                faults.append(str(error))
                continue
            needs = model.digests
            faults += [f"model {id}: {fault}" for fault in odd_tensors(model)]
            missing = sorted(digest for digest in needs if digest not in self.objects)
            hurt = sorted(needs & set(damaged))
            if missing or hurt:
                which = ", ".join([*(f"{d[:12]} is missing" for d in missing), *(f"{d[:12]} is damaged" for d in hurt)])
                faults.append(f"model {id} cannot be restored: {which}")
        return faults

    def _add_file(
        self, name: str, layout: MappedTensorFile, related: Mapping[str, ModelTensor], pool: ThreadPoolExecutor
    ) -> ModelFile:
        def add(tensor: TensorPart) -> ModelTensor:
            like = related.get(full_name(name, tensor.name)) or related.get(tensor.name)
            return self._add_tensor(layout, tensor, like=like)

        tensors = tuple(pool.map(add, layout.tensors))
        head = self.objects.put(layout.header, item_bytes=1)
        return ModelFile(path=name, head=head, tensors=tensors)

    def _add_tensor(self, layout: MappedTensorFile, tensor: TensorPart, *, like: ModelTensor | None) -> ModelTensor:
        is_like = like is not None and (like.dtype, like.shape) == (tensor.dtype, tensor.shape)
        try:
            digest = self.objects.put(
                layout.bytes_of(tensor),
                item_bytes=tensor.item_bytes,
                parent=like.digest if is_like and like is not None else None,
            )
        except TensorObjectError as error:
            raise TensorStoreError(
                f"{tensor.name} cannot be stored as a difference to its parent's: {error}"
            ) from error
        return ModelTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, digest=digest)

    def _content(self, digest: str) -> memoryview:
        try:
            return self.objects.get(digest)
        except TensorObjectError as error:
            raise TensorStoreError(f"{error}. {self._remedy}") from error

    def _fault(self, digest: str) -> tuple[str, str]:
        try:
            self.objects.get(digest)
        except TensorObjectError as error:
            return digest, str(error)
        return digest, ""

    def _with_parents(self, digests: Collection[str]) -> set[str]:
        needed: set[str] = set()
        todo: Sequence[str] = list(digests)
        while todo:
            needed.update(todo)
            try:
                parents = {self.objects.parent(digest) for digest in todo if digest in self.objects}
            except TensorObjectError as error:
                raise TensorStoreError(f"{error}. {self._remedy}") from error
            todo = [parent for parent in parents if parent is not None and parent not in needed]
        return needed

    def _path(self, id: str) -> Path:
        if "/" in id or id in ("", ".", ".."):
            raise ValueError(f"{id!r} is no model's id")
        return self.folder / "models" / f"{id}.json"

    @property
    def _remedy(self) -> str:
        return f"To fix: restore {self.folder} from a back-up, or add the model again"

    def _owners(self, id: str) -> Path:
        return self.folder / "owners" / id

    def _begin_owners(self) -> None:
        """Marks models from before owners were marked with an owner, as another lineage may need them."""
        if not (self.folder / "owners").exists():
            with TemporaryDirectory(dir=self.folder, prefix=".owners-") as aside:
                for id in self.ids():
                    (Path(aside) / "owners" / id).mkdir(parents=True)
                    (Path(aside) / "owners" / id / SOMEBODY).touch()
                (Path(aside) / "owners").mkdir(exist_ok=True)
                with suppress(OSError):  # another process has done so
                    (Path(aside) / "owners").rename(self.folder / "owners")

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, how)
            yield


def _layouts(model_dir: Path, only: Callable[[str], bool]) -> dict[str, MappedTensorFile]:
    """Returns the validated layouts of a model's files by name; a file without tensors is its own header."""
    try:
        found = {
            name: read_layout(path, named=str(model_dir / name)) if name.endswith(WEIGHTS) else plain_layout(path)
            for name, path in files_of(model_dir)
            if only(name)
        }
    except ValueError as error:
        raise TensorStoreError(str(error)) from error
    if not found:
        raise TensorStoreError(f"{model_dir} holds no files. To fix: give the folder of a model")
    return found


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Creates a folder to write into; on failure, removes whatever part of its path did not exist before."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in missing[-1:]:
            shutil.rmtree(path, ignore_errors=True)
        raise
