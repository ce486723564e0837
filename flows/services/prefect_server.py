"""Prefect's server behind a check of the Host header: `python -m ringmaster.flows.services.prefect_server --port PORT`.

Prefect as shipped answers whatever name a browser has asked for, so a page whose name is made to point to this machine
(DNS rebinding) may talk to it. Everything else, the services that schedule and trigger included, is as in
`prefect server start`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence

import uvicorn
from prefect.server.api.server import create_app
from prefect.settings import get_current_settings
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

from ringmaster.flows import ownership
from ringmaster.flows.services.hosts import ALLOWED_HOSTS, LOOPBACK, hosts_of, in_url

END_PATIENCE_S = 10.0  # for open requests, once nobody wants the server any more


def checked(app: ASGIApp, hosts: Sequence[str]) -> ASGIApp:
    """The application, for requests and websockets that ask for one of `hosts`; all others get 400. Ports are free."""
    return TrustedHostMiddleware(app, allowed_hosts=[in_url(host) for host in hosts], www_redirect=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM; with --until-stdin-ends also until then, which is when the process that started it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default=LOOPBACK[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--until-stdin-ends", action="store_true")
    asked = parser.parse_args(arguments)
    ownership.set_umask()
    if asked.until_stdin_ends:
        threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()
    hosts = hosts_of(os.environ.get(ALLOWED_HOSTS, "")) or LOOPBACK
    uvicorn.run(
        checked(create_app(final=True), hosts),
        host=asked.host,
        port=asked.port,
        log_level=get_current_settings().server.logging_level.lower(),
    )


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(END_PATIENCE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
