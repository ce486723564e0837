"""A segment as a Prefect task, and the batch's progress as a Prefect artifact."""

from __future__ import annotations

from concurrent.futures import Future
from typing import cast
from uuid import UUID

from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE

from tasks.execution.events import ExecutionEvent, JobEnded, SegmentEnded, SegmentStarted
from tasks.execution.executor import SegmentCall, Submit
from tasks.execution.local import LocalRunner
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
    """The batch's progress in Prefect's UI: the share of its steps that are trained."""

    def __init__(self, total_steps: int, *, done_steps: int = 0) -> None:
        self._total, self._done = max(total_steps, 1), done_steps
        self._artifact = cast(
            UUID,
            create_progress_artifact(progress=self._percent(), key="progress", description="Steps trained of all"),
        )

    def listen(self, event: ExecutionEvent) -> None:
        """An executor's listener: moves the bar where a segment or a job ends."""
        if isinstance(event, SegmentEnded):
            result = event.outcome.result
            self._done += result.get("step", 0) - result.get("first_step", 0)
        if isinstance(event, (SegmentStarted, SegmentEnded, JobEnded)):
            update_progress_artifact(self._artifact, progress=self._percent())

    def _percent(self) -> float:
        return min(100.0 * self._done / self._total, 100.0)
