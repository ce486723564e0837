"""Serves the metrics of a pool: `python -m ringmaster.flows.services.metrics.server --port PORT`.

The server reads the pool's database, and nothing else. So it measures a pool whose controller, nodes or other servers
are away, and goes on when another controller leads.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import os
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.pool.batch_requests import pool_address
from ringmaster.flows.process import ownership
from ringmaster.flows.process.process_log import Role, report_faults
from ringmaster.flows.services.hosts import ALLOWED_HOSTS, LOOPBACK, hosts_of
from ringmaster.flows.services.metrics.families import PoolCollector
from ringmaster.flows.services.serving import checked, serve, server_of
from ringmaster.tasks.pool.pool_monitor import Measurement, PoolMonitor
from ringmaster.tasks.storage.database import Database

METRICS_PATH, HEALTH_PATH = "/metrics", "/health"

SAMPLE_EVERY_S = 5.0
INPUT_FAULT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM; returns the exit status: 2 without a pool or its password, 1 if it cannot be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default=LOOPBACK[0])
    parser.add_argument("--port", type=int, required=True)
    asked = parser.parse_args(arguments)
    ownership.set_umask()
    try:
        pool = _pool()
    except InputError as error:
        report_faults(error.faults)
        return INPUT_FAULT
    monitor = PoolMonitor(lambda: Database(pool.database, patience_s=0.0))
    app = metrics_app(monitor.measurement, username=pool.username, password=pool.password)
    hosts = hosts_of(os.environ.get(ALLOWED_HOSTS, "")) or LOOPBACK
    server = server_of(checked(app, hosts), role=Role.METRICS, host=asked.host, port=asked.port, log_level="warning")
    over, failed = threading.Event(), threading.Event()
    threading.Thread(target=_sample, args=(monitor, server, over, failed), name="samples", daemon=True).start()
    try:
        serve(server)
    finally:
        over.set()
        monitor.close()
    return 1 if failed.is_set() else 0


def _pool() -> settings.PoolAddress:
    pool = pool_address()
    if not pool.password:
        raise InputError(["the metrics need the pool's password. To fix: set MLFLOW_TRACKING_PASSWORD"])
    return pool


def _sample(monitor: PoolMonitor, server: uvicorn.Server, over: threading.Event, failed: threading.Event) -> None:
    """Samples until `over` is set. Any other end is an error, which ends the server: old values must not be served."""
    try:
        monitor.sample()
        while not over.wait(SAMPLE_EVERY_S):
            monitor.sample()
    finally:
        if not over.is_set():
            failed.set()
            server.should_exit = True


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


if __name__ == "__main__":
    sys.exit(main())
