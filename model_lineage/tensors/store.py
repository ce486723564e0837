"""The tensor store: models in a folder, as lists of files whose tensors are content-addressed objects.

Equal tensors are stored once. A model's id is the digest of its list, so equal models are one. Stored data never
change, so writers need no lock against each other; only `gc` deletes, and it waits for the writers.

The owners of a model are marked next to it, so that several lineages can share a folder: a model is deleted with its
last owner, unless a reference to it is left. References are in folders of artifacts (`artifacts`), which the store
knows by links in `roots/`.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ringmaster.errors import TensorObjectError, TensorStoreError
from ringmaster.files import write_atomically
from ringmaster.model_lineage.tensors import model_files
from ringmaster.model_lineage.tensors.objects import Objects, digest_of
from ringmaster.model_lineage.tensors.references import REFERENCE, WEIGHTS, FileReference

NUM_THREADS = min(8, 2 * (os.cpu_count() or 1))  # hashing, zstd and numpy release the GIL, and syncing waits
ARTIFACTS = "artifacts"  # owner of models that are there for the references to them
KEY = "reference-key"
UNSEALED = "this store did not write the reference. To fix: log the model again, or delete the artifact"
STORE_LINK = ".tensors"  # in a folder of artifacts: the store, or a link to it
NUM_RELATED = 8  # the newest models that are looked through for a parent where none is named


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
        finds_parent: bool = False,
    ) -> model_files.StoredModel:
        """Stores the model in a folder; tensors that a parent has too are stored as differences if that is smaller.

        parent: the id of a model in the store.
        finds_parent: whether the newest models are looked through for a parent where none is named.
        owner: the name that owns the model until `gc` drops it; a model without any owner is never deleted.
        only: whether a file of that relative name belongs to the model; None where all do.

        Raises TensorStoreError if a file is damaged or lies outside of the folder, or if the parent does not exist. A
        failed call leaves nothing of the model behind.
        """
        layouts = _layouts(model_dir, only or bool)
        related = self._newest_like(layouts) if finds_parent else {}
        if parent is not None:
            related = self.model(parent).tensors
        try:
            return self._added(layouts, related, owner=owner)
        except BaseException:
            with suppress(TensorStoreError, OSError):  # damage or another writer; the next `gc` cleans up
                self.gc(drop=(), waits=False)
            raise

    def _added(
        self,
        layouts: Mapping[str, model_files.MappedTensorFile],
        related: Mapping[str, model_files.ModelTensor],
        *,
        owner: str | None,
    ) -> model_files.StoredModel:
        with self.writing(), ThreadPoolExecutor(NUM_THREADS) as pool:
            files = tuple(self._add_file(name, layout, related, pool) for name, layout in layouts.items())
            model = model_files.StoredModel(id=id_of(files), files=files)
            if owner is not None:
                self.own(model.id, owner)
            if not self._path(model.id).exists():
                write_atomically(self._path(model.id), _listed(files))
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
                self._write(file, Path(aside) / str(number), pool)
            for number, file in enumerate(model.files):
                target = folder / file.path
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.parent.resolve().is_relative_to(folder.resolve()):
                    raise TensorStoreError(f"{target} leads out of {folder}, by a link. To fix: name a new folder")
                (Path(aside) / str(number)).replace(target)

    def write_file(self, reference: FileReference, target: Path) -> None:
        """Writes the file that a reference represents. Raises TensorStoreError if something is missing or damaged."""
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            self._write(self._file(reference), target, pool)

    def _file(self, reference: FileReference) -> model_files.ModelFile:
        for file in self.model(reference.model).files:
            if file.path == reference.path:
                return file
        raise TensorStoreError(f"model {reference.model} has no file {reference.path}. {self._remedy}")

    def reference_to(self, path: str, *, model: str, num_bytes: int) -> FileReference:
        """Returns a reference to the file `path` of a stored model."""
        return FileReference(model=model, path=path, num_bytes=num_bytes).sealed(self._key())

    def check(self, reference: FileReference) -> None:
        """Raises TensorStoreError if a reference lacks this store's seal, or if what it represents is not there.

        An id is no secret, and who may write a file among the artifacts may not read every model. The seal is known to
        those alone who may read the store, or a reference to the same file.
        """
        if not reference.has_seal(self._key()):
            raise TensorStoreError(UNSEALED)
        self._file(reference)

    def _key(self) -> bytes:
        """Returns the secret of the seals.

        The call that makes it seals the references that are there: releases until 0.2 wrote them without a seal.
        """
        file = self.folder / KEY
        if not file.exists():
            with self._locked(fcntl.LOCK_EX, name=f"{KEY}.lock"):
                if not file.exists():
                    key = secrets.token_hex(32).encode()
                    for root in self.folder.glob("roots/*"):
                        for place, reference in FileReference.below(root.resolve(), faults=[]):
                            reference.sealed(key).overwrite(place)
                    write_atomically(file, key)
        return file.read_bytes()

    def _write(self, file: model_files.ModelFile, target: Path, pool: ThreadPoolExecutor) -> None:
        with target.open("wb") as out:
            pending: deque[Future[memoryview]] = deque()  # few are in memory at a time
            for digest in file.digests:
                pending.append(pool.submit(self.content, digest))
                if len(pending) > NUM_THREADS:
                    out.write(pending.popleft().result())
            for content in pending:
                out.write(content.result())
            out.flush()
            os.fsync(out.fileno())

    def model(self, id: str) -> model_files.StoredModel:
        """Returns a stored model. Raises TensorStoreError if there is none of that id, or if its list is damaged."""
        try:
            content = self._path(id).read_bytes()
        except (OSError, ValueError):
            raise TensorStoreError(f"there is no model {id!r} in {self.folder}; it has {len(self.ids())}") from None
        try:
            if digest_of(content)[:32] != id:
                raise ValueError("its content has another digest")
            return model_files.StoredModel(id=id, files=model_files.files_in(json.loads(content)))
        except (ValueError, RecursionError) as error:
            raise TensorStoreError(f"the list of model {id} is damaged: {error}. {self._remedy}") from error

    def ids(self) -> list[str]:
        """Returns the ids of all stored models."""
        return sorted(path.stem for path in (self.folder / "models").glob("*.json"))

    def add_artifacts(self, folder: Path) -> None:
        """Links a folder of artifacts and the store to each other: references below it keep models from `gc`."""
        root = self.folder / "roots" / digest_of(str(folder.resolve()).encode())[:16]
        for link, target in ((root, folder), (folder / STORE_LINK, self.folder)):
            link.parent.mkdir(parents=True, exist_ok=True)
            if target.absolute() != link.absolute() and not link.exists():
                link.unlink(missing_ok=True)
                with suppress(FileExistsError):  # relative, so that a home can be moved
                    link.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()))
        with suppress(PermissionError):  # of a user who may only read
            self._key()

    def references(self, *, faults: list[str] | None = None) -> Iterator[tuple[Path, FileReference]]:
        """Yields (file, reference) of each reference to a model of the store.

        A damaged one is skipped, and its message is added to `faults`; without this list, it raises TensorStoreError.
        Raises TensorStoreError if a folder of artifacts is not there.
        """
        for root in sorted(self.folder.glob("roots/*")):
            if not root.is_dir():
                raise TensorStoreError(
                    f"the artifacts that {root} leads to are not there, and which models they need is not known. "
                    f"To fix: bring them back, or remove {root} if they are gone for good"
                )
            yield from FileReference.below(root.resolve(), faults=faults)

    def reference_faults(self) -> list[str]:
        """Returns messages about references that are damaged, lack the seal, or lead to models that the store lacks."""
        faults: list[str] = []
        try:
            for file, reference in self.references(faults=faults):
                if not self._path(reference.model).exists():
                    faults.append(f"{file} is gone: the store does not have its model. {self._remedy}")
                elif not reference.has_seal(self._key()):
                    faults.append(f"the reference {file}{REFERENCE} cannot be read: {UNSEALED}")
        except TensorStoreError as error:
            faults.append(str(error))
        return faults

    def own(self, id: str, owner: str) -> None:
        """Marks a model as that of an owner."""
        mark = self._owners(id) / owner
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()

    def share(self, folder: Path) -> int:
        """Replaces the plain weights in the folder of a stored model by references; returns the bytes freed.

        Files that the store lacks stay, and all of a folder with weights that are not valid. Raises TensorStoreError.
        """
        try:
            layouts = _layouts(folder, bool)
        except TensorStoreError:
            return 0
        freed = 0
        with self.writing(), ThreadPoolExecutor(NUM_THREADS) as pool:
            files = [_described(name, layout, pool.map(digest_of, layout.parts)) for name, layout in layouts.items()]
            weights = [file for file in files if file.path.endswith(WEIGHTS)]
            # A server stores each file that it is sent as a model of its own; an interrupted call has left references.
            alone = [(replace(file, path=Path(file.path).name),) for file in weights]
            ids = {id_of(each) for each in (files, *alone)}
            ids |= {reference.model for _, reference in FileReference.below(folder, faults=[])}
            models = [self.model(id) for id in ids if self._path(id).exists()]
            known = {file.digests: (model.id, file.path) for model in models for file in model.files}
            for file in weights:
                model, path = known.get(file.digests, ("", ""))
                if model and all(digest in self.objects for digest in self._with_parents(file.digests)):
                    num_bytes = len(layouts[file.path].content)
                    self.reference_to(path, model=model, num_bytes=num_bytes).write(folder / file.path)
                    freed += num_bytes
        return freed

    def unshare(self, folder: Path) -> int:
        """Writes the plain weights again for which references stand in a folder; returns the bytes written.

        Each file appears complete or not at all. Raises TensorStoreError if something is missing or damaged.
        """
        written = 0
        with self.writing():
            for file, reference in [*FileReference.below(folder)]:
                with TemporaryDirectory(dir=file.parent, prefix=".restoring-") as aside:
                    self.write_file(reference, Path(aside) / file.name)
                    (Path(aside) / file.name).replace(file)
                Path(f"{file}{REFERENCE}").unlink()
                written += reference.num_bytes
        return written

    def disown(self, owner: str) -> None:
        """Removes `owner` from all models; other owners stay."""
        for mark in (self.folder / "owners").glob(f"*/{owner}"):
            mark.unlink(missing_ok=True)

    def owners(self) -> set[str]:
        """Returns the owners of all models."""
        return {mark.name for mark in (self.folder / "owners").glob("*/*")}

    def size_bytes(self, ids: Collection[str] | None = None) -> int:
        """Returns the bytes on disk that the given models need together; None means all models."""
        models = [self.model(id) for id in (self.ids() if ids is None else ids)]
        needed = self._with_parents({digest for model in models for digest in model.digests})
        return sum(self.objects.size(digest) for digest in needed) + sum(
            self._path(model.id).stat().st_size for model in models
        )

    def gc(self, *, drop: Collection[str], waits: bool = True) -> int:
        """Drops owners, then the models that nobody else owns, and every object that no remaining model needs.

        References in the artifacts of dropped owners, which are models of MLflow (MODEL_ID@LEDGER), go with them. A
        model to which another reference is left stays. Where a reference is damaged, so does every model that is there
        for references, as it may be the one: `reference_faults` has the messages.

        waits: whether to wait for writers; otherwise raises BlockingIOError if there are any. Returns the number of
        bytes freed. Raises TensorStoreError, without deleting anything, if damage makes it impossible to determine what
        is needed.
        """
        gone = set(drop)
        gone_ids = {owner.partition("@")[0] for owner in gone}
        with self._locked(fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB):
            marks = {id: {mark.name for mark in self._owners(id).glob("*")} for id in self.ids()}
            faults: list[str] = []
            references = list(self.references(faults=faults))
            lost = [file for file, _ in references if gone_ids.intersection(file.parts)]
            referred = {reference.model for file, reference in references if file not in set(lost)}
            passing = gone if faults else {*gone, ARTIFACTS}
            dropped = [id for id, owners in marks.items() if owners and owners <= passing and id not in referred]
            left = set(marks) - set(dropped)
            needed = self._with_parents({digest for id in left for digest in self.model(id).digests})
            freed = sum(self._path(id).stat().st_size for id in dropped)
            for file in lost:
                Path(f"{file}{REFERENCE}").unlink()
            for id in dropped:  # before its marks: without marks it would stay forever
                self._path(id).unlink()
            for mark in [*self.folder.glob("owners/*/*")]:
                if mark.name not in gone and mark.parent.name not in dropped:
                    continue
                mark.unlink()
                with suppress(OSError):  # others own the model
                    mark.parent.rmdir()
            for digest in [digest for digest in self.objects if digest not in needed]:
                freed += self.objects.size(digest)
                self.objects.remove(digest)
        return freed

    def fsck(self, *, names: Mapping[str, str] | None = None) -> list[str]:
        """Reads all objects and models; returns messages about damaged ones, and the models that these affect.

        names: what stored models are called in messages, by id.
        """
        names = names or {}
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
            named = f"model {id}" + (f" ({names[id]})" if id in names else "")
            missing = sorted(digest for digest in needs if digest not in self.objects)
            hurt = sorted(needs & set(damaged))
            if missing or hurt:
                which = ", ".join([*(f"{d[:12]} is missing" for d in missing), *(f"{d[:12]} is damaged" for d in hurt)])
                faults.append(f"{named} cannot be restored: {which}")
        return [*faults, *self.reference_faults()]

    def _add_file(
        self,
        name: str,
        layout: model_files.MappedTensorFile,
        related: Mapping[str, model_files.ModelTensor],
        pool: ThreadPoolExecutor,
    ) -> model_files.ModelFile:
        def add(tensor: model_files.TensorEntry) -> str:
            like = related.get(model_files.full_name(name, tensor.name)) or related.get(tensor.name)
            return self._add_tensor(layout, tensor, like=like)

        tensors = pool.map(add, layout.tensors)
        return _described(name, layout, [self.objects.put(layout.header, item_bytes=1), *tensors])

    def _newest_like(
        self, layouts: Mapping[str, model_files.MappedTensorFile]
    ) -> Mapping[str, model_files.ModelTensor]:
        """Returns the tensors of the newest model that has most of the tensors in files, by names and shapes."""
        own = {(each.name, each.dtype, each.shape) for layout in layouts.values() for each in layout.tensors}
        newest = sorted((self.folder / "models").glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in newest[: -NUM_RELATED - 1 : -1]:
            with suppress(TensorStoreError):  # a damaged list
                tensors = self.model(path.stem).tensors
                theirs = {(each.name, each.dtype, each.shape) for each in tensors.values()}
                if 2 * len(own & theirs) > len(own):
                    return tensors
        return {}

    def _add_tensor(
        self,
        layout: model_files.MappedTensorFile,
        tensor: model_files.TensorEntry,
        *,
        like: model_files.ModelTensor | None,
    ) -> str:
        parent = like.digest if like and (like.dtype, like.shape) == (tensor.dtype, tensor.shape) else None
        try:
            return self.objects.put(layout.bytes_of(tensor), item_bytes=tensor.item_bytes, parent=parent)
        except TensorObjectError as error:
            raise TensorStoreError(
                f"{tensor.name} cannot be stored as a difference to its parent's: {error}"
            ) from error

    def content(self, digest: str) -> memoryview:
        """Returns the bytes of a tensor, or of the head of a file. Raises TensorStoreError if missing or damaged."""
        try:
            return self.objects.get(digest)
        except TensorObjectError as error:
            raise TensorStoreError(f"{error}. {self._remedy}") from error

    def _fault(self, digest: str) -> tuple[str, str]:
        try:
            is_damaged = digest_of(self.objects.get(digest)) != digest
        except TensorObjectError as error:
            return digest, str(error)
        return digest, f"object {digest} is damaged: its content has another digest" if is_damaged else ""

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
            raise ValueError(f"{id!r} is not a model's id")
        return self.folder / "models" / f"{id}.json"

    @property
    def _remedy(self) -> str:
        return f"To fix: restore {self.folder} from a back-up, or add the model again"

    def _owners(self, id: str) -> Path:
        return self.folder / "owners" / id

    def writing(self) -> AbstractContextManager[None]:
        """Context manager that keeps `gc` from deleting what is written and has no owner or reference yet."""
        return self._locked(fcntl.LOCK_SH)

    @contextmanager
    def _locked(self, how: int, *, name: str = "lock") -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / name).open("w") as file:
            fcntl.flock(file, how)
            yield


def id_of(files: Sequence[model_files.ModelFile]) -> str:
    """Returns the id of the model of some files."""
    return digest_of(_listed(files))[:32]


def _listed(files: Sequence[model_files.ModelFile]) -> bytes:
    return json.dumps([asdict(file) for file in files], sort_keys=True).encode()


def _described(name: str, layout: model_files.MappedTensorFile, digests: Iterable[str]) -> model_files.ModelFile:
    """Returns a file of a model. digests: of its header and its tensors, in order."""
    head, *others = digests
    tensors = (
        model_files.ModelTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, digest=digest)
        for tensor, digest in zip(layout.tensors, others, strict=True)
    )
    return model_files.ModelFile(path=name, head=head, tensors=tuple(tensors))


def _layouts(model_dir: Path, only: Callable[[str], bool]) -> dict[str, model_files.MappedTensorFile]:
    """Returns the validated layouts of a model's files by name; a file without tensors is its own header."""
    try:
        result = {
            name: model_files.read_layout(path, named=str(model_dir / name))
            if name.endswith(WEIGHTS)
            else model_files.plain_layout(path)
            for name, path in model_files.files_of(model_dir)
            if only(name)
        }
    except ValueError as error:
        raise TensorStoreError(str(error)) from error
    if not result:
        raise TensorStoreError(f"{model_dir} holds no files. To fix: give the folder of a model")
    return result


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
