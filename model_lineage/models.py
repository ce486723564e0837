"""Models: a LoggedModel with its files, what it was made from, and a version in the registry that a person
can browse.

Everything that a repeated recording could double is looked up first, so that a retry after a crash at any
point goes on from there.
"""

import json
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_lineage import links
from model_lineage.faults import LedgerError
from model_lineage.graph import Adaptation, Graph
from model_lineage.records import ADAPTATION_KINDS, DatasetInput, ModelRecord
from model_lineage.runs import Runs, _text, flat_params

_KIND, _PARENTS, _DATASETS = "ringmaster.kind", "ringmaster.parents", "ringmaster.datasets"
_NAME, _MODEL_ID, _CHILD = "ringmaster.name", "ringmaster.model_id", "ringmaster.child."
_VERSIONS, _NOTE = "mlflow.modelVersions", "mlflow.note.content"
_DIGEST_LIMIT = 36  # characters of a data set's digest in MLflow
_PAGE = 1000


class Models(Runs):
    """The models of a ledger."""

    def record_model(
        self,
        name: str,
        *,
        run_id: str,
        folder: Path,
        kind: str,
        parents: Sequence[str] = (),
        datasets: Sequence[DatasetInput] = (),
        params: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        description: str = "",
    ) -> ModelRecord:
        """Record the model in `folder`, made by run `run_id`, as the next version of `name`.

        kind: one of ADAPTATION_KINDS. parents: models:/NAME@ALIAS, models:/NAME/VERSION or model ids.
        metrics: also logged on the run, where MLflow takes a model's metrics from; finite ones only.
        A run has one model of a name: recording it again returns the record that there is.
        """
        if kind not in ADAPTATION_KINDS:
            raise LedgerError(f"{kind!r} is no kind of adaptation: use one of {', '.join(ADAPTATION_KINDS)}")
        if not folder.is_dir() or not any(folder.iterdir()):
            raise LedgerError(f"{folder} holds no model: give the folder that save_pretrained wrote")
        parent_records = [self.resolve_model(parent) for parent in parents]
        model = self._made_by(run_id, name)
        if model is None:
            tags = {
                _KIND: kind,
                _NAME: name,
                _PARENTS: json.dumps([parent.model_id for parent in parent_records]),
                _DATASETS: json.dumps([vars(dataset) for dataset in datasets]),
            }
            model = self._create_logged_model(run_id, name, tags=tags, params=params or {})
        if model.status != "READY":
            self.client.log_model_artifacts(model.model_id, str(folder))
            self.client.finalize_logged_model(model.model_id, "READY")
        self._log_edges(run_id, model.model_id, parent_records, datasets)
        self._log_model_metrics(run_id, model.model_id, metrics or {})
        record = self._register(model, description)
        for parent in parent_records:
            self._link_child(parent, record)
        return record

    def resolve_model(self, uri: str) -> ModelRecord:
        """The model behind models:/NAME@ALIAS, models:/NAME/VERSION, models:/MODEL_ID or a bare model id.

        Raises LedgerError, which names what there is, where there is no such model.
        """
        reference = uri.removeprefix("models:/")
        if by_alias := re.fullmatch(r"([^/@]+)@([\w-]+)", reference):
            return self._version_record(*by_alias.groups())
        if by_version := re.fullmatch(r"([^/@]+)/(\d+)", reference):
            return self._version_record(by_version[1], int(by_version[2]))
        if not re.fullmatch(r"m-\w+", reference):
            raise LedgerError(
                f"{uri!r} names no model: use models:/NAME@ALIAS, models:/NAME/VERSION or a model id (m-...)"
            )
        try:
            return _record(self.client.get_logged_model(reference))
        except LedgerError as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise LedgerError(f"there is no model {reference!r} in the ledger", code=error.code) from error

    def download_model(self, uri: str, dst: Path) -> Path:
        """Copy a model's files to the folder `dst`/MODEL_ID and return that; it appears complete or not at
        all.

        Where it is there already, nothing is copied: a model never changes.
        """
        from mlflow.artifacts import download_artifacts

        record = self.resolve_model(uri)
        target = dst / record.model_id
        if target.is_dir():
            return target
        dst.mkdir(parents=True, exist_ok=True)
        location = self.client.get_logged_model(record.model_id).artifact_location
        with tempfile.TemporaryDirectory(dir=dst, prefix=".download-") as temporary:
            copy = self.client.call(
                download_artifacts, artifact_uri=location, dst_path=temporary, tracking_uri=self.tracking_uri
            )
            if not target.is_dir():
                Path(copy).replace(target)  # refused where another process was first with this name
        return target

    def set_alias(self, name: str, alias: str, version: int) -> None:
        """Let `alias` (e.g. "champion") of registered model `name` name `version`, in one step."""
        self._version_record(name, version)
        self.client.set_registered_model_alias(name, alias, str(version))

    def get_alias(self, name: str, alias: str) -> ModelRecord | None:
        """The model that `alias` of `name` names; None where it names none yet."""
        try:
            return self._version_record(name, alias)
        except LedgerError as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def models(self) -> list[ModelRecord]:
        """Every model that was recorded in this ledger's experiment, oldest first."""
        experiment_id = self.experiment_id(self.experiment)
        order = [{"field_name": "creation_timestamp", "ascending": True}]
        records: list[ModelRecord] = []
        token = None
        while True:
            page = self.client.search_logged_models(
                [experiment_id], f"tags.`{_KIND}` != ''", max_results=_PAGE, order_by=order, page_token=token
            )
            records += [_record(model) for model in page]
            token = page.token
            if not token:
                return records

    def graph(self) -> Graph:
        """The lineage of every recorded model, by model id."""
        return Graph(
            Adaptation(
                child=record.model_id,
                parents=record.parents,
                kind=record.kind,
                run=record.run_id,
                datasets=record.datasets,
            )
            for record in self.models()
        )

    def _made_by(self, run_id: str, name: str) -> Any | None:
        """The LoggedModel `name` that run `run_id` made already."""
        experiment_id = self.client.get_run(run_id).info.experiment_id
        found = self.client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'")
        return next((model for model in found if model.tags.get(_NAME) == name), None)

    def _create_logged_model(
        self, run_id: str, name: str, *, tags: Mapping[str, str], params: Mapping[str, Any]
    ) -> Any:
        return self.client.create_logged_model(
            self.client.get_run(run_id).info.experiment_id,
            name=re.sub(r"[/:.%\"']", "_", name),  # characters that a LoggedModel's name may not have
            source_run_id=run_id,
            tags=dict(tags),
            params={key: _text(value) for key, value in flat_params(params).items()},
            model_type=tags[_KIND],
        )

    def _log_edges(
        self, run_id: str, model_id: str, parents: Sequence[ModelRecord], datasets: Sequence[DatasetInput]
    ) -> None:
        """The run's inputs (data, parent models) and its output, as MLflow's own lineage has them."""
        from mlflow.entities import LoggedModelInput, LoggedModelOutput

        inputs = [LoggedModelInput(parent.model_id) for parent in parents]
        if inputs or datasets:
            self.client.log_inputs(run_id, datasets=_dataset_inputs(datasets), models=inputs)
        outputs = self.client.get_run(run_id).outputs
        if model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
            self.client.log_outputs(run_id, [LoggedModelOutput(model_id, step=0)])

    def _log_model_metrics(self, run_id: str, model_id: str, metrics: Mapping[str, float]) -> None:
        """A model's metrics are metrics of its run that carry its id."""
        from mlflow.entities import Metric

        known = {metric.key for metric in self.client.get_logged_model(model_id).metrics or []}
        now_ms = time.time_ns() // 1_000_000
        entries = [
            Metric(key, float(value), now_ms, 0, model_id=model_id)
            for key, value in metrics.items()
            if key not in known and math.isfinite(value)
        ]
        self.client.log_batch(run_id, metrics=entries)

    def _register(self, model: Any, description: str) -> ModelRecord:
        """Make the LoggedModel a version of the registered model of its name, unless it is one."""
        name, client = model.tags[_NAME], self.client
        version = next(
            (
                found
                for found in client.search_model_versions(f"run_id = '{model.source_run_id}'")
                if found.tags.get(_MODEL_ID) == model.model_id
            ),
            None,
        )
        if version is None:
            self._create_registered_model(name)
            version = client.create_model_version(
                name,
                # not models:/MODEL_ID, which MLflow would look up in its global tracking URI
                source=model.artifact_location,
                run_id=model.source_run_id,
                tags={_MODEL_ID: model.model_id, _KIND: model.tags[_KIND], _PARENTS: model.tags[_PARENTS]},
                description=self._description(model, description),
                model_id=model.model_id,
            )
        client.set_logged_model_tags(
            model.model_id,
            {
                _VERSIONS: json.dumps([{"name": name, "version": str(version.version)}]),
                _NOTE: version.description,
            },
        )
        return _record(client.get_logged_model(model.model_id))

    def _create_registered_model(self, name: str) -> None:
        try:
            self.client.create_registered_model(name)
        except LedgerError as error:
            if error.code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _description(self, model: Any, text: str) -> str:
        """Markdown: `text`, then where the model came from, every name a link."""
        run = self.client.get_run(model.source_run_id)
        experiment_id = run.info.experiment_id
        lines = [text, ""] if text else []
        for parent_id in json.loads(model.tags[_PARENTS]):
            parent = _record(self.client.get_logged_model(parent_id))
            lines.append(f"- {model.tags[_KIND]} from {_model_link(parent)}")
        if not json.loads(model.tags[_PARENTS]):
            lines.append(f"- {model.tags[_KIND]}, from no other recorded model")
        lines.append(f"- made by run {links.link(run.info.run_name, links.run_path(experiment_id, run.info.run_id))}")
        if batch_id := run.data.tags.get("mlflow.parentRunId"):
            batch_name = self.client.get_run(batch_id).info.run_name
            lines.append(f"- in batch {links.link(batch_name, links.run_path(experiment_id, batch_id))}")
        for dataset in _datasets(model.tags):
            rows = "" if dataset.num_rows is None else f", {dataset.num_rows} rows"
            lines.append(f"- data for {dataset.context}: {dataset.name} (`{dataset.digest[:12]}`{rows})")
        files = links.logged_model_path(experiment_id, model.model_id)
        lines.append(f"- files and metrics: {links.link(model.model_id, files)}")
        return "\n".join(lines)[: links.DESCRIPTION_LIMIT]

    def _link_child(self, parent: ModelRecord, child: ModelRecord) -> None:
        """Let the parent's page show its child.

        Each child writes a tag of its own, so that none is lost to another that writes at the same time;
        the text is written again for as long as the tags have changed since they were read.
        """
        entry = {"kind": child.kind, "name": child.registered_name, "version": child.version}
        self.client.set_logged_model_tags(parent.model_id, {f"{_CHILD}{child.model_id}": json.dumps(entry)})
        if parent.version is None:
            return
        shown: dict[str, str] = {}
        while (tags := _child_tags(self.client.get_logged_model(parent.model_id).tags)) != shown:
            shown = tags
            children = [json.loads(text) for text in tags.values()]
            children.sort(key=lambda entry: (entry["name"], -(entry["version"] or 0)))
            texts = [
                f"{entry['kind']}: "
                + links.link(
                    f"{entry['name']} version {entry['version']}",
                    links.model_version_path(entry["name"], entry["version"]),
                )
                for entry in children
            ]
            version = self.client.get_model_version(parent.registered_name, str(parent.version))
            text = links.with_children(version.description or "", texts)
            self.client.update_model_version(parent.registered_name, str(parent.version), text)
            self.client.set_logged_model_tags(parent.model_id, {_NOTE: text})

    def _version_record(self, name: str, version: int | str) -> ModelRecord:
        """The model of a version number or an alias. Raises LedgerError with what there is instead."""
        client = self.client
        try:
            if isinstance(version, int):
                found = client.get_model_version(name, str(version))
            else:
                found = client.get_model_version_by_alias(name, version)
        except LedgerError as error:
            if error.code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise LedgerError(self._what_there_is(name, version), code="RESOURCE_DOES_NOT_EXIST") from error
        model_id = found.tags.get(_MODEL_ID) or found.model_id
        if model_id is None:
            raise LedgerError(
                f"models:/{name}/{found.version} was registered by another program, without a LoggedModel. "
                "To fix: record it with record_model(..., kind='imported')."
            )
        return _record(client.get_logged_model(model_id), name=name, version=int(found.version))

    def _what_there_is(self, name: str, version: int | str) -> str:
        client = self.client
        try:
            registered = client.get_registered_model(name)
        except LedgerError:
            names = sorted(model.name for model in client.search_registered_models(max_results=100))
            return f"there is no registered model {name!r}; there are {names or 'none yet'}"
        if isinstance(version, str):
            aliases = sorted(registered.aliases)
            return f"model {name!r} has no alias {version!r}; it has {aliases or 'none yet'}"
        versions = sorted(int(found.version) for found in client.search_model_versions(f"name = '{name}'"))
        return f"model {name!r} has no version {version}; it has {versions or 'none yet'}"


def _record(model: Any, *, name: str | None = None, version: int | None = None) -> ModelRecord:
    tags = model.tags
    if version is None:
        for entry in json.loads(tags.get(_VERSIONS, "[]"))[-1:]:
            name, version = entry["name"], int(entry["version"])
    name = name or tags.get(_NAME) or model.name
    return ModelRecord(
        model_id=model.model_id,
        registered_name=name,
        version=version,
        uri=f"models:/{model.model_id}" if version is None else f"models:/{name}/{version}",
        kind=tags.get(_KIND, "imported"),
        parents=tuple(json.loads(tags.get(_PARENTS, "[]"))),
        datasets=_datasets(tags),
        run_id=model.source_run_id,
        experiment_id=str(model.experiment_id),
    )


def _datasets(tags: Mapping[str, str]) -> tuple[DatasetInput, ...]:
    return tuple(DatasetInput(**entry) for entry in json.loads(tags.get(_DATASETS, "[]")))


def _child_tags(tags: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in tags.items() if key.startswith(_CHILD)}


def _model_link(record: ModelRecord) -> str:
    if record.version is None:
        path = links.logged_model_path(str(record.experiment_id), record.model_id)
        return links.link(record.registered_name, path)
    text = f"{record.registered_name} version {record.version}"
    return links.link(text, links.model_version_path(record.registered_name, record.version))


def _dataset_inputs(datasets: Sequence[DatasetInput]) -> list[Any]:
    """MLflow's form. It keeps one input of a (name, digest): where a use differs, the use joins the name."""
    from mlflow.entities import Dataset, InputTag
    from mlflow.entities import DatasetInput as MlflowDatasetInput

    identities = [(dataset.name, dataset.digest) for dataset in datasets]
    inputs = []
    for dataset in datasets:
        is_shared = identities.count((dataset.name, dataset.digest)) > 1
        entity = Dataset(
            name=f"{dataset.name} ({dataset.context})" if is_shared else dataset.name,
            digest=dataset.digest[:_DIGEST_LIMIT],
            source_type="local",
            source=json.dumps({"uri": dataset.source}),
            profile=None if dataset.num_rows is None else json.dumps({"num_rows": dataset.num_rows}),
        )
        inputs.append(MlflowDatasetInput(entity, tags=[InputTag("mlflow.data.context", dataset.context)]))
    return inputs
