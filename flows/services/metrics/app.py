"""The web application of the metrics: one page, which asks for the password of the pool."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ringmaster.flows.services.metrics.families import PoolCollector
from ringmaster.tasks.pool.metrics.monitor import Measurement

METRICS_PATH, HEALTH_PATH = "/metrics", "/health"


def metrics_app(measure: Callable[[], Measurement], *, username: str, password: str) -> Starlette:
    """Returns the application. measure: returns what is known of the pool now.

    Without the password, it only says that it is up. Pages of other sites get nothing.
    """
    registry = CollectorRegistry()
    registry.register(PoolCollector(measure))

    def metrics(request: Request) -> Response:
        if _is_foreign(request):
            return PlainTextResponse("a page of another site may not read this\n", status_code=403)
        if not _may_read(request.headers.get("Authorization", ""), username=username, password=password):
            asks = {"WWW-Authenticate": 'Basic realm="ringmaster", charset="UTF-8"'}
            return PlainTextResponse("the password of the pool is needed\n", status_code=401, headers=asks)
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    def health(_: Request) -> Response:
        return PlainTextResponse("OK\n")

    return Starlette(routes=[Route(METRICS_PATH, metrics), Route(HEALTH_PATH, health)])


def _is_foreign(request: Request) -> bool:
    """Whether a browser sent the request for a page of another site."""
    origin = request.headers.get("Origin")
    return origin is not None and urlsplit(origin).netloc != request.headers.get("Host")


def _may_read(authorization: str, *, username: str, password: str) -> bool:
    scheme, _, said = authorization.partition(" ")
    if scheme.lower() != "basic":
        return False
    try:
        given = base64.b64decode(said.strip(), validate=True)
    except (binascii.Error, ValueError):
        return False
    return secrets.compare_digest(given, f"{username}:{password}".encode())
