"""Recorded models in the tensor store: each as a difference to its first parent, and the parts that relatives share."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Collection, Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster.model_lineage import beside, cards, links
from ringmaster.model_lineage.faults import redacted
from ringmaster.model_lineage.models import Models
from ringmaster.model_lineage.records import COMPONENT, ModelRecord
from ringmaster.model_lineage.registry import CHILD, COMPONENT_OF, KIND, NAME, TENSORS, record_of

if TYPE_CHECKING:  # numpy and zstandard are imported where something is kept
    from ringmaster.model_lineage.components import SharedPart
    from ringmaster.model_lineage.tensors import StoredModel, TensorStore

LEDGER = "ringmaster.ledger"  # a tag of the experiment
DIGEST = "ringmaster.digest"  # of a component's tensors
MEMBER = "ringmaster.member."  # and a model's id: a tag of a component
STORE_LINES = "ringmaster.store"  # what a model's page says of it in the store
MOST_RELATIVES = 12  # that a new model is compared with
_NOTE = "mlflow.note.content"


class Keeping(Models):
    """The models of a ledger that a tensor store has too."""

    def keep_tensors(
        self, record: ModelRecord, folder: Path, *, store: TensorStore, components: Mapping[str, str] | None = None
    ) -> StoredModel:
        """Keeps the files of a recorded model in `store`, as a difference to its first parent where that is there.

        Its page says how much room it takes, and which parts it shares with its parents and siblings; each of these
        becomes a node of kind "component". Again, it changes nothing. Raises StoreFault, OSError or LedgerError.

        components: parts that a person has named, each with the prefix of its parameters' names: nodes too, whether or
        not another model has them yet. Raises ValueError, once all else is done, where a prefix has no parameter.
        """
        from ringmaster.model_lineage.components import is_within, named_part, shared_parts

        named = components or {}

        parents = [self._stored(parent, store) for parent in record.parents]
        base = parents[0] if parents else None
        stored = store.add(folder, parent=base.id if base else None, owner=self.owner(record.model_id))
        self.client.set_logged_model_tags(record.model_id, {TENSORS: stored.id})
        for other_id, other in self._relatives(record, store):
            for part in shared_parts(stored, other):
                if not any(is_within(part.name, prefix) for prefix in named.values()):
                    self._join(part, record.model_id, other_id)
        alone = store.size_bytes([base.id]) if base else 0
        taken = store.size_bytes([stored.id] + ([base.id] if base else [])) - alone
        self._say_size(record, plain_bytes=_size_bytes(folder), taken_bytes=taken)
        if base is not None and record.kind in beside.KINDS:
            self._say_beside(record, weight_bytes=(stored.weight_bytes, base.weight_bytes))
        for name, prefix in named.items():
            self._join(named_part(stored, name, prefix=prefix), record.model_id)
        return stored

    def owner(self, model_id: str) -> str:
        """As whom a tensor store knows a model of this ledger. Raises LedgerError."""
        return f"{model_id}@{self._own_name()}"

    def gone(self, owners: Collection[str], *, but: Container[str]) -> list[str]:
        """Those among a tensor store's owners that are models of this ledger which are no more.

        but: ids of models that are known to be there. Every other one is asked for. Raises LedgerError.
        """
        name = self._own_name()
        ours = [owner.removesuffix(f"@{name}") for owner in owners if owner.endswith(f"@{name}")]
        return [f"{id}@{name}" for id in ours if id not in but and self._logged_model(id) is None]

    def _own_name(self) -> str:
        """What only this ledger is called: a tag of its experiment, made where it has none, and its address.

        Neither would do: two machines may have ledgers at one address, and a copy of a ledger has its tags.
        """
        experiment_id = self.experiment_id(self.experiment)
        tag = self.client.get_experiment(experiment_id).tags.get(LEDGER)
        if tag is None:
            tag = uuid.uuid4().hex
            self.client.set_experiment_tag(experiment_id, LEDGER, tag)
        return hashlib.sha256(f"{tag} {redacted(self.tracking_uri)}".encode()).hexdigest()[:16]

    def _stored(self, model_id: str, store: TensorStore) -> StoredModel | None:
        """A model of the ledger as the store has it; None where it has not."""
        from ringmaster.model_lineage.tensors import StoreFault

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
        entry = json.dumps({"name": part.name, "num_bytes": part.num_bytes, "is_named": part.is_named})
        for model_id in model_ids:
            self.client.set_logged_model_tags(model_id, {f"{COMPONENT_OF}{component.model_id}": entry})
            model = self._logged_model(model_id)
            if model is not None:
                member = cards.model_link(record_of(model))
                self.client.set_logged_model_tags(component.model_id, {f"{MEMBER}{model_id}": member})
                self._write_page(record_of(model))
        tags = self.client.get_logged_model(component.model_id).tags
        members = "\n".join(f"- {text}" for key, text in sorted(tags.items()) if key.startswith(MEMBER))
        note = f"{part.num_tensors} tensors, {beside.megabytes(part.num_bytes)}, part of:\n\n{members}"
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
        text = f"takes {beside.megabytes(taken_bytes)} of {beside.megabytes(plain_bytes)} ({times:.1f} times smaller)"
        self.client.set_logged_model_tags(record.model_id, {STORE_LINES: text})
        self._write_page(record)

    def _say_beside(self, record: ModelRecord, *, weight_bytes: tuple[int, int]) -> None:
        """Lets a model's page compare it with its first parent, as far as both are recorded."""
        own, parent = self._logged_model(record.model_id), self._logged_model(record.parents[0])
        if own is None or parent is None or record.version is None:
            return
        table = beside.beside_base(
            record, record_of(parent), weight_bytes=weight_bytes, metrics=_metrics(own), base_metrics=_metrics(parent)
        )
        version = self.client.get_model_version(record.registered_name, str(record.version))
        text = beside.with_beside(version.description or "", table, limit=cards.DESCRIPTION_LIMIT)
        self.client.update_model_version(record.registered_name, str(record.version), text)
        self.client.set_logged_model_tags(record.model_id, {_NOTE: text})

    def _write_page(self, record: ModelRecord) -> None:
        """Writes what the store knows of a model into its description and its note."""
        tags = self.client.get_logged_model(record.model_id).tags
        lines = [tags[STORE_LINES]] if STORE_LINES in tags else []
        for key, text in sorted(tags.items()):
            if key.startswith(COMPONENT_OF):
                part = json.loads(text)
                path = links.logged_model_path(str(record.experiment_id), key.removeprefix(COMPONENT_OF))
                how = "has" if part.get("is_named") else "shares"
                lines.append(f"{how} {links.link(part['name'], path)} ({beside.megabytes(part['num_bytes'])})")
        if record.version is None:
            return
        version = self.client.get_model_version(record.registered_name, str(record.version))
        text = cards.with_store(version.description or "", lines)
        self.client.update_model_version(record.registered_name, str(record.version), text)
        self.client.set_logged_model_tags(record.model_id, {_NOTE: text})


def _metrics(model: Any) -> dict[str, float]:
    return {metric.key: metric.value for metric in model.metrics or []}


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
