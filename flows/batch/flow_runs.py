"""Flow runs in Prefect: names, ids, final states, cancellation, and calls that wait for a server."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import closing, suppress
from http import HTTPStatus
from typing import Any, TypeVar, cast

import httpx
from prefect import Flow, get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import FlowRunCreate
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException, PrefectHTTPStatusError
from prefect.states import Cancelled, Failed, Pending, to_state_create

from ringmaster.compat.prefect import STARTED_RUN
from ringmaster.errors import RunFailed, RunInterrupted, ServerStartError
from ringmaster.flows import settings
from ringmaster.model_lineage.mlflow_calls import OutageRetry, show_nothing
from ringmaster.tasks.control.requests import RequestKind, Requests
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import Journal
from ringmaster.text import MAX_IN_NAME, Notice, printable

OF_COMMAND = "command line"  # the tag of runs whose process is a command of a person, and not of a worker
# The flows whose process sees that Prefect's page cancels them. Their runs then belong to their deployments.
CANCELLED_BY_PAGE = ("train-batch", "sweep")

T = TypeVar("T")

# Names that Prefect gives to unnamed runs: "amber-otter", and in its forms "lambda997-caracol-d".
_GREEK = "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon"
_DRAWN = re.compile(rf"[a-z]+-[a-z]+|({_GREEK}|phi|chi|psi|omega)\d+-[a-z-]+")


def run_name_template(template: str) -> Callable[[], str]:
    """Returns the `flow_run_name` of a flow: the name that a person typed, else one that describes the run.

    template: a format string over the run's parameters.
    """
    return lambda: typed_or(template.format(**runtime.flow_run.parameters))


def typed_or(wanted: str) -> str:
    """Returns the running flow's name if a person typed it, else `wanted`."""
    name = runtime.flow_run.name
    return printable(wanted, limit=MAX_IN_NAME) if not name or _DRAWN.fullmatch(name) else str(name)


def current_flow_run() -> FlowRun | None:
    """Returns the flow run in which the caller runs; None outside of any."""
    context = FlowRunContext.get()
    return None if context is None else context.flow_run


def run_with_cancel(flow: Flow[Any, Any], parameters: dict[str, Any]) -> FlowRun | None:
    """Creates the run of a flow that a command on a pool calls; returns None where Prefect is to create it.

    Prefect's page offers Cancel for runs of a deployment only. No worker runs this one: it is on no queue.
    """
    is_own = settings.checked_pool() is not None and not is_started_by_prefect() and current_flow_run() is None
    if not is_own or flow.name not in CANCELLED_BY_PAGE:
        return None
    with suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(f"{flow.name}/{flow.name}")
        run = FlowRunCreate(
            flow_id=deployment.flow_id,
            deployment_id=deployment.id,
            parameters=flow.serialize_parameters(parameters),
            state=to_state_create(Pending()),
            tags=[OF_COMMAND],
        )
        response = client.request("POST", "/flow_runs/", json=run.model_dump(mode="json", exclude_unset=True))
        result = FlowRun.model_validate(response.json())
        result.parameters = parameters
        return result
    return None


def root_run() -> str:
    """Returns the id of the flow run that Prefect started this process for, else of the current one; empty if none."""
    run = current_flow_run()
    return os.environ.get(STARTED_RUN) or ("" if run is None else str(run.id))


def runs_fact(root: str) -> str:
    """Returns the name of the pool's fact that lists the batch runs which a flow run has submitted."""
    return f"runs of {root}"


def is_being_cancelled(run: str = "") -> bool:
    """Returns whether a flow run is being cancelled. run: its id, by default of the one that started this process."""
    run = run or os.environ.get(STARTED_RUN, "")
    if not run:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(cast(Any, run)).state
    except (httpx.HTTPError, PrefectException):  # no answer
        return False
    return state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)


def is_started_by_prefect() -> bool:
    """Returns whether Prefect started this process; signals to it then come from Prefect."""
    return STARTED_RUN in os.environ


def final_state(result: T, *, status: str, message: str, failure: type[RunFailed]) -> T:
    """Returns what a flow returns: its result or, if it is not "done", a state for Prefect with an exception as data.

    A caller in Python gets `failure` raised, with the result, or RunInterrupted if the run was interrupted.
    """
    if status == "done":
        return result
    if status == "interrupted":
        text = f"interrupted: {message}"
        return cast(T, Cancelled(message=text, data=RunInterrupted(text, result)))
    if status == "skipped":
        return cast(T, Cancelled(name="Skipped", message=message, data=failure(message, result)))
    state = Cancelled if status == "cancelled" else Failed
    return cast(T, state(message=message, data=failure(message, result)))


def result_of(call: Callable[[], T]) -> T:
    """Calls a flow; returns its result, also where it is what RunFailed or RunInterrupted carries."""
    try:
        return call()
    except (RunFailed, RunInterrupted) as error:
        if error.result is None:
            raise
        return cast(T, error.result)
    except PrefectHTTPStatusError as error:
        what = f"Prefect's server answered {error.response.status_code}: {error.response.text:.200}"
        remedy = "see that the disk with its database is not full, and that it works; then run it again with --resume"
        raise ServerStartError(f"{what}. To fix: {remedy}") from error


def cancel_batches(flow: Any, flow_run: Any, state: Any) -> None:
    """A flow's cancellation hook: cancels the jobs that the flow run has submitted to a pool."""
    address = settings.checked_pool()
    if address is None:
        return
    with closing(Database(address.database, timeout_s=60.0)) as database:
        requests = Requests(database)
        for batch, _ in Journal(database, batch="").get(runs_fact(str(flow_run.id)), {}).values():
            requests.ask(RequestKind.CANCEL, {"batch": batch, "jobs": []}, key=f"cancel {batch} of {flow_run.id}")


def notices(notice: Notice) -> Notice:
    """Returns a function that shows a line by `notice` and in the log of the current flow run."""
    if FlowRunContext.get() is None:
        return notice
    logger = get_run_logger()

    def show(text: str) -> None:
        notice(text)
        logger.info(text)

    return show


def for_mlflow(notice: Notice) -> OutageRetry | None:
    """Returns what retries calls to a pool's MLflow server; None without a pool, where errors are reported at once."""
    return None if settings.checked_pool() is None else OutageRetry(notices(notice))


def for_prefect(act: Callable[[], T], notice: Notice = show_nothing) -> T:
    """Returns the result of `act`; on a pool, retries it while the pool's Prefect server is away, and notes that."""
    if settings.checked_pool() is None:
        return act()
    return OutageRetry(notices(notice), server="Prefect", may_pass=prefect_is_away).call(act)


def prefect_is_away(error: BaseException) -> bool:
    """Returns whether an error means that Prefect's server is away or overloaded."""
    if isinstance(error, httpx.HTTPStatusError):
        busy = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
        return error.response.status_code in busy or error.response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR
    return isinstance(error, httpx.TransportError)
