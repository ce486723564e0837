"""Prefect's server for its own pages alone: `python -m ringmaster.flows.services.prefect_server --port PORT`.

Prefect by default answers requests for any host name and of pages of any origin, so a page whose name is made to point
to this machine (DNS rebinding) may use its API. Everything else, including the services that schedule and trigger
runs, is as in `prefect server start`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ringmaster.compat.jsonschema import import_without_iris
from ringmaster.compat.prefect import MIGRATIONS, create_database, server_app
from ringmaster.flows.file_permissions import set_umask
from ringmaster.flows.interrupts import end_with_parent
from ringmaster.flows.output import ProcessRole, report_faults
from ringmaster.flows.services import serving
from ringmaster.model_lineage.database_templates import create_from_template
from ringmaster.model_lineage.sqlite_files import exclusive_lock
from ringmaster.origins import OwnOrigin
from ringmaster.text import message_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM or, with --until-stdin-ends, until stdin ends, as it does when the parent process ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default=serving.LOOPBACK[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--until-stdin-ends", action="store_true")
    requested = parser.parse_args(arguments)
    set_umask()
    if requested.until_stdin_ends:
        end_with_parent()
    import_without_iris()
    from prefect.settings import get_current_settings

    hosts = serving.hosts_of(os.environ.get(serving.ALLOWED_HOSTS, "")) or serving.LOOPBACK
    app = OwnOrigin(server_app(ephemeral=requested.until_stdin_ends))
    log_level = get_current_settings().server.logging_level.lower()
    with ExitStack() as lock:
        if (file := serving.prefect_database()) is not None:
            lock.enter_context(exclusive_lock(file.parent))
            if not file.exists() and get_current_settings().server.database.migrate_on_start:
                create_from_template(file, migrations=MIGRATIONS, make=lambda: asyncio.run(create_database()))
        served = serving.checked(started_alone(app, lock), hosts)
        serving.serve(
            serving.server_of(
                served, role=ProcessRole.PREFECT, host=requested.host, port=requested.port, log_level=log_level
            )
        )


def started_alone(app: ASGIApp, lock: ExitStack) -> ASGIApp:
    """Returns the application, which releases a lock once it has started, and prints why it cannot start.

    As it starts, Prefect creates or upgrades its tables and registers its blocks; two servers that do so at once in one
    SQLite file fail.
    """

    async def locked(scope: Scope, receive: Receive, send: Send) -> None:
        async def release_and_send(message: Message) -> None:
            lock.close()
            await send(message)

        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        try:
            await app(scope, receive, release_and_send)
        except Exception as error:
            report_faults([f"Prefect's server cannot start or end: {message_of(error)}"])
            raise

    return locked


if __name__ == "__main__":
    main()
