"""Flows that people do not start: a segment, and a machine that an engine lends, such as a Slurm node.

The pool's controller starts and ends their runs: those of a lent node in the engine's work pool, for as long as the
node is lent.
"""

from __future__ import annotations

import os

from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.pool.node import serve_node
from ringmaster.flows.pool.own_node import NodeOptions, cluster_of, node_name
from ringmaster.flows.process.process_log import logs_to
from ringmaster.tasks.pool.node_agent import DRAIN_S


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


@flow(name="serve-node", persist_result=False)
def serve_node_run(devices: str = "auto", drain_s: float = DRAIN_S) -> None:
    """Serves the machine on which it runs as a node of the pool.

    Args:
        devices: auto, cpu:N, gpu:N or gpu:all; auto takes the GPUs, or CPU slots where there is none.
        drain_s: Seconds that running jobs have to write a checkpoint when the machine is taken back.
    """
    address = settings.pool()
    if address is None:
        raise InputError(["this flow serves a node of a pool, and no pool is named. To fix: `ringmaster up`"])
    options = NodeOptions(
        home=settings.home(),
        pool=address,
        name=node_name(os.environ.get(settings.OWN_NODE)),
        cluster=cluster_of(devices),
        allocation=os.environ.get(settings.ALLOCATION) or str(flow_run.id),
        drain_s=drain_s,
    )
    os.environ[settings.OWN_NODE] = options.name  # for the flows that run here, which measure on these devices
    logger = get_run_logger()
    with logs_to(logger):
        if not serve_node(options, notice=logger.info):
            raise RuntimeError(f"another process serves node {options.name} by now")
