"""Models from elsewhere: each a node of kind "imported", and what its card says that it was made from."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from model_lineage.hub_cards import CARD, CardMetadata, read_card
from model_lineage.ledger import Ledger
from model_lineage.records import ModelRecord, Origin
from model_lineage.snapshot import Snapshot, UnknownName
from model_lineage.tensors import TensorStore

MODEL_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", CARD)
MOST_GENERATIONS = 8  # of bases of bases whose cards are followed

Fetch = Callable[[str, tuple[str, ...]], Path]
"""Brings files of these patterns from a hub name; returns their folder. Raises OSError where it cannot."""


def import_model(
    ledger: Ledger, source: str, *, name: str, snapshot: Snapshot, store: TensorStore, fetch: Fetch
) -> ModelRecord:
    """Records the model in a folder, or of a hub name, as `name`, and keeps it in the tensor store.

    Its card's base models are its parents: those that the lineage knows, by where they were imported from or by their
    names, and for each other one a node without weights, whose own card is followed in turn. The same model imported
    again is the same node. Raises ValueError (LedgerError, StoreFault) where there is no model, OSError where the hub
    cannot be reached.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        source = str(folder.resolve())
    else:
        folder = fetch(source, MODEL_FILES)
    if not any(folder.rglob("*.safetensors")):
        raise ValueError(f"{source} holds no safetensors. To fix: name a model's folder, or a hub name that has them")
    card = read_card(folder)
    stored = store.add(folder)
    known = {node.record.origin.source: node.id for node in snapshot.models if node.record.origin.source is not None}
    parents = base_ids(ledger, card, snapshot, known, fetch, path=(source,))
    key = f"import {name} {stored.id}"
    run_id = ledger.start_batch(f"import {name}", params={"source": source}, key=key)
    record = ledger.record_model(
        name,
        run_id=run_id,
        folder=folder,
        kind="imported",
        parents=parents,
        origin=Origin(source=source, relation=card.relation),
    )
    ledger.keep_tensors(record, folder, store=store)
    ledger.finish_run(run_id)
    return record


def registered_name(source: str) -> str:
    """What a model from elsewhere is called here: the folder's name, or the hub name with its slash replaced."""
    name = Path(source).name if Path(source).is_absolute() else source.strip("/").replace("/", "--")
    return re.sub(r"[^\w.-]", "-", name) or "imported"


def fetch_from_hub(name: str, patterns: tuple[str, ...]) -> Path:
    """Files of a model on Hugging Face's hub, in its own cache. Raises OSError with what to do."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise OSError(f"{name!r} is neither a folder nor a hub name: {error}") from error
    except (OSError, ValueError) as error:  # what the hub raises for all that goes wrong is one of the two
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OSError(
            f"{name} could not be fetched: {first} To fix: see that the hub can be reached, or name a folder"
        ) from error


def base_ids(
    ledger: Ledger,
    card: CardMetadata,
    snapshot: Snapshot,
    known: Mapping[str, str],
    fetch: Fetch,
    *,
    path: tuple[str, ...],
) -> list[str]:
    """The ids of a card's base models; nodes are made for those that nobody knows yet."""
    ids = []
    for base in card.base_models:
        if base in path:
            raise ValueError(f"the cards name each other as bases: {' -> '.join([*path, base])}. To fix: mend one")
        ids.append(known.get(base) or _by_name(snapshot, base) or _stub(ledger, base, snapshot, known, fetch, path))
    return ids


def _by_name(snapshot: Snapshot, base: str) -> str | None:
    try:
        return snapshot.find(base).id
    except UnknownName:
        return None


def _stub(
    ledger: Ledger, base: str, snapshot: Snapshot, known: Mapping[str, str], fetch: Fetch, path: tuple[str, ...]
) -> str:
    """A node for a base whose weights are elsewhere: its card, where it can be read, and its own bases."""
    card, text = CardMetadata(), f"# {base}\n\nIts weights are not here.\n"
    if len(path) < MOST_GENERATIONS:
        try:
            fetched = fetch(base, (CARD,))
            card = read_card(fetched)
            text = (fetched / CARD).read_text(encoding="utf-8")
        except (OSError, ValueError):  # it has no card that can be read: it is a root
            card = CardMetadata()
    parents = base_ids(ledger, card, snapshot, known, fetch, path=(*path, base))
    name = registered_name(base)
    run_id = ledger.start_batch(f"import {name}", params={"source": base}, key=f"import {name} without weights")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CARD).write_text(text, encoding="utf-8")
        record = ledger.record_model(
            name,
            run_id=run_id,
            folder=Path(folder),
            kind="imported",
            parents=parents,
            origin=Origin(source=base, relation=card.relation),
        )
    ledger.finish_run(run_id)
    return record.model_id
