"""The lineage graph, independent of MLflow: models are nodes, adaptations are edges from parents to a child."""

import difflib
import graphlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ringmaster.errors import LineageCycle
from ringmaster.model_lineage.records import DatasetInput


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """How model `child` was made from `parents` (several for merging and distillation), by `kind`.

    child, parents: model ids. run: the id of the run that made the child. datasets: the training and evaluation data.
    kind: one of ADAPTATION_KINDS, or what a person has written into MLflow's tags.
    """

    child: str
    parents: tuple[str, ...]
    kind: str
    run: str | None = None
    datasets: tuple[DatasetInput, ...] = ()


class Graph:
    """The models and the adaptations between them.

    A model may have several adaptations (it was distilled from one model, then merged with another). A parent that no
    adaptation made is a node too. Raises LineageCycle if a model would be its own ancestor.
    """

    def __init__(self, adaptations: Iterable[Adaptation]) -> None:
        self.adaptations = tuple(adaptations)
        self._parents: dict[str, list[str]] = {}
        self._children: dict[str, list[str]] = {}
        for adaptation in self.adaptations:
            for node in (*adaptation.parents, adaptation.child):
                self._parents.setdefault(node, [])
                self._children.setdefault(node, [])
            for parent in adaptation.parents:
                if parent not in self._parents[adaptation.child]:
                    self._parents[adaptation.child].append(parent)
                    self._children[parent].append(adaptation.child)
        try:
            self.models = tuple(graphlib.TopologicalSorter(self._parents).static_order())
        except graphlib.CycleError as error:
            path = " -> ".join(error.args[1])
            raise LineageCycle(f"these models would be their own ancestors: {path}") from error

    def made_by(self, model: str) -> tuple[Adaptation, ...]:
        """Returns the adaptations that made `model`; none for a root."""
        self._check(model)
        return tuple(adaptation for adaptation in self.adaptations if adaptation.child == model)

    def parents(self, model: str) -> tuple[str, ...]:
        """Returns the models that `model` was directly made from."""
        self._check(model)
        return tuple(self._parents[model])

    def children(self, model: str) -> tuple[str, ...]:
        """Returns the models that were directly made from `model`."""
        self._check(model)
        return tuple(self._children[model])

    def ancestors(self, model: str) -> tuple[str, ...]:
        """Returns all ancestors of `model`, the nearest first, without `model` itself."""
        self._check(model)
        return _breadth_first([model], self._parents.__getitem__)

    def descendants(self, *models: str) -> tuple[str, ...]:
        """Returns all descendants of `models`, the nearest first, without `models` themselves."""
        for model in models:
            self._check(model)
        return _breadth_first(models, self._children.__getitem__)

    def __contains__(self, model: object) -> bool:
        return model in self._parents

    def __len__(self) -> int:
        return len(self.models)

    def _check(self, model: str) -> None:
        if model not in self._parents:
            close = difflib.get_close_matches(model, self.models, n=3)
            hint = f"did you mean {', '.join(close)}?" if close else f"there are {len(self)} models"
            raise ValueError(f"the lineage has no model {model!r}; {hint}")


def _breadth_first(starts: Sequence[str], neighbours: Callable[[str], Iterable[str]]) -> tuple[str, ...]:
    reached = dict.fromkeys(starts)
    queue = list(reached)
    for node in queue:
        for neighbour in neighbours(node):
            if neighbour not in reached:
                reached[neighbour] = None
                queue.append(neighbour)
    return tuple(queue[len(set(starts)) :])
