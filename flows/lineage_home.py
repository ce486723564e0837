"""What the lineage commands work on: the ledger and the tensor store of this home, and the models' files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit

import typer

from flows import settings
from flows.faults import InputError
from flows.output import error_console
from model_lineage import QUIET_ENVIRONMENT, Ledger, LedgerError

if TYPE_CHECKING:
    from model_lineage.snapshot import Node, Snapshot
    from model_lineage.tensors import TensorStore

Model = Annotated[
    str, typer.Argument(help="NAME, NAME/VERSION, NAME@ALIAS, or a model id; NAME is its champion, else its newest.")
]
Refresh = Annotated[bool, typer.Option("--refresh", help="Ask an MLflow server for everything anew.")]


@dataclass(frozen=True, kw_only=True)
class LineageHome:
    """The lineage that is recorded from this home. is_fresh: whether to ask a server for everything anew."""

    folder: Path
    is_fresh: bool = False

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger, which nothing has opened yet."""
        address = settings.pool()
        for name, value in {**QUIET_ENVIRONMENT, **(address.environment() if address else {})}.items():
            os.environ.setdefault(name, value)
        return Ledger(settings.tracking_uri(self.folder), artifact_root=self.folder / "mlartifacts")

    @cached_property
    def store(self) -> TensorStore:
        """The tensors."""
        from model_lineage.tensors import TensorStore

        return TensorStore(settings.tensors(self.folder))

    @cached_property
    def snapshot(self) -> Snapshot:
        """The lineage as it is now."""
        from model_lineage.snapshot import Snapshot

        return Snapshot.of(self.ledger, cache=self.folder / "cache" / "lineage", is_fresh=self.is_fresh)

    def find(self, name: str) -> Node:
        """The node of that name. Raises InputError with close names."""
        from model_lineage.snapshot import UnknownName

        try:
            return self.snapshot.find(name)
        except UnknownName as error:
            raise InputError([str(error)]) from error

    def model_dir(self, node: Node) -> Path:
        """The folder of a model's files: MLflow's own where that is on a disk here, else a copy in the cache.

        Where MLflow's files are gone, what the tensor store has. Raises InputError where nobody has them.
        """
        parts = urlsplit(node.location)
        if parts.scheme in ("", "file") and Path(unquote(parts.path)).is_dir():
            return Path(unquote(parts.path))
        cache = self.folder / "cache" / "models"
        if (cache / node.id).is_dir():
            return cache / node.id
        if node.record.tensors_id in self.store.ids():
            assert node.record.tensors_id is not None, "it is in the store"
            self.store.restore(node.record.tensors_id, cache / node.id)
            return cache / node.id
        return self.ledger.download_model(node.id, cache)


@contextmanager
def lineage_home(*, is_fresh: bool = False) -> Iterator[LineageHome]:
    """The lineage of this home; what goes wrong is told: exit 2 for faults in the input, 1 for all else."""
    from model_lineage.tensors import StoreFault

    try:
        yield LineageHome(folder=settings.home(), is_fresh=is_fresh)
    except (LedgerError, StoreFault) as error:
        if isinstance(error, LedgerError) and not error.may_pass:
            raise InputError([str(error)]) from error
        error_console().print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
