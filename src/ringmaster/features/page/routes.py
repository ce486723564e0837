"""The routes of the page, for the server of a pool's metrics and for that of a home. They are behind its password."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from ringmaster.features.page.feed import Feed, RunView
from ringmaster.features.page.sources import PoolBatches, RunSource
from ringmaster.flows.settings import PoolAddress

STATIC = Path(__file__).absolute().parent / "static"
PAGE_PATH = "/page"
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


def page_routes(source: RunSource, is_over: Callable[[], bool]) -> Sequence[BaseRoute]:
    """Returns the routes of the page of some runs.

    Args:
        source: Where the runs are found.
        is_over: Returns whether the server is about to end.
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

    def to_page(_: Request) -> Response:
        return RedirectResponse(f"{PAGE_PATH}/")

    return [
        Route("/", to_page),
        Route(PAGE_PATH, to_page),
        Route(f"{PAGE_PATH}/events", events),
        Mount(PAGE_PATH, PageFiles(directory=STATIC, html=True)),
    ]


def pool_routes(pool: PoolAddress, is_over: Callable[[], bool]) -> Sequence[BaseRoute]:
    """Returns the routes of the page of a pool."""
    return page_routes(PoolBatches(pool), is_over)


ROUTES = pool_routes
