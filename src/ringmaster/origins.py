"""Requests that a browser sends for a page of another origin, and how our servers answer them.

An origin is a scheme, a host and a port: another port of the same host is another origin, and on a shared machine it
may be another user's page. A browser names the origin of the page in the header `Origin`, and in `Host` the address
that it sends the request to. The two agree only if the page came from the server itself. So a server behind a tunnel or
a reverse proxy has its own origin too, whatever the address of that is, if the proxy forwards `Host` and, for TLS,
`X-Forwarded-Proto`. The servers check `Host` against their own names.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

SAFE_METHODS = ("GET", "HEAD")
POLICY_VIOLATION = 1008  # close code of a websocket
REFUSAL = b"a page of another origin may not use this server\n"


def is_foreign(scope: Scope) -> bool:
    """Returns whether a browser sent the request for a page of another origin; `null` and empty origins are foreign."""
    headers = scope["headers"]
    origins = {value for name, value in headers if name == b"origin"}
    hosts = [value for name, value in headers if name == b"host"]
    scheme = {"ws": "http", "wss": "https"}.get(scope["scheme"]) or str(scope["scheme"])
    return bool(origins) and (len(hosts) != 1 or origins != {b"%s://%s" % (scheme.encode(), hosts[0])})


class OwnOrigin:
    """An ASGI application that pages of its own origin alone may use.

    Other pages get nothing but answers that their browser does not let them read: their preflights, websockets and
    requests that may change something are refused. The application itself sees no origins, so it allows none.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
        elif not is_foreign(scope) or scope.get("method") in SAFE_METHODS:
            headers = [(name, value) for name, value in scope["headers"] if name != b"origin"]
            await self.app({**scope, "headers": headers}, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        else:
            headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(REFUSAL))]
            await send({"type": "http.response.start", "status": HTTPStatus.FORBIDDEN, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})
