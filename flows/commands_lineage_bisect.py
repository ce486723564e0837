"""The command that finds the adaptation that broke a model, and the steps of its training in which that happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.faults import InputError
from flows.lineage_home import LineageHome, Model, Refresh, lineage_home
from flows.output import AsJson, error_console, output_console, print_json

if TYPE_CHECKING:
    from flows.lineage_tests import CommandTest, MetricTest
    from model_lineage.blame import Blame, Culprit
    from model_lineage.graph import Graph
    from model_lineage.snapshot import Node


def bisect(
    model: Model,
    test: Annotated[
        str,
        typer.Option(help="A shell command, given the model's folder, that ends with 0 for a good one; or loss<2.5."),
    ],
    every: Annotated[bool, typer.Option("--all", help="Test all ancestors: faults may come and go.")] = False,
    checkpoints: Annotated[bool, typer.Option(help="Whether to search the culprit's checkpoints too.")] = True,
    refresh: Refresh = False,
    as_json: AsJson = False,
) -> None:
    """Find the adaptation that broke a model, by testing its ancestors, and the steps in which it did."""
    from flows.lineage_tests import parse_test

    with lineage_home(is_fresh=refresh) as home:
        search = _Search(home=home, test=parse_test(test))
        node = home.find(model)
        found, untested = search.run(node, every=every)
        culprits = [search.describe(culprit, checkpoints=checkpoints) for culprit in found.culprits]
        label = home.snapshot.label
        if as_json:
            verdicts = {label(id): is_good for id, is_good in found.verdicts.items()}
            said = {"model": node.label, "test": test, "culprits": culprits, "is_monotone": found.is_monotone}
            print_json({**said, "verdicts": verdicts, "untested": [label(id) for id in untested]})
            return
        for culprit in culprits:
            output_console().print(_sentence(culprit), markup=False, soft_wrap=True)
        if not found.is_monotone:
            error_console().print("some good model came from a bad one: the fault came more than once, or was mended")
        if untested:
            error_console().print(f"not tested, and passed over: {', '.join(map(label, untested))}", markup=False)


@dataclass(frozen=True, kw_only=True)
class _Search:
    """One search: a test, over the models of a home."""

    home: LineageHome
    test: MetricTest | CommandTest

    def run(self, node: Node, *, every: bool) -> tuple[Blame, list[str]]:
        """(what was found, the ancestors that cannot be tested). Raises InputError where the model passes."""
        from model_lineage.blame import blame

        graph = self.home.snapshot.graph
        if node.id not in graph:
            raise InputError([f"{node.label} is a component: no adaptation made it. To fix: name a model"])
        line = [node.id, *graph.ancestors(node.id)]
        testable = {id for id in line if self._is_testable(id)}
        if node.id not in testable:
            raise InputError([self._untestable(node)])
        if self.is_good(node.id):
            raise InputError([f"{node.label} passes the test: nothing broke it. To fix: name a model that fails"])
        answers = {node.id: False}

        def is_good(id: str) -> bool:
            if id not in answers:
                answers[id] = self.is_good(id)
            return answers[id]

        found = blame(without(graph, line, testable), node.id, is_good, every=every)
        return found, [id for id in line if id not in testable]

    def is_good(self, id: str) -> bool:
        """Tests a model, and says so."""
        from flows.lineage_tests import MetricTest

        node = self.home.snapshot.nodes[id]
        is_good = (
            self.test.is_good(node)
            if isinstance(self.test, MetricTest)
            else self.test.is_good(self.home.model_dir(node))
        )
        error_console().print(f"{node.label}: {'good' if is_good else 'bad'}", markup=False, highlight=False)
        return is_good

    def describe(self, culprit: Culprit, *, checkpoints: bool) -> dict[str, Any]:
        """What is known of an adaptation that broke something."""
        from flows.lineage_tests import CommandTest
        from model_lineage.exporting import node_json

        node = self.home.snapshot.nodes[culprit.child]
        said: dict[str, Any] = {
            "child": node.label,
            "parents": [self.home.snapshot.label(parent) for parent in culprit.parents],
            **{key: node_json(node)[key] for key in ("id", "kind", "run", "datasets", "origin")},
            "steps": None,
        }
        if checkpoints and isinstance(self.test, CommandTest) and node.record.origin.checkpoints is not None:
            said["steps"] = self._steps(node, self.test)
        return said

    def _steps(self, node: Node, test: CommandTest) -> dict[str, Any] | None:
        """Between which steps of a training its model became bad; None where no checkpoint is left."""
        from model_lineage.blame import first_bad
        from techniques.engine.models.at_checkpoint import checkpoint_steps, export_checkpoint

        root, last = node.record.origin.checkpoints, node.record.origin.num_steps
        assert root is not None, "there is a place to look"
        names = checkpoint_steps(root)
        points = sorted(step for step in names if last is None or step < last)
        if not points:
            return None
        finished = self.home.model_dir(node)

        def is_good(point: str) -> bool:
            if point == str(last):
                return False
            with TemporaryDirectory(prefix="ringmaster-") as aside:
                folder = Path(aside) / f"step-{point}"
                try:
                    export_checkpoint(root, names[int(point)], finished=finished, folder=folder)
                except (ValueError, OSError) as error:
                    raise InputError([f"{error}. To fix: search without --checkpoints"]) from error
                is_good = test.is_good(folder)
            verdict = "good" if is_good else "bad"
            error_console().print(f"{node.label} after step {point}: {verdict}", markup=False, highlight=False)
            return is_good

        steps = [*points, *([last] if last is not None else [])]
        index, is_monotone = first_bad([str(step) for step in steps], is_good)
        return {
            "last_good": steps[index - 1] if index else 0,
            "first_bad": steps[index],
            "checkpoints": points,
            "is_monotone": is_monotone,
        }

    def _is_testable(self, id: str) -> bool:
        from flows.lineage_tests import MetricTest

        node = self.home.snapshot.nodes.get(id)
        if node is None:
            return False
        if isinstance(self.test, MetricTest):
            return self.test.applies_to(node)
        try:
            return any(self.home.model_dir(node).rglob("*.safetensors"))
        except ValueError:  # deleted, or nowhere that can be reached
            return False

    def _untestable(self, node: Node) -> str:
        from flows.lineage_tests import MetricTest

        if isinstance(self.test, MetricTest):
            there = ", ".join(sorted(node.metrics)) or "none"
            return f"{node.label} has no metric {self.test.metric!r}. It has {there}"
        return f"the files of {node.label} are nowhere to be found. To fix: bring them back, or test a recorded metric"


def without(graph: Graph, line: Sequence[str], testable: set[str]) -> Graph:
    """The ancestry with only the models that can be tested: who came from one that cannot came from its parents."""
    from model_lineage.graph import Adaptation, Graph

    def parents(id: str) -> list[str]:
        found: dict[str, None] = {}
        for parent in graph.parents(id):
            found |= dict.fromkeys([parent] if parent in testable else parents(parent))
        return list(found)

    return Graph(
        Adaptation(child=id, parents=tuple(parents(id)), kind="merged")
        for id in graph.models
        if id in {*line} & testable
    )


def _sentence(culprit: dict[str, Any]) -> str:
    came = (
        f" from {', '.join(culprit['parents'])}" if culprit["parents"] else ", which came from nothing that was tested"
    )
    data = ", ".join(dict.fromkeys(d["name"] for d in culprit["datasets"] if d["context"] == "training"))
    text = f"{culprit['child']} is where it broke: {culprit['kind']}{came}" + (f", on {data}" if data else "")
    if culprit["steps"]:
        text += f", between steps {culprit['steps']['last_good']} and {culprit['steps']['first_bad']}"
    return text
