"""Bisection: the search for the adaptation that broke a model, which can resume after an interruption.

A test of a model is a shell command on its files, or a bound on a recorded metric.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringmaster.errors import InputError, input_errors
from ringmaster.features.bisection.fault_search import BisectionResult, BreakingAdaptation, blame, every_bad, first_bad
from ringmaster.files import write_atomically
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.model_lineage import model_pages
from ringmaster.model_lineage.exporting import node_json
from ringmaster.model_lineage.records import INDEXED
from ringmaster.model_lineage.snapshot import LineageNode
from ringmaster.techniques.checkpoints.storage import checkpoint_steps
from ringmaster.text import code_span

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
FOLDER_VARIABLE = "RINGMASTER_MODEL"
PAGE_LINE = "**A fault began here**, "
SKIP = 125  # "cannot be tested", as in git bisect run


@dataclass(frozen=True, kw_only=True)
class MetricTest:
    """A test that a model passes if a recorded metric satisfies a bound.

    metric: name of the metric.
    comparison: a key of COMPARISONS.
    value: the bound.
    """

    metric: str
    comparison: str
    value: float

    def is_good(self, node: LineageNode) -> bool:
        """Returns whether the model passes."""
        return COMPARISONS[self.comparison](node.metrics[self.metric], self.value)


@dataclass(frozen=True, kw_only=True)
class CommandTest:
    """A test that a model passes if a shell command, with the model's folder as its last argument, exits with 0."""

    command: str

    def is_good(self, folder: Path) -> bool | None:
        """Runs the command, with its output on stderr; returns None if the command reports that it cannot test this
        model.

        Raises InputError if the command failed to complete, which is not a result about the model.
        """
        done = subprocess.run(
            ["/bin/sh", "-c", f'exec 1>&2; {self.command} "$@"', "sh", str(folder)],
            env={**os.environ, FOLDER_VARIABLE: str(folder)},
            check=False,
        )
        if done.returncode == SKIP:
            return None
        if done.returncode in (126, 127) or done.returncode < 0 or done.returncode > 127:
            raise InputError(
                [
                    f"the test did not complete: `{self.command} {folder}` ended with {done.returncode}. "
                    "To fix: let it end with 0 for a good model, with 1 for a bad one, and with 125 for one that "
                    "cannot be tested; the same command then continues from here"
                ]
            )
        return done.returncode == 0


def parse_test(text: str) -> MetricTest | CommandTest:
    """Parses a test: `loss<2.5` is a bound on a recorded metric, other text a shell command.

    Raises InputError if the text is empty.
    """
    if match := re.fullmatch(r"\s*([\w./-]+?)\s*(<=|>=|<|>)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*", text):
        return MetricTest(metric=match[1], comparison=match[2], value=float(match[3]))
    if not text.strip():
        raise InputError(["the test is empty. To fix: give a shell command, or a bound such as 'loss<2.5'"])
    return CommandTest(command=text)


class TestResults:
    """Results of a test by model id, and by "ID step N" for checkpoints; stored in a file until the search ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.known: dict[str, bool | None] = json.loads(file.read_text()) if file.exists() else {}

    @classmethod
    def of(cls, folder: Path, *, model: str, test: str) -> TestResults:
        """Returns the stored results of an interrupted search for what broke `model` by `test`, or an empty object."""
        return cls(folder / f"{hashlib.sha256(json.dumps([model, test]).encode()).hexdigest()[:32]}.json")

    def put(self, key: str, is_good: bool | None) -> None:
        """Stores a result; None means that the model cannot be tested."""
        self.known[key] = is_good
        write_atomically(self._file, json.dumps(self.known).encode())

    def forget(self) -> None:
        """Deletes all results, as the search has ended, or starts again."""
        self.known.clear()
        self._file.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """One search, with a test, over the models of a home.

    home: the lineage.
    test: the test.
    results: its stored results.
    every: whether to test all models, whatever the results are.
    show: receives the progress.
    """

    home: LineageHome
    test: MetricTest | CommandTest
    results: TestResults
    every: bool
    show: Callable[[str], None]

    def run(self, node: LineageNode) -> BisectionResult:
        """Finds the adaptation that broke a model. Raises InputError if the model passes, or cannot be tested."""
        graph = self.home.snapshot.graph
        if node.id not in graph:
            raise InputError([f"{node.label} is a component: no adaptation made it. To fix: name a model"])
        if self.is_good(node.id) is not False:
            passes = self.is_good(node.id)
            self.results.forget()  # by the next time the test or the files may have changed
            text = f"{node.label} passes the test: nothing broke it. To fix: name a model that fails"
            raise InputError([text if passes else self._untestable(node)])
        return blame(graph, node.id, self.is_good, every=self.every)

    def is_good(self, id: str) -> bool | None:
        """Tests a model, and reports the result; None if it cannot be tested."""
        node = self.home.snapshot.nodes.get(id)
        if node is None:  # deleted
            return None
        return self._stored_result(node.id, node.label, lambda: self._tested(node))

    def mark(self, culprit: BreakingAdaptation, *, test: str) -> None:
        """Marks an adaptation that broke a model, by a test, on the pages of its family in MLflow."""
        snapshot, ledger = self.home.snapshot, self.home.ledger
        record = snapshot.nodes[culprit.child].record
        ledger.rewrite_page(record, lambda text: with_culprit(text, test))
        reached = [snapshot.nodes[each].record for each in snapshot.reached_from([culprit.child])]
        ledger.mark_culprit(record, by=test, reached=reached)

    def describe(self, culprit: BreakingAdaptation, *, checkpoints: bool) -> dict[str, Any]:
        """Returns the facts about an adaptation that broke a model, as JSON values."""
        label = self.home.snapshot.label
        node = self.home.snapshot.nodes[culprit.child]
        fields: dict[str, Any] = {
            "child": node.label,
            "parents": [label(parent) for parent in culprit.parents],
            "perhaps": [label(other) for other in culprit.perhaps],
            **{key: node_json(node)[key] for key in ("id", "kind", "run", "datasets", "origin")},
            "steps": None,
        }
        has_states = checkpoints and node.record.kind != INDEXED  # those of a store are vectors
        root = node.record.origin.checkpoints if has_states else None
        if root is not None and isinstance(self.test, CommandTest):
            fields["steps"] = self._steps(node, self.test, root)
        return fields

    def _steps(self, node: LineageNode, test: CommandTest, root: str) -> dict[str, Any] | None:
        """Returns between which training steps a model became bad; None if it has no checkpoints left."""
        last, names = node.record.origin.num_steps, checkpoint_steps(root)
        steps = sorted(step for step in names if last is None or step < last)
        if not steps:
            return None
        points = [*steps, *([last] if last is not None else [])]

        def is_good(point: str) -> bool | None:
            if point == str(last):
                return False
            label = f"{node.label} after step {point}"
            key = f"{node.id} step {point}"
            return self._stored_result(key, label, lambda: self._at_step(node, test, root, names[int(point)], point))

        texts = [str(point) for point in points]
        changes = every_bad(texts, is_good) if self.every else [first_bad(texts, is_good)]
        ranges = [{"last_good": points[good] if good >= 0 else 0, "first_bad": points[bad]} for good, bad in changes]
        return {**ranges[-1], "checkpoints": steps, "is_monotone": len(ranges) == 1, "every": ranges}

    def _at_step(self, node: LineageNode, test: CommandTest, root: str, name: str, step: str) -> bool | None:
        from ringmaster.techniques.models.export import export_checkpoint
        from ringmaster.techniques.processes.forkserver_client import ScratchFolder

        with ScratchFolder() as aside:
            folder = aside.path / f"step-{step}"
            with input_errors(ValueError, OSError, remedy="search with --no-checkpoints"):
                export_checkpoint(root, name, finished=self.home.model_dir(node), folder=folder)
            return test.is_good(folder)

    def _stored_result(self, key: str, label: str, judge: Callable[[], bool | None]) -> bool | None:
        """Returns the stored result, or runs the test and stores its result."""
        if key in self.results.known:
            return self.results.known[key]
        is_good = judge()
        self.results.put(key, is_good)
        self.show(f"{label}: {'cannot be tested' if is_good is None else 'good' if is_good else 'bad'}")
        return is_good

    def _tested(self, node: LineageNode) -> bool | None:
        if isinstance(self.test, MetricTest):
            return self.test.is_good(node) if self.test.metric in node.metrics else None
        try:
            folder = self.home.model_dir(node)
        except ValueError:  # deleted, or out of reach
            return None
        return self.test.is_good(folder) if any(folder.rglob("*.safetensors")) else None

    def _untestable(self, node: LineageNode) -> str:
        if isinstance(self.test, MetricTest):
            there = ", ".join(sorted(node.metrics)) or "none"
            return f"{node.label} has no metric {self.test.metric!r}. It has {there}"
        return (
            f"{node.label} cannot be tested: its files are nowhere to be found, or the test ended with 125. "
            "To fix: bring them back, test a recorded metric, or name another model that fails"
        )


def with_culprit(description: str, test: str) -> str:
    """Returns `description` below a first line that a bisection by `test` found this model, instead of an earlier one.

    Returns `description` unchanged if the result would exceed what MLflow keeps.
    """
    below = description.partition("\n\n")[2] if description.startswith(PAGE_LINE) else description
    text = f"{PAGE_LINE}as a bisection found by the test {code_span(test, limit=200)}.\n\n{below}"
    return description if len(text) > model_pages.DESCRIPTION_LIMIT else text
