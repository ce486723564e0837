"""Scores of models by row, computed by a worker process, and metrics of them with bootstrap confidence intervals.

A metric is a function of sums over rows, such as a ratio of hits and labels, or of the order of all rows. Rows are
resampled with replacement, the same ones for both models (Efron & Tibshirani, An Introduction to the Bootstrap, 1993,
chapters 13 and 16), so the difficulty of a row for both models cancels out.

If all rows are right, or all are wrong, every resample is equal and the bootstrap interval has no width. Wilson's
interval replaces it (Probable Inference, the Law of Succession, and Statistical Inference, JASA 22, 1927), with the
rows as trials: for n rows without an error, the true error rate is at most z^2 / (n + z^2).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmaster.codec import to_json
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment, slots_of
from ringmaster.techniques import Job
from ringmaster.techniques.metric import SCORES, GatheredMetric, Metric, metric_named
from ringmaster.techniques.processes.forkserver_client import ScratchFolder
from ringmaster.techniques.processes.gang_events import (
    ModelFailed,
    RankExited,
    RowsScored,
    ScoringProgress,
    event_from_json,
)
from ringmaster.techniques.scoring import Progress, ScoringOrder
from ringmaster.techniques.scoring.scored_rows import TrainingData

NUM_DRAWS = 2000
LEVEL = 0.95
"""The probability with which intervals contain what they are of."""
CHUNK = 4_000_000  # the most counts drawn at a time

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MetricRows:
    """The contribution of each row to the sums of a metric: [rows] or [rows, k] each, by the sum's name.

    Of a `GatheredMetric`, the values that its `relate` returns.
    """

    metric: Metric
    sums: Mapping[str, Values]

    def __post_init__(self) -> None:
        if len({len(values) for values in self.sums.values()}) != 1:
            shapes = ", ".join(str(values.shape) for values in self.sums.values())
            raise ValueError(f"sums of the shapes {shapes} are not of the same rows")

    def __len__(self) -> int:
        return len(next(iter(self.sums.values())))

    @property
    def value(self) -> float:
        """The metric over all rows; NaN if nothing was counted."""
        if not len(self):
            return math.nan
        if isinstance(self.metric, GatheredMetric):
            return float(self.drawn(np.ones(len(self))))
        return float(self._value({name: values.sum(axis=0) for name, values in self.sums.items()}))

    @property
    def by_row(self) -> Values:
        """The metric of each row alone, [rows]; NaN if nothing was counted in it. Not of a metric of all rows."""
        assert not isinstance(self.metric, GatheredMetric), "one row has no such metric"
        return self._value(self.sums)

    @property
    def num_counted(self) -> int:
        """The number of rows with counted elements, for a metric that is a share of them; else 0."""
        share_of = self.metric.share_of
        return 0 if share_of is None else int(np.count_nonzero(self.sums[share_of]))

    def drawn(self, counts: Values) -> Values:
        """Returns the metric of samples of the rows. counts: how often a sample has each row, [samples, rows]."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.metric.value_of_rows(self.sums, counts)

    def where(self, mask: npt.NDArray[np.bool_]) -> MetricRows:
        """Returns the rows of a slice. mask: [rows]."""
        return MetricRows(self.metric, {name: values[mask] for name, values in self.sums.items()})

    def _value(self, sums: Mapping[str, Values]) -> Values:
        with np.errstate(invalid="ignore", divide="ignore"):  # of nothing that is counted, the metric is NaN
            return self.metric.value(sums)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A metric, and the interval that contains it with probability `level` according to the rows."""

    value: float
    low: float
    high: float
    level: float
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class ScoreComparison:
    """By how much one model is better than another on the same rows.

    gain: the difference in the metric; positive if the model is better.
    low, high: the confidence interval of the gain.
    p_better: the one-sided probability of at least this gain if there were none; at least 1 / (draws + 1), and at least
        0.5^n if n rows differ.
    p_worse: likewise for a loss.
    """

    gain: float
    low: float
    high: float
    p_better: float
    p_worse: float


def estimate(rows: MetricRows, *, num_draws: int = NUM_DRAWS, seed: int = 0) -> Estimate:
    """Returns a metric with its percentile interval, or Wilson's for a share of 0 or 1; NaN without counted rows."""
    if rows.num_counted and rows.value in (0.0, 1.0):
        most = unseen(rows.num_counted)
        low, high = (0.0, most) if rows.value == 0.0 else (1.0 - most, 1.0)
        return Estimate(value=rows.value, low=low, high=high, level=LEVEL, num_rows=len(rows))
    drawn = _joined(rows.drawn(counts) for counts in _draws(len(rows), num_draws, seed))
    low, high = _quantiles(drawn)
    return Estimate(value=rows.value, low=low, high=high, level=LEVEL, num_rows=len(rows))


def compare(
    model: MetricRows,
    other: MetricRows,
    *,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> ScoreComparison:
    """Compares two models on the same rows, in the same order. Raises ValueError if their numbers of rows differ."""
    if len(model) != len(other):
        raise ValueError(f"{len(model)} rows cannot be compared with {len(other)}: give both models the same data")
    sign = 1.0 if model.metric.higher_is_better else -1.0
    gain = sign * (model.value - other.value)
    drawn = _joined(sign * (model.drawn(c) - other.drawn(c)) for c in _draws(len(model), num_draws, seed))
    low, high = _quantiles(drawn)
    num_different = np.count_nonzero(np.any([_differ(v, other.sums[name]) for name, v in model.sums.items()], axis=0))
    if model.num_counted and not num_different:
        high = unseen(model.num_counted)  # no row differs: the same evidence as no errors
        low = -high
    # The smallest p-value that n differing rows support: without an effect, all gain with probability 0.5^n. A
    # bootstrap resamples only these rows, so it would be certain of a gain that all of them share, even of one row.
    least = float(0.5**num_different)
    return ScoreComparison(
        gain=gain,
        low=low,
        high=high,
        p_better=max(_share(drawn <= 0), least) if math.isfinite(gain) else 1.0,
        p_worse=max(_share(drawn >= 0), least) if math.isfinite(gain) else 1.0,
    )


def unseen(num_rows: int) -> float:
    """Returns Wilson's upper bound, at `LEVEL`, on the share of an event that occurred in none of `num_rows` rows."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    return z * z / (num_rows + z * z)


def _draws(num_rows: int, num_draws: int, seed: int) -> Iterator[Values]:
    """Yields how often each row is drawn, as chunks of [draws, rows]."""
    generator = np.random.default_rng(seed)
    left = num_draws if num_rows else 0
    while left:
        size = min(left, max(1, CHUNK // num_rows))
        yield generator.multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=size).astype(np.float64)
        left -= size


def _joined(parts: Iterable[Values]) -> Values:
    """Returns the finite values of all draws."""
    drawn: Values = np.concatenate([np.zeros(0), *parts])
    return drawn[np.isfinite(drawn)]


def _differ(one: Values, other: Values) -> npt.NDArray[np.bool_]:
    """Returns which rows differ, [rows]; rows without a value are equal."""
    differ = (one != other) & ~(np.isnan(one) & np.isnan(other))
    return np.asarray(differ.any(axis=1) if differ.ndim > 1 else differ)


def _quantiles(drawn: Values) -> tuple[float, float]:
    if not len(drawn):
        return math.nan, math.nan
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _share(hits: npt.NDArray[np.bool_]) -> float:
    return (int(hits.sum()) + 1) / (len(hits) + 1)


SCORER = "ringmaster.techniques.scoring:main"
CAUSAL, CLASSIFIER, OTHER = "causal", "classifier", "other"

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """The outputs of one model for some rows.

    kind: "causal", "classifier" or "other".
    sums: [rows] or [rows, k], the sums of the default metrics and of those of the job's evaluation, by name; without
        those that cannot be computed, for example because the rows have no labels.
    log_probabilities: [rows], of a causal model.
    predictions: [rows], and probabilities: [rows, labels], of a classifier.
    num_tokens: [rows], of rows of tokens.
    columns: integers of each row, by name, such as its label.
    slices: the name of each row's slice, by the slicer's name.
    documents: the values of each metric that has rows of its own, by the metric's name.
    inputs: the rows themselves, if they were requested.
    """

    kind: str
    num_rows: int
    sums: Mapping[str, Array] = field(default_factory=dict)
    log_probabilities: Array | None = None
    predictions: Array | None = None
    probabilities: Array | None = None
    num_tokens: Array | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)
    slices: Mapping[str, Array] = field(default_factory=dict)
    documents: Mapping[str, Array] = field(default_factory=dict)
    inputs: Mapping[str, Array] = field(default_factory=dict)

    def rows(self, metric: str) -> MetricRows:
        """Returns the contribution of each row to a metric.

        Raises ValueError if there is no such metric, or if the rows lack the labels for it.
        """
        measure = metric_named(metric)
        if metric in self.documents:
            return MetricRows(measure, {measure.sums[0]: self.documents[metric]})
        if not self.sums.keys() >= set(measure.sums):
            needed = f", which needs {measure.needs}" if measure.needs else ""
            raise ValueError(
                f"these rows have no {metric}{needed}. To fix: name a metric that suits the model and its rows"
            )
        sums: Mapping[str, Array] = {name: self.sums[name] for name in measure.sums}
        return MetricRows(measure, measure.relate(sums) if isinstance(measure, GatheredMetric) else sums)


@dataclass(frozen=True, kw_only=True)
class Cases:
    """Literal cases, one per row: texts, or columns of arrays such as pixel_values [rows, channels, height, width].

    encode: the dotted name of a function that converts texts to columns of tensors.
    """

    texts: tuple[str, ...] | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)
    encode: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScoringResult:
    """Scores, and the faults of models without scores, by the model's name."""

    scores: Mapping[str, Scores] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)


Score = Callable[[Cases], ScoringResult]
"""Scores cases with the models under test, by the models' names."""


def score_models(
    models: Mapping[str, Path],
    *,
    job: Job,
    data: Mapping[str, Any] | None = None,
    cases: Cases | None = None,
    slicers: Mapping[str, str] | None = None,
    keep_inputs: bool = False,
    max_rows: int | None = None,
    is_whole: bool = False,
    trained_on: TrainingData | None = None,
    progress: Progress | None = None,
    environment: GangEnvironment,
    device: Device,
    more_devices: Sequence[Device] = (),
) -> ScoringResult:
    """Scores models (folders by name) on the same rows, in one worker process for each device.

    Adapters of one base are scored in one batch over it (`techniques.scoring.score_together`), others
    sequentially.

    job: also determines the loss, the precision and the metrics in addition to the default ones.
    data: the JSON form of prepared data, of which the held-out rows are scored: those that an evaluation of `job`
        reads, or the first `max_rows`. None means the job's data, which is then prepared.
    is_whole: whether all rows of the data are scored, as those of data that nothing is trained on.
    trained_on: data whose training rows are left out.
    cases: literal cases to score instead of held-out rows.
    slicers: dotted names of functions from a row to its slice, by the slicer's name.
    progress: called from time to time as progress(num_done, num_rows), summed over all rows of all models.
    more_devices: devices over which each model is divided together with `device`, by tensor parallelism.
    """
    assert data is None or cases is None, "either data or cases"
    environment.cache_dir.mkdir(parents=True, exist_ok=True)
    log = environment.cache_dir / "scoring.log"
    scores: dict[str, Scores] = {}
    faults: dict[str, str] = {}
    with ScratchFolder(prefix="ringmaster-scores-") as scratch:
        order = ScoringOrder(
            job=job,
            models={name: str(path) for name, path in models.items()},
            slots=slots_of([device, *more_devices]),
            cache_dir=str(environment.cache_dir),
            folder=str(scratch.path),
            data=data,
            cases=None if cases is None else _write_cases(cases, scratch.path),
            encode=None if cases is None else cases.encode,
            slicers=slicers or {},
            keep_inputs=keep_inputs,
            max_rows=max_rows,
            is_whole=is_whole,
            trained_on=trained_on,
            import_paths=environment.import_paths,
        )
        server = environment.server
        if job.runs_elsewhere:
            server = server.server_for(job, cache_dir=order.cache_dir)
        with ExitStack() as stack:
            channel, *_ = [
                stack.enter_context(
                    closing(server.spawn(target=SCORER, argument=to_json(replace(order, rank=rank)), log=log))
                )
                for rank in range(len(order.slots))
            ]
            while not isinstance(event := event_from_json(channel.receive()), RankExited):
                match event:
                    case RowsScored():
                        scores[event.model] = _read(Path(event.file), event.kind)
                    case ModelFailed():
                        faults[event.model] = event.message
                    case ScoringProgress() if progress is not None:
                        progress(event.num_done, event.num_rows)
            status = event.status
    for name in models:
        if name not in scores and name not in faults:
            faults[name] = f"its process ended with status {status}; see {log}"
    return ScoringResult(scores=scores, faults=faults)


def _write_cases(cases: Cases, folder: Path) -> str:
    """Writes the cases to a file for the worker and returns its path."""
    if cases.texts is not None:
        file = folder / "cases.json"
        file.write_text(json.dumps({"texts": list(cases.texts)}), encoding="utf-8")
    else:
        file = folder / "cases.npz"
        np.savez(file, **cases.columns)  # type: ignore[arg-type]
    return str(file)


def _read(file: Path, kind: str) -> Scores:
    with np.load(file, allow_pickle=False) as result:
        arrays = {name: result[name] for name in result.files}
    grouped: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, array in arrays.items():
        group, dot, rest = name.partition(".")
        grouped[group if dot else ""][rest or name] = array
    plain = grouped[""]
    sums = {name: plain.pop(name) for name in list(plain) if name not in SCORES}
    num_rows = max((len(array) for name, array in arrays.items() if not name.startswith("document.")), default=0)
    if "predictions" in plain:
        plain["predictions"] = plain["predictions"].astype(np.int64)
    return Scores(
        kind=kind,
        sums=sums,
        num_rows=num_rows,
        columns=grouped["column"],
        slices=grouped["slice"],
        inputs=grouped["input"],
        documents=grouped["document"],
        **plain,
    )
