"""Predicts the ends of each batch that an executor runs, and of its jobs: at the first plan, and again as it runs.

Batches that arrive later share the devices and may change what is predicted for a batch of a pool.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ringmaster.tasks.execution.execution_events import (
    ExecutionEvent,
    GangReport,
    JobEnded,
    PlanUpdate,
    Prediction,
    PredictionUpdate,
    SegmentEnded,
    predictions_in,
)
from ringmaster.tasks.execution.forecast import Draws, EndScores, calibrated, predict, spread_of
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.execution.plan_manager import PlanManager
from ringmaster.tasks.storage.fact_keys import FIRST_PREDICTION, NEWEST_PREDICTION
from ringmaster.tasks.storage.journal import ENDED, JobStatus, Journal
from ringmaster.techniques.processes.gang_events import Steps

SCORES = "end_scores"  # the fact of a pool: {"jobs", "batches"}, of each the rows of `EndScores`
EVERY_S = 2.0  # while speeds are measured
MAX_SHARE = 0.01  # of the executor's time


class Forecaster:
    """Predicts the ends of each batch of an executor's job table; a listener of the executor.

    plan_manager: re-plans by what it believes of the jobs' speeds.
    notify: receives a `PredictionUpdate` for each batch.
    clock: monotonic seconds.
    """

    PURPOSE = "the prediction of when jobs end"

    def __init__(
        self,
        plan_manager: PlanManager,
        job_table: JobTable,
        *,
        notify: Callable[[ExecutionEvent], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan_manager, self._job_table, self._database = plan_manager, job_table, job_table.journal.database
        self._notify, self._clock, self._now_s = notify, clock, job_table.journal.clock
        self._since_s: dict[str, float] = {}  # by batch, when it began
        self._first_spread: dict[str, float] = {}  # by batch, of the first forecast
        self._facts = Journal(self._database, batch="")  # of a pool's controllers, one after another
        known = self._facts.get(SCORES, {})
        self._of_jobs, self._of_batches = (EndScores(known.get(key, ())) for key in ("jobs", "batches"))
        self._made_s = self._free_s = -math.inf  # when the newest forecast was made, and until when none is made

    def listen(self, event: ExecutionEvent) -> None:
        """Predicts again if an event may have changed what is known, and that has not been done lately."""
        now_s = self._clock()
        if isinstance(event, JobEnded) and (batch := self._job_table.entries[event.job].batch) in self._since_s:
            self._of_jobs.close(event.job, self._now_s() if event.record.status == JobStatus.DONE else None)
            statuses = {self._job_table.records[job].status for job in self._job_table.of_batch(batch)}
            if statuses.issubset(ENDED):
                self._of_batches.close(batch, self._now_s() if statuses == {JobStatus.DONE} else None)
                del self._since_s[batch]  # it may be resumed, and begins again then
                self._facts.put_later(
                    {SCORES: {"jobs": list(self._of_jobs.rows), "batches": list(self._of_batches.rows)}}
                )
        is_learnt = isinstance(event, GangReport) and isinstance(event.event, Steps) and now_s >= self._made_s + EVERY_S
        if (is_learnt or isinstance(event, (PlanUpdate, SegmentEnded))) and now_s >= self._free_s:
            self._predict_all()
            self._made_s = self._clock()
            self._free_s = self._made_s + (self._made_s - now_s) / MAX_SHARE

    def _predict_all(self) -> None:
        replanner = self._plan_manager.replanner
        of_batches: dict[str, dict[str, Draws]] = {}
        left, least = replanner.seconds_left(self._plan_manager.state())
        for job, draws in left.items():
            if (entry := self._job_table.entries.get(job)) is not None:
                of_batches.setdefault(entry.batch, {})[job] = draws
        self._since_s = {batch: at_s for batch, at_s in self._since_s.items() if batch in of_batches}
        earliest_s = {} if least is None else least.of_jobs()
        for batch, of_jobs in of_batches.items():
            local = {job: self._job_table.entries[job].job_in_batch.name for job in of_jobs}
            predict_batch = partial(
                predict,
                {local[job]: draws for job, draws in of_jobs.items()},
                conditions=replanner.present_conditions,
                earliest_s={local[job]: earliest_s[job] for job in of_jobs if job in earliest_s},
                earliest_last_s=0.0 if least is None else least.of_last(of_jobs),
            )
            prediction = self._predict(batch, predict_batch, spread=spread_of(of_jobs))
            self._of_batches.note(batch, prediction.end, prediction, batch=batch)
            for job, name in local.items():
                self._of_jobs.note(job, prediction.jobs[name], prediction, batch=batch)

    def _predict(self, batch: str, predict_batch: Callable[..., Prediction], *, spread: float) -> Prediction:
        """Predicts a batch and publishes that corrected by earlier ends; returns it as it was before."""
        journal, now_s = Journal(self._database, batch=batch), self._now_s()
        facts = {}
        if batch not in self._since_s:
            first, _ = predictions_in({FIRST_PREDICTION: journal.get(FIRST_PREDICTION)})
            self._since_s[batch] = min((first.since_s if first is not None else 0.0) or now_s, now_s)
            self._first_spread[batch] = spread
            first = first or self._calibrated(predict_batch())
            facts[FIRST_PREDICTION] = replace(first, since_s=self._since_s[batch]).to_json()
        since_s = self._since_s[batch]
        prediction = predict_batch(first_spread=self._first_spread[batch], since_s=since_s, made_s=now_s - since_s)
        published = replace(self._calibrated(prediction), run_load=self._plan_manager.replanner.run_load)
        journal.put_later({**facts, NEWEST_PREDICTION: published.to_json()})
        self._notify(PredictionUpdate(batch=batch, prediction=published))
        return prediction

    def _calibrated(self, prediction: Prediction) -> Prediction:
        return calibrated(prediction, of_jobs=self._of_jobs, of_batches=self._of_batches)
