"""The leaderboard of a sweep's trials, the best first, as plain rows for tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.tasks.sweeping.space import Values
from ringmaster.techniques.metric import metric_named

Reports = Mapping[str, Mapping[int, Mapping[str, float]]]
"""The metrics on held-out data, by trial and step."""


def leaderboard(
    trials: Sequence[str],
    *,
    objective: str,
    values: Mapping[str, Values],
    reports: Reports,
    jobs: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Returns a row per trial: completed trials ordered by the objective, then the others by their number of steps.

    values: by trial, as far as proposed. jobs: the rows of a batch's result. A trial without a finite value of the
    objective has no rank; the first completed one is the best.
    """
    ended = {row["name"]: row for row in jobs}
    sign = -1.0 if metric_named(objective).higher_is_better else 1.0

    def order(name: str) -> tuple[bool, int, float]:
        value = last(reports.get(name, {})).get(objective, math.nan)
        is_done = ended[name]["status"] == JobStatus.DONE
        return not is_done, 0 if is_done else -max(reports.get(name, {}), default=0), sign * value

    ranked = [name for name in trials if math.isfinite(last(reports.get(name, {})).get(objective, math.nan))]
    ranked.sort(key=order)
    return [
        _row(name, place if name in ranked else None, values=values, reports=reports, job=ended[name])
        for place, name in enumerate([*ranked, *(name for name in trials if name not in ranked)], start=1)
    ]


def best(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns the row of the best trial, or None if no trial has completed."""
    return next((dict(row) for row in rows if row["status"] == JobStatus.DONE and row["rank"] is not None), None)


def last(reports: Mapping[int, Mapping[str, float]]) -> Mapping[str, float]:
    """Returns the last metrics of a trial."""
    return reports[max(reports)] if reports else {}


def _row(
    name: str, rank: int | None, *, values: Mapping[str, Values], reports: Reports, job: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "rank": rank,
        "job": name,
        **{f"held-out {key}": _figure(value) for key, value in last(reports.get(name, {})).items()},
        **{
            key: str(value) if isinstance(value, (list, dict)) else value for key, value in values.get(name, {}).items()
        },
        "status": job["status"],
        "steps": job["num_steps"],
        "device seconds": round(sum(s["device_s"] for s in job["segments"]), 1),
        "model": job["model_uri"],
    }


def _figure(value: float) -> float | None:
    """Rounds a metric for tables; a value that is not finite, which JSON lacks, becomes None."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
