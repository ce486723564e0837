"""Tests of models in files of slices and assertions, which features define.

The module `suite` of a feature lists its kinds of tests in `SUITE_TESTS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from ringmaster.features import listed
from ringmaster.findings import Finding, Location, findings_where
from ringmaster.tasks.batch.sections import Section

if TYPE_CHECKING:
    from ringmaster.tasks.evaluation.scores import Score, ScoringResult

Keys = TypeVar("Keys", bound=Section)


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """The result of one test of a model.

    examples: messages about some of the failed cases.
    fault: why the test could not be run; such a test does not pass.
    """

    __test__ = False  # not a test for pytest to collect

    test: str
    kind: str
    num_cases: int = 0
    num_failures: int = 0
    max_failures: float = 0.0
    examples: tuple[str, ...] = ()
    fault: str = ""

    @property
    def passed(self) -> bool:
        """Whether at most the allowed fraction of the cases failed."""
        return not self.fault and self.num_failures <= self.max_failures * self.num_cases + 1e-9


class SuiteTests(ABC, Generic[Keys]):
    """A kind of tests of models.

    keys: the section with their keys, which a suite file has too; a suite is an instance of it.
    """

    keys: ClassVar[type[Section]]

    @abstractmethod
    def entries(self, suite: Keys) -> Sequence[Any]:
        """Returns the tests of a suite."""

    @abstractmethod
    def on_held_out(self, suite: Keys) -> Sequence[Any]:
        """Returns those that read rows of held-out data. All others bring cases of their own."""

    @abstractmethod
    def findings(self, suite: Keys) -> Iterator[Finding]:
        """Yields the faults of a suite's tests, of which each value is of its type."""

    @abstractmethod
    def run(
        self, suite: Keys, *, models: Sequence[str], scored: ScoringResult, score: Score
    ) -> Mapping[str, Sequence[TestResult]]:
        """Returns the results of a suite's tests by model, in the order of the file.

        scored: the scores of held-out rows, with the rows themselves where `on_held_out` returned tests.
        score: scores cases with all models.
        """


def suite_tests() -> list[SuiteTests[Any]]:
    """Returns the kinds of tests of all features."""
    return list(listed("suite", "SUITE_TESTS"))


def repeated_names(section: str, entries: Sequence[Any]) -> Iterator[Finding]:
    """Yields a fault for each entry of a section of a suite that has the name of an earlier one."""
    names = [entry.name for entry in entries]
    yield from findings_where(
        *(
            (name in names[:i], (section, i, "name"), f"{name!r} is there already", "give each its own name")
            for i, name in enumerate(names)
        )
    )


def exactly_one(entry: Section, keys: tuple[str, ...], at: Location) -> Iterator[Finding]:
    """Yields a fault where an entry has not exactly one of some keys."""
    given = [key for key in keys if getattr(entry, key) is not None]
    if len(given) != 1:
        yield Finding(at, f"has {' and '.join(given) or 'none'} of {', '.join(keys)}", "give exactly one of them")
