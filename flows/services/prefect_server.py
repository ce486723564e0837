"""Prefect's server for its own pages alone: `python -m ringmaster.flows.services.prefect_server --port PORT`.

Prefect by default answers requests for any host name and of pages of any origin, so a page whose name is made to point
to this machine (DNS rebinding) may use its API. Everything else, including the services that schedule and trigger
runs, is as in `prefect server start`.
"""

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from prefect.server.api.server import create_app
from prefect.server.database import provide_database_interface
from prefect.settings import get_current_settings

from ringmaster.flows import settings
from ringmaster.flows.interrupts import end_with_parent
from ringmaster.flows.output import ProcessRole
from ringmaster.flows.services import serving
from ringmaster.model_lineage.sqlite_files import alone_in
from ringmaster.origins import OwnOrigin


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM or, with --until-stdin-ends, until stdin ends, as it does when the parent process ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default=serving.LOOPBACK[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--until-stdin-ends", action="store_true")
    requested = parser.parse_args(arguments)
    settings.set_umask()
    if requested.until_stdin_ends:
        end_with_parent()
    if (file := serving.prefect_database()) is not None:
        asyncio.run(create_database(file))
    hosts = serving.hosts_of(os.environ.get(serving.ALLOWED_HOSTS, "")) or serving.LOOPBACK
    app = serving.checked(OwnOrigin(create_app(final=True, ephemeral=requested.until_stdin_ends)), hosts)
    log_level = get_current_settings().server.logging_level.lower()
    serving.serve(
        serving.server_of(app, role=ProcessRole.PREFECT, host=requested.host, port=requested.port, log_level=log_level)
    )


async def create_database(file: Path) -> None:
    """Creates or upgrades Prefect's tables. Two servers that do so at once in one SQLite file fail."""
    database = provide_database_interface()
    with alone_in(file.parent):
        await database.create_db()
    await (await database.engine()).dispose()


if __name__ == "__main__":
    main()
