"""The flow of one segment of a job on a node, which the node's worker runs without a process of its own."""

from __future__ import annotations

from prefect import flow


@flow(name="segment", flow_run_name="segment {segment} on {node}", persist_result=False)
def segment(segment: int, node: str) -> None:
    """Runs a node's share of a segment that the pool's executor has ordered.

    Args:
        segment: Number of the segment.
        node: Name of the node whose worker runs it.
    """
    raise RuntimeError(
        f"segment {segment} is run by the worker of node {node}, not as a process of its own. To fix: start that "
        "worker by `ringmaster pool worker`; Prefect's own workers must not serve the queues of nodes"
    )
