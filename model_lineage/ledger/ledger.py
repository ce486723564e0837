"""The ledger: all MLflow records of a batch, behind one class with plain arguments.

    ledger = Ledger("sqlite:////home/me/.ringmaster/mlflow.db")
    batch = ledger.start_batch("tonight", batch="tonight", params={"objective": "makespan"})
    job = ledger.start_job(batch, "llama", params={"optimizer": {"lr": 3e-4}})
    ledger.log_metrics(job, [MetricPoint("loss", 2.5, step=10)])
    model = ledger.record_model("llama", run_id=job, folder=Path("out"), kind="pretrained")
    ledger.finish_run(job)

The class is built in layers, a module each: `connection` (the client, created lazily, and its database), `runs` (with
profiles), `families` (finding models, and drawing their families), `models` (recording them), and here their tensors in
the store. `model_pages` has the content of their pages.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster.model_lineage import model_pages
from ringmaster.model_lineage.ledger.families import CHILD, COMPONENT_OF, KIND, NAME, NOTE, TENSORS, record_of
from ringmaster.model_lineage.ledger.models import Models
from ringmaster.model_lineage.records import COMPONENT, ModelRecord
from ringmaster.text import code_span, markdown, markdown_table, redacted

COMPARED_KINDS = ("fine-tuned", "lora", "prefix-tuned", "ia3")
BESIDE = "\n\n**Beside its base**\n\n"  # heading of the section on a model's page

if TYPE_CHECKING:  # numpy and zstandard are imported only when tensors are stored
    from ringmaster.model_lineage.tensors import StoredModel, TensorStore
    from ringmaster.model_lineage.tensors.comparison import CommonComponent

LEDGER = "ringmaster.ledger"  # a tag of the experiment
DIGEST = "ringmaster.digest"  # of a component's tensors
MEMBER = "ringmaster.member."  # followed by a model's id: a tag of a component
STORE_LINES = "ringmaster.store"  # the text on a model's page about its size in the store
MAX_RELATIVES = 12  # the most relatives that a new model is compared with


class Ledger(Models):
    """A team's record of batches, jobs, profiles and models, in one MLflow store; several threads may use it.

    tracking_uri: "sqlite:////absolute/path/mlflow.db", "postgresql://...", or an MLflow server's "http(s)://...".
    experiment: the ledger's own experiment. The runs and models of a batch go to the experiment EXPERIMENT/BATCH,
        profiles to EXPERIMENT-profiles.
    artifact_root: the folder for files if a database is used directly (next to a sqlite file by default); a server uses
        its own configured location.

    The constructor opens nothing; the first use or `warm_up()` does. Every failure raises LedgerError with a remedy.
    """

    def keep_tensors(
        self,
        record: ModelRecord,
        folder: Path,
        *,
        store: TensorStore,
        components: Mapping[str, str] | None = None,
        only: Callable[[str], bool] | None = None,
    ) -> StoredModel:
        """Adds the files of a recorded model to `store`, as a difference to its first parent if the store has that.

        The model's page then shows the space that it takes, and the parts that it shares with its parents and siblings.
        Each such part becomes a node of kind "component". A repeated call changes nothing.

        Raises TensorStoreError, OSError or LedgerError.

        components: named parts and the prefix of each one's parameter names. They become nodes too, whether or not
        another model has them yet. Raises ValueError, after all other work is done, if a prefix matches no parameter.
        only: whether a file of that relative name belongs to the model; None where all do.
        """
        from ringmaster.model_lineage.tensors.comparison import common_components, is_within, named_component

        named = components or {}
        parents = [self._stored(parent, store) for parent in record.parents]
        base = parents[0] if parents else None
        model, owner = self.client.get_logged_model(record.model_id), self.owner(record.model_id)
        if (id := model.tags.get(TENSORS)) is not None and id in store.ids():
            stored = store.model(id)
            store.own(id, owner)
        else:
            stored = store.add(folder, parent=base.id if base else None, owner=owner, only=only)
            self.client.set_logged_model_tags(record.model_id, {TENSORS: stored.id})
            if (repository := self.artifacts(model.artifact_location)) is not None:
                self.client.call(repository.refer, stored, folder=folder)
        for other_id, other in self._relatives(record, store):
            for part in common_components(stored, other):
                if not any(is_within(part.name, prefix) for prefix in named.values()):
                    self._join(part, record.model_id, other_id)
        alone = store.size_bytes([base.id]) if base else 0
        taken = store.size_bytes([stored.id] + ([base.id] if base else [])) - alone
        plain = sum((folder / file.path).stat().st_size for file in stored.files)
        times = plain / taken if taken else 1.0
        text = f"takes {megabytes(taken)} of {megabytes(plain)} ({times:.1f} times smaller)"
        self.client.set_logged_model_tags(record.model_id, {STORE_LINES: text})
        self._write_store_section(record)
        if base is not None and record.kind in COMPARED_KINDS:
            self._compare_with_base(record, weight_bytes=(stored.weight_bytes, base.weight_bytes))
        for name, prefix in named.items():
            self._join(named_component(stored, name, prefix=prefix), record.model_id)
        return stored

    def owner(self, model_id: str) -> str:
        """Returns the name under which a model of this ledger owns tensors in a store. Raises LedgerError."""
        return f"{model_id}@{self._own_name()}"

    def gone(self, owners: Collection[str], *, but: Container[str]) -> list[str]:
        """Returns the owners in a tensor store that are models of this ledger and no longer exist.

        but: ids of models that are known to exist. The ledger is queried for every other id. Raises LedgerError.
        """
        name = self._own_name()
        ours = [owner.removesuffix(f"@{name}") for owner in owners if owner.endswith(f"@{name}")]
        return [f"{id}@{name}" for id in ours if id not in but and self._logged_model(id) is None]

    def ui_links(self, *, run_id: str | None = None, model: ModelRecord | None = None) -> dict[str, str]:
        """Returns the paths in MLflow's UI of the experiment and, where given, of a run and a model.

        The experiment is that of the run, or the ledger's own. The paths start with "#/": prefix them with the UI's
        address, or use them unchanged in the UI's markdown.
        """
        experiment_id = str(self.experiment_id(self.experiment)) if run_id is None else self.experiment_of(run_id)
        paths = {"experiment": model_pages.experiment_path(experiment_id)}
        if run_id is not None:
            paths["run"] = model_pages.run_path(experiment_id, run_id)
        if model is not None and model.version is not None:
            paths["model"] = model_pages.model_version_path(model.registered_name, model.version)
        elif model is not None:
            paths["model"] = model_pages.logged_model_path(str(model.experiment_id), model.model_id)
        return paths

    def _own_name(self) -> str:
        """Returns a name unique to this ledger, from a tag of its experiment, created if missing, and its address.

        Neither is enough alone: two machines may have ledgers at one address, and a copy of a ledger has its tags.
        """
        experiment_id = self.experiment_id(self.experiment)
        tag = self.client.get_experiment(experiment_id).tags.get(LEDGER)
        if tag is None:
            tag = uuid.uuid4().hex
            self.client.set_experiment_tag(experiment_id, LEDGER, tag)
        return hashlib.sha256(f"{tag} {redacted(self.tracking_uri)}".encode()).hexdigest()[:16]

    def _stored(self, model_id: str, store: TensorStore) -> StoredModel | None:
        """Returns a model of the ledger from the store, or None if the store does not have it."""
        from ringmaster.errors import TensorStoreError

        model = self._logged_model(model_id)
        id = None if model is None else model.tags.get(TENSORS)
        try:
            return None if id is None else store.model(id)
        except TensorStoreError:  # the store belongs to another home folder, or was cleared
            return None

    def _relatives(self, record: ModelRecord, store: TensorStore) -> Iterator[tuple[str, StoredModel]]:
        """Yields the parents and their other children that the store has, with their ids."""
        ids = dict.fromkeys(record.parents)
        for parent in record.parents:
            model = self._logged_model(parent)
            tags = {} if model is None else model.tags
            ids |= dict.fromkeys(key.removeprefix(CHILD) for key in tags if key.startswith(CHILD))
        for id in [id for id in ids if id != record.model_id][:MAX_RELATIVES]:
            stored = self._stored(id, store)
            if stored is not None:
                yield id, stored

    def _join(self, part: CommonComponent, *model_ids: str) -> None:
        """Links some models to the component that they share, which is created if it does not exist yet."""
        component = self._component(part)
        entry = json.dumps({"name": part.name, "num_bytes": part.num_bytes, "is_named": part.is_named})
        for model_id in model_ids:
            self.client.set_logged_model_tags(model_id, {f"{COMPONENT_OF}{component.model_id}": entry})
            model = self._logged_model(model_id)
            if model is not None:
                member = model_pages.model_link(record_of(model))
                self.client.set_logged_model_tags(component.model_id, {f"{MEMBER}{model_id}": member})
                self._write_store_section(record_of(model))
        tags = self.client.get_logged_model(component.model_id).tags
        members = "\n".join(f"- {text}" for key, text in sorted(tags.items()) if key.startswith(MEMBER))
        note = f"{part.num_tensors} tensors, {megabytes(part.num_bytes)}, part of:\n\n{members}"
        self.client.set_logged_model_tags(component.model_id, {NOTE: note})

    def _component(self, part: CommonComponent) -> Any:
        experiment_id = self.experiment_id(self.experiment)
        order = [{"field_name": "creation_timestamp", "ascending": True}]  # two may have been created concurrently
        condition = f"tags.`{DIGEST}` = '{part.digest}'"
        result = self.client.search_logged_models([experiment_id], condition, max_results=1, order_by=order)
        if result:
            return result[0]
        tags = {KIND: COMPONENT, NAME: part.name, DIGEST: part.digest}
        made = self.client.create_logged_model(
            experiment_id, name=part.name.replace(".", "_"), tags=tags, model_type=COMPONENT
        )
        return self.client.finalize_logged_model(made.model_id, "READY")

    def _compare_with_base(self, record: ModelRecord, *, weight_bytes: tuple[int, int]) -> None:
        """Adds a comparison with the first parent to a model's page, from what is recorded of both."""
        own, parent = self._logged_model(record.model_id), self._logged_model(record.parents[0])
        if own is None or parent is None or record.version is None:
            return
        table = compared_with_base(
            record, record_of(parent), weight_bytes=weight_bytes, metrics=_metrics(own), base_metrics=_metrics(parent)
        )
        self.rewrite_page(record, lambda text: with_comparison(text, table, limit=model_pages.DESCRIPTION_LIMIT))

    def _write_store_section(self, record: ModelRecord) -> None:
        """Writes a model's size in the store and its components into its description and its note."""
        tags = self.client.get_logged_model(record.model_id).tags
        lines = [tags[STORE_LINES]] if STORE_LINES in tags else []
        for key, text in sorted(tags.items()):
            if key.startswith(COMPONENT_OF):
                part = json.loads(text)
                path = model_pages.logged_model_path(
                    str(self.experiment_id(self.experiment)), key.removeprefix(COMPONENT_OF)
                )
                how = "has" if part.get("is_named") else "shares"
                lines.append(f"{how} {model_pages.link(part['name'], path)} ({megabytes(part['num_bytes'])})")
        self.rewrite_page(record, lambda text: model_pages.with_store(text, lines))


def _metrics(model: Any) -> dict[str, float]:
    return {metric.key: metric.value for metric in model.metrics or []}


def compared_with_base(
    record: ModelRecord,
    base: ModelRecord,
    *,
    weight_bytes: tuple[int, int],
    metrics: Mapping[str, float],
    base_metrics: Mapping[str, float],
) -> str:
    """Returns a markdown table with the bytes of (the model's tensors, its base's) and the model's held-out metrics.

    base_metrics: shown only if both models were measured on the same rows, as they are not comparable otherwise.
    """
    own, theirs = weight_bytes
    name = base.registered_name if base.version is None else f"{base.registered_name}/{base.version}"
    times = f" ({theirs / own:.1f} times as large)" if own else ""
    rows = [["", "this one", code_span(name)], ["weights", megabytes(own), f"{megabytes(theirs)}{times}"]]
    known = base_metrics if held_out(record) == held_out(base) else {}
    rows += [
        [markdown(key), f"{value:.4g}", f"{known[key]:.4g}" if key in known else ""] for key, value in metrics.items()
    ]
    return markdown_table(rows[0], rows[1:])


def held_out(record: ModelRecord) -> frozenset[str]:
    """Returns the digests of the data that a model was evaluated on; of divided data, the digests of the whole."""
    of_evaluation = [data.digest for data in record.datasets if data.context == "evaluation"]
    return frozenset(of_evaluation or [data.digest for data in record.datasets])


def with_comparison(description: str, table: str, *, limit: int) -> str:
    """Inserts the table as a section before the first one of `description`.

    Returns `description` unchanged if it has the section already, or would exceed `limit`.
    """
    if BESIDE in description or len(description) + len(BESIDE) + len(table) > limit:
        return description
    above, mark, below = description.partition("\n\n**")
    return above + BESIDE + table + mark + below


def megabytes(num_bytes: int) -> str:
    """Formats a number of bytes for display."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
