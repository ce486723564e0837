"""Lookup of recorded models by alias, version or id, download of their files, and aliases."""

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from ringmaster.errors import LedgerError
from ringmaster.model_lineage.ledger.runs import Runs
from ringmaster.model_lineage.records import DatasetInput, ModelRecord, Origin

# Tags of a LoggedModel, from which its record is read. KIND, PARENTS and MODEL_ID are tags of its version too.
KIND, PARENTS, DATASETS = "ringmaster.kind", "ringmaster.parents", "ringmaster.datasets"
NAME, MODEL_ID = "ringmaster.name", "ringmaster.model_id"
ORIGIN, TENSORS = "ringmaster.origin", "ringmaster.tensors"
COMPONENT_OF = "ringmaster.component."  # followed by the component's id: a tag of each model that contains it
CHILD = "ringmaster.child."  # followed by the child's id: a tag of the parent
VERSIONS = "mlflow.modelVersions"
CULPRIT = "ringmaster.culprit"  # the test by which a bisection found that a fault began with the model

T = TypeVar("T")


class Registry(Runs):
    """The part of the ledger that finds registered models."""

    def resolve_model(self, uri: str) -> ModelRecord:
        """Returns the model for models:/NAME@ALIAS, models:/NAME/VERSION, models:/MODEL_ID or a bare model id.

        Raises LedgerError if there is no such model; the message lists what exists.
        """
        reference = uri.removeprefix("models:/")
        if by_alias := re.fullmatch(r"([^/@]+)@([\w-]+)", reference):
            return self._version_record(*by_alias.groups())
        if by_version := re.fullmatch(r"([^/@]+)/(\d+)", reference):
            return self._version_record(by_version[1], int(by_version[2]))
        if newest := self._newest_version(reference):
            raise LedgerError(
                f"{uri!r} has no alias; write models:/{reference}/{newest}", code="RESOURCE_DOES_NOT_EXIST"
            )
        if not re.fullmatch(r"m-\w+", reference):
            raise LedgerError(
                f"{uri!r} names no model: use models:/NAME@ALIAS, models:/NAME/VERSION or a model id (m-...)"
            )
        try:
            return record_of(self.client.get_logged_model(reference))
        except LedgerError as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise LedgerError(f"there is no model {reference!r} in the ledger", code=error.code) from error

    def download_model(self, uri: str, dst: Path) -> Path:
        """Copies a model's files to the folder `dst`/MODEL_ID and returns it. The folder appears complete or not at
        all.

        An existing folder is returned without copying, as a model never changes. Raises LedgerError if the files are
        gone.
        """
        from mlflow.artifacts import download_artifacts

        record = self.resolve_model(uri)
        target = dst / record.model_id
        if target.is_dir():
            return target
        dst.mkdir(parents=True, exist_ok=True)
        location = self.client.get_logged_model(record.model_id).artifact_location
        with tempfile.TemporaryDirectory(dir=dst, prefix=".download-") as temporary:
            try:
                copy = self.client.call(
                    download_artifacts, artifact_uri=location, dst_path=temporary, tracking_uri=self.tracking_uri
                )
            except LedgerError as error:
                if error.may_pass:
                    raise
                raise LedgerError(_files_gone(record, location), code="RESOURCE_DOES_NOT_EXIST") from error
            try:
                Path(copy).rename(target)
            except OSError:
                if not target.is_dir():  # otherwise another process has downloaded it
                    raise
        return target

    def set_alias(self, name: str, alias: str, version: int) -> None:
        """Points `alias` (e.g. "champion") of registered model `name` to `version`, atomically."""
        self._version_record(name, version)
        self.client.set_registered_model_alias(name, alias, str(version))

    def get_alias(self, name: str, alias: str) -> ModelRecord | None:
        """Returns the model that `alias` of `name` points to, or None if it points to none."""
        return self._if_there(name, alias)

    def get_version(self, name: str, version: int) -> ModelRecord | None:
        """Returns the model that is this version of `name`, or None if the registry has no such version (any more)."""
        return self._if_there(name, version)

    def tagged(self, key: str) -> dict[str, str]:
        """Returns the values of a tag of registered models, by model name."""
        found: dict[str, str] = {}
        token = None
        while True:
            page = self.client.search_registered_models(max_results=100, page_token=token)
            found |= {model.name: str(model.tags[key]) for model in page if key in model.tags}
            token = page.token
            if not token:
                return found

    def _if_there(self, name: str, version: int | str) -> ModelRecord | None:
        try:
            return self._version_record(name, version)
        except LedgerError as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _version_record(self, name: str, version: int | str) -> ModelRecord:
        """Returns the model of a version number or an alias. Raises LedgerError that lists what exists instead."""
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
        model_id = found.tags.get(MODEL_ID) or found.model_id
        if model_id is None:
            raise LedgerError(
                f"models:/{name}/{found.version} was registered by another program, without a LoggedModel. "
                "To fix: record it with record_model(..., kind='imported')."
            )
        return record_of(client.get_logged_model(model_id), name=name, version=int(found.version))

    def _newest_version(self, name: str) -> int | None:
        """Returns the newest version of a registered model, or None if there is no model of that name."""
        if not re.fullmatch(r"[^/@]+", name) or re.fullmatch(r"m-\w+", name):
            return None
        found = self.client.search_model_versions(f"name = '{name}'")
        return max((int(version.version) for version in found), default=None)

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


def of_tag(tags: Mapping[str, str], key: str, kind: type[T]) -> T:
    """Returns the JSON value of a tag, which is of that type; an empty one where there is none.

    People may change tags in MLflow. A damaged one hides what it says of its model, and nothing of other models.
    """
    try:
        found = json.loads(tags[key])
    except (KeyError, ValueError, RecursionError):
        return kind()
    return found if isinstance(found, kind) else kind()


def versions_of(tags: Mapping[str, str]) -> list[tuple[str, int]]:
    """Returns (name, version) of each registered version of a LoggedModel with these tags, the newest last."""
    entries = [entry for entry in of_tag(tags, VERSIONS, list) if isinstance(entry, dict)]
    return [
        (str(entry.get("name")), int(number))
        for entry in entries
        if re.fullmatch(r"[0-9]{1,18}", number := str(entry.get("version")))
    ]


def parents_of(tags: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the model ids of the parents of a LoggedModel with these tags."""
    return tuple(parent for parent in of_tag(tags, PARENTS, list) if isinstance(parent, str))


def children_of(tags: Mapping[str, str]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the id of each child of a LoggedModel with these tags, and the tag's name, version, kind and relation.

    They are sorted by name, then by version, newest first.
    """
    entries = [(key.removeprefix(CHILD), of_tag(tags, key, dict)) for key in tags if key.startswith(CHILD)]
    whole = [
        (id, entry)
        for id, entry in entries
        if isinstance(entry.get("version"), int) and all(isinstance(entry.get(key), str) for key in ("name", "kind"))
    ]
    return sorted(whole, key=lambda child: (child[1]["name"], -child[1]["version"]))


def record_of(model: Any, *, name: str | None = None, version: int | None = None) -> ModelRecord:
    """Returns the record in a LoggedModel's tags, as the given name and version or as its latest version."""
    tags: Mapping[str, str] = model.tags
    if version is None:
        for newest in versions_of(tags)[-1:]:
            name, version = newest
    name = name or tags.get(NAME) or str(model.name)
    return ModelRecord(
        model_id=model.model_id,
        registered_name=name,
        version=version,
        uri=f"models:/{model.model_id}" if version is None else f"models:/{name}/{version}",
        kind=tags.get(KIND, "imported"),
        parents=parents_of(tags),
        datasets=tuple(filter(None, (_of_fields(DatasetInput, entry) for entry in of_tag(tags, DATASETS, list)))),
        run_id=model.source_run_id,
        experiment_id=str(model.experiment_id),
        components=tuple(sorted(key.removeprefix(COMPONENT_OF) for key in tags if key.startswith(COMPONENT_OF))),
        origin=_of_fields(Origin, of_tag(tags, ORIGIN, dict)) or Origin(),
        tensors_id=tags.get(TENSORS),
    )


def _files_gone(record: ModelRecord, location: str) -> str:
    version = "" if record.version is None else f" version {record.version}"
    way = (
        f"`ringmaster lineage restore {record.model_id} FOLDER` has them from the tensor store"
        if record.tensors_id
        else "bring them back from a back-up"
    )
    return f"the files of {record.registered_name}{version} are gone from {location}. To fix: {way}"


def origin_text(origin: Origin) -> str:
    """Returns the tag's text for an origin: the fields that are set, as JSON."""
    return json.dumps({key: value for key, value in vars(origin).items() if value is not None})


def _of_fields(cls: Callable[..., T], entry: Any) -> T | None:
    """Returns the record in a tag, without fields that a later release added; None where a field is missing."""
    known = {field.name: str(field.type) for field in dataclasses.fields(cast("Any", cls))}
    given = entry if isinstance(entry, dict) else {}
    try:
        return cls(**{key: value for key, value in given.items() if _is_of(value, known.get(key, ""))})
    except TypeError:
        return None


def _is_of(value: Any, annotation: str) -> bool:
    """Whether a value may be that of a field, which is a text or a number."""
    return type(value).__name__ in annotation or (value is None and "None" in annotation)
