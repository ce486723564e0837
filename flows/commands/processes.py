"""The commands of a pool's processes: its controller, and the worker that makes this machine a node."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.process.process_log import Role, log_to_stderr, notice
from ringmaster.flows.settings import OWN_NODE


def controller(
    seed: Annotated[int, typer.Option(help="Of the planner.")] = 0,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="What runs the segments; by default RINGMASTER_ENGINE, or `workers`.")
    ] = "",
) -> None:
    """Plan and decide for the pool, until SIGTERM or Ctrl-C; where another controller leads, stand by for it.

    One a pool is enough; a second one, on another machine, takes over within seconds where the first one dies.
    """
    from ringmaster.flows.pool.batch_requests import pool_address

    log_to_stderr(Role.CONTROLLER)
    settings.choose_engine(engine)
    pool = pool_address()
    settings.embed(settings.home())
    from ringmaster.flows.pool.controller import serve_pool

    serve_pool(pool, notice=notice, seed=seed)


LOOK_EVERY_S = 1.0  # for a pool that is not there yet
NO_DEVICES = "none"
LONGEST_DRAIN_S = 25.0  # of the 30 s that a spot notice gives


def worker(
    name: Annotated[str | None, typer.Option(help="Of this node in the pool; by default the machine's.")] = None,
    devices: Annotated[
        str, typer.Option(help="auto (the GPUs, or else CPU slots), cpu:N, gpu:N, gpu:all, or none with --flows.")
    ] = "auto",
    flows: Annotated[bool, typer.Option("--flows", help="Run flows here, too, besides the segments of jobs.")] = False,
    address: Annotated[
        str | None, typer.Option(help="By which other nodes reach this one; by default the one that reaches the pool.")
    ] = None,
    drain: Annotated[
        float, typer.Option(help="Seconds that running jobs have to write a checkpoint when the worker ends.", min=0.0)
    ] = LONGEST_DRAIN_S,
) -> None:
    """Serve this machine's devices as a node of the pool, until SIGTERM or Ctrl-C: jobs then write a checkpoint."""
    from ringmaster.flows.pool.own_node import NodeOptions, cluster_of, node_name

    log_to_stderr(Role.NODE)
    if devices == NO_DEVICES and not flows:
        raise InputError(["--devices none serves nothing. To fix: add --flows, or leave out --devices"])
    name = node_name(name)
    cluster = cluster_of(devices) if devices != NO_DEVICES else None
    pool = _pool()
    settings.embed(settings.home())
    from ringmaster.flows.pool import node

    if cluster is None:
        node.serve_flows(pool, name=name, notice=notice)
        return
    os.environ[OWN_NODE] = name  # for the flows that run here, which measure on these devices
    options = NodeOptions(
        home=settings.home(),
        pool=pool,
        name=name,
        cluster=cluster,
        address=address,
        allocation=os.environ.get(settings.ALLOCATION, ""),
        serves_flows=flows,
        drain_s=drain,
    )
    if not node.serve_node(options, notice=notice):
        raise typer.Exit(1)


def _pool() -> settings.PoolAddress:
    """The pool that this home belongs to, once it says so: machines start in any order."""
    is_told = False
    while (pool := settings.pool()) is None:
        if not is_told:
            where = f"{settings.pool_file(settings.home())} is not there yet"
            how = "`ringmaster up` in this home writes it; RINGMASTER_DATABASE and its servers name a pool elsewhere"
            notice(f"waiting for a pool: {where} ({how})")
            is_told = True
        time.sleep(LOOK_EVERY_S)
    return pool
