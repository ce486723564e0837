"""The policy file, which defines when a challenger becomes the champion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch.data_schema import Section
from ringmaster.tasks.batch.faults import Finding
from ringmaster.tasks.batch.field_types import Metric, Name, Positive, Whole
from ringmaster.tasks.evaluation import declared
from ringmaster.tasks.evaluation.suite import Suite, load_suite
from ringmaster.tasks.files import is_file

Probability = Annotated[float, Field(gt=0, lt=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ApprovalEntry(Section):
    """A person's approval, requested in Prefect's UI."""

    timeout_s: Positive = Field(default=86_400.0, description="seconds to wait for the answer, such as 3600")


class PolicyEntry(Section):
    """A whole policy file."""

    name: Name = Field(description="a name, such as careful")
    metric: Metric | None = Field(default=None, description="the metric that decides, such as accuracy")
    min_gain: Amount = Field(default=0.0, description="by how much a challenger must be better, such as 0.005")
    significance: Probability | None = Field(
        default=0.05, description="the chance of seeing such a gain where there is none must be below, such as 0.05"
    )
    max_loss: Amount | None = Field(default=None, description="the most that a slice may lose, such as 0.02")
    min_slice_rows: Whole = Field(default=20, description="the rows that a slice must have to be compared, such as 20")
    suites: list[str] = Field(default=[], description="files of slices, tests and assertions, such as [tests.yaml]")
    max_rows: Whole | None = Field(
        default=None,
        description="the most rows that are read, such as 5000; by default 2000 held-out rows, or all of compare_on",
    )
    approval: ApprovalEntry | None = Field(default=None, description="who must agree, such as {timeout_s: 3600}")


MAX_HELD_OUT = 2000
MORE_SLICES = "name a suite with slices, or leave max_loss out"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The rules for the promotion of a challenger; all of them must hold.

    metric: the metric that decides; None stands for the model's own.
    min_gain: in the metric's unit.
    significance: the upper bound of the paired bootstrap's p-value; None for no such test.
    max_loss: the most that any slice of at least `min_slice_rows` rows may lose; None for any loss.
    suites: their tests and assertions must pass, and their slices are compared.
    max_rows: the most rows to score; None for `MAX_HELD_OUT` held-out rows, and all rows of data to compare on.
    approval_s: seconds to wait for a person's approval; None if none is needed.
    folder: the folder of the policy file.
    """

    name: str
    metric: str | None = None
    min_gain: float = 0.0
    significance: float | None = 0.05
    max_loss: float | None = None
    min_slice_rows: int = 20
    suites: tuple[Suite, ...] = ()
    max_rows: int | None = None
    approval_s: float | None = None
    folder: Path = Path()

    @property
    def num_rows(self) -> int:
        """The most held-out rows to score."""
        return self.max_rows or MAX_HELD_OUT


def load_policy(path: Path) -> Policy:
    """Loads the policy of a YAML file. Raises BatchFileError with all faults in it and in the suites that it names."""
    suites: list[Suite] = []

    def rules(entry: PolicyEntry) -> Iterator[Finding]:
        has_faults = False
        for i, name in enumerate(entry.suites):
            for finding in _read_suite(path.parent, name, suites):
                has_faults = True
                yield replace(finding, place=("suites", i))
        if entry.max_loss is not None and not has_faults and not any(suite.slices for suite in suites):
            yield Finding(("max_loss",), "asks for slices, and no suite has any", MORE_SLICES)
        elif entry.max_loss is not None and not suites:
            yield Finding(("max_loss",), "asks for the slices of a suite that cannot be read", MORE_SLICES)

    entry = declared.load(path, PolicyEntry, rules=rules, what="a policy, such as policy.yaml")
    return Policy(
        name=entry.name,
        metric=entry.metric,
        min_gain=entry.min_gain,
        significance=entry.significance,
        max_loss=entry.max_loss,
        min_slice_rows=entry.min_slice_rows,
        suites=tuple(suites),
        max_rows=entry.max_rows,
        approval_s=None if entry.approval is None else entry.approval.timeout_s,
        folder=path.parent.resolve(),
    )


def _read_suite(folder: Path, name: str, suites: list[Suite]) -> Iterator[Finding]:
    """Adds a suite to `suites`; yields its faults if it has any."""
    if not is_file(folder, name):
        remedy = "copy it there, name a file relative to the policy's folder, or leave suites out"
        yield Finding((), f"there is no file {name!r} beside this one", remedy)
        return
    try:
        suites.append(load_suite(folder / name))
    except BatchFileError as error:
        for fault in error.faults:
            place = f"{fault.file}:{fault.line or 1}: {fault.place}".rstrip()
            yield Finding((), f"{place} {fault.message}", fault.remedy)
