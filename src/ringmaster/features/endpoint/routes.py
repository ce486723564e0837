"""The endpoints of a pool under addresses that stay: the server of the pool's metrics passes requests on to the node.

`/endpoints/NAME/api/v1/...` is that of the endpoint NAME, whichever node serves it. The node's server checks the keys,
so these routes are not behind the pool's password, which would let clients run programs. While no node serves the
endpoint, the status is 503, upon which clients try again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from ringmaster.features.endpoint.server.endpoint_server import FOLDER, SERVER_FILE
from ringmaster.features.endpoint.server.server_app import API
from ringmaster.flows import settings
from ringmaster.origins import is_foreign
from ringmaster.techniques.job_features import is_name

if TYPE_CHECKING:
    from ringmaster.flows.settings import PoolAddress

CONNECT_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 120.0
RETRY_AFTER_S = "1"
METHODS = ["GET", "POST", "PUT", "DELETE"]
PASSED_ON = ("content-type", "content-encoding", "accept", "x-api-key", "authorization", "x-idempotency-key")
"""The headers of requests that the node gets, beside those of the client's that begin with X-Tinker."""
RETURNED = ("content-type", "content-encoding", "retry-after")


def public_url(pool: PoolAddress, name: str) -> str | None:
    """Returns the address of an endpoint that stays; None where the server of the pool's metrics is not known."""
    root = pool.metrics_url.removesuffix("/metrics")
    return f"{root}/{FOLDER}/{name}" if root else None


def endpoint_routes(home: Path, *, transport: httpx.AsyncBaseTransport | None = None) -> Sequence[BaseRoute]:
    """Returns the routes of the endpoints of a home.

    transport: by which the nodes are reached, by default HTTP.
    """
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    client = httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)

    async def pass_on(request: Request) -> Response:
        name = request.path_params["name"]
        if is_foreign(request.scope):
            return PlainTextResponse("a page of another origin may not use this server\n", status_code=403)
        folder = home / FOLDER / name
        if not is_name(name) or not folder.is_dir():
            return PlainTextResponse("there is no such endpoint\n", status_code=HTTPStatus.NOT_FOUND)
        try:
            node = httpx.URL(json.loads((folder / SERVER_FILE).read_text())["url"])
            sent = client.build_request(
                request.method,
                node.copy_with(raw_path=_path_on_node(request)),
                headers=_passed_on(request),
                content=request.stream() if request.method in ("POST", "PUT") else None,
            )
            answer = await client.send(sent, stream=True)
            try:
                content = b"".join([part async for part in answer.aiter_raw()])
            finally:
                await answer.aclose()
        except (OSError, ValueError, KeyError, httpx.TransportError):
            return _away(name)
        except ClientDisconnect:
            return Response(status_code=HTTPStatus.BAD_REQUEST)
        headers = {key: value for key, value in answer.headers.items() if key in RETURNED}
        return Response(content, status_code=answer.status_code, headers=headers)

    return [Route(f"/{FOLDER}/{{name}}{API}/{{path:path}}", pass_on, methods=METHODS)]


def _path_on_node(request: Request) -> bytes:
    """Returns the path after `/endpoints/NAME`, as it was sent, with the query."""
    path: bytes = request.scope["raw_path"]
    query: bytes = request.scope["query_string"]
    return b"/" + path.split(b"/", 3)[3] + (b"?" + query if query else b"")


def _passed_on(request: Request) -> dict[str, str]:
    return {key: value for key, value in request.headers.items() if key in PASSED_ON or key.startswith("x-tinker")}


def _away(name: str) -> Response:
    return PlainTextResponse(
        f"no node serves {name} now\n",
        status_code=HTTPStatus.SERVICE_UNAVAILABLE,
        headers={"Retry-After": RETRY_AFTER_S},
    )


def pool_endpoints(_: PoolAddress, __: Callable[[], bool]) -> Sequence[BaseRoute]:
    """Returns the routes of the endpoints of a pool."""
    return endpoint_routes(settings.home())


KEYED_ROUTES = pool_endpoints
