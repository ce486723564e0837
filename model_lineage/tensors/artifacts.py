"""MLflow's artifact repository for `tensors:///FOLDER`: weights are in the tensor store, all other files in FOLDER.

MLflow finds it by the entry point `mlflow.artifact_repository` of this package, for clients that open a database
directly and for servers (`mlflow server --artifacts-destination tensors:///FOLDER`). In place of a file of weights,
FOLDER holds a small reference, NAME.safetensors.stored, to a model of the store. Clients list, download and delete
NAME.safetensors, which comes back bit for bit.

A link in FOLDER or in one above it, `.tensors`, leads to the store; `TensorStore.add_artifacts` creates it. Neither the
link nor a reference is an artifact: clients cannot write, read or delete them under their own names.
"""

from collections.abc import AsyncIterable, Callable
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from mlflow.entities import FileInfo
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.utils.file_utils import create_tmp_dir
from mlflow.utils.uri import validate_path_is_safe

from ringmaster.compat.mlflow import register_artifact_repository
from ringmaster.errors import TensorStoreError
from ringmaster.model_lineage.mlflow_calls import TENSORS_SCHEME
from ringmaster.model_lineage.tensors.model_files import StoredModel
from ringmaster.model_lineage.tensors.references import REFERENCE, WEIGHTS, FileReference
from ringmaster.model_lineage.tensors.store import ARTIFACTS, STORE_LINK, TensorStore


class TensorArtifactRepository(LocalArtifactRepository):  # type: ignore[misc]
    """The artifacts below `tensors:///FOLDER`."""

    def __init__(self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        self.folder = Path(unquote(urlsplit(artifact_uri).path))
        super().__init__(self.folder.as_uri(), tracking_uri, registry_uri)
        self.artifact_uri = artifact_uri

    @property
    def store(self) -> TensorStore:
        """The store to which the folder, or one above it, is linked; a new one in the folder if none is."""
        for above in (self.folder, *self.folder.parents):
            if (above / STORE_LINK).is_dir():
                return TensorStore((above / STORE_LINK).resolve())
        store = TensorStore(self.folder / STORE_LINK)
        store.add_artifacts(self.folder)
        return store

    def log_model(self, folder: Path, *, parent: str | None = None, artifact_path: str | None = None) -> StoredModel:
        """Stores the model in a folder, its weights as differences to those of the stored model `parent`.

        Without a parent, the newest stored model with such tensors is taken for one. Raises TensorStoreError.
        """
        store = self.store
        with store.writing():  # until it is referred to, or a concurrent `gc` would drop it
            stored = store.add(folder, parent=parent, owner=ARTIFACTS, finds_parent=parent is None)
            self.refer(stored, folder=folder, artifact_path=artifact_path, replaces=True)
        return stored

    def refer(
        self, stored: StoredModel, *, folder: Path, artifact_path: str | None = None, replaces: bool = False
    ) -> None:
        """Lets the artifacts be those of a stored model: its weights by reference, copies of its other files.

        replaces: whether other files that are there already are replaced.
        """
        for file in stored.files:
            target = self.folder / (artifact_path or "") / file.path
            if file.path.endswith(WEIGHTS):
                num_bytes = (folder / file.path).stat().st_size
                self.store.reference_to(file.path, model=stored.id, num_bytes=num_bytes).write(target)
            elif replaces or not target.exists():
                below = target.parent.relative_to(self.folder).as_posix()
                super().log_artifact(str(folder / file.path), None if below == "." else below)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Stores the files of a folder."""
        for file in Path(local_dir).rglob("*"):
            _check(file.relative_to(local_dir).as_posix(), below=artifact_path)
        if any(Path(local_dir).rglob(f"*{WEIGHTS}")):
            try:
                self.log_model(Path(local_dir), artifact_path=artifact_path)
                return
            except TensorStoreError:  # weights that are not safetensors are stored as they are
                pass
        super().log_artifacts(local_dir, artifact_path)

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        """Stores a file."""
        _check(Path(local_file).name, below=artifact_path)
        super().log_artifact(local_file, artifact_path)
        self._pack(Path(local_file).name, artifact_path)

    def log_artifact_from_stream(
        self, stream: BinaryIO, artifact_file_name: str, artifact_path: str | None = None
    ) -> None:
        """Stores what a client uploads."""
        _check(artifact_file_name, below=artifact_path)
        super().log_artifact_from_stream(stream, artifact_file_name, artifact_path)
        self._pack(artifact_file_name, artifact_path)

    async def log_artifact_from_async_stream(
        self, chunks: AsyncIterable[bytes], artifact_file_name: str, artifact_path: str | None = None
    ) -> None:
        """Stores what a client uploads."""
        import asyncio

        _check(artifact_file_name, below=artifact_path)
        await super().log_artifact_from_async_stream(chunks, artifact_file_name, artifact_path)
        await asyncio.to_thread(self._pack, artifact_file_name, artifact_path)

    def _pack(self, name: str, artifact_path: str | None) -> None:
        """Moves a file of weights from the folder into the store. One that is not a safetensors file stays."""
        file = self.folder / (artifact_path or "") / name
        if not name.endswith(WEIGHTS):
            return
        store = self.store
        try:
            with store.writing():
                stored = store.add(file.parent, owner=ARTIFACTS, only=lambda each: each == name, finds_parent=True)
                self.refer(stored, folder=file.parent, artifact_path=artifact_path)
        except TensorStoreError:
            _remove_reference(file)  # of a file that had this name before

    def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
        """Lists a folder; a file of weights has its plain name and size."""
        _check(path or "")
        try:
            infos = [info for info in super().list_artifacts(path) if Path(info.path).name != STORE_LINK]
        except OSError as error:  # a link that leads nowhere, which no client has made
            name = Path(str(error.filename)).name
            raise MlflowException.invalid_parameter_value(f"{name} cannot be listed: {error.strerror}") from error
        return sorted(map(self._info, infos), key=lambda info: str(info.path))

    def _info(self, info: FileInfo) -> FileInfo:
        if not info.path.endswith(WEIGHTS + REFERENCE):
            return info
        name = info.path.removesuffix(REFERENCE)
        try:
            reference = FileReference.at(self.folder / name)
        except TensorStoreError:  # a download of the file has the message
            return FileInfo(name, False, 0)
        return info if reference is None else FileInfo(name, False, reference.num_bytes)

    def get_local_path(self, artifact_path: str) -> str | None:
        """Returns the path of a file that lies there as it is; None for one that is to be downloaded."""
        where = self.folder / validate_path_is_safe(artifact_path)
        references = [where] if self._reference(artifact_path) else list(where.rglob(f"*{WEIGHTS}{REFERENCE}"))
        return None if references else super().get_local_path(artifact_path)

    def _reference(self, artifact_path: str) -> FileReference | None:
        """Returns the reference that represents an artifact, or None. Raises MlflowException if it is not usable."""
        path = validate_path_is_safe(artifact_path)
        _check(path)
        try:
            reference = FileReference.at(self.folder / path, named=path)
        except TensorStoreError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error
        try:
            if reference is not None:
                self.store.check(reference)
        except TensorStoreError as error:
            raise MlflowException.invalid_parameter_value(f"{path} cannot be read: {error}") from error
        return reference

    def download_artifacts(self, artifact_path: str, dst_path: str | None = None) -> str:
        """Writes an artifact or a folder of them to `dst_path`, or to a new folder; returns its path."""
        if dst_path is None and (there := self.get_local_path(artifact_path or "")) is not None:
            return there
        return str(super().download_artifacts(artifact_path, dst_path or create_tmp_dir()))

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        reference = self._reference(remote_file_path)
        if reference is None:
            super()._download_file(remote_file_path, local_path)
        else:
            self.store.write_file(reference, Path(local_path))

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        """Deletes an artifact or a folder; `ringmaster lineage gc` frees what only they needed in the store."""
        if artifact_path:
            _check(artifact_path)
            _remove_reference(self.folder / artifact_path)
        super().delete_artifacts(artifact_path)


def _check(path: str, *, below: str | None = None) -> None:
    """Raises MlflowException if a part of an artifact's path has a name that is kept for the tensor store."""
    for part in (*PurePosixPath(below or "").parts, *PurePosixPath(path).parts):
        name = part.casefold()  # some file systems take both for one
        if name == STORE_LINK or name.endswith(WEIGHTS + REFERENCE):
            raise MlflowException.invalid_parameter_value(
                f"{path!r} is not an artifact's name: {part!r} is kept for the tensor store. To fix: use another name, "
                f"and for weights the one without {REFERENCE}"
            )


def _remove_reference(file: Path) -> None:
    Path(f"{file}{REFERENCE}").unlink(missing_ok=True)


def register(scheme: str = TENSORS_SCHEME, repository: Callable[..., Any] = TensorArtifactRepository) -> None:
    """Lets MLflow in this process find the repository, also where the package's entry points are not installed."""
    register_artifact_repository(scheme, repository)
