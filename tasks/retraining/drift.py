"""Drift: the distance of recent data, and of logged predictions, from the data that a model was trained on.

There are two measures. Each compares with a *reference* that is stored when a model is trained, so that the old data
need not be stored:

- the population stability index, PSI = sum (q - p) ln(q / p), over ten quantile bins of the reference or over its most
  frequent values, with p the reference's shares and q the recent ones (Siddiqi, Credit Risk Scorecards, 2006);
- the two-sample Kolmogorov-Smirnov test, for numbers only.

Without drift, the PSI of n rows against m is about (1/n + 1/m) chi2 with one degree of freedom less than bins (Yurdakul
and Naranjo, Statistical properties of the population stability index, J. Risk Model Validation 2020). Few rows thus
have a large PSI by chance, and a PSI below that level does not count as drift.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ringmaster.codec import stored_as
from ringmaster.tasks.batch.references import Positive, Whole
from ringmaster.tasks.batch.sections import Section
from ringmaster.tasks.evaluation.model_assertions import largest_probability
from ringmaster.tasks.evaluation.scores import Scores
from ringmaster.tasks.retraining.policy import Probability
from ringmaster.techniques.data.arrow_files import some_rows

NUM_BINS = 10
MAX_CATEGORIES = 20  # the remaining values form one bin
MAX_KEPT = 1000  # the most quantiles of a reference that are stored for the Kolmogorov-Smirnov test
CHANCE = 0.01  # the probability of a PSI above the chance level without drift

Array = npt.NDArray[Any]


class DriftEntry(Section):
    """The thresholds of drift, and the data observed for it. A measure without a threshold is skipped."""

    psi: Positive | None = Field(default=0.2, description="the population stability index above which, such as 0.2")
    ks: Probability | None = Field(
        default=None, description="the Kolmogorov-Smirnov p-value below which, such as 0.001, or leave it out"
    )
    min_rows: Whole = Field(default=100, description="the minimum number of rows for a decision, such as 100")
    inputs: dict[str, Any] | None = Field(
        default=None, description="data as in a batch file that came in lately; the model's own where it is left out"
    )
    predictions: str | None = Field(
        default=None, description="a JSONL or Parquet file of logged predictions, such as predictions.jsonl"
    )


@dataclass(frozen=True, kw_only=True)
class FeatureReference:
    """The distribution of a feature at training time, as counts of bins rather than rows.

    num_rows: the number of values.
    counts: [bins].
    edges: the edges between a number's bins; empty for a category.
    categories: the values of a category, each a bin, followed by one bin for all others.
    kept: quantiles of a number, ascending.
    """

    num_rows: int
    counts: tuple[int, ...]
    edges: tuple[float, ...] = ()
    categories: tuple[str, ...] = ()
    kept: tuple[float, ...] = ()

    @property
    def is_number(self) -> bool:
        """Whether the feature is a number rather than a category."""
        return not self.categories


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The drift of a feature.

    has_drifted: whether at least one measure shows drift; False if there are too few rows.
    why: an explanation for users.
    p: the p-value of the Kolmogorov-Smirnov test.
    """

    feature: str
    has_drifted: bool
    why: str
    num_rows: int
    psi: float | None = None
    p: float | None = None


def reference_of(values: Sequence[Any] | Array) -> FeatureReference | None:
    """Returns the reference of a feature's values, or None if there is no value, or no finite number.

    Floats are numbers; all other values are categories.
    """
    if _are_numbers(values):
        numbers = _finite(values)
        if not len(numbers):
            return None
        edges = _edges(numbers)
        kept = np.quantile(numbers, np.linspace(0, 1, min(len(numbers), MAX_KEPT)))
        return FeatureReference(
            num_rows=len(numbers),
            counts=tuple(_binned(numbers, edges)),
            edges=tuple(float(edge) for edge in edges),
            kept=tuple(float(value) for value in kept),
        )
    texts = Counter(_texts(values))
    if not texts:
        return None
    common = [text for text, _ in sorted(texts.items(), key=lambda item: (-item[1], item[0]))[:MAX_CATEGORIES]]
    return FeatureReference(
        num_rows=texts.total(),
        counts=(*(texts[text] for text in common), texts.total() - sum(texts[text] for text in common)),
        categories=tuple(common),
    )


def drift_of(feature: str, reference: FeatureReference, values: Sequence[Any] | Array, rule: DriftEntry) -> Drift:
    """Returns the distance of `values` from the reference, and whether it is drift under a rule."""
    numbers = _finite(values) if reference.is_number else None
    num_rows = len(_texts(values)) if numbers is None else len(numbers)
    if num_rows < rule.min_rows:
        why = f"{feature} has {num_rows} rows, too few to decide (min_rows {rule.min_rows})"
        return Drift(feature=feature, has_drifted=False, why=why, num_rows=num_rows)
    lines: list[str] = []
    index = p = None
    if rule.psi is not None:
        index, by_chance = psi(reference, values)
        if index > max(rule.psi, by_chance):
            lines.append(f"{feature} has drifted: PSI {index:.2f}, above {max(rule.psi, by_chance):.2g}")
    if rule.ks is not None and numbers is not None:
        p = ks(reference, values)
        if p < rule.ks:
            lines.append(f"{feature} has drifted: Kolmogorov-Smirnov p {p:.1g}, below {rule.ks:g}")
    figures = [f"PSI {index:.2f}"] if index is not None else []
    figures += [f"p {p:.2g}"] if p is not None else []
    return Drift(
        feature=feature,
        has_drifted=bool(lines),
        why="; ".join(lines) or f"{feature} has not drifted ({', '.join(figures)})",
        num_rows=num_rows,
        psi=index,
        p=p,
    )


def psi(reference: FeatureReference, values: Sequence[Any] | Array) -> tuple[float, float]:
    """Returns the population stability index of `values`, and the level that it reaches by chance without drift.

    Half a row is added to each bin, so that an empty one does not make the index infinite.
    """
    from scipy.stats import chi2  # type: ignore[import-untyped]

    if reference.is_number:
        result = np.array(_binned(_finite(values), np.array(reference.edges)))
    else:
        texts = Counter(_texts(values))
        known = [texts[text] for text in reference.categories]
        result = np.array([*known, texts.total() - sum(known)])
    then = np.array(reference.counts) + 0.5
    now = result + 0.5
    p, q = then / then.sum(), now / now.sum()
    index = float(np.sum((q - p) * np.log(q / p)))
    by_chance = (1 / reference.num_rows + 1 / result.sum()) * chi2.ppf(1 - CHANCE, max(len(then) - 1, 1))
    return index, float(by_chance)


def ks(reference: FeatureReference, values: Sequence[Any] | Array) -> float:
    """Returns the p-value of the two-sample Kolmogorov-Smirnov test, small if the distributions differ."""
    from scipy.stats import ks_2samp

    return float(ks_2samp(reference.kept, _finite(values), method="asymp").pvalue)


def drifts_of(
    references: Mapping[str, FeatureReference], now: Mapping[str, Sequence[Any] | Array], rule: DriftEntry
) -> list[Drift]:
    """Returns the drift of every feature that both mappings have, drifted features first."""
    result = [drift_of(name, references[name], now[name], rule) for name in references if name in now]
    return sorted(result, key=lambda drift: not drift.has_drifted)


def _are_numbers(values: Sequence[Any] | Array) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype.kind == "f"
    return bool(values) and all(isinstance(value, (float, type(None))) for value in values)


def _finite(values: Sequence[Any] | Array) -> Array:
    """Returns the finite numbers among the values."""
    numbers = np.array([v for v in values if isinstance(v, (int, float, np.number))], dtype=np.float64)
    return numbers[np.isfinite(numbers)]


def _edges(numbers: Array) -> Array:
    """Returns the edges between the bins: the inner quantiles.

    A number that equals several quantiles, such as a constant, gets a bin of its own, so that rows that had it and have
    a larger one now fall into another bin.
    """
    quantiles = np.quantile(numbers, np.linspace(0, 1, NUM_BINS + 1))
    return np.unique([*quantiles[1:-1], *np.nextafter(quantiles[1:][np.diff(quantiles) == 0], np.inf)])


def _binned(numbers: Array, edges: Array) -> list[int]:
    """Returns the number of values in each bin; a value on an edge belongs to the upper bin."""
    places = np.searchsorted(edges, numbers, side="right")
    return [int(count) for count in np.bincount(places, minlength=len(edges) + 1)]


def _texts(values: Sequence[Any] | Array) -> list[str]:
    plain = values.tolist() if isinstance(values, np.ndarray) else values
    return [str(value) for value in plain if value is not None]


MAX_ROWS = 5000  # of data: evenly spread rows; of a log: the newest rows
PREDICTED = ("prediction", "confidence")
"""The fields of a log that are observed, where its rows have them."""

Features = Mapping[str, Sequence[Any] | Array]


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """A record of a training, stored with the model, with which later retraining runs compare.

    run_date: the date of the run that trained the model.
    at_s: when the training began, in seconds since the epoch.
    digest, num_samples: of the training data.
    files: (name, a text that changes with the content) of each training file.
    inputs, predictions: references of the features of the training data, and of the model's outputs for held-out rows.
    """

    run_date: str = stored_as("night")
    at_s: float
    digest: str
    num_samples: int
    files: tuple[tuple[str, str], ...] = ()
    inputs: Mapping[str, FeatureReference] = field(default_factory=dict)
    predictions: Mapping[str, FeatureReference] = field(default_factory=dict)


def input_features(folder: Path) -> dict[str, Array]:
    """Returns features of the training part of prepared data; none if the data was not prepared into a folder.

    Images have `brightness` and `contrast`, the mean and standard deviation of each image's pixels. Samples with a
    label have `label`. Text has `token`, and the share of `distinct_tokens` in each sample.
    """
    columns = some_rows(folder, "training", most=MAX_ROWS)
    result: dict[str, Array] = {}
    if isinstance(pixels := columns.get("pixel_values"), np.ndarray):
        flat = pixels.reshape(len(pixels), -1).astype(np.float64)
        result |= {"brightness": flat.mean(axis=1), "contrast": flat.std(axis=1)}
    if (tokens := columns.get("input_ids")) is not None:
        result |= {"token": np.concatenate(list(tokens)).reshape(-1), "distinct_tokens": _distinct(tokens)}
    if isinstance(labels := columns.get("labels"), np.ndarray) and labels.ndim == 1:
        result["label"] = labels
    return result


def logged_features(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the features PREDICTED of the newest rows of logged predictions, where the rows have them."""
    newest = deque(rows, maxlen=MAX_ROWS)
    result = {name: [v for row in newest if (v := _value(row, name)) is not None] for name in PREDICTED}
    return {name: values for name, values in result.items() if values}


def scored_features(scores: Scores) -> dict[str, Array]:
    """Returns the same features for a model's outputs on scored rows."""
    result: dict[str, Array] = {}
    if scores.predictions is not None:
        result["prediction"] = scores.predictions
    if scores.probabilities is not None:
        result["confidence"] = scores.probabilities.max(axis=1).astype(np.float64)
    return result


def references_of(features: Features) -> dict[str, FeatureReference]:
    """Returns a reference for each feature that has values. A feature of NaNs only, as of a broken model, has none."""
    return {name: result for name, values in features.items() if (result := reference_of(values)) is not None}


def _distinct(rows: Iterable[Array]) -> Array:
    """Returns the share of distinct tokens in each row."""
    return np.array([len(np.unique(row)) / max(row.size, 1) for row in rows])


def _value(row: Mapping[str, Any], name: str) -> Any:
    """Returns a field of a logged row. A confidence is a float; if not logged, it is the largest probability."""
    value = row.get(name)
    if name != "confidence":
        return value
    if value is None:
        value = largest_probability(row)
    return float(value) if isinstance(value, (int, float)) else None
