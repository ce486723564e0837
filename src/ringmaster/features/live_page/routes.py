"""The routes of the page, for the server of a pool's metrics and for that of a home. They are behind its password."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from ringmaster.codec import finite
from ringmaster.errors import InputError, RingmasterError
from ringmaster.features.live_page.feed import Feed, RunView
from ringmaster.features.live_page.sources import PoolBatches, RunSource
from ringmaster.flows import settings
from ringmaster.flows.settings import PoolAddress
from ringmaster.text import message_of

STATIC = Path(__file__).absolute().parent / "static"
PAGE_PATH = "/page"
PAGES = {"page": f"{PAGE_PATH}/"}
MAX_BYTES = 1_000_000
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageFiles(StaticFiles):
    """The files of the page, with the headers that keep anything else from running in it."""

    def file_response(self, *args: object, **options: object) -> Response:
        """Returns a file."""
        response = super().file_response(*args, **options)  # type: ignore[arg-type]
        response.headers.update(SECURITY)
        return response


def page_routes(
    source: RunSource, is_over: Callable[[], bool], *, pool: PoolAddress | None = None
) -> Sequence[BaseRoute]:
    """Returns the routes of the page of some runs.

    Args:
        source: Where the runs are found.
        is_over: Returns whether the server is about to end.
        pool: The pool to which jobs can be added.
    """
    feeds: dict[str | None, Feed] = {}

    async def events(request: Request) -> Response:
        run = request.query_params.get("run")
        known = [each.id for each in source.runs()]
        if run is not None and run not in known:
            return PlainTextResponse(f"there is no run {run!r}\n", status_code=404)
        feed = feeds.setdefault(run, Feed(RunView(source, run), is_over=is_over))
        headers = {**SECURITY, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(feed.messages(), media_type="text/event-stream", headers=headers)

    async def forms(request: Request) -> Response:
        from ringmaster.features.live_page.actions import (
            forms_for,  # loads Prefect, once a person wants to do something
        )

        return await _answered(lambda: forms_for(request.query_params.getlist("job")))

    async def requests(request: Request) -> Response:
        content = await _content(request)
        if isinstance(content, Response):
            return content
        from ringmaster.features.live_page import actions

        return await _answered(lambda: actions.request(source, content))

    async def jobs(request: Request) -> Response:
        content = await _content(request)
        if isinstance(content, Response):
            return content
        if pool is None:
            return _refused(["jobs can be added to a pool. To fix: `ringmaster up` starts one"])
        from ringmaster.features.live_page import actions

        return await _answered(lambda: actions.submit(pool, content, folder=settings.home().parent))

    def to_page(_: Request) -> Response:
        return RedirectResponse(f"{PAGE_PATH}/")

    return [
        Route("/", to_page),
        Route(PAGE_PATH, to_page),
        Route(f"{PAGE_PATH}/events", events),
        Route(f"{PAGE_PATH}/forms", forms),
        Route(f"{PAGE_PATH}/requests", requests, methods=["POST"]),
        Route(f"{PAGE_PATH}/jobs", jobs, methods=["POST"]),
        Mount(PAGE_PATH, PageFiles(directory=STATIC, html=True)),
    ]


async def _content(request: Request) -> Mapping[str, Any] | Response:
    """Returns the JSON object in a request, or the answer to one that has none.

    Only a script can send JSON, and a browser lets those of this page alone; a form of another page cannot.
    """
    if request.headers.get("Content-Type", "").partition(";")[0] != "application/json":
        return _refused(["a request is JSON"], status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            return _refused(["a request has at most 1 MB"], status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    try:
        content = json.loads(body)
    except ValueError:
        content = None
    return content if isinstance(content, dict) else _refused(["a request is a JSON object"])


async def _answered(action: Callable[[], Any]) -> Response:
    """Returns what a blocking action returns, or its faults."""
    try:
        return JSONResponse(finite(await run_in_threadpool(action)), headers=SECURITY)
    except InputError as error:
        return _refused([str(fault) for fault in error.faults])
    except (RingmasterError, SQLAlchemyError, OSError) as error:
        return _refused([message_of(error)], status=HTTPStatus.SERVICE_UNAVAILABLE)


def _refused(faults: Sequence[str], *, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> Response:
    return JSONResponse({"faults": faults}, status_code=status, headers=SECURITY)


def pool_routes(pool: PoolAddress, is_over: Callable[[], bool]) -> Sequence[BaseRoute]:
    """Returns the routes of the page of a pool."""
    return page_routes(PoolBatches(pool), is_over, pool=pool)


ROUTES = pool_routes
