"""Access to a home's lineage for commands: the ledger, the tensor store, and the files of models."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit

import typer

from ringmaster.errors import InputError, LedgerError, LineageCycle, TensorStoreError, UnknownModel, input_errors
from ringmaster.flows import settings
from ringmaster.flows.output import error_console
from ringmaster.model_lineage import IMPORTED, QUIET_ENVIRONMENT, Ledger
from ringmaster.techniques.models.peft_format import has_lost_base, is_adapter, on_base

if TYPE_CHECKING:
    from ringmaster.model_lineage.snapshot import LineageNode, Snapshot
    from ringmaster.model_lineage.tensors import TensorStore

FINE_TUNED = "fine-tuned"
Model = Annotated[
    str, typer.Argument(help="NAME, NAME/VERSION, NAME@ALIAS, or a model id; NAME is its champion, else its newest.")
]
Refresh = Annotated[
    bool, typer.Option("--refresh", help="Read everything from the MLflow server again, not from the cache.")
]


@dataclass(frozen=True, kw_only=True)
class LineageHome:
    """The lineage that was recorded from this home.

    folder: the home.
    scratch: removes temporary folders once the lineage is no longer used.
    is_fresh: whether to read everything again from an MLflow server, and not from the cache.
    """

    folder: Path
    scratch: ExitStack = field(default_factory=ExitStack)
    is_fresh: bool = False

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger, with its environment set up; no connection is open yet."""
        address = settings.checked_pool()
        environment = {**QUIET_ENVIRONMENT, **settings.MLFLOW_PATIENCE}
        for name, value in {**environment, **(address.environment() if address else {})}.items():
            os.environ.setdefault(name, value)
        return settings.ledger(self.folder)

    @cached_property
    def store(self) -> TensorStore:
        """The tensor store."""
        store = self.ledger.store
        assert store is not None, "the ledger of a home has one"
        return store

    @cached_property
    def cache(self) -> Path:
        """The folder of copies: of the home or, where this user may not write there, a temporary one."""
        folder = self.folder / "cache"
        above = next(each for each in (folder, *folder.parents) if each.exists())
        return folder if os.access(above, os.W_OK | os.X_OK) else Path(self.scratch.enter_context(TemporaryDirectory()))

    @cached_property
    def snapshot(self) -> Snapshot:
        """A snapshot of the lineage, taken on first use."""
        from ringmaster.model_lineage.snapshot import Snapshot

        return Snapshot.of(self.ledger, cache=self.cache / "lineage", is_fresh=self.is_fresh)

    def find(self, name: str) -> LineageNode:
        """Returns the node of that name. Raises InputError with similar names if there is none."""
        with input_errors(UnknownModel):
            return self.snapshot.find(name)

    def model_dir(self, node: LineageNode) -> Path:
        """Returns a folder with a model's files: MLflow's own if it is on a local disk, else a copy in the cache.

        If MLflow's files are gone, the copy comes from the tensor store. An adapter whose base has moved, and a model
        whose loss compares it with its base, get a copy that names this home's path of the base. Raises InputError if
        the files are nowhere to be found.
        """
        folder = self.files(node)
        parent, is_on_base = self.snapshot.nodes.get(node.record.weights_from or ""), is_adapter(folder)
        if parent is None or not (is_on_base or node.record.kind == FINE_TUNED) or not has_lost_base(folder):
            return folder
        try:
            base = self.model_dir(parent)
        except ValueError:  # InputError, LedgerError and TensorStoreError are among them
            if is_on_base:
                raise
            return folder  # a whole model does without, except where its loss is computed
        return on_base(folder, base, copy=self.cache / "models" / f"{node.id}-on-{parent.id}")

    def files(self, node: LineageNode) -> Path:
        """Returns a folder with a model's files as they were recorded."""
        parts = urlsplit(node.location)
        of_ledger, cache = Path(unquote(parts.path)), self.cache / "models"
        is_here = parts.scheme in ("", "file") and of_ledger.is_dir()
        if is_here and (node.record.kind != IMPORTED or any(of_ledger.rglob("*.safetensors"))):
            return of_ledger
        if node.record.kind == IMPORTED and (whole := self._whole(node, cache / f"{node.id}-whole")) is not None:
            return whole
        if is_here:
            return of_ledger
        if (id := node.record.tensors_id) is not None and id in self.store.ids():
            return self._restored(id, cache / node.id)
        return self.ledger.download_model(node.id, cache)

    def clear_copies(self, *, before_s: float) -> int:
        """Removes plain copies of models that were last written before a time; returns the bytes freed."""
        freed = 0
        for copy in (self.folder / "cache" / "models").glob("*"):
            if copy.is_dir() and copy.stat().st_mtime < before_s:
                freed += sum(path.stat().st_size for path in copy.rglob("*") if path.is_file())
                shutil.rmtree(copy)
        return freed

    def _restored(self, id: str, folder: Path) -> Path:
        """Returns `folder` with a model from the tensor store; the folder appears atomically."""
        if folder.is_dir():
            os.utime(folder)  # `gc` removes copies that are not used
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=folder.parent, prefix=".restored-") as aside:
                self.store.restore(id, Path(aside) / "model")
                with suppress(OSError):  # another process was first
                    (Path(aside) / "model").rename(folder)
        return folder

    def _whole(self, node: LineageNode, restored: Path) -> Path | None:
        """Returns an imported model with its weights, which MLflow may lack, from the tensor store or its source."""
        source, id = node.record.origin.source, node.record.tensors_id
        if id is not None and id in self.store.ids():
            return self._restored(id, restored)
        if source is not None and Path(source).is_absolute() and any(Path(source).rglob("*.safetensors")):
            return Path(source)
        return None


@contextmanager
def lineage_home(*, is_fresh: bool = False, writes: bool = False) -> Iterator[LineageHome]:
    """Yields the lineage of this home. Faults in the input become InputError (exit 2); others are printed (exit 1).

    writes: whether the home is to be written, which is refused at once where this user cannot.
    """
    if writes:
        settings.check_folders(settings.home())
    try:
        with ExitStack() as scratch:
            yield LineageHome(folder=settings.home(), scratch=scratch, is_fresh=is_fresh)
    except LineageCycle as error:
        raise InputError([f"{error}. To fix: correct the tag ringmaster.parents of one of them in MLflow"]) from error
    except (LedgerError, TensorStoreError) as error:
        if isinstance(error, LedgerError) and not error.may_pass:
            raise InputError([str(error)]) from error
        error_console().print(str(error), style="red", soft_wrap=True)
        raise typer.Exit(1) from error
