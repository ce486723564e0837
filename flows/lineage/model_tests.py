"""Tests of models, as `bisect` runs them: a shell command on a model's files, or a bound on a recorded metric."""

from __future__ import annotations

import operator
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ringmaster.flows.faults import InputError
from ringmaster.model_lineage.snapshot import Node

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
FOLDER_VARIABLE = "RINGMASTER_MODEL"
SKIP = 125  # what git bisect run takes for "cannot be tested"


@dataclass(frozen=True, kw_only=True)
class MetricTest:
    """Good where a recorded metric compares so with a value."""

    metric: str
    comparison: str
    value: float

    def applies_to(self, node: Node) -> bool:
        """Whether the model has that metric."""
        return self.metric in node.metrics

    def is_good(self, node: Node) -> bool:
        """Whether the model passes."""
        return COMPARISONS[self.comparison](node.metrics[self.metric], self.value)


@dataclass(frozen=True, kw_only=True)
class CommandTest:
    """Good where a shell command, given the model's folder as its last argument, ends with 0."""

    command: str

    def is_good(self, folder: Path) -> bool | None:
        """Runs it; what it prints goes to stderr. None where it says that this model cannot be tested.

        Raises InputError where it could not be run to its end, which says nothing of the model.
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
    """`loss<2.5` is a bound on a recorded metric; all else is a shell command. Raises InputError on an empty one."""
    if match := re.fullmatch(r"\s*([\w./-]+?)\s*(<=|>=|<|>)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*", text):
        return MetricTest(metric=match[1], comparison=match[2], value=float(match[3]))
    if not text.strip():
        raise InputError(["the test is empty. To fix: give a shell command, or a bound such as 'loss<2.5'"])
    return CommandTest(command=text)
