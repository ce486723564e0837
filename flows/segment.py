"""The flow of a segment, under which Prefect shows it. No process is started for it."""

from __future__ import annotations

from prefect import flow


@flow(name="segment", flow_run_name="segment {segment}", persist_result=False)
def segment(segment: int) -> None:
    """Shows a segment of a job, which the pool's controller starts and ends. Cancel it to preempt the segment.

    Args:
        segment: Number of the segment.
    """
    raise RuntimeError(
        f"segment {segment} is started by the pool's controller, not by a worker of Prefect. To fix: end the worker "
        "that serves the queue `segments`"
    )
