"""A model examined: its metrics by slice, against another model, its behavioural tests and its assertions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tasks.cluster import Device
from tasks.evaluation.assertions import AssertionResult, check, importable, rows_of
from tasks.evaluation.behaviour import TestResult, run_images, run_texts
from tasks.evaluation.scores import CAUSAL, CLASSIFIER, Cases, Scored, Scores, score_models
from tasks.evaluation.slices import Measured, measure
from tasks.evaluation.suite import Suite
from tasks.profiling.trials import Site
from techniques import Job
from techniques.values import to_json

MODEL, OTHER = "model", "other"
METRICS_OF: Mapping[str, tuple[str, ...]] = {
    CAUSAL: ("loss", "perplexity", "accuracy"),
    CLASSIFIER: ("accuracy", "loss"),
}
"""What is measured where nobody says what, by the kind of the model."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What was found of a model. faults: why something could not be measured. num_rows: held-out ones."""

    num_rows: int = 0
    measured: tuple[Measured, ...] = ()
    tests: tuple[TestResult, ...] = ()
    assertions: tuple[AssertionResult, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every test and every assertion passed, and all could be measured."""
        return not self.faults and all(t.passed for t in self.tests) and all(a.passed for a in self.assertions)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "passed": self.passed,
            "num_rows": self.num_rows,
            "metrics": to_json(self.measured),
            "tests": [{**to_json(test), "passed": test.passed} for test in self.tests],
            "assertions": to_json(self.assertions),
            "faults": list(self.faults),
        }


def examine(
    model: Path,
    *,
    job: Job,
    data: Mapping[str, Any] | None = None,
    held_out: bool = True,
    suite: Suite | None = None,
    against: Path | None = None,
    metrics: Sequence[str] | None = None,
    max_rows: int | None = None,
    site: Site,
    device: Device,
    folder: Path | None = None,
) -> Examined:
    """Examines the model in a folder, on one device, in worker processes of its own.

    job, data, max_rows: whose held-out rows are read, as in `score_models`; none where `held_out` is false.
    metrics: the job's usual ones, else by the kind of the model. folder: the suite's, where its functions are.
    """
    suite = suite or Suite(name="metrics")
    score = partial(score_models, job=job, site=site, device=device)
    models = {MODEL: model, **({} if against is None else {OTHER: against})}
    faults: list[str] = []
    scored = Scored()
    with_images = any(test.held_out is not None for test in suite.tests)
    if held_out:
        slicers = {entry.name: entry.by for entry in suite.slices if entry.by is not None}
        scored = score(models, data=data, slicers=slicers, keep_inputs=with_images, max_rows=max_rows)
        faults += [f"the {name} cannot be scored: {fault}" for name, fault in scored.faults.items()]
    own = scored.scores.get(MODEL)
    measured: list[Measured] = []
    if own is not None:
        try:
            names = metrics or METRICS_OF.get(own.kind, ("loss",))
            measured = measure(own, scored.scores.get(OTHER), metrics=names, slices=suite.slices)
        except ValueError as error:
            faults.append(str(error))
    return Examined(
        num_rows=0 if own is None else own.num_rows,
        measured=tuple(measured),
        tests=tuple(_tests(suite, model, own, score)),
        assertions=tuple(_assertions(suite, own, folder)),
        faults=tuple(faults),
    )


def _tests(suite: Suite, model: Path, own: Scores | None, score: partial[Scored]) -> list[TestResult]:
    """The results in the order of the file."""

    def asked(cases: Cases) -> Scored:
        return score({MODEL: model}, cases=cases)

    texts = [test for test in suite.tests if not test.of_images]
    pictures = [test for test in suite.tests if test.of_images]
    found = run_texts(texts, score=asked, encode=suite.encode).get(MODEL, [])
    if pictures:
        found += run_images(pictures, models=[MODEL], images=None if own is None else own.inputs, score=asked)[MODEL]
    order = [test.name for test in suite.tests]
    return sorted(found, key=lambda result: order.index(result.test))


def _assertions(suite: Suite, own: Scores | None, folder: Path | None) -> list[AssertionResult]:
    if not suite.assertions:
        return []
    with importable(folder or Path()):
        return check(suite.assertions, rows_of(own) if own is not None else [])
