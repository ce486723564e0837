"""Examination of a model: metrics by slice, comparison with another model, tests and assertions.

A metric has its value and confidence interval over all rows and over each slice of them. MLflow has the results as
tables, metrics, and a figure with a panel per metric, a line per slice, and a dot with its interval per model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmaster.codec import to_json
from ringmaster.model_lineage import Ledger, MetricPoint, ModelRecord
from ringmaster.model_lineage.ledger.families import final_fault
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation.model_assertions import AssertionResult, check, importable, rows_of
from ringmaster.tasks.evaluation.scores import Cases, MetricRows, Scores, ScoringResult, compare, estimate, score_models
from ringmaster.tasks.evaluation.suite import SliceEntry, Suite
from ringmaster.tasks.evaluation.suite_tests import TestResult, suite_tests
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.techniques import Job
from ringmaster.techniques.metric import ModelMetric, default_metrics, metric_named, metrics_named
from ringmaster.techniques.scoring import Progress
from ringmaster.techniques.scoring.scored_rows import TrainingData
from ringmaster.text import page_template

FOLDER = "evaluation"  # of the artifacts
METRICS = "test"  # prefix of the metrics, as `eval` is that of the metrics during training
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

    def record(
        self,
        ledger: Ledger,
        model: ModelRecord,
        *,
        other: str | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Writes the results to the run that made the model in MLflow, replacing earlier ones.

        other: the name of the model compared with, or None. Nothing is recorded for a model without a run.
        notice: is called where the run was deleted, and cannot have them.
        """
        if model.run_id is not None and (fault := final_fault(self._write, ledger, model, model.run_id, other)):
            notice(f"what was measured of {model.uri} is not recorded: {fault}")

    def _write(self, ledger: Ledger, model: ModelRecord, run: str, other: str | None) -> None:
        if self.measured:
            ledger.write_table(run, f"{FOLDER}/metrics.json", [to_json(line) for line in self.measured])
            title = model.uri.removeprefix("models:/")
            ledger.write_svg(run, f"{FOLDER}/metrics.svg", figure(title, self.measured, other=other))
            points = [
                MetricPoint(f"{METRICS}/{line.metric}{suffix}", value)
                for line in self.measured
                if line.slice == ALL
                for suffix, value in (("", line.value), ("_low", line.low), ("_high", line.high))
            ]
            ledger.log_metrics(run, points)
        for name, rows in self.tables().items():
            if rows:
                ledger.write_table(run, f"{FOLDER}/{name}.json", rows)

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the tables of tests and of assertions, with a row for each."""
        return {
            "tests": [
                {
                    "test": result.test,
                    "kind": result.kind,
                    "num_cases": result.num_cases,
                    "failures": result.num_failures,
                    "allowed": f"{result.max_failures:.1%}",
                    "passed": result.passed,
                    "examples": "\n".join(result.examples) or result.fault,
                }
                for result in self.tests
            ],
            "assertions": [
                {
                    "assertion": result.assertion,
                    "kind": result.kind,
                    "num_rows": result.num_rows,
                    "failures": result.num_failures,
                    "allowed": f"{result.max_failures:.1%}",
                    "passed": result.passed,
                    "examples": "\n".join(result.examples) or result.why,
                }
                for result in self.assertions
            ],
        }


@dataclass(frozen=True, kw_only=True)
class ExaminationRequest:
    """What models are examined on, and by what.

    job, environment, device, more_devices, data, max_rows, is_whole, trained_on, progress: as in `score_models`.
    held_out: whether to read held-out rows.
    against: the folder of a model that each is compared with.
    against_job: as `job`, for that model, where it reads the same rows otherwise, such as with other passages.
    metrics: the names of the metrics; None means the defaults of the model's kind.
    more_metrics: the names of metrics in addition to these.
    folder: the suite's folder, from which its functions are imported.
    """

    job: Job
    environment: GangEnvironment
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
            keep_inputs=any(tests.on_held_out(suite) for tests in suite_tests()),
            max_rows=request.max_rows,
            is_whole=request.is_whole,
            trained_on=request.trained_on,
        )
        scored = score_rows(requested)
        if request.against_job is not None:
            trained_on = request.trained_on and request.against and request.trained_on.read_by(request.against)
            other_job = replace(request.against_job, evaluation=job.evaluation)
            other = score_rows(others, job=other_job, data=None, trained_on=trained_on)
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

    results = [tests.run(suite, models=list(models), scored=scored, score=score_cases) for tests in suite_tests()]
    return {name: [result for each in results for result in each.get(name, ())] for name in models}


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
            raise ValueError(f"slice {entry.name}: the rows are not texts. To fix: name a column or a function")
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


TOP, LINE, GAP = 76, 26, 58
LEFT, RANGE = 220, 490  # where the values lie, in pixels
FIGURE = page_template("""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {{ height }}" width="900" height="{{ height }}" \
role="img" aria-label="Metrics of {{ title | xml }}">
<style>text{font-family:system-ui,'DejaVu Sans',sans-serif;fill:#22303c}
.title{font-size:18px;font-weight:600}.said{font-size:13px;fill:#52616d}.metric{font-size:14px;font-weight:600}
.name{font-size:12px;text-anchor:end}.tick{font-size:11px;text-anchor:middle;fill:#52616d}
.value{font-size:11px;fill:#52616d}.field{fill:#f3f5f7}.grid{stroke:#dde3e8}
.interval{stroke:#1f6f8b;stroke-width:3;stroke-opacity:0.45}.own{fill:#1f6f8b}.other{fill:#c0702a}</style>
<rect width="900" height="{{ height }}" fill="#ffffff"/>
<text x="20" y="26" class="title">{{ title | xml(limit=90) }}</text><text x="20" y="46" class="said">
{% if level is none %}nothing was measured
{% else %}dots: metric; bars: {{ "%.0f" % (100 * level) }}% interval{% endif %}
{% if other is not none %}; at the right, the gain over the other on the same rows{% endif %}
</text>
{% if other is not none %}
<text x="220" y="64" class="said"><tspan class="own">● this model</tspan>\
<tspan class="other" dx="14">● {{ other | xml }}</tspan></text>
{% endif %}
{% for field in fields %}
<text x="20" y="{{ field.top + 8 }}" class="metric">{{ field.metric | xml }}</text>
<rect x="220" y="{{ field.top }}" width="490" height="{{ field.bottom - field.top }}" class="field"/>
{% for tick in field.ticks %}
{% set x = field.x(tick) %}
<line x1="{{ x }}" y1="{{ field.top }}" x2="{{ x }}" y2="{{ field.bottom }}" class="grid"/>
<text x="{{ x }}" y="{{ field.bottom + 15 }}" class="tick">{{ "%.4g" % tick }}</text>
{% endfor %}
{% for line in field.lines %}
{% set y = field.top + 13 + 26 * loop.index0 %}
<text x="210" y="{{ y + 4 }}" class="name">{{ (line.slice ~ " (" ~ line.num_rows ~ ")") | xml(limit=34) }}</text>
{% if line.low is finite and line.high is finite %}
<line x1="{{ field.x(line.low) }}" y1="{{ y }}" x2="{{ field.x(line.high) }}" y2="{{ y }}" class="interval"/>
{% endif %}
{% if line.other is finite %}
<circle cx="{{ field.x(line.other) }}" cy="{{ y }}" r="4.5" class="other">\
<title>the other: {{ "%.4g" % line.other }}</title></circle>
{% endif %}
{% if line.value is finite %}
<circle cx="{{ field.x(line.value) }}" cy="{{ y }}" r="4.5" class="own">\
<title>{{ "%.4g (%.4g to %.4g)" % (line.value, line.low, line.high) }}</title></circle>
{% endif %}
<text x="720" y="{{ y + 4 }}" class="value">{{ "%.4g" % line.value }}\
{% if none not in (line.gain, line.p_better, line.p_worse) %}, gain {{ "%+.3g" % line.gain }} \
(p {{ "%.2g" % ([line.p_better, line.p_worse] | min) }}){% endif %}
</text>
{% endfor %}
{% endfor %}
</svg>
""")


def figure(title: str, measured: Sequence[SliceMetric], *, other: str | None = None) -> str:
    """Returns the figure of the measured metrics. other: the name of the model compared with, or None."""
    fields: list[dict[str, Any]] = []
    top = TOP
    for metric in dict.fromkeys(line.metric for line in measured):
        lines = [line for line in measured if line.metric == metric]
        low, high = _ends(metric, lines)
        fields.append(
            {
                "metric": metric,
                "lines": lines,
                "top": top,
                "bottom": top + LINE * len(lines),
                "x": partial(_pixel, low=low, high=high),
                "ticks": [low + (high - low) * i / 4 for i in range(5)],
            }
        )
        top += LINE * len(lines) + GAP
    level = measured[0].level if measured else None
    return FIGURE.render(title=title, other=other, level=level, fields=fields, height=top) + "\n"


def _ends(metric: str, lines: Sequence[SliceMetric]) -> tuple[float, float]:
    """Returns the ends of the axis of a metric, with room on both sides of its values."""
    values = [v for line in lines for v in (line.value, line.low, line.high, line.other) if v is not None]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    if metric_named(metric).share_of is not None:
        return max(low - room, 0.0), min(high + room, 1.0)
    return low - room, high + room


def _pixel(value: float, *, low: float, high: float) -> float:
    return round(LEFT + (value - low) / (high - low) * RANGE, 1)
