"""Recording of models: a LoggedModel with its files and origin, and a registered version that users can browse.

Every step first looks up what an earlier attempt has recorded, so that a retry after a crash at any point continues
from there without duplicates.
"""

import json
import math
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ringmaster.errors import LedgerError, SignatureError, TensorStoreError
from ringmaster.model_lineage import model_pages
from ringmaster.model_lineage.ledger import families
from ringmaster.model_lineage.ledger.connection import paged
from ringmaster.model_lineage.ledger.runs import flat_params, param_text, valid_key
from ringmaster.model_lineage.mlflow_calls import TENSORS_SCHEME
from ringmaster.model_lineage.model_pages import CARD, hub_card
from ringmaster.model_lineage.records import ADAPTATION_KINDS, COMPONENT, DatasetInput, ModelRecord, Origin
from ringmaster.model_lineage.signatures import SIGNATURE, SignatureProof, sign, signed_digest, verify
from ringmaster.text import markdown, storable


def _recorded(model: Any) -> dict[str, Any]:
    """Returns what a signature protects of a LoggedModel's records."""
    tags = {
        key: model.tags.get(key)
        for key in (
            families.KIND,
            families.NAME,
            families.PARENTS,
            families.DATASETS,
            families.ORIGIN,
        )
    }
    return {"model_id": model.model_id, "run_id": model.source_run_id, "params": dict(model.params), **tags}


_DIGEST_LIMIT = 36  # the maximum length of a data set's digest in MLflow


class Models(families.Families):
    """The part of the ledger that records models."""

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
        origin: Origin = Origin(),
    ) -> ModelRecord:
        """Records the model in `folder`, made by run `run_id`, as the next version of `name`.

        kind: one of ADAPTATION_KINDS.
        parents: models:/NAME@ALIAS, models:/NAME/VERSION or model ids.
        metrics: also logged on the run, from which MLflow takes a model's metrics; finite values only.
        origin: further facts about how the model was made.

        A run has one model of a name: recording it again returns the existing record, with parents that it lacked.
        Raises LedgerError, before anything is recorded, if the kind is unknown, or the folder or a parent does not
        exist.
        """
        if kind not in ADAPTATION_KINDS:
            raise LedgerError(f"{kind!r} is not a kind of adaptation: use one of {', '.join(ADAPTATION_KINDS)}")
        if not folder.is_dir() or not any(folder.iterdir()):
            raise LedgerError(f"{folder} holds no model: give the folder that save_pretrained wrote")
        parent_records = [self.resolve_model(parent) for parent in parents]
        if origin.started_from is not None:
            origin = replace(origin, started_from=self.resolve_model(origin.started_from).model_id)
        model = self._made_by(run_id, name)
        if model is not None and model.model_id in [parent.model_id for parent in parent_records]:
            raise LedgerError(f"{name} cannot be its own parent. To fix: name the model that it was made from")
        tags = {
            families.KIND: kind,
            families.NAME: name,
            families.PARENTS: json.dumps([parent.model_id for parent in parent_records]),
            families.DATASETS: json.dumps([vars(dataset) for dataset in datasets]),
            families.ORIGIN: families.origin_text(origin),
            **({families.MAIN_METRIC: next(iter(metrics))} if metrics else {}),
        }
        if model is None:
            model = self._create_logged_model(run_id, name, tags=tags, params=params or {})
        elif len(json.loads(model.tags[families.PARENTS])) < len(parent_records):  # some could not be recorded then
            self.client.set_logged_model_tags(model.model_id, tags)
            model = self.client.get_logged_model(model.model_id)
            if model.status == "READY":
                self._sign(model, folder, parent_records, metrics or {})
        if model.status != "READY":
            self._store_files(model, folder, parent=parent_records[0] if parent_records else None)
            _close_to_others(model.artifact_location)
            if not (folder / CARD).exists():
                self._write_hub_card(model, parent_records, metrics or {})
            self._sign(model, folder, parent_records, metrics or {})
            self.client.finalize_logged_model(model.model_id, "READY")
        self._log_edges(run_id, model.model_id, parent_records, datasets)
        self._log_model_metrics(run_id, model.model_id, metrics or {})
        record = self._register(model, parent_records, description)
        if self.keys is not None and (
            digest := self.client.get_logged_model(record.model_id).tags.get(families.SIGNED)
        ):
            self.rewrite_page(record, lambda text: model_pages.with_signature(text, record, digest=digest))
        if datasets:
            self.write_table(run_id, model_pages.DATA_TABLE, [vars(dataset) for dataset in datasets])
        for parent in parent_records:
            self._link_child(parent, record)
        self.draw_families([record, *parent_records, *self.siblings(record)])
        return record

    def _store_files(self, model: Any, folder: Path, *, parent: ModelRecord | None) -> None:
        """Stores the files of a LoggedModel, where possible as a difference to its parent's."""
        repository = self.artifacts(model.artifact_location)
        if repository is None or not any(folder.rglob("*.safetensors")):
            self.client.log_model_artifacts(model.model_id, str(folder))
            return
        id = None if parent is None else parent.tensors_id
        try:
            stored = self.client.call(repository.log_model, folder, parent=id if id in repository.store.ids() else None)
        except TensorStoreError:  # its weights are not valid safetensors, and are stored as they are
            self.client.log_model_artifacts(model.model_id, str(folder))
        else:
            self.client.set_logged_model_tags(model.model_id, {families.TENSORS: stored.id})

    def _sign(self, model: Any, folder: Path, parents: Sequence[ModelRecord], metrics: Mapping[str, float]) -> None:
        """Adds a signature over all files of a model, and a statement of how it was made, where there is a key."""
        if self.keys is None or (key := self.keys.private) is None:
            return
        from ringmaster.model_lineage.tensors.model_files import files_of  # imports numpy

        with tempfile.TemporaryDirectory() as name:
            aside = Path(name)
            files = dict(files_of(folder))
            if CARD not in files:
                files[CARD] = self._downloaded(model, aside, CARD)
            recorded = {**_recorded(model), "metrics": dict(metrics)}
            signed = sign(files, key=key, recorded=recorded, materials=self._materials(model, parents))
            added = aside / "added"
            added.mkdir()
            for each, content in signed.items():
                (added / each).write_bytes(content)
            self.client.log_model_artifacts(model.model_id, str(added))
            self.client.set_logged_model_tags(model.model_id, {families.SIGNED: sha256(signed[SIGNATURE]).hexdigest()})

    def _materials(self, model: Any, parents: Sequence[ModelRecord]) -> list[dict[str, Any]]:
        """Returns what a model was made from, with the digests that are known."""
        origin = families.of_tag(model.tags, families.ORIGIN, dict)
        data = [
            {"name": f"data: {each['name']}", "uri": each["source"], "digest": {"ringmaster": each["digest"]}}
            for each in families.of_tag(model.tags, families.DATASETS, list)
        ]
        bases = [
            {"name": f"base: {each.uri}", "uri": f"models:/{each.model_id}", "digest": self._digest_of(each)}
            for each in parents
        ]
        texts = [(model.source_run_id, path) for path in ("training/job.json", "training/chain.json")]
        if origin.get("plan"):
            texts.append((origin["batch_run_id"], origin["plan"]))
        artifacts = [
            {"name": path, "uri": f"runs:/{run_id}/{path}", "digest": {"sha256": sha256(text.encode()).hexdigest()}}
            for run_id, path in texts
            if (text := families.unless_lost(self.read_text, run_id, path)) is not None
        ]
        code = str(origin.get("code_version") or "")
        kind, _, commit = code.partition(" ")
        code_digest = {"gitCommit": commit} if kind == "git" else {}
        return [*data, *bases, *artifacts, *([{"name": f"code: {code}", "digest": code_digest}] if code else [])]

    def _digest_of(self, record: ModelRecord) -> dict[str, str]:
        """Returns the digests of a base: that of its signature, or that of its list of tensors."""
        model = self.client.get_logged_model(record.model_id)
        if families.SIGNED in model.tags:
            with tempfile.TemporaryDirectory() as aside:
                return {"sha256": signed_digest(self._downloaded(model, Path(aside), SIGNATURE).read_bytes())}
        return {} if record.tensors_id is None else {"tensors": record.tensors_id}

    def _downloaded(self, model: Any, folder: Path, name: str) -> Path:
        """Copies a file of a model, or with the name "" all of them, to a folder. Returns the copy."""
        from mlflow.artifacts import download_artifacts

        location = f"{model.artifact_location.rstrip('/')}/{name}".rstrip("/")
        copy = self.client.call(
            download_artifacts, artifact_uri=location, dst_path=str(folder), tracking_uri=self.tracking_uri
        )
        return Path(copy)

    def verify(self, record: ModelRecord) -> SignatureProof:
        """Verifies a model's files and records as they are now in MLflow. Raises SignatureError where they differ."""
        model = self.client.get_logged_model(record.model_id)
        if self.keys is None or families.SIGNED not in model.tags:
            remedy = f"record it with a key in {self.keys.folder if self.keys else 'keys'}"
            raise SignatureError(f"{record.uri} was not signed when it was recorded. To fix: {remedy}")
        with tempfile.TemporaryDirectory() as aside:
            try:
                folder = self._downloaded(model, Path(aside), "")
            except ValueError as error:  # of the tensor store, whose contents have digests too
                if isinstance(error, LedgerError) and error.may_pass:
                    raise
                raise SignatureError(f"the files of {record.uri} cannot be read: {error}") from error
            proof = verify(folder, self.keys, model=record.uri, signature_digest=model.tags[families.SIGNED])
        recorded = dict(proof.recorded())
        metrics = {valid_key(key): value for key, value in recorded.pop("metrics").items() if math.isfinite(value)}
        now = _recorded(model)
        differing = [name for name in recorded if recorded[name] != now.get(name)]
        known = self.metrics_of(record)
        differing += [f"metric {name}" for name, value in metrics.items() if known.get(name) != value]
        if differing:
            raise SignatureError(
                f"{record.uri}: its records are not what was signed: {', '.join(differing)}. "
                "To fix: restore them in MLflow"
            )
        for material in proof.materials():
            self._check_material(record, material)
        return proof

    def _check_material(self, record: ModelRecord, material: Mapping[str, Any]) -> None:
        """Raises SignatureError where a base or a recorded text is not what the model was made from."""
        scheme, _, rest = str(material.get("uri", "")).partition(":/")
        if scheme == "models" and material["digest"]:
            now: Mapping[str, str] | None = self._digest_of(self.resolve_model(f"models:/{rest}"))
        elif scheme == "runs":
            text = families.unless_lost(self.read_text, *rest.split("/", 1))
            now = None if text is None else {"sha256": sha256(text.encode()).hexdigest()}
        else:
            return
        if now != material["digest"]:
            raise SignatureError(f"{record.uri}: {material['name']} is not what it was made from")

    def check_use(self, record: ModelRecord, use: str, *, folder: Path | None = None) -> None:
        """Verifies a model where the home's policy requires it for a use. Raises SignatureError where it fails.

        folder: the copy of its files that is about to be used.
        """
        if self.keys is not None and self.keys.requires(use):
            proof = self.verify(record)
            if folder is not None:
                proof.check(folder)

    def add_version(self, record: ModelRecord, name: str, *, text: str = "") -> ModelRecord:
        """Registers a recorded model as the next version of another registered model too. Returns that version's
        record.

        The best of several models that were trained for one name is recorded so. A repeated call changes nothing. text:
        for the model's card.
        """
        model, client = self.client.get_logged_model(record.model_id), self.client
        parents = self._parents(record)
        version = self._version(model, name, parents, text)
        known = families.of_tag(model.tags, families.VERSIONS, list)
        entry = {"name": name, "version": str(version.version)}
        tag = json.dumps([*(other for other in known if other != entry), entry])
        client.set_logged_model_tags(model.model_id, {families.VERSIONS: tag})
        added = families.record_of(client.get_logged_model(model.model_id), name=name, version=int(version.version))
        for parent in parents:  # their pages show the newest name
            self._link_child(parent, added)
        return added

    def has_run(self, run_id: str) -> bool:
        """Whether MLflow has a run, be it deleted or not."""
        return families.unless_missing(self.client.get_run, run_id) is not None

    def version_made_by(self, run_id: str, name: str) -> str | None:
        """Returns the URI of the version of model `name` that a run has made, be it purged or not; None without one."""
        versions = self.client.search_model_versions(f"run_id = '{run_id}'")
        return next((f"models:/{name}/{version.version}" for version in versions if version.name == name), None)

    def take_back(self, run_id: str) -> None:
        """Deletes a run and the models that it made, with their versions, as if they had never been recorded.

        The files are deleted by `mlflow gc`, like all files of entities deleted in MLflow.
        """
        client = self.client
        for version in client.search_model_versions(f"run_id = '{run_id}'"):
            client.delete_model_version(version.name, str(version.version))
            if not client.search_model_versions(f"name = '{version.name}'"):
                client.delete_registered_model(version.name)
        for model in client.search_logged_models([self.experiment_of(run_id)], f"source_run_id = '{run_id}'"):
            for parent in families.parents_of(model.tags):
                self._unlink_child(parent, model.model_id)
            client.delete_logged_model(model.model_id)
        client.delete_run(run_id)

    def metrics_of(self, record: ModelRecord) -> dict[str, float]:
        """Returns the metrics of a recorded model at the end of its training; finite values only."""
        return {metric.key: metric.value for metric in self.client.get_logged_model(record.model_id).metrics or []}

    def models(self) -> list[ModelRecord]:
        """Returns every model recorded in this ledger, oldest first."""
        order = [{"field_name": "creation_timestamp", "ascending": True}]
        are_models = f"tags.`{families.KIND}` != '{COMPONENT}'"
        result = paged(self.client.search_logged_models, self.experiment_ids(), are_models, order_by=order)
        return [families.record_of(model) for model in result]

    def jobs_of(self, name: str) -> list[str]:
        """Returns the names of the jobs that have made models recorded under a name."""
        result = paged(self.client.search_logged_models, self.experiment_ids(), f"tags.`{families.NAME}` = '{name}'")
        jobs = [families.record_of(model).origin.job for model in result]
        return sorted({job for job in jobs if job is not None})

    def batches_of(self, name: str) -> set[str]:
        """Returns the batches whose jobs have made the versions of a registered model; "" for what is not a job's."""
        result = set()
        for version in paged(self.client.search_model_versions, filter_string=f"name = '{name}'"):
            id = version.tags.get(families.MODEL_ID) or version.model_id
            model = None if id is None else self._logged_model(id)
            made = "" if model is None else model.tags.get(families.NAME, "")
            job = None if model is None else families.record_of(model).origin.job
            result.add(made.removesuffix(f".{job}") if made.endswith(f".{job}") else "")
        return result

    def _made_by(self, run_id: str, name: str) -> Any | None:
        """Returns the LoggedModel `name` that run `run_id` has already made, or None."""
        result = self.client.search_logged_models([self.experiment_of(run_id)], f"source_run_id = '{run_id}'")
        return next((model for model in result if model.tags.get(families.NAME) == name), None)

    def _create_logged_model(
        self, run_id: str, name: str, *, tags: Mapping[str, str], params: Mapping[str, Any]
    ) -> Any:
        return self.client.create_logged_model(
            self.experiment_of(run_id),
            name=re.sub(r"[/:.%\"']", "_", name),  # characters that a LoggedModel's name must not have
            source_run_id=run_id,
            tags=dict(tags),
            params={valid_key(key): param_text(value) for key, value in flat_params(params).items()},
            model_type=tags[families.KIND],
        )

    def _log_edges(
        self, run_id: str, model_id: str, parents: Sequence[ModelRecord], datasets: Sequence[DatasetInput]
    ) -> None:
        """Logs the run's inputs (data, parent models) and its output, for MLflow's own lineage."""
        from mlflow.entities import LoggedModelInput, LoggedModelOutput

        inputs = [LoggedModelInput(parent.model_id) for parent in parents]
        if inputs or datasets:
            self.client.log_inputs(run_id, datasets=_dataset_inputs(datasets), models=inputs)
        outputs = self.client.get_run(run_id).outputs
        if model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
            self.client.log_outputs(run_id, [LoggedModelOutput(model_id, step=0)])

    def _log_model_metrics(self, run_id: str, model_id: str, metrics: Mapping[str, float]) -> None:
        """Logs a model's metrics as metrics of its run that carry the model's id."""
        from mlflow.entities import Metric

        known = {metric.key for metric in self.client.get_logged_model(model_id).metrics or []}
        now_ms = time.time_ns() // 1_000_000
        entries = [
            Metric(valid_key(key), float(value), now_ms, 0, model_id=model_id)
            for key, value in metrics.items()
            if valid_key(key) not in known and math.isfinite(value)
        ]
        self.client.log_batch(run_id, metrics=entries)

    def _version(self, model: Any, name: str, parents: Sequence[ModelRecord], text: str) -> Any:
        """Returns the version of the registered model `name` that a LoggedModel is; creates what is missing.

        text: for the model's card.
        """
        versions = self.client.search_model_versions(f"run_id = '{model.source_run_id}'")
        own = (
            result
            for result in versions
            if result.name == name and result.tags.get(families.MODEL_ID) == model.model_id
        )
        if (version := next(own, None)) is not None:
            return version
        try:
            self.client.create_registered_model(name)
        except LedgerError as error:
            if error.code != "RESOURCE_ALREADY_EXISTS":
                raise
        return self.client.create_model_version(
            name,
            # not models:/MODEL_ID, which MLflow would look up in its global tracking URI
            source=model.artifact_location,
            run_id=model.source_run_id,
            tags={
                families.MODEL_ID: model.model_id,
                families.KIND: model.tags[families.KIND],
                families.PARENTS: model.tags[families.PARENTS],
            },
            description=self._card(model, parents, text),
            model_id=model.model_id,
            await_creation_for=None,  # the version is ready at once; MLflow would print that it waits
        )

    def _register(self, model: Any, parents: Sequence[ModelRecord], text: str) -> ModelRecord:
        """Registers the LoggedModel as a version of the registered model of its name, unless it is one already."""
        name, client = model.tags[families.NAME], self.client
        version = self._version(model, name, parents, text)
        tags = {families.NOTE: version.description}
        if not families.versions_of(model.tags):  # a model recorded earlier may have further names by now
            tags[families.VERSIONS] = json.dumps([{"name": name, "version": str(version.version)}])
        client.set_logged_model_tags(model.model_id, tags)
        return families.record_of(client.get_logged_model(model.model_id), name=name, version=int(version.version))

    def _card(self, model: Any, parents: Sequence[ModelRecord], text: str) -> str:
        run = self.client.get_run(model.source_run_id)
        batch_id = run.data.tags.get("mlflow.parentRunId")
        batch = (self.client.get_run(batch_id).info.run_name, batch_id) if batch_id else None
        return model_pages.card(
            families.record_of(model),
            text=text,
            parents=parents,
            run_name=run.info.run_name,
            batch=batch,
            metric=families.metric_of(self.client.get_logged_model(model.model_id)),
        )

    def _write_hub_card(self, model: Any, parents: Sequence[ModelRecord], metrics: Mapping[str, float]) -> None:
        """Adds a card to the model's files, so that the files show their origin wherever they are copied."""
        bases = [parent.origin.source or parent.registered_name for parent in parents]
        text = hub_card(families.record_of(model), base_models=bases, metrics=metrics, params=model.params)
        with tempfile.TemporaryDirectory() as aside:
            (Path(aside) / CARD).write_text(text, encoding="utf-8")
            self.client.log_model_artifacts(model.model_id, aside)

    def _link_child(self, parent: ModelRecord, child: ModelRecord) -> None:
        """Adds a child to the parent's page.

        Each child writes a tag of its own, so that concurrent writers lose none. The page's text is written again for
        as long as the tags have changed since they were read.
        """
        entry = {"kind": child.kind, "name": child.registered_name, "version": child.version}
        if (relation := child.relation_to(parent.model_id)) != child.kind:
            entry["relation"] = relation
        self.client.set_logged_model_tags(parent.model_id, {f"{families.CHILD}{child.model_id}": json.dumps(entry)})
        if parent.version is None:
            return
        shown: list[str] = []
        while (lines := self._child_lines(parent.model_id)) != shown:
            shown = lines
            self.rewrite_page(parent, partial(model_pages.with_children, children=lines))

    def _unlink_child(self, parent_id: str, child_id: str) -> None:
        """Removes a child that `_link_child` has added to a parent's page."""
        parent = self.client.get_logged_model(parent_id)
        if f"{families.CHILD}{child_id}" not in parent.tags:
            return
        self.client.delete_logged_model_tag(parent_id, f"{families.CHILD}{child_id}")
        self.rewrite_page(
            families.record_of(parent), partial(model_pages.with_children, children=self._child_lines(parent_id))
        )

    def _child_lines(self, model_id: str) -> list[str]:
        """Returns a line of markdown for each child, sorted by name, then by version, newest first."""
        return [
            f"{markdown(str(child.get('relation', child['kind'])))}: "
            + model_pages.link(
                f"{child['name']} version {child['version']}",
                model_pages.model_version_path(child["name"], child["version"]),
            )
            for _, child in families.children_of(self.client.get_logged_model(model_id).tags)
        ]


def _close_to_others(location: str) -> None:
    """Takes from others the access to copied files that those they were copied from have; those on a server have none.

    A group that RINGMASTER_UMASK lets in, which is this process's umask, keeps its access.
    """
    parts = urlsplit(location)
    folder = Path(unquote(parts.path))
    if parts.scheme not in ("file", TENSORS_SCHEME) or not folder.is_dir():  # on a server
        return
    taken = int(os.environ.get("RINGMASTER_UMASK") or "077", 8)
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~taken & (0o2777 if path.is_dir() else 0o666))


def _dataset_inputs(datasets: Sequence[DatasetInput]) -> list[Any]:
    """Converts data sets to MLflow's inputs.

    MLflow stores one input per (name, digest), so the name of data with several contexts gets the context appended.
    """
    from mlflow.entities import Dataset, InputTag
    from mlflow.entities import DatasetInput as MlflowDatasetInput

    identities = [(dataset.name, dataset.digest) for dataset in datasets]
    inputs = []
    for dataset in datasets:
        is_shared = identities.count((dataset.name, dataset.digest)) > 1
        entity = Dataset(
            name=storable(f"{dataset.name} ({dataset.context})" if is_shared else dataset.name),
            digest=dataset.digest[:_DIGEST_LIMIT],
            source_type="local",
            source=json.dumps({"uri": dataset.source}),
            profile=json.dumps(facts) if (facts := dataset.facts()) else None,
        )
        inputs.append(MlflowDatasetInput(entity, tags=[InputTag("mlflow.data.context", storable(dataset.context))]))
    return inputs
