"""Serves the page of a home's runs on loopback: `python -m ringmaster.features.live_page.server --port PORT`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from starlette.applications import Starlette

from ringmaster.features.live_page.routes import page_routes
from ringmaster.features.live_page.sources import HomeRuns
from ringmaster.flows import settings
from ringmaster.flows.file_permissions import set_umask
from ringmaster.flows.interrupts import end_with_parent
from ringmaster.flows.output import ProcessRole
from ringmaster.flows.services.serving import (
    ALLOWED_HOSTS,
    LOOPBACK,
    PasswordCheck,
    checked,
    hosts_of,
    serve,
    server_of,
)

USERNAME = settings.PoolAddress.username
NICENESS = 5  # jobs train on the same cores
PASSWORD = "RINGMASTER_PAGE_PASSWORD"  # noqa: S105 - the variable
"""Environment variable with the password of the page: every user of the machine can read a process's arguments."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM or, with --until-stdin-ends, until stdin ends, as it does when the parent process ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--since", type=float, default=0.0, help="show runs that were written since then")
    parser.add_argument("--until-stdin-ends", action="store_true")
    requested = parser.parse_args(arguments)
    set_umask()
    os.nice(NICENESS)
    if requested.until_stdin_ends:
        end_with_parent()
    routes = page_routes(HomeRuns(settings.home(), since_s=requested.since), lambda: server.should_exit)
    app = PasswordCheck(Starlette(routes=routes), username=USERNAME, password=os.environ[PASSWORD])
    hosts = hosts_of(os.environ.get(ALLOWED_HOSTS, "")) or LOOPBACK
    server = server_of(
        checked(app, hosts), role=ProcessRole.METRICS, host=LOOPBACK[0], port=requested.port, log_level="warning"
    )
    serve(server)


if __name__ == "__main__":
    main()
