"""Curves of metrics over steps and seconds, thinned to few points that keep every extreme, and their reader."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import select

from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.schema import GANG_EVENTS, SEGMENTS
from ringmaster.techniques.processes.gang_events import EvaluationReported, JobEvent, Steps, event_or_refusal

MAX_POINTS = 2000  # of a curve that are kept
MAX_ROWS = 1000  # events that are read at a time
SIGNIFICANT = 6  # digits of values


@dataclass
class Curve:
    """The values of a metric of one job, thinned as they come: those of each range of steps are its extremes.

    steps: after which the values were taken, in ascending order.
    at_s: when, in seconds since the epoch.
    trained_s: seconds that the job had trained by then.
    """

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    at_s: array[float] = field(default_factory=lambda: array("d"))
    trained_s: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)

    def extend(
        self,
        steps: Sequence[float],
        values: Sequence[float],
        *,
        at_s: Sequence[float],
        trained_s: Sequence[float],
    ) -> None:
        """Adds points. Where earlier ones have later steps, these are dropped: the job takes them again."""
        if len(steps):
            num_before = bisect_left(self.steps, steps[0])
            for column, items in zip(self._columns(), (steps, values, at_s, trained_s), strict=True):
                del column[num_before:]
                column.extend(items)
        if len(self) >= 2 * MAX_POINTS:
            thin = self.thinned(MAX_POINTS)
            self.steps, self.values, self.at_s, self.trained_s = thin._columns()

    def thinned(self, most: int) -> Curve:
        """Returns about `most` of its points: the least and the greatest value of each of equal ranges of steps."""
        if len(self) <= most:
            return self
        steps, values = np.frombuffer(self.steps), np.frombuffer(self.values)
        ranges = (steps - steps[0]) * (max(1, most // 2) / (steps[-1] - steps[0] + 1))
        order = np.lexsort((values, ranges.astype(int)))
        is_first = np.diff(ranges.astype(int)[order], prepend=-1) > 0
        kept = np.unique([0, len(self) - 1, *order[is_first], *order[np.roll(is_first, -1)]])
        return Curve(*(array("d", np.frombuffer(column)[kept].tobytes()) for column in self._columns()))

    def after(self, step: float) -> Curve:
        """Returns the points after a step."""
        num_before = bisect_right(self.steps, step)
        return Curve(*(column[num_before:] for column in self._columns()))

    def to_json(self, *, base_s: float) -> dict[str, Any]:
        """Returns its columns as lists. base_s: the time from which on `at` counts."""
        return {
            "step": [int(step) for step in self.steps],
            "value": [float(f"{value:.{SIGNIFICANT}g}") for value in self.values],
            "at": [round(at_s - base_s, 2) for at_s in self.at_s],
            "trained": [round(seconds, 2) for seconds in self.trained_s],
        }

    def _columns(self) -> tuple[array[float], array[float], array[float], array[float]]:
        return self.steps, self.values, self.at_s, self.trained_s


@dataclass
class _TrainedTime:
    """The seconds that a job has trained: those of earlier segments, and since when the present one trains."""

    segment: int = 0
    earlier_s: float = 0.0
    since_s: float = 0.0
    until_s: float = 0.0

    def begin(self, segment: int, *, at_s: float) -> None:
        """Notes that a segment trains, whose first step began at a time."""
        if segment != self.segment:
            self.earlier_s += self.until_s - self.since_s
            self.segment, self.since_s, self.until_s = segment, at_s, at_s

    def at(self, at_s: float) -> float:
        """Returns the seconds that the job has trained at a time of the present segment."""
        self.until_s = max(self.until_s, at_s)
        return self.earlier_s + max(0.0, at_s - self.since_s)


CurveKey = tuple[str, str]  # the job's name in the timeline, and the metric's name as in MLflow


class CurveReader:
    """Reads the curves of a batch that runs alone, or of a pool, whose jobs are named "BATCH/JOB"."""

    def __init__(self, database: Database, *, is_pool: bool) -> None:
        self._database, self._is_pool = database, is_pool
        self._after: dict[str, int] = {}  # by batch: the newest event that was read
        self._times: dict[str, _TrainedTime] = {}
        self.curves: dict[CurveKey, Curve] = {}

    def read(self, batches: Iterable[str]) -> dict[CurveKey, float]:
        """Reads the new events of some batches, by id.

        Returns the curves that have changed, each with the step after which its points are new.
        """
        changed: dict[CurveKey, float] = {}
        for batch in batches:
            for segment, job, started_s, event in self._events(batch):
                name = (event.job if isinstance(event, JobEvent) else None) or job
                name = f"{batch}/{name}" if self._is_pool else name
                if isinstance(event, Steps) and event.seconds:
                    self._take_steps(name, segment, event, changed)
                elif isinstance(event, EvaluationReported) and (event.part is None or event.part.begin == 0):
                    at_s = event.wall_s or started_s
                    trained_s = self._times[name].at(at_s) if name in self._times else 0.0
                    for metric, value in event.metrics.items():
                        key = name, f"eval/{metric}" if event.part is None else f"eval-part/{metric}"
                        self._take(key, [event.step], [value], at_s=[at_s], trained_s=[trained_s], changed=changed)
        return changed

    def _events(self, batch: str) -> Iterator[tuple[int, str, float, Any]]:
        query = select(GANG_EVENTS, SEGMENTS.c.job, SEGMENTS.c.started_s).where(SEGMENTS.c.batch == batch)
        query = query.join(SEGMENTS, SEGMENTS.c.id == GANG_EVENTS.c.segment).order_by(GANG_EVENTS.c.id).limit(MAX_ROWS)
        while rows := self._database.rows(query.where(GANG_EVENTS.c.id > self._after.get(batch, 0))):
            for row in rows:
                yield row.segment, row.job, row.started_s, event_or_refusal(row.content)
            self._after[batch] = rows[-1].id

    def _take_steps(self, job: str, segment: int, event: Steps, changed: dict[CurveKey, float]) -> None:
        began_s = event.wall_s - sum(event.seconds)
        times = self._times.setdefault(job, _TrainedTime())
        times.begin(segment, at_s=began_s)
        at_s = began_s + np.cumsum(event.seconds)
        trained_s = at_s - at_s[-1] + times.at(float(at_s[-1]))
        steps = range(event.first_step + 1, event.step + 1)
        for metric, values in (("train/loss", event.losses), ("train/reward", event.rewards)):
            if len(values) == len(steps):
                self._take((job, metric), steps, values, at_s=at_s, trained_s=trained_s, changed=changed)

    def _take(
        self, key: CurveKey, steps: Any, values: Any, *, at_s: Any, trained_s: Any, changed: dict[CurveKey, float]
    ) -> None:
        is_known = np.isfinite(np.asarray(values, dtype=float))
        if not is_known.any():
            return
        steps, values, at_s, trained_s = (
            np.asarray(each, dtype=float)[is_known] for each in (steps, values, at_s, trained_s)
        )
        curve = self.curves.setdefault(key, Curve())
        last = curve.steps[-1] if curve.steps else -1.0
        changed[key] = min(changed.get(key, last), last, steps[0] - 1)
        curve.extend(steps, values, at_s=at_s, trained_s=trained_s)


def curves_to_json(
    curves: Mapping[CurveKey, Curve], *, base_s: float, most: int
) -> dict[str, dict[str, dict[str, Sequence[float]]]]:
    """Returns curves by metric and job, thinned to about `most` points in all, but at least 50 of each."""
    each = max(50, min(MAX_POINTS, most // max(1, len(curves))))
    result: dict[str, dict[str, dict[str, Sequence[float]]]] = {}
    for (job, metric), curve in curves.items():
        result.setdefault(metric, {})[job] = curve.thinned(each).to_json(base_s=base_s)
    return result
