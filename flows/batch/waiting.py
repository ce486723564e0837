"""Calls to a pool's servers that wait while a server is away, so that a batch on the pool is not given up."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

import httpx
from prefect import get_run_logger
from prefect.context import FlowRunContext

from ringmaster.flows import settings
from ringmaster.flows.reports.progress import current_view
from ringmaster.model_lineage.waiting import Waiting

T = TypeVar("T")


def notices() -> Callable[[str], None]:
    """Returns a function that shows a line on the terminal and in the log of the current flow run."""
    notice = current_view.get().notice
    if FlowRunContext.get() is None:
        return notice
    logger = get_run_logger()

    def show(text: str) -> None:
        notice(text)
        logger.info(text)

    return show


def for_mlflow() -> Waiting | None:
    """Returns what retries calls to a pool's MLflow server; None without a pool, where errors are reported at once."""
    return None if settings.pool() is None else Waiting(notices())


def for_prefect(act: Callable[[], T]) -> T:
    """Returns the result of `act`; on a pool, retries it while the pool's Prefect server is away."""
    if settings.pool() is None:
        return act()
    return Waiting(notices(), server="Prefect", may_pass=prefect_is_away).call(act)


def prefect_is_away(error: BaseException) -> bool:
    """Returns whether an error means that Prefect's server is away or overloaded."""
    if isinstance(error, httpx.HTTPStatusError):
        busy = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
        return error.response.status_code in busy or error.response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR
    return isinstance(error, httpx.TransportError)
