"""Schema of an evaluation suite file: slices, assertions, and the tests of features.

Assertions are predicates over predictions (Kang et al., Model Assertions, MLSys 2020).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, create_model

from ringmaster.findings import Finding
from ringmaster.tasks.batch import references, yaml_sections
from ringmaster.tasks.batch.document import FileKind
from ringmaster.tasks.batch.references import Factory, Name, Whole
from ringmaster.tasks.batch.sections import Section
from ringmaster.tasks.evaluation.suite_tests import exactly_one, repeated_names, suite_tests

Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class SliceEntry(Section):
    """A way to divide the rows: exactly one of column, tokens and by."""

    name: Name = Field(description="a name, such as class")
    column: str | None = Field(default=None, description="a column of whole numbers, such as labels")
    tokens: Annotated[list[Whole], Field(min_length=1)] | None = Field(
        default=None, description="the lengths in tokens where a slice begins, rising, such as [64, 128]"
    )
    by: Factory | None = Field(
        default=None, description='"package.module:function", from a row (a dict of tensors) to a name'
    )


class RangeEntry(Section):
    """The values that a field may have."""

    field: str = Field(description="a field of a row, such as confidence")
    min: Number | None = Field(default=None, description="the least value, such as 0.5")
    max: Number | None = Field(default=None, description="the largest value, such as 1")


class ShareEntry(Section):
    """The fraction of rows that may have a value."""

    field: str = Field(default="prediction", description="a field of a row, such as prediction")
    value: int | str | bool = Field(description="the value that is counted, such as 3")
    min: Share = Field(default=0.0, description="the least share of all rows, such as 0.05")
    max: Share = Field(default=1.0, description="the largest share of all rows, such as 0.3")


class ConsistentEntry(Section):
    """Rows of one group have equal values: augmentations of one input, or frames of one film."""

    field: str = Field(default="prediction", description="a field of a row, such as prediction")
    by: str | None = Field(default=None, description="the field that rows of one group share, such as image_id")


class SteadyEntry(Section):
    """Values of neighbouring rows in one group, in the order of the file, do not jump."""

    field: str = Field(default="prediction", description="a field of a row, such as prediction")
    by: str | None = Field(default=None, description="the field that rows of one group share, such as camera")
    max_change: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="by how much a number may change from row to row, such as 0.5"
    )


class AssertionEntry(Section):
    """One predicate over predictions: exactly one of finite, range, share, consistent, steady and predicate."""

    name: Name = Field(description="a name, such as confident")
    finite: Annotated[list[str], references.Distinct] | None = Field(
        default=None, description="fields that are never missing, NaN or infinite, such as [probabilities]"
    )
    range: RangeEntry | None = Field(default=None, description="such as {field: confidence, min: 0.5}")
    share: ShareEntry | None = Field(default=None, description="such as {value: 3, min: 0.05, max: 0.2}")
    consistent: ConsistentEntry | None = Field(default=None, description="such as {by: image_id}")
    steady: SteadyEntry | None = Field(default=None, description="such as {field: price, max_change: 2.0}")
    predicate: Factory | None = Field(
        default=None, description='"package.module:function", from a row (a dict) to whether it is right'
    )
    where: dict[str, int | str | bool] = Field(
        default={}, description="the values of the rows to check, such as {country: NZ}"
    )
    max_failures: Share = Field(default=0.0, description="the share of rows that may fail, such as 0.01")


class Suite(Section):
    """A whole suite file."""

    name: Name = Field(description="a name, such as reviews")
    slices: list[SliceEntry] = Field(default=[], description="a list of slices")
    assertions: list[AssertionEntry] = Field(default=[], description="a list of assertions")


if not TYPE_CHECKING:
    sections = (Suite, *(tests.keys for tests in suite_tests()))
    Suite = create_model("Suite", __base__=sections, __doc__=Suite.__doc__)


ASSERTED = ("finite", "range", "share", "consistent", "steady", "predicate")


def load_suite(path: Path) -> Suite:
    """Loads the slices, tests and assertions of a YAML file. Raises BatchFileError with all faults."""
    return yaml_sections.load_section(path, Suite, rules=_findings, kind=FileKind.TESTS)


def _findings(suite: Suite) -> Iterator[Finding]:
    yield from repeated_names("slices", suite.slices)
    yield from repeated_names("assertions", suite.assertions)
    if not (suite.slices or suite.assertions or any(tests.entries(suite) for tests in suite_tests())):
        yield Finding((), "is empty", "give slices, tests or assertions")
    for i, entry in enumerate(suite.slices):
        yield from exactly_one(entry, ("column", "tokens", "by"), ("slices", i))
        if entry.tokens is not None and entry.tokens != sorted(set(entry.tokens)):
            yield Finding(("slices", i, "tokens"), "must rise", "write the lengths from small to large")
    for tests in suite_tests():
        yield from tests.findings(suite)
    for i, assertion in enumerate(suite.assertions):
        yield from exactly_one(assertion, ASSERTED, ("assertions", i))
        bounds = assertion.range
        if bounds is not None and bounds.min is None and bounds.max is None:
            yield Finding(("assertions", i, "range"), "has no bound", "give min, max or both")
