"""Models from elsewhere that others start from: each gets a node by itself, once."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from ringmaster.model_lineage.hub_cards import CARD, read_card
from ringmaster.model_lineage.importing import (
    MODEL_FILES,
    Fetch,
    fetch_from_hub,
    planned_bases,
    registered_name,
    whole_or_nothing,
)
from ringmaster.model_lineage.ledger import Ledger
from ringmaster.model_lineage.records import ModelRecord
from ringmaster.model_lineage.snapshot import Node, Snapshot
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.model_lineage.tensors.folders import files_of

SAID = (".json", ".txt", ".md", ".model", ".jinja")
MOST_SAID_BYTES = 50_000_000  # of one file: what is larger than a large vocabulary is no description

Cached = Callable[[str], Path | None]
"""The folder of a hub name's files that are on this machine already, or None."""


def record_base(
    ledger: Ledger, source: str, *, store: TensorStore | None, fetch: Fetch | None = None, cached: Cached | None = None
) -> str:
    """The id of the node of a model that others start from: a folder, or a hub name.

    It is the node of a model that has the very same files, or was found in the same place; one of which only a card
    spoke until now gets its weights. Else it is recorded, with its card's base models as its parents. Its weights are
    not copied into MLflow: the store has them, where there is one and they are on this machine. Raises ValueError
    (LedgerError, StoreFault) and OSError as `import_model` does.
    """
    fetch, cached = fetch or fetch_from_hub, cached or cached_from_hub
    place = Path(source).expanduser()
    folder: Path | None = place if place.is_dir() else cached(source)
    source = str(place.resolve()) if place.is_dir() else source
    with ExitStack() as exits:
        aside = exits.enter_context(tempfile.TemporaryDirectory())
        snapshot = Snapshot.of(ledger, cache=Path(aside) / "rows")
        if folder is not None:
            files_of(folder)  # before anything of it is read
        attempt = exits.enter_context(whole_or_nothing(ledger, store))
        stored = None if folder is None or store is None else store.add(folder, owner=attempt.owner)
        if (node := _known(ledger, snapshot, source, tensors_id=stored.id if stored else None)) is not None:
            if folder is not None and store is not None and node.record.tensors_id is None:
                ledger.keep_tensors(node.record, folder, store=store)
            return node.id
        said = _said_of(source, folder, fetch, Path(aside) / "said")
        card = read_card(said)

        def keep(record: ModelRecord) -> None:
            if folder is not None and store is not None:
                ledger.keep_tensors(record, folder, store=store)

        return attempt.record(
            registered_name(source),
            key=f"import {source} {stored.id if stored else 'without weights'}",
            source=source,
            folder=said,
            relation=card.relation,
            bases=planned_bases(card, snapshot, fetch, source=source),
            keep=keep,
        ).model_id


def _known(ledger: Ledger, snapshot: Snapshot, source: str, *, tensors_id: str | None) -> Node | None:
    """The newest node of these tensors, else the newest of this place whose tensors are not known, here or there."""
    newest = list(reversed(snapshot.models))
    of_place = [node for node in newest if node.record.origin.source == source]
    if tensors_id is None:
        return next(iter(of_place), None)
    if same := [node for node in newest if node.record.tensors_id == tensors_id]:
        return same[0]
    # Without tensors it may also be half recorded, which its run tells.
    said = ((node, node.record.run_id) for node in of_place if node.record.tensors_id is None)
    return next((node for node, run in said if run is not None and ledger.is_finished(run)), None)


def _said_of(source: str, folder: Path | None, fetch: Fetch, aside: Path) -> Path:
    """A folder with what is said of a model, without its weights; a card, if need be one that says only where it is."""
    aside.mkdir()
    for path in [] if folder is None else sorted(folder.iterdir()):
        if path.is_file() and path.suffix in SAID and path.stat().st_size <= MOST_SAID_BYTES:
            shutil.copyfile(path, aside / path.name)
    if not Path(source).is_dir() and not (aside / CARD).exists():
        with suppress(OSError, ValueError):  # the hub cannot be reached, or has no card: the model is a root
            shutil.copyfile(fetch(source, (CARD,)) / CARD, aside / CARD)
    if not any(aside.iterdir()):
        (aside / CARD).write_text(f"# {source}\n\nIts weights are not here.\n", encoding="utf-8")
    return aside


def cached_from_hub(name: str) -> Path | None:
    """The folder of a model of the hub that this machine has already; None where it has not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(MODEL_FILES), local_files_only=True))
    except (OSError, ValueError, HFValidationError):
        return None
    return folder if any(folder.rglob("*.safetensors")) else None
