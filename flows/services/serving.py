"""Serves an ASGI application on this machine behind a check of the Host header."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp
from uvicorn.config import LOGGING_CONFIG

from ringmaster.flows.process.process_log import Role, is_json, log_to_stderr
from ringmaster.flows.services.hosts import in_url

STARTUP_FAILURE = 3  # uvicorn's own exit status


def checked(app: ASGIApp, hosts: Sequence[str]) -> ASGIApp:
    """Returns the application for requests and websockets to one of `hosts`, on any port; others get status 400.

    A page whose name is made to point to this machine (DNS rebinding) thus gets no answer.
    """
    return TrustedHostMiddleware(app, allowed_hosts=[in_url(host) for host in hosts], www_redirect=False)


def server_of(app: ASGIApp, *, role: Role, host: str, port: int, log_level: str) -> uvicorn.Server:
    """Returns a server for the application, which logs like our other processes."""
    log_to_stderr(role)
    log_config = None if is_json() else LOGGING_CONFIG
    return uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level=log_level, log_config=log_config))


def serve(server: uvicorn.Server) -> None:
    """Serves until SIGTERM or Ctrl-C. Raises SystemExit if the server could not start."""
    with suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        sys.exit(STARTUP_FAILURE)
