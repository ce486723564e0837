"""HTTP servers of this machine: their host names, the check of the Host header, and the database of Prefect's."""

from __future__ import annotations

import base64
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ringmaster.flows.output import ProcessRole, is_json, log_to_stderr
from ringmaster.model_lineage.sqlite_files import path_of
from ringmaster.origins import is_foreign

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Receive, Scope, Send

ALLOWED_HOSTS = "RINGMASTER_ALLOWED_HOSTS"
"""Environment variable with further host names of the servers, separated by commas, such as that of a reverse proxy."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
STARTUP_FAILURE = 3  # uvicorn's own exit status


def is_wildcard(host: str) -> bool:
    """Returns whether `host` means all addresses of this machine."""
    return host in ("0.0.0.0", "::")  # noqa: S104 - nothing listens here


def in_url(host: str) -> str:
    """Returns the host as it is written in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def hosts_of(text: str) -> tuple[str, ...]:
    """Returns the host names in `text`, which are separated by commas, without brackets."""
    return tuple(name.strip().strip("[]") for name in text.split(",") if name.strip())


def names_of(host: str, *, further: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the names under which a server that listens on `host` may be requested, without ports and brackets."""
    own = _names_of_this_machine() if is_wildcard(host) else (host,)
    return tuple(dict.fromkeys([*LOOPBACK, *own, *further]))


def _names_of_this_machine() -> tuple[str, ...]:
    addresses = [address for each in psutil.net_if_addrs().values() for address in each]
    numbers = [a.address.partition("%")[0] for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
    return (socket.gethostname(), socket.getfqdn(), *numbers)


def checked(app: ASGIApp, hosts: Sequence[str]) -> ASGIApp:
    """Returns the application for requests and websockets to one of `hosts`, on any port; others get status 400.

    A page whose name is made to point to this machine (DNS rebinding) thus gets no answer.
    """
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    return TrustedHostMiddleware(app, allowed_hosts=[in_url(host) for host in hosts], www_redirect=False)


class PasswordCheck:
    """An ASGI application that asks for a password, and whose answers pages of other origins do not get."""

    def __init__(self, app: ASGIApp, *, username: str, password: str) -> None:
        self._app, self._expected = app, base64.b64encode(f"{username}:{password}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        from starlette.responses import PlainTextResponse

        app = self._app
        if scope["type"] == "http" and is_foreign(scope):
            app = PlainTextResponse("a page of another origin may not read this\n", status_code=403)
        elif scope["type"] == "http" and not self._knows(dict(scope["headers"]).get(b"authorization", b"")):
            headers = {"WWW-Authenticate": 'Basic realm="ringmaster", charset="UTF-8"'}
            app = PlainTextResponse("the password of the pool is needed\n", status_code=401, headers=headers)
        await app(scope, receive, send)

    def _knows(self, authorization: bytes) -> bool:
        scheme, _, value = authorization.partition(b" ")
        return scheme.lower() == b"basic" and secrets.compare_digest(value.strip(), self._expected)


def server_of(app: ASGIApp, *, role: ProcessRole, host: str, port: int, log_level: str) -> uvicorn.Server:
    """Returns a server for the application, which logs like our other processes."""
    import uvicorn
    from uvicorn.config import LOGGING_CONFIG

    log_to_stderr(role)
    log_config = None if is_json() else LOGGING_CONFIG
    # The same parser whatever else is installed: httptools lets requests with two Host headers through, h11 does not.
    config = uvicorn.Config(
        app, host=host, port=port, http="h11", loop="asyncio", log_level=log_level, log_config=log_config
    )
    return uvicorn.Server(config)


def serve(server: uvicorn.Server) -> None:
    """Serves until SIGTERM or Ctrl-C. Raises SystemExit if the server could not start."""
    with suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        sys.exit(STARTUP_FAILURE)


def prefect_database() -> Path | None:
    """Returns the SQLite file of a Prefect server that this process is or starts; None for another database."""
    from prefect.settings import get_current_settings

    secret = get_current_settings().server.database.connection_url
    url = "" if secret is None else secret.get_secret_value()
    file = path_of(url) if url.startswith("sqlite") else ""
    return Path(file).absolute() if file and ":memory:" not in file else None
