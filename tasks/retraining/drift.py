"""Drift: how far what comes in now is from what a model was trained on.

Two measures, each against a *reference* that is kept when a model is trained, so that the old data need not be there:

- the population stability index over ten quantile bins of the reference, or its most frequent values,
  PSI = sum (q - p) ln(q / p) with p the reference's shares and q today's (Siddiqi, Credit Risk Scorecards, 2006);
- the two-sample Kolmogorov-Smirnov test, of numbers only.

Where nothing has drifted the PSI of n rows against m is about (1/n + 1/m) chi2 with one degree of freedom less than
bins (Yurdakul and Naranjo, Statistical properties of the population stability index, J. Risk Model Validation 2020):
few rows have a large PSI by chance, and below that nothing counts as drift.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

NUM_BINS = 10
MOST_CATEGORIES = 20  # the rest are one bin
MOST_KEPT = 1000  # values of a reference that are kept for the Kolmogorov-Smirnov test, its quantiles
CHANCE = 0.01  # of a PSI above the bound where nothing has drifted

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class DriftRule:
    """What counts as drift. psi: above which; ks: the p-value below which; None: not looked at. min_rows: else too few
    rows say nothing."""

    psi: float | None = 0.2
    ks: float | None = None
    min_rows: int = 100


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a feature was like at the training: shares of its bins, not its rows.

    edges: between the bins of a number; none of a category, whose bins are `categories` and one for all others.
    counts: [bins]. kept: quantiles of a number, ascending.
    """

    num_rows: int
    counts: tuple[int, ...]
    edges: tuple[float, ...] = ()
    categories: tuple[str, ...] = ()
    kept: tuple[float, ...] = ()

    @property
    def is_number(self) -> bool:
        """Whether the feature is a number, rather than one of some values."""
        return not self.categories


@dataclass(frozen=True, kw_only=True)
class Drift:
    """What was found of a feature. why: in words. has_drifted: by one measure at least; False of too few rows."""

    feature: str
    has_drifted: bool
    why: str
    num_rows: int
    psi: float | None = None
    p: float | None = None


def reference_of(values: Sequence[Any] | Array) -> Reference | None:
    """The reference of a feature's values: floats are numbers, all else are categories. None where there is no value,
    or no finite number."""
    if _are_numbers(values):
        numbers = _finite(values)
        if not len(numbers):
            return None
        edges = _edges(numbers)
        kept = np.quantile(numbers, np.linspace(0, 1, min(len(numbers), MOST_KEPT)))
        return Reference(
            num_rows=len(numbers),
            counts=tuple(_binned(numbers, edges)),
            edges=tuple(float(edge) for edge in edges),
            kept=tuple(float(value) for value in kept),
        )
    texts = Counter(_texts(values))
    if not texts:
        return None
    common = [text for text, _ in sorted(texts.items(), key=lambda item: (-item[1], item[0]))[:MOST_CATEGORIES]]
    return Reference(
        num_rows=texts.total(),
        counts=(*(texts[text] for text in common), texts.total() - sum(texts[text] for text in common)),
        categories=tuple(common),
    )


def drift_of(feature: str, reference: Reference, values: Sequence[Any] | Array, rule: DriftRule) -> Drift:
    """How far `values` are from the reference, and whether a rule calls that drift."""
    numbers = _finite(values) if reference.is_number else None
    num_rows = len(_texts(values)) if numbers is None else len(numbers)
    if num_rows < max(rule.min_rows, 1):
        why = f"{feature} has {num_rows} rows, too few to tell (min_rows {rule.min_rows})"
        return Drift(feature=feature, has_drifted=False, why=why, num_rows=num_rows)
    said: list[str] = []
    index = p = None
    if rule.psi is not None:
        index, by_chance = psi(reference, values)
        if index > max(rule.psi, by_chance):
            said.append(f"{feature} has drifted: PSI {index:.2f}, above {max(rule.psi, by_chance):.2g}")
    if rule.ks is not None and numbers is not None:
        p = ks(reference, values)
        if p < rule.ks:
            said.append(f"{feature} has drifted: Kolmogorov-Smirnov p {p:.1g}, below {rule.ks:g}")
    figures = [f"PSI {index:.2f}"] if index is not None else []
    figures += [f"p {p:.2g}"] if p is not None else []
    return Drift(
        feature=feature,
        has_drifted=bool(said),
        why="; ".join(said) or f"{feature} has not drifted ({', '.join(figures)})",
        num_rows=num_rows,
        psi=index,
        p=p,
    )


def psi(reference: Reference, values: Sequence[Any] | Array) -> tuple[float, float]:
    """The population stability index of `values`, and what it reaches by chance where nothing has drifted.

    Half a row is added to each bin, so that an empty one does not make it infinite.
    """
    from scipy.stats import chi2  # type: ignore[import-untyped]

    if reference.is_number:
        found = np.array(_binned(_finite(values), np.array(reference.edges)))
    else:
        texts = Counter(_texts(values))
        known = [texts[text] for text in reference.categories]
        found = np.array([*known, texts.total() - sum(known)])
    then = np.array(reference.counts) + 0.5
    now = found + 0.5
    p, q = then / then.sum(), now / now.sum()
    index = float(np.sum((q - p) * np.log(q / p)))
    by_chance = (1 / reference.num_rows + 1 / found.sum()) * chi2.ppf(1 - CHANCE, max(len(then) - 1, 1))
    return index, float(by_chance)


def ks(reference: Reference, values: Sequence[Any] | Array) -> float:
    """The p-value of the two-sample Kolmogorov-Smirnov test: small where the two are not of one distribution."""
    from scipy.stats import ks_2samp

    return float(ks_2samp(reference.kept, _finite(values), method="asymp").pvalue)


def drifts_of(
    references: Mapping[str, Reference], now: Mapping[str, Sequence[Any] | Array], rule: DriftRule
) -> list[Drift]:
    """The drift of every feature that both know, those that have drifted first."""
    found = [drift_of(name, references[name], now[name], rule) for name in references if name in now]
    return sorted(found, key=lambda drift: not drift.has_drifted)


def _are_numbers(values: Sequence[Any] | Array) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype.kind == "f"
    return bool(values) and all(isinstance(value, (float, type(None))) for value in values)


def _finite(values: Sequence[Any] | Array) -> Array:
    """The numbers among the values; what a log left out, and what is infinite, says nothing of a distribution."""
    numbers = np.array([v for v in values if isinstance(v, (int, float, np.number))], dtype=np.float64)
    return numbers[np.isfinite(numbers)]


def _edges(numbers: Array) -> Array:
    """Between the bins: the inner quantiles. A number that is more than one of them, as a constant is, has a bin of its
    own, so that rows that had it and have a larger one now are in another bin."""
    quantiles = np.quantile(numbers, np.linspace(0, 1, NUM_BINS + 1))
    repeated = quantiles[1:][np.diff(quantiles) == 0]
    return np.unique([*quantiles[1:-1], *np.nextafter(repeated, np.inf)])


def _binned(numbers: Array, edges: Array) -> list[int]:
    """How many numbers lie in each bin; a number on an edge lies above it."""
    places = np.searchsorted(edges, numbers, side="right")
    return [int(count) for count in np.bincount(places, minlength=len(edges) + 1)]


def _texts(values: Sequence[Any] | Array) -> list[str]:
    plain = values.tolist() if isinstance(values, np.ndarray) else values
    return [str(value) for value in plain if value is not None]
