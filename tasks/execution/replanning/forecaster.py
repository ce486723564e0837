"""Predicts the ends of each batch that an executor runs, and of its jobs: at the first plan, and again as it runs.

Batches that arrive later share the devices and may change what is predicted for a batch of a pool.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from ringmaster.tasks.execution.events import (
    ExecutionEvent,
    GangSaid,
    JobEnded,
    Planned,
    PredictionUpdate,
    SegmentEnded,
)
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.execution.prediction import FIRST_PREDICTION, NEWEST_PREDICTION, predictions_in
from ringmaster.tasks.execution.replanning.forecast import Draws, Surroundings, predict, spread_of
from ringmaster.tasks.execution.replanning.plan_manager import PlanManager
from ringmaster.tasks.storage.journal import ENDED, Journal
from ringmaster.techniques.processes.events import Steps

EVERY_S = 2.0  # while speeds are measured
MOST_SHARE = 0.01  # of the executor's time


class Forecaster:
    """Predicts the ends of each batch of an executor's job table; a listener of the executor.

    plan_manager: re-plans by what it believes of the jobs' speeds; nothing is predicted without a replanner.
    tell: receives a `PredictionUpdate` for each batch.
    clock: monotonic seconds.
    wall_clock: seconds since the epoch.
    """

    PURPOSE = "the prediction of when jobs end"

    def __init__(
        self,
        plan_manager: PlanManager,
        job_table: JobTable,
        journal: Journal,
        *,
        tell: Callable[[ExecutionEvent], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._plan_manager, self._job_table, self._journal = plan_manager, job_table, journal
        self._tell, self._clock, self._wall_clock = tell, clock, wall_clock
        self._since_s: dict[str, float] = {}  # by batch, when it began
        self._first_spread: dict[str, float] = {}  # by batch, of the first forecast
        self._made_s = self._free_s = -math.inf  # when the newest forecast was made, and until when none is made

    def listen(self, event: ExecutionEvent) -> None:
        """Predicts anew if an event may have changed what is known, and that has not been done lately."""
        now_s = self._clock()
        if isinstance(event, JobEnded) and (batch := self._job_table.entries[event.job].batch) in self._since_s:
            jobs = self._job_table.of_batch(batch)
            if all(self._job_table.records[job].status in ENDED for job in jobs):
                del self._since_s[batch]  # it may be resumed, and begins anew then
        is_learnt = isinstance(event, GangSaid) and isinstance(event.event, Steps) and now_s >= self._made_s + EVERY_S
        if (is_learnt or isinstance(event, (Planned, SegmentEnded))) and now_s >= self._free_s:
            self._predict_all()
            self._made_s = self._clock()
            self._free_s = self._made_s + (self._made_s - now_s) / MOST_SHARE

    def _predict_all(self) -> None:
        if (replanner := self._plan_manager.replanner) is None:
            return
        of_batches: dict[str, dict[str, Draws]] = {}
        for job, draws in replanner.seconds_left(self._plan_manager.state()).items():
            if (entry := self._job_table.entries.get(job)) is not None:
                of_batches.setdefault(entry.batch, {})[entry.local_job.name] = draws
        self._since_s = {batch: at_s for batch, at_s in self._since_s.items() if batch in of_batches}
        for batch, left in of_batches.items():
            self._predict(batch, left, replanner.surroundings)

    def _predict(self, batch: str, left: dict[str, Draws], surroundings: Surroundings) -> None:
        journal, now_s = Journal(self._journal.database, batch=batch), self._wall_clock()
        facts = {}
        if batch not in self._since_s:
            first, _ = predictions_in({FIRST_PREDICTION: journal.get(FIRST_PREDICTION)})
            self._since_s[batch] = (first.since_s if first is not None else 0.0) or now_s
            self._first_spread[batch] = spread_of(left)
            first = first or predict(left, surroundings=surroundings)
            facts[FIRST_PREDICTION] = replace(first, since_s=self._since_s[batch]).to_json()
        since_s = self._since_s[batch]
        prediction = predict(
            left,
            surroundings=surroundings,
            first_spread=self._first_spread[batch],
            since_s=since_s,
            made_s=now_s - since_s,
        )
        journal.put_later({**facts, NEWEST_PREDICTION: prediction.to_json()})
        self._tell(PredictionUpdate(batch=batch, prediction=prediction))
