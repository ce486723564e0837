"""The lineage graph, independent of MLflow: models are nodes, adaptations are edges from parents to a child."""

import graphlib
from collections.abc import Callable, Iterable, Sequence

from ringmaster.errors import LineageCycle


class Graph:
    """The models and what they were made from, by model id.

    parents: (child, parents) of each adaptation. A model may have several (it was distilled from one model, then merged
        with another). A parent that no adaptation made is a node too.
    Raises LineageCycle if a model would be its own ancestor.
    """

    def __init__(self, parents: Iterable[tuple[str, Sequence[str]]]) -> None:
        self._parents: dict[str, list[str]] = {}
        self._children: dict[str, list[str]] = {}
        for child, above in parents:
            for node in (*above, child):
                self._parents.setdefault(node, [])
                self._children.setdefault(node, [])
            for parent in above:
                if parent not in self._parents[child]:
                    self._parents[child].append(parent)
                    self._children[parent].append(child)
        try:
            self.models = tuple(graphlib.TopologicalSorter(self._parents).static_order())
        except graphlib.CycleError as error:
            path = " -> ".join(error.args[1])
            raise LineageCycle(f"these models would be their own ancestors: {path}") from error

    def parents(self, model: str) -> tuple[str, ...]:
        """Returns the models that `model` was directly made from."""
        return tuple(self._parents[model])

    def children(self, model: str) -> tuple[str, ...]:
        """Returns the models that were directly made from `model`."""
        return tuple(self._children[model])

    def ancestors(self, model: str) -> tuple[str, ...]:
        """Returns all ancestors of `model`, the nearest first, without `model` itself."""
        return _breadth_first([model], self._parents.__getitem__)

    def descendants(self, *models: str) -> tuple[str, ...]:
        """Returns all descendants of `models`, the nearest first, without `models` themselves."""
        return _breadth_first(models, self._children.__getitem__)

    def __contains__(self, model: object) -> bool:
        return model in self._parents


def _breadth_first(starts: Sequence[str], neighbours: Callable[[str], Iterable[str]]) -> tuple[str, ...]:
    reached = dict.fromkeys(starts)
    queue = list(reached)
    for node in queue:
        for neighbour in neighbours(node):
            if neighbour not in reached:
                reached[neighbour] = None
                queue.append(neighbour)
    return tuple(queue[len(set(starts)) :])
