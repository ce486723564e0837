"""Recorded models in the tensor store: each as a difference to its first parent, and the parts that relatives share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_lineage import cards, links
from model_lineage.models import Models
from model_lineage.records import COMPONENT, ModelRecord
from model_lineage.registry import CHILD, COMPONENT_OF, KIND, NAME, TENSORS, record_of

if TYPE_CHECKING:  # numpy and zstandard are imported where something is kept
    from model_lineage.components import SharedPart
    from model_lineage.tensors import StoredModel, TensorStore

DIGEST = "ringmaster.digest"  # of a component's tensors
MEMBER = "ringmaster.member."  # and a model's id: a tag of a component
STORE_LINES = "ringmaster.store"  # what a model's page says of it in the store
MOST_RELATIVES = 12  # that a new model is compared with
_NOTE = "mlflow.note.content"


class Keeping(Models):
    """The models of a ledger that a tensor store has too."""

    def keep_tensors(self, record: ModelRecord, folder: Path, *, store: TensorStore) -> StoredModel:
        """Keeps the files of a recorded model in `store`, as a difference to its first parent where that is there.

        Its page says how much room it takes, and which parts it shares with its parents and siblings; each of these
        becomes a node of kind "component". Again, it changes nothing. Raises StoreFault, OSError or LedgerError.
        """
        from model_lineage.components import shared_parts

        parents = [self._stored(parent, store) for parent in record.parents]
        base = parents[0] if parents else None
        stored = store.add(folder, parent=base.id if base else None)
        self.client.set_logged_model_tags(record.model_id, {TENSORS: stored.id})
        for other_id, other in self._relatives(record, store):
            for part in shared_parts(stored, other):
                self._join(part, record.model_id, other_id)
        alone = store.size_bytes([base.id]) if base else 0
        taken = store.size_bytes([stored.id] + ([base.id] if base else [])) - alone
        self._say_size(record, plain_bytes=_size_bytes(folder), taken_bytes=taken)
        return stored

    def _stored(self, model_id: str, store: TensorStore) -> StoredModel | None:
        """A model of the ledger as the store has it; None where it has not."""
        from model_lineage.tensors import StoreFault

        model = self._logged_model(model_id)
        id = None if model is None else model.tags.get(TENSORS)
        try:
            return None if id is None else store.model(id)
        except StoreFault:  # another home's store, or one that was cleared
            return None

    def _relatives(self, record: ModelRecord, store: TensorStore) -> Iterator[tuple[str, StoredModel]]:
        """The parents, and their children, that the store has."""
        ids = dict.fromkeys(record.parents)
        for parent in record.parents:
            model = self._logged_model(parent)
            tags = {} if model is None else model.tags
            ids |= dict.fromkeys(key.removeprefix(CHILD) for key in tags if key.startswith(CHILD))
        for id in [id for id in ids if id != record.model_id][:MOST_RELATIVES]:
            stored = self._stored(id, store)
            if stored is not None:
                yield id, stored

    def _join(self, part: SharedPart, *model_ids: str) -> None:
        """Lets some models point to the component that they share, which is made where nobody had it yet."""
        component = self._component(part)
        entry = json.dumps({"name": part.name, "num_bytes": part.num_bytes})
        for model_id in model_ids:
            self.client.set_logged_model_tags(model_id, {f"{COMPONENT_OF}{component.model_id}": entry})
            model = self._logged_model(model_id)
            if model is not None:
                member = cards.model_link(record_of(model))
                self.client.set_logged_model_tags(component.model_id, {f"{MEMBER}{model_id}": member})
                self._write_page(record_of(model))
        tags = self.client.get_logged_model(component.model_id).tags
        members = "\n".join(f"- {text}" for key, text in sorted(tags.items()) if key.startswith(MEMBER))
        note = f"{part.num_tensors} tensors, {_megabytes(part.num_bytes)}, that these models share:\n\n{members}"
        self.client.set_logged_model_tags(component.model_id, {_NOTE: note})

    def _component(self, part: SharedPart) -> Any:
        experiment_id = self.experiment_id(self.experiment)
        order = [{"field_name": "creation_timestamp", "ascending": True}]  # two may have been made at once
        condition = f"tags.`{DIGEST}` = '{part.digest}'"
        found = self.client.search_logged_models([experiment_id], condition, max_results=1, order_by=order)
        if found:
            return found[0]
        tags = {KIND: COMPONENT, NAME: part.name, DIGEST: part.digest}
        made = self.client.create_logged_model(
            experiment_id, name=part.name.replace(".", "_"), tags=tags, model_type=COMPONENT
        )
        return self.client.finalize_logged_model(made.model_id, "READY")

    def _say_size(self, record: ModelRecord, *, plain_bytes: int, taken_bytes: int) -> None:
        times = plain_bytes / taken_bytes if taken_bytes else 1.0
        text = f"takes {_megabytes(taken_bytes)} of {_megabytes(plain_bytes)} ({times:.1f} times smaller)"
        self.client.set_logged_model_tags(record.model_id, {STORE_LINES: text})
        self._write_page(record)

    def _write_page(self, record: ModelRecord) -> None:
        """Writes what the store knows of a model into its description and its note."""
        tags = self.client.get_logged_model(record.model_id).tags
        lines = [tags[STORE_LINES]] if STORE_LINES in tags else []
        for key, text in sorted(tags.items()):
            if key.startswith(COMPONENT_OF):
                part = json.loads(text)
                path = links.logged_model_path(str(record.experiment_id), key.removeprefix(COMPONENT_OF))
                lines.append(f"shares {links.link(part['name'], path)} ({_megabytes(part['num_bytes'])})")
        if record.version is None:
            return
        version = self.client.get_model_version(record.registered_name, str(record.version))
        text = cards.with_store(version.description or "", lines)
        self.client.update_model_version(record.registered_name, str(record.version), text)
        self.client.set_logged_model_tags(record.model_id, {_NOTE: text})


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
