"""Examination of a model: metrics by slice, comparison with another model, behavioural tests and assertions.

A metric has its value and confidence interval over all rows and over each slice of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmaster.codec import to_json
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation.behaviour import TestResult, run_images, run_texts
from ringmaster.tasks.evaluation.model_assertions import AssertionResult, check, importable, rows_of
from ringmaster.tasks.evaluation.scores import Cases, MetricRows, Scores, ScoringResult, compare, estimate, score_models
from ringmaster.tasks.evaluation.suite import SliceEntry, Suite
from ringmaster.tasks.profiling.preflight import TrialEnvironment
from ringmaster.techniques import Job
from ringmaster.techniques.metric import ModelMetric, default_metrics, metrics_named
from ringmaster.techniques.scoring import Progress
from ringmaster.techniques.scoring.scored_rows import TrainingData

MODEL, OTHER = "model", ""  # OTHER is empty because no model has an empty name


@dataclass(frozen=True, kw_only=True)
class ExaminationResult:
    """The result of an examination. num_rows: of held-out data. faults: why something could not be measured."""

    num_rows: int = 0
    measured: tuple[SliceMetric, ...] = ()
    tests: tuple[TestResult, ...] = ()
    assertions: tuple[AssertionResult, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all tests and assertions passed, and everything could be measured."""
        return not self.faults and all(t.passed for t in self.tests) and all(a.passed for a in self.assertions)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {
            "passed": self.passed,
            "num_rows": self.num_rows,
            "metrics": to_json(self.measured),
            "tests": [{**to_json(test), "passed": test.passed} for test in self.tests],
            "assertions": to_json(self.assertions),
            "faults": list(self.faults),
        }


@dataclass(frozen=True, kw_only=True)
class ExaminationRequest:
    """What models are examined on, and by what.

    job, environment, device, more_devices, data, max_rows, is_whole, trained_on, progress: as in `score_models`.
    held_out: whether to read held-out rows.
    against: the folder of a model that each is compared with.
    against_job: as `job`, for that model, where it reads the same rows otherwise, such as with other passages.
    metrics: the names of the metrics; None stands for the defaults of the model's kind.
    more_metrics: the names of metrics beside these.
    folder: the suite's folder, from which its functions are imported.
    """

    job: Job
    environment: TrialEnvironment
    device: Device
    more_devices: tuple[Device, ...] = ()
    data: Mapping[str, Any] | None = None
    held_out: bool = True
    suite: Suite = field(default_factory=lambda: Suite(name="metrics"))
    against: Path | None = None
    against_job: Job | None = None
    metrics: Sequence[str] | None = None
    more_metrics: Sequence[str] = ()
    max_rows: int | None = None
    is_whole: bool = False
    trained_on: TrainingData | None = None
    progress: Progress | None = None
    folder: Path | None = None


def examine(model: Path, request: ExaminationRequest) -> ExaminationResult:
    """Examines the model in a folder."""
    return examine_each({MODEL: model}, request)[MODEL]


def examine_each(models: Mapping[str, Path], request: ExaminationRequest) -> dict[str, ExaminationResult]:
    """Examines models on the same rows and cases, on one device; adapters of one base share a copy of the base.

    models: the models' folders by name.
    """
    job, suite, metrics, more = request.job, request.suite, request.metrics, tuple(request.more_metrics)
    if metrics is not None or more:
        job = replace(job, evaluation=replace(job.evaluation, metrics=(*(metrics or ()), *more)))
    score = partial(
        score_models,
        job=job,
        progress=request.progress,
        environment=request.environment,
        device=request.device,
        more_devices=request.more_devices,
    )
    others = {} if request.against is None else {OTHER: request.against}
    requested = dict(models) if request.against_job is not None else {**models, **others}
    scored = ScoringResult()
    if request.held_out:
        score_rows = partial(
            score,
            data=request.data,
            slicers={entry.name: entry.by for entry in suite.slices if entry.by is not None},
            keep_inputs=any(test.held_out is not None for test in suite.tests),
            max_rows=request.max_rows,
            is_whole=request.is_whole,
            trained_on=request.trained_on,
        )
        scored = score_rows(requested)
        if request.against_job is not None:
            other = score_rows(others, job=replace(request.against_job, evaluation=job.evaluation))
            scored = ScoringResult(scores={**scored.scores, **other.scores}, faults={**scored.faults, **other.faults})
    elif any(isinstance(metric, ModelMetric) for metric in metrics_named(metrics or ())):
        scored = score(requested, cases=Cases(texts=()), max_rows=request.max_rows, is_whole=request.is_whole)
    tests = _tests(suite, models, scored, score)
    return {
        name: _examined(name, suite, scored, tests[name], metrics=metrics, more=more, folder=request.folder)
        for name in models
    }


def _examined(
    name: str,
    suite: Suite,
    scored: ScoringResult,
    tests: Sequence[TestResult],
    *,
    metrics: Sequence[str] | None,
    more: Sequence[str],
    folder: Path | None,
) -> ExaminationResult:
    """Returns the result of one model."""
    faults = [
        f"the {who} cannot be scored: {scored.faults[of]}"
        for of, who in ((name, MODEL), (OTHER, "other"))
        if of in scored.faults
    ]
    own = scored.scores.get(name)
    measured: list[SliceMetric] = []
    if own is not None:
        try:
            names = [*(metrics or default_metrics(own.kind)), *more]
            measured = measure(own, scored.scores.get(OTHER), metrics=names, slices=suite.slices)
        except ValueError as error:
            faults.append(str(error))
    return ExaminationResult(
        num_rows=0 if own is None else own.num_rows,
        measured=tuple(measured),
        tests=tuple(tests),
        assertions=tuple(_assertions(suite, own, folder)),
        faults=tuple(faults),
    )


def _tests(
    suite: Suite, models: Mapping[str, Path], scored: ScoringResult, score: partial[ScoringResult]
) -> dict[str, list[TestResult]]:
    """Returns the test results of each model, in the order of the file; all models are scored on the same cases."""

    def score_cases(cases: Cases) -> ScoringResult:
        return score(models, cases=cases)

    texts = [test for test in suite.tests if not test.of_images]
    pictures = [test for test in suite.tests if test.of_images]
    match = run_texts(texts, score=score_cases, encode=suite.encode)
    shown: dict[str, list[TestResult]] = {}
    if pictures:
        images = next((scores.inputs for scores in scored.scores.values()), None)
        shown = run_images(pictures, models=list(models), images=images, score=score_cases)
    order = [test.name for test in suite.tests]
    return {
        name: sorted([*match.get(name, ()), *shown.get(name, ())], key=lambda result: order.index(result.test))
        for name in models
    }


def _assertions(suite: Suite, own: Scores | None, folder: Path | None) -> list[AssertionResult]:
    if not suite.assertions:
        return []
    with importable(folder or Path()):
        return check(suite.assertions, rows_of(own) if own is not None else [])


ALL = "all"

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class SliceMetric:
    """One metric of one slice of the rows, or of all rows (slice "all").

    low, high: the interval that contains the metric with probability `level`.
    other: the metric of the model compared with.
    gain: the difference, positive if this model is better; gain_low, gain_high: its interval.
    p_better, p_worse: the probability of so large a gain (or loss) by chance.

    The fields of a comparison are None without one.
    """

    metric: str
    slice: str
    num_rows: int
    value: float
    low: float
    high: float
    level: float
    other: float | None = None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    p_better: float | None = None
    p_worse: float | None = None


def measure(
    scores: Scores, other: Scores | None = None, *, metrics: Sequence[str], slices: Sequence[SliceEntry] = ()
) -> list[SliceMetric]:
    """Returns every metric over all rows and over every slice.

    Raises ValueError if a slice does not apply to these rows, or if the two models have different numbers of rows.
    """
    masks = {ALL: np.ones(scores.num_rows, bool)} | {
        f"{entry.name}={value}": mask for entry in slices for value, mask in masks_of(entry, scores)
    }
    if other is not None and other.num_rows != scores.num_rows:
        raise ValueError(f"{scores.num_rows} rows cannot be compared with {other.num_rows}: give both the same data")
    result: list[SliceMetric] = []
    for metric in metrics:
        own, others = scores.rows(metric), None if other is None else other.rows(metric)
        of_metric = {ALL: np.ones(len(own), bool)} if metric in scores.documents else masks
        result += [_measured(own, others, metric, name, mask) for name, mask in of_metric.items()]
    return result


def masks_of(entry: SliceEntry, scores: Scores) -> Iterator[tuple[str, Mask]]:
    """Yields each slice's name and mask, [rows]."""
    if entry.tokens is not None:
        if scores.num_tokens is None:
            raise ValueError(f"slice {entry.name}: the rows are no texts. To fix: name a column or a function")
        for low, high in zip([0, *entry.tokens], [*entry.tokens, None], strict=True):
            mask = scores.num_tokens >= low
            name = f">={low}" if high is None else f"{low}-{high - 1}"
            if high is not None:
                mask &= scores.num_tokens < high
            if mask.any():
                yield name, mask
        return
    named: Mapping[str, npt.NDArray[np.generic]] = scores.columns if entry.column is not None else scores.slices
    key = entry.column if entry.column is not None else entry.name
    if key not in named:
        there = ", ".join(sorted(scores.columns)) or "none"
        raise ValueError(f"slice {entry.name}: the rows have no column {key}. To fix: name one of these: {there}")
    for value in np.unique(named[key]):
        yield str(value), named[key] == value


def _measured(own: MetricRows, other: MetricRows | None, metric: str, name: str, mask: Mask) -> SliceMetric:
    rows = own.where(mask)
    reported = estimate(rows)
    if other is None:
        return SliceMetric(metric=metric, slice=name, **vars(reported))
    others = other.where(mask)
    result = compare(rows, others)
    return SliceMetric(
        metric=metric,
        slice=name,
        **vars(reported),
        other=others.value,
        gain=result.gain,
        gain_low=result.low,
        gain_high=result.high,
        p_better=result.p_better,
        p_worse=result.p_worse,
    )
