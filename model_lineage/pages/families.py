"""The family picture on each model's page: ancestors, siblings and children, redrawn when a child is added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringmaster.errors import LedgerError
from ringmaster.model_lineage.ledger.connection import paged
from ringmaster.model_lineage.ledger.registry import CULPRIT, Registry, children_of, record_of
from ringmaster.model_lineage.pages.cards import family_path, with_culprit
from ringmaster.model_lineage.pages.pictures import Relative, family_svg
from ringmaster.model_lineage.records import CHAMPION, ModelRecord

MOST_ANCESTORS, MOST_SIBLINGS, MOST_CHILDREN = 12, 6, 8  # the most relatives that are drawn; the others are counted
MOST_REDRAWN = 50  # pictures that one finding redraws
_NOTE = "mlflow.note.content"


@dataclass(frozen=True)
class Marks:
    """What pictures mark: the titles of the models that serve, and the ids of the culprits of bisections."""

    serving: frozenset[str]
    culprits: frozenset[str]

    def on(self, relative: Relative) -> Relative:
        """Returns a box with its marks."""
        return replace(relative, serves=relative.title in self.serving, is_culprit=relative.id in self.culprits)


class Families(Registry):
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
        found = [*near, *(known for id in children if (known := self._known(id)) is not None)]
        marks = self.marks()
        for known in {known.model_id: known for known in found[:MOST_REDRAWN]}.values():
            try:
                self._draw(known, marks)
            except LedgerError as error:
                if error.may_pass:
                    raise

    def _draw(self, record: ModelRecord, marks: Marks) -> None:
        if record.run_id is not None:
            self.write_svg(record.run_id, family_path(record), self.family_picture(record, marks))

    def mark_culprit(self, record: ModelRecord, *, test: str, reached: Sequence[ModelRecord] = ()) -> None:
        """Marks a model as the one with which a fault began, on its page and in the pictures of its family.

        test: the test by which a bisection found it. reached: the descendants of the model.
        """
        self.client.set_logged_model_tags(record.model_id, {CULPRIT: test})
        if record.version is not None:
            version = self.client.get_model_version(record.registered_name, str(record.version))
            text = with_culprit(version.description or "", test)
            self.client.update_model_version(record.registered_name, str(record.version), text)
            self.client.set_logged_model_tags(record.model_id, {_NOTE: text})
        self.redraw(record, *reached)

    def marks(self) -> Marks:
        """Returns what pictures mark, in two requests for a registry of up to 1,000 models."""
        every = paged(self.client.search_registered_models)
        serving = {_title(model.name, model.aliases[CHAMPION]) for model in every if CHAMPION in model.aliases}
        culprits = self.client.search_logged_models(self.experiment_ids(), f"tags.`{CULPRIT}` != ''")
        return Marks(serving=frozenset(serving), culprits=frozenset(model.model_id for model in culprits))

    def siblings(self, record: ModelRecord) -> list[ModelRecord]:
        """Returns the other children of a model's parents, as many as a page shows; their pages show the model too."""
        ids = [child.id for parent in record.parents for child in self._children(parent)[: MOST_SIBLINGS + 1]]
        found = [self._known(id) for id in dict.fromkeys(ids) if id != record.model_id]
        return [sibling for sibling in found if sibling is not None]

    def family_picture(self, record: ModelRecord, marks: Marks) -> str:
        """Returns the drawing (SVG) of a model's family, built from the tags of its relatives."""
        relatives = {record.model_id: _relative(record)}
        edges: list[tuple[str, str]] = []
        todo = [record]
        for model in todo:
            for parent in model.parents:
                edges.append((parent, model.model_id))
                if parent not in relatives and len(relatives) <= MOST_ANCESTORS:
                    found = self._known(parent)
                    relatives[parent] = _relative(found) if found else _gone(parent)
                    todo += [found] if found else []
        for parent in record.parents:
            if parent in relatives:
                self._add_children(parent, relatives, edges, most=MOST_SIBLINGS)
        self._add_children(record.model_id, relatives, edges, most=MOST_CHILDREN)
        boxes = [marks.on(relative) for relative in relatives.values()]
        return family_svg(boxes, dict.fromkeys(edges), focus=record.model_id)

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

    def _logged_model(self, model_id: str) -> Any | None:
        """Returns a LoggedModel, or None if it was deleted."""
        try:
            return self.client.get_logged_model(model_id)
        except LedgerError as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None


def _relative(record: ModelRecord) -> Relative:
    title = record.registered_name if record.version is None else _title(record.registered_name, record.version)
    return Relative(id=record.model_id, title=title, kind=record.kind)


def _title(name: str, version: int | str) -> str:
    return f"{name} v{version}"


def _gone(model_id: str) -> Relative:
    return Relative(id=model_id, title=model_id, kind="deleted")
