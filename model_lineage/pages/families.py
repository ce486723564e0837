"""The family picture on each model's page: ancestors, siblings and children, redrawn when a child is added."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ringmaster.model_lineage.faults import LedgerError
from ringmaster.model_lineage.ledger.registry import CHILD, Registry, record_of
from ringmaster.model_lineage.pages.cards import family_path
from ringmaster.model_lineage.pages.pictures import Relative, family_svg
from ringmaster.model_lineage.records import ModelRecord

MOST_ANCESTORS, MOST_SIBLINGS, MOST_CHILDREN = 12, 6, 8  # the most relatives that are drawn; the others are counted


class Families(Registry):
    """A ledger mixin that draws model families."""

    def draw_families(self, records: Sequence[ModelRecord]) -> None:
        """Draws the family of each of the given models and stores it among the artifacts of the model's run."""
        for record in records:
            if record.run_id is not None:
                self.write_svg(record.run_id, family_path(record), self.family_picture(record))

    def siblings(self, record: ModelRecord) -> list[ModelRecord]:
        """Returns the other children of a model's parents, as many as a page shows; their pages show the model too."""
        ids = [child.id for parent in record.parents for child in self._children(parent)[: MOST_SIBLINGS + 1]]
        found = [self._known(id) for id in dict.fromkeys(ids) if id != record.model_id]
        return [sibling for sibling in found if sibling is not None]

    def family_picture(self, record: ModelRecord) -> str:
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
        return family_svg(list(relatives.values()), dict.fromkeys(edges), focus=record.model_id)

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
        entries = [(key.removeprefix(CHILD), json.loads(text)) for key, text in tags.items() if key.startswith(CHILD)]
        entries.sort(key=lambda entry: (entry[1]["name"], -entry[1]["version"]))
        return [
            Relative(id=id, title=f"{entry['name']} v{entry['version']}", kind=entry["kind"]) for id, entry in entries
        ]

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
    version = "" if record.version is None else f" v{record.version}"
    return Relative(id=record.model_id, title=f"{record.registered_name}{version}", kind=record.kind)


def _gone(model_id: str) -> Relative:
    return Relative(id=model_id, title=model_id, kind="deleted")
