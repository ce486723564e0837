"""The commands of a pool's processes: its controller, and the worker that makes this machine a node."""

from __future__ import annotations

import os
import platform
import time
from typing import Annotated

import typer

from ringmaster.flows import settings
from ringmaster.flows.faults import InputError
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
    from ringmaster.flows.pool.asking import pool_address

    log_to_stderr(Role.CONTROLLER)
    settings.choose_engine(engine)
    pool = pool_address()
    settings.embed(settings.home())
    from ringmaster.flows.pool.controller import serve_pool

    serve_pool(pool, notice=notice, seed=seed)


LOOK_EVERY_S = 1.0  # for a pool that is not there yet
LONGEST_DRAIN_S = 25.0  # of the 30 s that a spot notice gives


def worker(
    name: Annotated[str | None, typer.Option(help="Of this node in the pool; by default the machine's.")] = None,
    devices: Annotated[
        str, typer.Option(help="auto, cpu:N or gpu:N, gpu:all; auto takes the GPUs, or CPU slots where there is none.")
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
    from ringmaster.tasks.cluster import detect

    log_to_stderr(Role.NODE)
    name = name or platform.node() or "localhost"
    faults = [f"--name {name} may not contain / or %"] if set(name) & set("/%") else []
    try:
        cluster = detect(_asked(devices))
    except ValueError as error:
        raise InputError([*faults, f"--devices {devices}: {error}"]) from error
    if faults:
        raise InputError(faults)
    pool = _pool()
    settings.embed(settings.home())
    os.environ[OWN_NODE] = name  # for the flows that run here, which measure on these devices
    from ringmaster.flows.pool.node import NodeOptions, serve_node

    options = NodeOptions(
        home=settings.home(), pool=pool, name=name, cluster=cluster, address=address, serves_flows=flows, drain_s=drain
    )
    if not serve_node(options, notice=notice):
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


def _asked(devices: str) -> str | dict[str, int | str]:
    """What `detect` takes for "cpu:2". Raises ValueError."""
    kind, colon, number = devices.partition(":")
    return {kind: int(number) if number.isdigit() else number} if colon else devices
