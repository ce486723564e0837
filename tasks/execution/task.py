"""The Prefect task that runs a segment on this machine."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext
from typing import cast

from prefect import task
from prefect.cache_policies import NO_CACHE

from ringmaster.tasks.execution.local.device_metrics import SegmentTelemetry
from ringmaster.tasks.execution.local.runner import LocalRunner
from ringmaster.tasks.execution.orders import SegmentCall, Submit
from ringmaster.techniques.runtime.processes.gang import Outcome


def submit_with(runner: LocalRunner, *, measured: SegmentTelemetry | None = None) -> Submit:
    """Returns a `Submit` function that runs each segment as a Prefect task.

    The task takes only a label and a folder, so that Prefect serialises nothing of a running gang. The task returns the
    gang's outcome as a value, even if the gang failed. It has no retries of its own: the executor decides whether and
    how the job continues.

    measured: adds device metrics to the events of each segment, or None.
    """
    calls: dict[str, SegmentCall] = {}

    @task(name="segment", task_run_name="{label}", cache_policy=NO_CACHE, persist_result=False)
    def segment(label: str, folder: str) -> Outcome:
        call = calls.pop(folder)
        with nullcontext(call.on_event) if measured is None else measured.segment(call) as say:
            return runner.run(call.order, num_ranks=call.num_ranks, on_event=say)

    def submit(call: SegmentCall) -> Future[Outcome]:
        calls[call.order.folder] = call
        # A Prefect future has the two methods of a Future that an executor uses.
        return cast("Future[Outcome]", segment.submit(call.label, call.order.folder))

    return submit
