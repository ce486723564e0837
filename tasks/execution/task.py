"""A segment as a Prefect task, and the batch's progress as a Prefect artifact."""

from __future__ import annotations

from concurrent.futures import Future
from typing import cast
from uuid import UUID

import httpx
from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import PrefectException

from tasks.execution.events import ExecutionEvent, JobEnded, SegmentEnded, SegmentStarted
from tasks.execution.journal import Journal
from tasks.execution.local import LocalRunner
from tasks.execution.orders import SegmentCall, Submit
from techniques.engine.gang import Outcome


def submit_with(runner: LocalRunner) -> Submit:
    """A way to start segments that makes each of them a Prefect task run.

    The task only takes its label, so that nothing of a running gang is serialised; its outcome is a value, also where
    the gang failed: whether and how to go on is the executor's to decide, so the task has no retries of its own.
    """
    calls: dict[str, SegmentCall] = {}

    @task(name="segment", task_run_name="{label}", cache_policy=NO_CACHE, persist_result=False)
    def segment(label: str, folder: str) -> Outcome:
        call = calls.pop(folder)
        return runner.run(call.order, num_ranks=call.num_ranks, on_event=call.on_event)

    def submit(call: SegmentCall) -> Future[Outcome]:
        calls[call.order.folder] = call
        # A Prefect future has the two methods of a Future that an executor uses.
        return cast("Future[Outcome]", segment.submit(call.label, call.order.folder))

    return submit


class ProgressArtifact:
    """The batch's progress in Prefect's UI: the share of its steps that are trained, by its journal."""

    def __init__(self, journal: Journal, *, total_steps: int) -> None:
        self._journal, self._total = journal, max(total_steps, 1)
        self._artifact = cast(
            UUID,
            create_progress_artifact(progress=self._percent(), key="progress", description="Steps trained of all"),
        )

    def listen(self, event: ExecutionEvent) -> None:
        """An executor's listener: moves the bar where a segment or a job ends."""
        if not isinstance(event, (SegmentStarted, SegmentEnded, JobEnded)):
            return
        try:
            update_progress_artifact(self._artifact, progress=self._percent())
        except (httpx.HTTPError, PrefectException) as error:  # a picture that lags is no reason to end a training
            get_run_logger().warning("the progress artifact could not be updated: %s", error)

    def _percent(self) -> float:
        return min(100.0 * sum(record.step for record in self._journal.jobs().values()) / self._total, 100.0)
