"""The command that looks on while batches run."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from ringmaster.flows.output import AsJson


def watch(
    batch: Annotated[
        str | None,
        typer.Argument(help="A batch's name, in a pool its id too; the pool, or here the newest batch, by default."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print how it stands now, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show by device what was planned, what happens and what comes, until the batch has ended."""
    from ringmaster.flows.reports.watch import opened, watch_on, watch_once

    with opened(batch) as watched, suppress(KeyboardInterrupt):  # Ctrl-C is how one stops looking
        watch_once(watched, as_json=as_json) if once else watch_on(watched, as_json=as_json)
