"""Recording of external base models: each one that a job starts from gets one node of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from ringmaster.errors import TensorStoreError
from ringmaster.model_lineage.exchange.hub_cards import CARD, read_card
from ringmaster.model_lineage.exchange.importing import (
    fetch_from_hub,
    planned_bases,
    registered_name,
    whole_or_nothing,
)
from ringmaster.model_lineage.exchange.model_folder import (
    MODEL_FILES,
    WEIGHTS,
    Fetch,
    ModelFolder,
    is_model_file,
    model_files,
)
from ringmaster.model_lineage.graph.snapshot import Node, Snapshot
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.records import ModelRecord
from ringmaster.model_lineage.tensors import StoredModel, TensorStore

MOST_SAID_BYTES = 50_000_000  # for one file: anything larger than a large vocabulary is not a description

Cached = Callable[[str], Path | None]
"""Returns the folder of a hub name's files that are already on this machine, or None."""


def record_base(
    ledger: Ledger, source: str, *, store: TensorStore | None, fetch: Fetch | None = None, cached: Cached | None = None
) -> str:
    """Returns the node id of a base model, given as a folder or a hub name.

    An existing node is reused if it has exactly the same files or the same source; a node known only from a card then
    gets its weights. Otherwise the model is recorded, with its card's base models as its parents. The weights are not
    copied into MLflow; they are added to the tensor store, if there is one and safetensors are on this machine. Files
    that may be code are left out, as `import_model` does.

    Raises ValueError (LedgerError, TensorStoreError) and OSError as `import_model` does.
    """
    fetch, cached = fetch or fetch_from_hub, cached or cached_from_hub
    place = Path(source).expanduser()
    folder: Path | None = place if place.is_dir() else cached(source)
    source = str(place.resolve()) if place.is_dir() else source
    with ExitStack() as exits:
        aside = exits.enter_context(tempfile.TemporaryDirectory())
        snapshot = Snapshot.of(ledger, cache=Path(aside) / "rows")
        model = None if folder is None else model_files(folder)  # validated before any file is read
        has_weights = model is not None and any(name.endswith(WEIGHTS) for name in model.files)
        attempt = exits.enter_context(whole_or_nothing(ledger, store))

        def add(owner: str) -> StoredModel | None:
            if folder is None or store is None or not has_weights:
                return None
            return store.add(folder, owner=owner, only=is_model_file)

        def keep(record: ModelRecord) -> None:
            if folder is not None and store is not None and has_weights:
                ledger.keep_tensors(record, folder, store=store, only=is_model_file)

        stored = add(attempt.owner)
        if (node := _known(ledger, snapshot, source, stored=stored, store=store)) is not None:
            if node.record.tensors_id is None:
                keep(node.record)
            elif stored is not None and node.record.tensors_id != stored.id:
                add(ledger.owner(node.id))  # a model in the store that nobody owns is never deleted
            return node.id
        said = _said_of(source, model, fetch, Path(aside) / "said")
        card = read_card(said)
        return attempt.record(
            registered_name(source, taken=lambda name: _is_taken(snapshot, name, source)),
            key=f"import {source} {stored.id if stored else 'without weights'}",
            source=source,
            folder=said,
            relation=card.relation,
            bases=planned_bases(card, snapshot, fetch, source=source),
            keep=keep,
        ).model_id


def _known(
    ledger: Ledger, snapshot: Snapshot, source: str, *, stored: StoredModel | None, store: TensorStore | None
) -> Node | None:
    """Returns the newest node with these files, or else of this source if either side's tensors are unknown."""
    newest = list(reversed(snapshot.models))
    of_place = [node for node in newest if node.record.origin.source == source]
    if stored is None or store is None:
        return next(iter(of_place), None)
    if same := [node for node in newest if _has_files(node, stored, store)]:
        return same[0]
    # A node without tensors may be recorded only in part; the status of its run says whether it is.
    said = ((node, node.record.run_id) for node in of_place if node.record.tensors_id is None)
    return next((node for node, run in said if run is not None and ledger.is_finished(run)), None)


def _has_files(node: Node, stored: StoredModel, store: TensorStore) -> bool:
    """Whether a node has the files of a stored model; a model that a job has written may have others beside them."""
    id = node.record.tensors_id
    if id is None or id == stored.id:
        return id is not None
    with suppress(TensorStoreError):  # the store belongs to another home folder, or was cleared
        return tuple(file for file in store.model(id).files if is_model_file(file.path)) == stored.files
    return False


def _is_taken(snapshot: Snapshot, name: str, source: str) -> bool:
    """Whether a name is that of another model than the one of this source, whose versions share it."""
    return any(
        node.record.origin.source != source and name in (each.record.registered_name for each in node.versions)
        for node in snapshot.models
    )


def _said_of(source: str, model: ModelFolder | None, fetch: Fetch, aside: Path) -> Path:
    """Returns a folder with a model's descriptive files, without its weights, but at least with a minimal card."""
    aside.mkdir()
    for name, path in model.files.items() if model else ():
        if "/" not in name and not name.endswith(WEIGHTS) and path.stat().st_size <= MOST_SAID_BYTES:
            shutil.copyfile(path, aside / name)
    if not Path(source).is_dir() and not (aside / CARD).exists():
        with suppress(OSError, ValueError):  # without a reachable hub or a card, the model is a root
            shutil.copyfile(fetch(source, (CARD,)) / CARD, aside / CARD)
    if not any(aside.iterdir()):
        (aside / CARD).write_text(f"# {source}\n\nIts weights are not here.\n", encoding="utf-8")
    return aside


def cached_from_hub(name: str) -> Path | None:
    """Returns the folder of a hub model in this machine's cache, or None if it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(MODEL_FILES), local_files_only=True))
    except (OSError, ValueError, HFValidationError):
        return None
    return folder if any(folder.rglob("*.safetensors")) else None
