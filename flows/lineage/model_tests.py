"""Tests of models for `bisect`: a shell command on a model's files, or a bound on a recorded metric."""

from __future__ import annotations

import operator
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ringmaster.errors import InputError
from ringmaster.model_lineage.snapshot import Node

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
FOLDER_VARIABLE = "RINGMASTER_MODEL"
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

    def applies_to(self, node: Node) -> bool:
        """Returns whether the model has that metric."""
        return self.metric in node.metrics

    def is_good(self, node: Node) -> bool:
        """Returns whether the model passes."""
        return COMPARISONS[self.comparison](node.metrics[self.metric], self.value)


@dataclass(frozen=True, kw_only=True)
class CommandTest:
    """A test that a model passes if a shell command, with the model's folder as its last argument, exits with 0."""

    command: str

    def is_good(self, folder: Path) -> bool | None:
        """Runs the command, with its output on stderr; returns None if the command reports that it cannot test this
        model.

        Raises InputError if the command failed to run to its end, which says nothing about the model.
        """
        done = subprocess.run(
            ["sh", "-c", f'exec 1>&2; {self.command} "$@"', "sh", str(folder)],
            env={**os.environ, FOLDER_VARIABLE: str(folder)},
            check=False,
        )
        if done.returncode == SKIP:
            return None
        if done.returncode in (126, 127) or done.returncode < 0 or done.returncode > 127:
            raise InputError(
                [
                    f"the test could not be run to its end: `{self.command} {folder}` ended with {done.returncode}. "
                    "To fix: let it end with 0 for a good model, with 1 for a bad one, and with 125 for one that "
                    "cannot be tested; the same command then goes on from here"
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
