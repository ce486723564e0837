"""Beliefs about the speed of each job under each option: predictions, corrected by what running segments measure.

The seconds of a step of job j under option o are the predicted ones times exp(x_jo). With k the option's technique,

    x_jo = s_m u + s_t v_k + s_b w_j + s_o z_jo        u, v_k, w_j, z_jo ~ N(0, 1), independent

u is what the machine, v_k what the technique, and w_j what the job has in common with all of its options; `SpeedErrors`
has the standard deviations. A running segment measures y_jo = x_jo + e_jo with e_jo ~ N(0, s_e^2).

Let i number a job's measurements, f_i = (s_m, s_t e_k) be their coefficients of theta = (u, v_1, ..., v_K), b_i their
s_b and p_i = 1 / (s_o^2 + s_e^2). Given theta, the posterior of the job's factor w_j is normal (Bishop, Pattern
Recognition and Machine Learning, 2.3.3), with B = 1 + sum_i p_i b_i^2:

    mean  sum_i g_i (y_i - f_i theta)  with g_i = p_i b_i / B        variance  1 / B

Integrating over w_j, the job contributes to theta

    precision    sum_i p_i f_i f_i'  -  B g g'     with g = sum_i g_i f_i
    information  sum_i p_i f_i y_i   -  B g sum_i g_i y_i

so that one system of 1 + K equations is solved, however many jobs there are. `SpeedBeliefs.draws` draws theta, then
each w_j given theta, then each z_jo given both, so that draws of several options are correlated as the posterior is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques import Profile
from ringmaster.techniques.profiles import PREDICTED
from ringmaster.techniques.registry import TECHNIQUES

MIN_SPREAD = 1e-9  # of an option that has not run
Option = int | str
"""The number or the fingerprint of an option of a job."""


@dataclass(frozen=True, kw_only=True)
class SpeedErrors:
    """Standard deviations of the logarithm of true over predicted step times, by what causes them.

    machine: common to all jobs on this machine.
    technique: common to all jobs under one technique.
    job: common to all options of a job.
    option: of one option of one job.
    measurement: of the mean step time that a running segment reports.
    """

    machine: float
    technique: float
    job: float
    option: float
    measurement: float = 0.005


OF_PREDICTIONS = SpeedErrors(machine=0.2, technique=0.1, job=0.25, option=0.1)
OF_MEASUREMENTS = SpeedErrors(machine=0.0, technique=0.0, job=0.1, option=0.03)
# A technique, or code of a job's steps, that is not built in: seven times as slow in one of 20 cases.
OWN_CODE_SPREAD = 1.2
GUESS_SPREAD = 2.5  # a step of which nothing is known: 16 ms to 60 s in nine of ten cases, around a second


def prediction_errors(technique: str, *, is_rough: bool = False) -> SpeedErrors:
    """Returns the errors of predicted step times under a technique.

    The cost model predicts a technique that is not built in as if it did what built-in ones of its mesh do.

    is_rough: the steps call code that is not built in, and were predicted by its operations.
    """
    errors = replace(OF_PREDICTIONS, job=OWN_CODE_SPREAD) if is_rough else OF_PREDICTIONS
    return errors if technique in TECHNIQUES.builtin else replace(errors, technique=OWN_CODE_SPREAD)


def errors_of(profile: Profile) -> SpeedErrors:
    """Returns the errors to expect of a profile's step time.

    A prediction that measurements have corrected states its spread. That of the option itself is corrected last. What
    exceeds the errors of predictions, as the spread of a guess does, is the job's.
    """
    if profile.source != PREDICTED:
        return replace(OF_MEASUREMENTS, option=math.hypot(OF_MEASUREMENTS.option, profile.spread))
    prior = prediction_errors(profile.technique)
    if not profile.spread:
        return prior
    option = min(prior.option, profile.spread)
    shared = math.sqrt(profile.spread**2 - option**2)
    known = min(1.0, shared / math.hypot(prior.machine, prior.technique, prior.job))
    machine, technique = known * prior.machine, known * prior.technique
    job = math.sqrt(max(shared**2 - machine**2 - technique**2, 0.0))
    return replace(prior, machine=machine, technique=technique, job=job, option=option)


@dataclass(frozen=True, kw_only=True)
class SpeedBelief:
    """The believed true over predicted seconds of a step: log-normal, exp(N(mean, spread^2)).

    own_spread: the part of the spread that other options of the job do not share; 0 for an option that has run.
    """

    mean: float
    spread: float
    own_spread: float

    @property
    def is_measured(self) -> bool:
        """Whether the option itself has run."""
        return self.own_spread == 0.0

    def ratio(self, *, optimism: float = 0.0) -> float:
        """Returns the median of true over predicted seconds, less `optimism` times the option's own spread."""
        return math.exp(self.mean - optimism * self.own_spread)

    def spread_relative_to(self, other: SpeedBelief) -> float:
        """Returns the standard deviation of the logarithm of this ratio over that of another option of the job."""
        if self.is_measured or other.is_measured:
            return math.hypot(self.spread, other.spread)
        return math.hypot(self.own_spread, other.own_spread)


@dataclass(frozen=True, kw_only=True)
class _Measurement:
    log_ratio: float
    technique: str
    errors: SpeedErrors


def _mean_of(measurements: Sequence[_Measurement]) -> _Measurement:
    """Returns the mean of measurements of one option by the inverse squares of their errors."""
    weights = [each.errors.measurement**-2 for each in measurements]
    total = sum(weights)
    mean = sum(weight * each.log_ratio for weight, each in zip(weights, measurements, strict=True)) / total
    newest = measurements[-1]
    return replace(newest, log_ratio=mean, errors=replace(newest.errors, measurement=total**-0.5))


class SpeedBeliefs:
    """The posterior of all step times, given a measurement of each option that has run."""

    def __init__(self) -> None:
        self._measured: dict[str, dict[Option, _Measurement]] = {}
        self._of_segments: dict[tuple[str, Option], dict[int, _Measurement]] = {}
        self._posterior: _Posterior | None = None  # of the machine and the techniques, until something is measured
        self._beliefs: dict[Hashable, SpeedBelief] = {}  # equal ones of thousands of options, until then

    def note(
        self, job: str, option: Option, ratio: float, *, technique: str, errors: SpeedErrors, segment: int = 0
    ) -> None:
        """Records the measured over the predicted seconds of a step under an option, both without load.

        The mean of what segments have measured of the option counts.

        errors: the prior errors of the option's predicted step time.
        segment: the number of the one that measures, whose last measurement is replaced.
        """
        measurement = _Measurement(log_ratio=math.log(ratio), technique=technique, errors=errors)
        of_segments = self._of_segments.setdefault((job, option), {})
        of_segments[segment] = measurement
        if len(of_segments) > 1:
            measurement = _mean_of([*of_segments.values()])
        known = self._measured.setdefault(job, {})
        if known.get(option) != measurement:
            known[option] = measurement
            self._posterior = None

    def forget(self, job: str) -> None:
        """Drops the measurements of a job whose options have changed."""
        if self._measured.pop(job, None):
            self._of_segments = {key: known for key, known in self._of_segments.items() if key[0] != job}
            self._posterior = None

    def of(self, job: str, option: Option, *, technique: str, errors: SpeedErrors) -> SpeedBelief:
        """Returns the belief about an option."""
        posterior = self._posterior_now()
        known = self._measured.get(job, {})
        key = (job if known else None, option if option in known else None, technique, errors)
        if key not in self._beliefs:
            self._beliefs[key] = self._belief(option, known, posterior, technique=technique, errors=errors)
        return self._beliefs[key]

    def _belief(
        self,
        option: Option,
        known: Mapping[Option, _Measurement],
        posterior: _Posterior,
        *,
        technique: str,
        errors: SpeedErrors,
    ) -> SpeedBelief:
        mean, variance = posterior.common(known.values(), technique=technique, errors=errors)
        own = errors.option**2
        if (measurement := known.get(option)) is None:
            own += posterior.technique_variance(technique, errors=errors)
            return SpeedBelief(
                mean=mean, spread=math.sqrt(variance + errors.option**2), own_spread=max(math.sqrt(own), MIN_SPREAD)
            )
        # What the option's own error is, given its measurement and what is common to it and others.
        share, measured = _own_share(measurement.errors), measurement.errors.measurement
        return SpeedBelief(
            mean=mean + share * (measurement.log_ratio - mean),
            spread=math.sqrt(share * measured**2 + (1 - share) ** 2 * variance),
            own_spread=0.0,
        )

    def draws(
        self, options: Mapping[tuple[str, int], tuple[str, SpeedErrors]], *, normals: Callable[[], NDArray[np.float64]]
    ) -> dict[tuple[str, int], NDArray[np.float64]]:
        """Returns draws of x, the logarithm of true over predicted seconds, of options from their joint posterior.

        options: by job and number, the technique and the prior errors.
        normals: returns the next independent standard normal numbers, one for each draw.
        """
        posterior = self._posterior_now()
        new = dict.fromkeys(name for name, _ in options.values() if name not in posterior.techniques)
        root = np.linalg.cholesky(posterior.covariance)
        # Row 0 is the machine, then the techniques that were measured, then those that were not.
        theta = posterior.mean[:, None] + root @ np.array([normals() for _ in posterior.mean])
        theta = np.vstack([theta, *(normals() for _ in new)])
        rows = {**posterior.techniques, **{name: len(posterior.mean) + k for k, name in enumerate(new)}}
        of_jobs: dict[str, NDArray[np.float64]] = {}
        drawn = {}
        for (job, option), (technique, errors) in options.items():
            known = self._measured.get(job, {})
            if job not in of_jobs:
                terms = _JobTerms.of(known.values(), posterior.techniques)
                off = terms.log_ratios[:, None] - terms.factors @ theta[: len(posterior.mean)]
                of_jobs[job] = terms.gains @ off + normals() / math.sqrt(terms.total)
            common = errors.machine * theta[0] + errors.technique * theta[rows[technique]] + errors.job * of_jobs[job]
            if (measurement := known.get(option)) is None:
                drawn[job, option] = common + errors.option * normals()
                continue
            share = _own_share(measurement.errors)
            own = share * (measurement.log_ratio - common)
            drawn[job, option] = common + own + math.sqrt(share) * measurement.errors.measurement * normals()
        return drawn

    def _posterior_now(self) -> _Posterior:
        if self._posterior is None:
            self._posterior, self._beliefs = _Posterior.of(self._measured), {}
        return self._posterior


def _own_share(errors: SpeedErrors) -> float:
    """Returns the part of what a measurement differs by from what is common that is the option's own error."""
    own = errors.option**2
    return own / (own + errors.measurement**2) if own else 0.0


@dataclass(frozen=True)
class _JobTerms:
    """The measurements of a job, in the notation of the module: f_i by row, p_i, y_i, B and g_i."""

    factors: NDArray[np.float64]
    weights: NDArray[np.float64]
    log_ratios: NDArray[np.float64]
    total: float
    gains: NDArray[np.float64]

    @classmethod
    def of(cls, known: Iterable[_Measurement], techniques: Mapping[str, int]) -> _JobTerms:
        listed = list(known)
        factors = [_factors(m.technique, m.errors, techniques) for m in listed]
        weights = np.array([1 / (m.errors.option**2 + m.errors.measurement**2) for m in listed])
        job_errors = np.array([m.errors.job for m in listed])
        total = 1.0 + float(weights @ job_errors**2)
        return cls(
            factors=np.array(factors).reshape(len(listed), 1 + len(techniques)),
            weights=weights,
            log_ratios=np.array([m.log_ratio for m in listed]),
            total=total,
            gains=weights * job_errors / total,
        )


@dataclass(frozen=True)
class _Posterior:
    """The posterior of theta; `techniques` are numbered as in theta, after the machine."""

    techniques: Mapping[str, int]
    mean: NDArray[np.float64]
    covariance: NDArray[np.float64]

    @classmethod
    def of(cls, measured: Mapping[str, Mapping[Option, _Measurement]]) -> _Posterior:
        names = sorted({m.technique for known in measured.values() for m in known.values()})
        techniques = {name: number for number, name in enumerate(names, start=1)}
        precision, information = np.eye(1 + len(names)), np.zeros(1 + len(names))
        for known in measured.values():
            job = _JobTerms.of(known.values(), techniques)
            pull = job.gains @ job.factors
            precision += job.factors.T @ (job.weights[:, None] * job.factors) - job.total * np.outer(pull, pull)
            information += job.factors.T @ (job.weights * job.log_ratios)
            information -= job.total * pull * float(job.gains @ job.log_ratios)
        covariance: NDArray[np.float64] = np.linalg.inv(precision).astype(np.float64)
        return cls(techniques, covariance @ information, covariance)

    def common(self, known: Iterable[_Measurement], *, technique: str, errors: SpeedErrors) -> tuple[float, float]:
        """Returns mean and variance of what an option has in common with others: x_jo without its own error.

        known: the measurements of its job.
        """
        job = _JobTerms.of(known, self.techniques)
        factors = _factors(technique, errors, self.techniques) - errors.job * (job.gains @ job.factors)
        mean = float(factors @ self.mean) + errors.job * float(job.gains @ job.log_ratios)
        variance = float(factors @ self.covariance @ factors) + errors.job**2 / job.total
        return mean, variance + (0.0 if technique in self.techniques else errors.technique**2)

    def technique_variance(self, technique: str, *, errors: SpeedErrors) -> float:
        """Returns the variance of what the options of one technique have in common."""
        number = self.techniques.get(technique)
        return errors.technique**2 * (1.0 if number is None else float(self.covariance[number, number]))


def _factors(technique: str, errors: SpeedErrors, techniques: Mapping[str, int]) -> NDArray[np.float64]:
    factors = np.zeros(1 + len(techniques))
    factors[0] = errors.machine
    if technique in techniques:
        factors[techniques[technique]] = errors.technique
    return factors
