"""The predicted makespan of a plan, with an interval that contains the actual one in 90 % of all runs.

Let e = log(actual / planned makespan). The spread s of a plan is how far e is expected to be from 0, by what was
measured for the plan. The errors of earlier runs correct it:

    e_i ~ N(mu, tau s_i^2)      mu ~ N(0, tau s^2)      tau ~ scaled inverse chi-squared(NU, 1)

where mu is what runs have in common (what profiles do not contain), tau is by how much spreads are too small or too
large, and s_1, ..., s_n are the spreads that earlier runs stated. This prior is conjugate (Gelman et al., Bayesian Data
Analysis, 3rd edition, sections 3.3 and 14.2): with k = 1 / s^2 + sum of 1 / s_i^2,

    m = sum of (e_i / s_i^2) / k      t = (NU + sum of (e_i^2 / s_i^2) - k m^2) / (NU + n)

the next error follows a Student t distribution with NU + n degrees of freedom, centre m and scale
sqrt(t (s^2 + 1 / k)). The module is pure: it has no clock, no I/O and no random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from ringmaster.tasks.planning import Plan, Segment
from ringmaster.tasks.profiling.over_nodes import PREDICTED
from ringmaster.tasks.profiling.reference import Load
from ringmaster.techniques import Profile

COVERAGE = 0.9  # the share of runs whose makespan should be in the interval
NU = 4  # the runs that the prior spread counts for
LEAST_SPREAD = 0.08  # what no trial contains: records, evaluation beside training, a machine that drifts
UNMEASURED_SPREAD = 0.35  # the error of predicted step times (docs/log.md, "Decisions: predictions")
# The part of a load, as a logarithm, that may come or go before the batch ends.
PASSING_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """An earlier run of a batch.

    error: the logarithm of its actual over its planned makespan.
    spread: the spread that was stated for it.
    """

    error: float
    spread: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted makespan of a plan.

    makespan_s: the median prediction, which the errors of earlier runs have corrected.
    low_s, high_s: the interval that contains the actual makespan with probability `coverage`.
    load: the load of the machine when the plan was made (`tasks/profiling/reference.py`), which the plan contains.
    spread: the expected logarithmic error of the plan itself.
    num_earlier: the number of earlier runs that are taken into account.
    """

    makespan_s: float
    low_s: float
    high_s: float
    load: float
    spread: float
    num_earlier: int
    coverage: float = COVERAGE


def predict(planned_s: float, *, spread: float, load: float = 1.0, earlier: Sequence[EarlierRun] = ()) -> Prediction:
    """Returns the prediction for a plan with this makespan and spread; `spread` and those of earlier runs exceed 0."""
    weights = [1 / run.spread**2 for run in earlier]
    precision = 1 / spread**2 + sum(weights)
    centre = sum(weight * run.error for weight, run in zip(weights, earlier, strict=True)) / precision
    squares = sum(weight * run.error**2 for weight, run in zip(weights, earlier, strict=True))
    freedom = NU + len(earlier)
    tau = max(NU + squares - precision * centre**2, 0.0) / freedom
    half = t_quantile((1 + COVERAGE) / 2, freedom=freedom) * math.sqrt(tau * (spread**2 + 1 / precision))
    return Prediction(
        makespan_s=planned_s * math.exp(centre),
        low_s=planned_s * math.exp(centre - half),
        high_s=planned_s * math.exp(centre + half),
        load=load,
        spread=spread,
        num_earlier=len(earlier),
    )


def spread_of_plan(plan: Plan, profiles: Mapping[str, Sequence[Profile]], load: Load) -> float:
    """Returns the spread of a plan's makespan; option k of a job is its profile k.

    The errors of profiles count by their share of the device time. They are added as if they were one error, because
    what makes one job slower than its profile usually makes all of them slower.
    """
    used = [(s.duration_s * _num_devices(s), profiles[s.job][s.option]) for s in plan.segments]
    device_s = sum(seconds for seconds, _ in used)
    steps = sum(seconds * _spread(profile) for seconds, profile in used) / device_s if device_s else 0.0
    return math.hypot(LEAST_SPREAD, steps, load.spread, PASSING_SHARE * math.log(load.ratio))


def errors_of(runs: Iterable[Mapping[str, float]]) -> list[EarlierRun]:
    """Returns the errors of earlier runs by their metrics; leaves out runs that stated no spread, or took no time."""
    keys = ("makespan_s", "planned_makespan_s", "prediction_spread")
    found = (tuple(run.get(key, 0.0) for key in keys) for run in runs)
    return [
        EarlierRun(error=math.log(actual_s / planned_s), spread=spread)
        for actual_s, planned_s, spread in found
        if min(actual_s, planned_s, spread) > 0
    ]


def t_quantile(probability: float, *, freedom: int) -> float:
    """Returns a quantile of Student's t distribution with at least `NU` degrees of freedom, to 0.2 %.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5. SciPy's takes a second to import.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / math.pow(freedom, power) for power, term in enumerate(terms))


def _num_devices(segment: Segment) -> int:
    return sum(len(ids) for _, ids in segment.devices)


def _spread(profile: Profile) -> float:
    return UNMEASURED_SPREAD if profile.source == PREDICTED else profile.spread
