"""Flow runs that Prefect started: which they are, how they end, and what follows where they are cancelled."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.states import Cancelled, Failed

from ringmaster.flows import settings
from ringmaster.flows.faults import Interrupted, RunFailed
from ringmaster.tasks.execution.journal import Journal
from ringmaster.tasks.pool import requests as wishes
from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.pool.requests import Requests

STARTED_RUN = "PREFECT__FLOW_RUN_ID"  # Prefect's name for the run for which it started a process

T = TypeVar("T")


def root_run() -> str:
    """The id of the flow run that this process is for, or else of the one that we are in; empty outside of any."""
    context = FlowRunContext.get()
    inner = str(context.flow_run.id) if context is not None and context.flow_run is not None else ""
    return os.environ.get(STARTED_RUN) or inner


def runs_fact(root: str) -> str:
    """The fact of a pool that tells the runs of batches which a flow run has submitted."""
    return f"runs of {root}"


def is_being_cancelled() -> bool:
    """Whether Prefect has been told to cancel the run that this process is for."""
    run = os.environ.get(STARTED_RUN)
    if run is None:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(cast(Any, run)).state
    except (httpx.HTTPError, PrefectException):  # nobody says so
        return False
    return state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)


def is_started_by_prefect() -> bool:
    """Whether Prefect started this process, to which its signals then belong."""
    return STARTED_RUN in os.environ


def ended(result: T, *, status: str, message: str, failure: type[RunFailed]) -> T:
    """What a flow returns: its result or, where not all is done, a state that says so in Prefect's list of runs.

    Whoever has called the flow in Python gets `failure` raised, with the result; Interrupted where it was stopped.
    """
    if status == "done":
        return result
    if status == "interrupted":
        said = f"interrupted: {message}"
        return cast(T, Cancelled(message=said, data=Interrupted(said, result)))
    state = Cancelled if status == "cancelled" else Failed
    return cast(T, state(message=message, data=failure(message, result)))


def result_of(run: Callable[..., T], *args: Any, **options: Any) -> T:
    """What a flow has come to, however it ended: its result, also where it raises that not all is done."""
    try:
        return run(*args, **options)
    except (RunFailed, Interrupted) as end:
        if end.result is None:
            raise
        return cast(T, end.result)


def cancel_batches(flow: Any, flow_run: Any, state: Any) -> None:
    """A flow's hook for its cancellation: the jobs that it has handed over to a pool are cancelled, too."""
    address = settings.pool()
    if address is None:
        return
    database = Database(address.database, patience_s=60.0)
    try:
        requests = Requests(database)
        for batch, _ in Journal(database, batch="").get(runs_fact(str(flow_run.id)), {}).values():
            requests.ask(wishes.CANCEL, {"batch": batch, "jobs": []}, key=f"cancel {batch} of {flow_run.id}")
    finally:
        database.close()
