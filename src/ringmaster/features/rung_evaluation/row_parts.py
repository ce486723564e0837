"""Parts of the held-out rows in one random order: which rows they are, and what they show of all rows.

A gang reports the further rows of a part a few at a time, and is commanded meanwhile to go on, or that they are enough.
"""

from __future__ import annotations

import math
from random import Random

from ringmaster.techniques import EvaluationSpec
from ringmaster.techniques.job_specs import EvaluationSlice
from ringmaster.techniques.processes.gang_events import PartialEvaluation

MIN_PART_ROWS = 64  # of fewer, the variance of a mean is not known
MIN_ROWS_AT_ONCE, ROWS_AT_ONCE = 16, 8
"""Further rows are reported at least so many together, and one such share of those before."""
PARTS, ENOUGH = "parts", "enough"
"""Keys of steering requests: the parts on which jobs are evaluated in addition, and the steps at whose evaluations no
further rows of jobs are needed."""
ROWS = "rows "  # the head of the command


def part_at(evaluation: EvaluationSpec, step: int) -> EvaluationSlice | None:
    """Returns the part that an evaluation after a step computes; None for all rows."""
    return next((part for part in reversed(evaluation.parts) if part.step == step), None)


def place_of(share: float, num_rows: int) -> int:
    """Returns how many of `num_rows` rows come before a share of them; no part ends before `MIN_PART_ROWS`."""
    if share <= 0.0:
        return 0
    return min(num_rows, max(MIN_PART_ROWS, math.ceil(round(share * num_rows, 6))))


def row_order(num_rows: int, *, seed: int) -> list[int]:
    """Returns the numbers of all rows in their random order."""
    return Random(seed).sample(range(num_rows), num_rows)


def rows_of(part: EvaluationSlice, num_rows: int) -> list[int]:
    """Returns the numbers of a part's rows, in the order. num_rows: of a whole evaluation."""
    return row_order(num_rows, seed=part.seed)[place_of(part.begin, num_rows) : place_of(part.end, num_rows)]


def num_at_once(place: int) -> int:
    """Returns how many rows from a place on are evaluated before it is known whether more are needed.

    The first ones of the order are evaluated together.
    """
    return max(MIN_ROWS_AT_ONCE, place // ROWS_AT_ONCE)


def rows_up_to(job: str, *, step: int, share: float) -> str:
    """Returns the command that an evaluation of a part goes on up to a share of the rows; 0 ends it where it is."""
    return f"{head_of(job, step=step)}{share:.9g}"


def head_of(job: str, *, step: int) -> str:
    """Returns what comes before the share in commands about the evaluation of a job after a step."""
    return f"{ROWS}{job} {step} "


def end_of(part: PartialEvaluation) -> int:
    """Returns where the row after the last one of a part is in the random order."""
    return part.begin + len(part.rows.values)


def mean_of(part: PartialEvaluation) -> float:
    """Returns the metric of a part's rows; NaN where they count nothing."""
    count = sum(part.rows.counts)
    return sum(part.rows.values) / count if count else math.nan


def interval_of(part: PartialEvaluation) -> tuple[float, float]:
    """Returns the 95 % confidence interval of the metric of all rows.

    It is that of a ratio of means of rows drawn without replacement (Cochran, Sampling Techniques, 1977, 6.4).
    """
    num, mean = len(part.rows.values), mean_of(part)
    if num < 2 or not math.isfinite(mean):
        return -math.inf, math.inf
    residuals = [v - mean * c for v, c in zip(part.rows.values, part.rows.counts, strict=True)]
    variance = sum(each * each for each in residuals) / (num - 1) * (1.0 - num / part.whole) / num
    radius = 1.96 * math.sqrt(variance) * num / sum(part.rows.counts)
    return mean - radius, mean + radius


def in_words(part: PartialEvaluation) -> str:
    """Returns what a part is a part of, with the interval."""
    low, high = interval_of(part)
    return f"a part of {part.whole:,}, {low:.4g} to {high:.4g} with 95 %"
