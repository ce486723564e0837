"""Predicted ends of a batch and of its jobs: what an executor states, and what other processes read of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringmaster.codec import from_json, to_json

COVERAGE = 0.9  # the share of ends that should be in their interval
FIRST_PREDICTION = "prediction"
"""The fact: the first prediction since the batch was started or resumed, as JSON."""
NEWEST_PREDICTION = "newest_prediction"
"""The fact: the newest prediction, as JSON."""


@dataclass(frozen=True, kw_only=True)
class PredictedEnd:
    """When something ends: the median, and the interval that contains the end with probability `COVERAGE`."""

    end_s: float
    low_s: float
    high_s: float

    def later(self, seconds: float) -> PredictedEnd:
        """Returns the same end in seconds that count from `seconds` earlier."""
        return PredictedEnd(end_s=self.end_s + seconds, low_s=self.low_s + seconds, high_s=self.high_s + seconds)

    def not_before(self, now_s: float) -> PredictedEnd:
        """Returns the end of something that has not ended at `now_s`."""
        return PredictedEnd(end_s=max(self.end_s, now_s), low_s=max(self.low_s, now_s), high_s=max(self.high_s, now_s))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted ends of a batch and its jobs. All seconds count from the batch's begin.

    makespan_s: when the last job ends, the median.
    low_s, high_s: the interval that contains the actual makespan with probability `coverage`.
    load: the load of the machine when the plan was made (`tasks/profiling/reference.py`), which the plan contains.
    spread: the expected logarithmic error of what the speeds alone say.
    num_earlier: the number of earlier runs whose errors correct it.
    uncorrected_s: the median makespan by the speeds alone; None in predictions of earlier releases.
    jobs: the end of each job that has not ended.
    since_s: the batch's begin, in seconds since the epoch; 0 if it has not begun.
    made_s: when it was made.
    """

    makespan_s: float
    low_s: float
    high_s: float
    load: float
    spread: float
    num_earlier: int
    coverage: float = COVERAGE
    uncorrected_s: float | None = None
    jobs: Mapping[str, PredictedEnd] = field(default_factory=dict)
    since_s: float = 0.0
    made_s: float = 0.0

    @property
    def end(self) -> PredictedEnd:
        """The end of the batch."""
        return PredictedEnd(end_s=self.makespan_s, low_s=self.low_s, high_s=self.high_s)

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form, with seconds to a thousandth."""
        data: dict[str, Any] = to_json(self)
        jobs = {name: {key: round(value, 3) for key, value in end.items()} for name, end in data["jobs"].items()}
        return {**data, "jobs": jobs}


def predictions_in(facts: Mapping[str, Any]) -> tuple[Prediction | None, Prediction | None]:
    """Returns the first and the newest prediction of a batch by its facts; None for what is missing or unreadable."""
    return _read(facts.get(FIRST_PREDICTION)), _read(facts.get(NEWEST_PREDICTION) or facts.get(FIRST_PREDICTION))


def _read(data: Any) -> Prediction | None:
    try:
        return None if data is None else from_json(Prediction, data)
    except ValueError:  # of another release
        return None
