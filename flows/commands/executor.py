"""The command that plans and decides for a pool."""

from __future__ import annotations

from typing import Annotated

import typer

from ringmaster.flows import settings
from ringmaster.flows.process.process_log import Role, log_to_stderr, notice


def executor(
    seed: Annotated[int, typer.Option(help="Of the planner.")] = 0,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="What runs the segments; by default RINGMASTER_ENGINE, or `workers`.")
    ] = "",
) -> None:
    """Plan and decide for the pool, until SIGTERM or Ctrl-C; where another executor leads, stand by for it.

    One a pool is enough; a second one, on another machine, takes over within seconds where the first one dies.
    """
    from ringmaster.flows.pool.asking import pool_address

    log_to_stderr(Role.CONTROLLER)
    settings.choose_engine(engine)
    pool = pool_address()
    settings.embed(settings.home())
    from ringmaster.flows.pool.executor import serve_pool

    serve_pool(pool, notice=notice, seed=seed)
