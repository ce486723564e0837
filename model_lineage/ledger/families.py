"""Lookup of recorded models by alias, version or id, download of their files, aliases, and the pictures of families."""

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from ringmaster.errors import LedgerError
from ringmaster.model_lineage.ledger.connection import paged
from ringmaster.model_lineage.ledger.runs import LedgerRuns
from ringmaster.model_lineage.model_pages import (
    Relative,
    family_path,
    family_svg,
    with_states,
)
from ringmaster.model_lineage.records import DatasetInput, ModelRecord, Origin, metric_text, states_of

# Tags of a LoggedModel, from which its record is read. KIND, PARENTS and MODEL_ID are tags of its version too.
KIND, PARENTS, DATASETS = "ringmaster.kind", "ringmaster.parents", "ringmaster.datasets"
NAME, MODEL_ID = "ringmaster.name", "ringmaster.model_id"
ORIGIN, TENSORS = "ringmaster.origin", "ringmaster.tensors"
SIGNED = "ringmaster.signature"  # the SHA-256 of the signature
COMPONENT_OF = "ringmaster.component."  # followed by the component's id: a tag of each model that contains it
CHILD = "ringmaster.child."  # followed by the child's id: a tag of the parent
VERSIONS = "mlflow.modelVersions"
CHALLENGER_OF = "ringmaster.challenger_of"
"""A tag of a sweep's best model: the registered model whose challenger the sweep's file makes it, or NOBODY."""
NOBODY = "-"
DECISION = "ringmaster.decision"  # a tag of a version: the last decisions about it
MAIN_METRIC, NUM_ROWS = "ringmaster.metric", "num_evaluated_rows"
"""A tag of a model, the name of its main metric, and a parameter, the number of rows that it is of."""
UNDONE = "ringmaster.undone"  # what was undone, so that other models were made in place of this one
CULPRIT = "ringmaster.culprit"  # the test by which a fault was found to have begun with the model
NOTE = "mlflow.note.content"  # the text on the page of a run or a model

T = TypeVar("T")


def unless_missing(call: Callable[..., T], *args: Any) -> T | None:
    """Returns the result of a call to MLflow, or None where the requested object does not exist."""
    try:
        return call(*args)
    except LedgerError as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def unless_lost(call: Callable[..., T], *args: Any) -> T | None:
    """Returns the result of a call to the ledger; None where it fails, and would fail again."""
    try:
        return call(*args)
    except LedgerError as error:
        if error.may_pass:
            raise
        return None


def final_fault(call: Callable[..., object], *args: Any) -> str | None:
    """Makes a call to the ledger; returns why it failed, if it would fail again."""
    try:
        call(*args)
    except LedgerError as error:
        if error.may_pass:
            raise
        return str(error)
    return None


class ModelRegistry(LedgerRuns):
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
        if (model := self._logged_model(reference)) is None:
            raise LedgerError(f"there is no model {reference!r} in the ledger", code="RESOURCE_DOES_NOT_EXIST")
        return record_of(model)

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
            os.utime(target)  # `gc` removes copies that are not used
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
        return unless_missing(self._version_record, name, alias)

    def get_version(self, name: str, version: int) -> ModelRecord | None:
        """Returns the model that is this version of `name`, or None if the registry has no such version (any more)."""
        return unless_missing(self._version_record, name, version)

    def tagged(self, key: str) -> dict[str, str]:
        """Returns the values of a tag of registered models, by model name."""
        every = paged(self.client.search_registered_models, max_results=100)
        return {model.name: str(model.tags[key]) for model in every if key in model.tags}

    def model_versions(self) -> Iterator[Any]:
        """Yields every version of every registered model, as MLflow has it; none where there is no database yet."""
        if self.file is not None and not self.file.exists():
            return
        yield from paged(self.client.search_model_versions)

    def _logged_model(self, model_id: str) -> Any | None:
        """Returns a LoggedModel, or None if it was deleted."""
        return unless_missing(self.client.get_logged_model, model_id)

    def _version_record(self, name: str, version: int | str) -> ModelRecord:
        """Returns the model of a version number or an alias. Raises LedgerError that lists what exists instead."""
        client = self.client
        try:
            if isinstance(version, int):
                result = client.get_model_version(name, str(version))
            else:
                result = client.get_model_version_by_alias(name, version)
        except LedgerError as error:
            if error.code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise LedgerError(self._what_there_is(name, version), code="RESOURCE_DOES_NOT_EXIST") from error
        model_id = result.tags.get(MODEL_ID) or result.model_id
        if model_id is None:
            raise LedgerError(
                f"models:/{name}/{result.version} was registered by another program, without a LoggedModel. "
                "To fix: record it with record_model(..., kind='imported')."
            )
        return record_of(client.get_logged_model(model_id), name=name, version=int(result.version))

    def _newest_version(self, name: str) -> int | None:
        """Returns the newest version of a registered model, or None if there is no model of that name."""
        if not re.fullmatch(r"[^/@]+", name) or re.fullmatch(r"m-\w+", name):
            return None
        result = self.client.search_model_versions(f"name = '{name}'")
        return max((int(version.version) for version in result), default=None)

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
        versions = sorted(int(result.version) for result in client.search_model_versions(f"name = '{name}'"))
        return f"model {name!r} has no version {version}; it has {versions or 'none yet'}"


def of_tag(tags: Mapping[str, str], key: str, kind: type[T]) -> T:
    """Returns the JSON value of a tag, which is of that type; an empty one where there is none.

    Users may change tags in MLflow. A damaged one hides its content of its model, and nothing of other models.
    """
    try:
        result = json.loads(tags[key])
    except (KeyError, ValueError, RecursionError):
        return kind()
    return result if isinstance(result, kind) else kind()


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


MAX_ANCESTORS, MAX_SIBLINGS, MAX_CHILDREN = 12, 6, 8  # the most relatives that are drawn; the others are counted
MAX_REDRAWN = 50  # pictures that one finding redraws


@dataclass(frozen=True, kw_only=True)
class FamilyMarks:
    """What pictures show of the registry: aliases and the last decision by title, and the ids of culprits."""

    aliases: Mapping[str, Sequence[str]]
    outcomes: Mapping[str, str]
    culprits: frozenset[str]
    experiment_ids: Sequence[str]

    def states(self, model: Any) -> tuple[str, ...]:
        """Returns the states of a LoggedModel, under any of its names."""
        titles = [_title(*version) for version in versions_of(model.tags)]
        outcomes = [self.outcomes[title] for title in titles if title in self.outcomes]
        return states_of(
            aliases=[alias for title in titles for alias in self.aliases.get(title, ())],
            outcome=outcomes[-1] if outcomes else None,
            is_undone=UNDONE in model.tags,
            is_ready=model.status == "READY",
        )


class Families(ModelRegistry):
    """A ledger mixin that draws model families."""

    def draw_families(self, records: Sequence[ModelRecord]) -> None:
        """Draws the family of each of the given models and stores it among the artifacts of the model's run."""
        marks = self.marks()
        for record in {record.model_id: record for record in records}.values():
            self._draw(record, marks)

    def redraw(self, *records: ModelRecord) -> None:
        """Redraws the pictures on which some models are: their own, and those of parents, siblings and children.

        A picture that cannot be stored, as its run was deleted, stays as it is.
        """
        near = [known for each in records for known in [each, *self._parents(each), *self.siblings(each)]]
        children = [child.id for record in records for child in self._children(record.model_id)]
        result = [*near, *(known for id in children if (known := self._known(id)) is not None)]
        marks = self.marks()
        named = {record.model_id: record for record in records}
        for known in {known.model_id: known for known in result[:MAX_REDRAWN]}.values():
            try:
                self._draw(known, marks)
                if (model := named.get(known.model_id)) is not None:
                    states = marks.states(self.client.get_logged_model(model.model_id))
                    self.rewrite_page(model, partial(with_states, states=states))
            except LedgerError as error:
                if error.may_pass:
                    raise

    def _draw(self, record: ModelRecord, marks: FamilyMarks) -> None:
        if record.run_id is not None:
            self.write_svg(record.run_id, family_path(record), self.family_picture(record, marks))

    def mark_culprit(self, record: ModelRecord, *, by: str, reached: Sequence[ModelRecord] = ()) -> None:
        """Marks a model as the one with which a fault began, in the pictures of its family.

        by: the test that found it. reached: the descendants of the model.
        """
        self.client.set_logged_model_tags(record.model_id, {CULPRIT: by})
        self.redraw(record, *reached)

    def mark_undone(self, record: ModelRecord, what: str) -> None:
        """Marks a model that is taken out of the line, or in whose place another one was made without `what`."""
        self.client.set_logged_model_tags(record.model_id, {UNDONE: what})
        self.redraw(record)

    def rewrite_page(self, record: ModelRecord, rewrite: Callable[[str], str]) -> None:
        """Changes the text on a model's page, which is the description of its version and the note of its LoggedModel.

        A model without a version has no page.
        """
        if record.version is not None:
            name, number = record.registered_name, str(record.version)
            text = rewrite(self.client.get_model_version(name, number).description or "")
            self.client.update_model_version(name, number, text)
            self.client.set_logged_model_tags(record.model_id, {NOTE: text})

    def marks(self) -> FamilyMarks:
        """Returns what pictures mark, in a few requests for a registry of up to 1,000 models."""
        aliases, experiment_ids = dict[str, list[str]](), self.experiment_ids()
        for model in paged(self.client.search_registered_models):
            for alias, version in model.aliases.items():
                aliases.setdefault(_title(model.name, version), []).append(alias)
        culprits = self.client.search_logged_models(experiment_ids, f"tags.`{CULPRIT}` != ''")
        return FamilyMarks(
            aliases=aliases,
            outcomes={_title(*version): outcome for version, outcome in self.outcomes().items()},
            culprits=frozenset(model.model_id for model in culprits),
            experiment_ids=experiment_ids,
        )

    def outcomes(self) -> dict[tuple[str, int], str]:
        """Returns the outcome of the last decision about each version (name, number) that there is one about."""
        decided = paged(self.client.search_model_versions, filter_string=f"tags.`{DECISION}` != ''")
        return {
            (version.name, int(version.version)): outcome
            for version in decided
            if (outcome := outcome_in(version.tags)) is not None
        }

    def siblings(self, record: ModelRecord) -> list[ModelRecord]:
        """Returns the other children of a model's parents, as many as a page shows; their pages show the model too."""
        ids = [child.id for parent in record.parents for child in self._children(parent)[: MAX_SIBLINGS + 1]]
        result = [self._known(id) for id in dict.fromkeys(ids) if id != record.model_id]
        return [sibling for sibling in result if sibling is not None]

    def family_picture(self, record: ModelRecord, marks: FamilyMarks) -> str:
        """Returns the drawing (SVG) of a model's family, built from the tags of its relatives."""
        relatives = {record.model_id: _relative(record)}
        edges: list[tuple[str, str]] = []
        todo = [record]
        for model in todo:
            for parent in model.parents:
                edges.append((parent, model.model_id))
                if parent not in relatives and len(relatives) <= MAX_ANCESTORS:
                    result = self._known(parent)
                    relatives[parent] = (
                        _relative(result) if result else Relative(id=parent, title=parent, kind="deleted")
                    )
                    todo += [result] if result else []
        for parent in record.parents:
            if parent in relatives:
                self._add_children(parent, relatives, edges, most=MAX_SIBLINGS)
        self._add_children(record.model_id, relatives, edges, most=MAX_CHILDREN)
        models = self._models(list(relatives), experiment_ids=marks.experiment_ids)
        boxes = [
            replace(each, **_shown(models[each.id], marks)) if each.id in models else each
            for each in relatives.values()
        ]
        return family_svg(boxes, dict.fromkeys(edges), focus=record.model_id)

    def _models(self, ids: Sequence[str], *, experiment_ids: Sequence[str]) -> dict[str, Any]:
        """Returns the LoggedModels with some ids, in one request."""
        among = ", ".join(f"'{id}'" for id in ids if re.fullmatch(r"m-\w+", id))
        if not among:
            return {}
        models = paged(self.client.search_logged_models, list(experiment_ids), f"model_id IN ({among})")
        return {model.model_id: model for model in models}

    def _add_children(
        self, parent: str, relatives: dict[str, Relative], edges: list[tuple[str, str]], *, most: int
    ) -> None:
        """Adds at most `most` children of `parent`, newest first; all others become one box with their number."""
        left_out = 0
        for child in self._children(parent):
            if child.id not in relatives:
                if most == 0:
                    left_out += 1
                    continue
                most -= 1
                relatives[child.id] = child
            edges.append((parent, child.id))
        if left_out:
            more = Relative(id=f"more of {parent}", title=f"and {left_out} more", kind="children")
            relatives[more.id] = more
            edges.append((parent, more.id))

    def _children(self, model_id: str) -> list[Relative]:
        model = self._logged_model(model_id)
        tags = {} if model is None else model.tags
        return [
            Relative(id=id, title=_title(entry["name"], entry["version"]), kind=entry["kind"])
            for id, entry in children_of(tags)
        ]

    def _parents(self, record: ModelRecord) -> list[ModelRecord]:
        return [known for id in record.parents if (known := self._known(id)) is not None]

    def _known(self, model_id: str) -> ModelRecord | None:
        model = self._logged_model(model_id)
        return None if model is None else record_of(model)


def _shown(model: Any, marks: FamilyMarks) -> dict[str, Any]:
    """Returns what the box of a LoggedModel shows in addition to its name and kind."""
    data = [each for each in record_of(model).datasets if each.context == "training"]
    return {
        "metric": metric_of(model),
        "data": ", ".join(each.short_label for each in data),
        "states": marks.states(model),
        "is_culprit": model.model_id in marks.culprits,
    }


def metric_of(model: Any) -> str:
    """Returns the main metric of a LoggedModel, with the number of its rows."""
    metrics = {metric.key: metric.value for metric in model.metrics or []}
    return metric_text(metrics, main=model.tags.get(MAIN_METRIC), num_rows=(model.params or {}).get(NUM_ROWS))


def outcome_in(tags: Mapping[str, str]) -> str | None:
    """Returns the outcome of the last decision in the tags of a version, or None."""
    last = next(iter(of_tag(tags, DECISION, list)[-1:]), None)
    outcome = last.get("outcome") if isinstance(last, dict) else None
    return outcome if isinstance(outcome, str) else None


def _relative(record: ModelRecord) -> Relative:
    title = record.registered_name if record.version is None else _title(record.registered_name, record.version)
    return Relative(id=record.model_id, title=title, kind=record.kind)


def _title(name: str, version: int | str) -> str:
    return f"{name} v{version}"
