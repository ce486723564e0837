"""What waits for a pool's servers while they are away: a batch that a pool has taken is not given up for that."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

import httpx
from prefect import get_run_logger
from prefect.context import FlowRunContext

from ringmaster.flows import settings
from ringmaster.flows.views import current_view
from ringmaster.model_lineage.waiting import Waiting

T = TypeVar("T")


def notices() -> Callable[[str], None]:
    """What shows a line to whoever looks: at the terminal, and in the log of the flow run that we are in."""
    notice = current_view.get().notice
    if FlowRunContext.get() is None:
        return notice
    logger = get_run_logger()

    def show(text: str) -> None:
        notice(text)
        logger.info(text)

    return show


def for_mlflow() -> Waiting | None:
    """What tries calls to a pool's MLflow again; None without a pool, where a person is told at once."""
    return None if settings.pool() is None else Waiting(notices())


def for_prefect(act: Callable[[], T]) -> T:
    """What `act` returns, once a pool's Prefect server lets it; without a pool it is done once."""
    if settings.pool() is None:
        return act()
    return Waiting(notices(), server="Prefect", may_pass=prefect_is_away).call(act)


def prefect_is_away(error: Exception) -> bool:
    """Whether an error says that Prefect's server is away, or has something else to do just now."""
    if isinstance(error, httpx.HTTPStatusError):
        busy = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
        return error.response.status_code in busy or error.response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR
    return isinstance(error, httpx.TransportError)
