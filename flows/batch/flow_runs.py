"""Flow runs in Prefect: names, ids, final states, cancellation, tasks of segments, and calls that wait for its server.

Runs without a pool start a server of their own, with a password and a check of the Host header. Prefect would start one
with neither, and would end it at a normal exit only. This server also ends when the run's process dies.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import httpx
from prefect import Flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import FlowRunCreate
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext, refresh_global_settings_context
from prefect.exceptions import PrefectException, PrefectHTTPStatusError
from prefect.flow_engine import run_flow
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_UI_ENABLED,
    get_current_settings,
    temporary_settings,
)
from prefect.states import Cancelled, Failed, Pending, to_state_create
from prefect.utilities.callables import get_call_parameters

from ringmaster.compat.prefect import STARTED_RUN, copy_flow, process_settings
from ringmaster.errors import RunFailed, RunInterrupted, ServerStartError
from ringmaster.flows import settings
from ringmaster.flows.batch.batch_input import as_parameter
from ringmaster.flows.caller import Caller
from ringmaster.flows.services.first_processes import ServerProcess, check_prefect_database
from ringmaster.flows.services.pool_processes import PREFECT
from ringmaster.flows.services.serving import prefect_database
from ringmaster.model_lineage.mlflow_calls import OutageRetry, show_nothing
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.control.requests import RequestKind, Requests
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques.processes.events import Outcome
from ringmaster.text import MAX_IN_NAME, printable

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
    is_own = settings.pool() is not None and not is_started_by_prefect() and current_flow_run() is None
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
    address = settings.pool()
    if address is None:
        return
    with closing(Database(address.database, timeout_s=60.0)) as database:
        requests = Requests(database)
        for batch, _ in Journal(database, batch="").get(runs_fact(str(flow_run.id)), {}).values():
            requests.ask(RequestKind.CANCEL, {"batch": batch, "jobs": []}, key=f"cancel {batch} of {flow_run.id}")


Notice = Callable[[str], None]
"""Shows a line of progress."""


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
    return None if settings.pool() is None else OutageRetry(notices(notice))


def for_prefect(act: Callable[[], T], notice: Notice = show_nothing) -> T:
    """Returns the result of `act`; on a pool, retries it while the pool's Prefect server is away, and notes that."""
    if settings.pool() is None:
        return act()
    return OutageRetry(notices(notice), server="Prefect", may_pass=prefect_is_away).call(act)


def prefect_is_away(error: BaseException) -> bool:
    """Returns whether an error means that Prefect's server is away or overloaded."""
    if isinstance(error, httpx.HTTPStatusError):
        busy = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
        return error.response.status_code in busy or error.response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR
    return isinstance(error, httpx.TransportError)


LONGEST_START_S = 600  # a busy machine takes minutes; a server that has ended is detected at once
REPORT_EVERY_S = 30.0
LOOK_EVERY_S = 0.1
REMEDY = "run it again, or start the servers with `ringmaster up`, which runs then use"

P = ParamSpec("P")
R = TypeVar("R")


_starting = threading.Lock()


def embedded_server(caller: Caller | None = None) -> AbstractContextManager[Any]:
    """Makes Prefect use the embedded server in the block; does nothing where its settings name another server.

    The first call starts the server, which all later runs of this process use.

    caller: the caller of the flow, which may have started a server ahead for this process.

    Raises InputError where its database cannot be used, ServerStartError where it, or the other server, does not
    answer. Where a pool is up, its server may be away for a while: a command waits for it, if it is started again.
    The settings of this process, which Prefect holds, say which server that is, and that it has no pages.
    """
    caller = caller or Caller()
    notice = caller.view.notice
    if (url := PREFECT_API_URL.value()) is not None:
        if has_lasting_server() and settings.pool() is None:
            _check_answer(url)
        elif has_lasting_server() and not is_started_by_prefect() and current_flow_run() is None:
            settings.check_prefect(url)
            for_prefect(lambda: _ask_pool(url), notice)
        return nullcontext()
    with _starting:
        if process_settings().api.url is None:  # the first run of this process
            notice("waiting for Prefect's server")
            # Prefect reads the environment here. Processes that are started later get no password with it.
            with _variables(_answering_server(caller.prefect, notice).environment()):
                refresh_global_settings_context()
    # The settings of a context, as `temporary_settings` makes one, take precedence over those of the process.
    settings_now = process_settings()
    return temporary_settings(
        {
            PREFECT_API_URL: settings_now.api.url,
            PREFECT_API_AUTH_STRING: settings_now.api.auth_string,
            PREFECT_UI_ENABLED: settings_now.server.ui.enabled,
        }
    )


def _ask_pool(url: str) -> None:
    """Raises httpx's error where the pool's Prefect server does not answer, ServerStartError where it will not."""
    processes = settings.processes_behind(url, settings.home())
    if processes is not None and not processes.is_supervised() and (fault := processes.service_fault(PREFECT)):
        remedy = "`ringmaster up`, which starts again what has ended, and takes over what runs"
        raise ServerStartError(f"the pool's Prefect does not answer, and nothing starts it: {fault}. To fix: {remedy}")
    with get_client(sync_client=True) as client:
        error = client.api_healthcheck()
    if error is not None and prefect_is_away(error):
        raise error
    if error is not None:
        raise ServerStartError(
            f"{url} is not the pool's Prefect server: {error}. To fix: see which process answers there"
        )


def _check_answer(url: str) -> None:
    """Raises ServerStartError where the server that the settings name does not answer."""
    with get_client(sync_client=True) as client:
        fault = client.api_healthcheck()
    if fault is None:
        return
    files = [name for name in settings.PREFECT_FILES if Path(name).is_file() and url in Path(name).read_text()]
    places = ["PREFECT_API_URL"] if os.environ.get("PREFECT_API_URL") else files or ["Prefect's profile"]
    raise ServerStartError(
        f"Prefect's server at {url}, which {' and '.join(places)} names, does not answer: {fault}. To fix: start it, "
        "or take its address out of there: a run then has a server of its own"
    )


def has_lasting_server() -> bool:
    """Returns whether Prefect's server has pages to link to: one that lasts longer than this process."""
    return PREFECT_API_URL.value() is not None and PREFECT_UI_ENABLED.value()


class LocalFlow(Flow[P, R]):
    """A flow of Prefect whose calls start the embedded server where Prefect's settings name no other server."""

    @classmethod
    def of(cls, flow: Flow[P, R]) -> LocalFlow[P, R]:
        """Returns a flow with the function and the options of another one. Use it as a decorator above `@flow`."""
        return copy_flow(flow, cls)

    if not TYPE_CHECKING:  # the types of the base class hold

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Calls the flow while Prefect has a server. On a pool, its page in Prefect can cancel it."""
            with embedded_server(kwargs.get("caller")):
                options = {key: kwargs.pop(key) for key in ("return_state", "wait_for") if key in kwargs}
                parameters = get_call_parameters(self.fn, args, kwargs)
                if options or (run := run_with_cancel(self, parameters)) is None:
                    return super().__call__(*args, **kwargs, **options)
                return run_flow(self, flow_run=run, parameters=parameters)

        def serialize_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
            """Returns the parameters as Prefect stores them: of a batch its JSON form, and no `Caller`."""
            kept = {key: each for key, each in parameters.items() if not isinstance(each, Caller)}
            as_json = {key: as_parameter(each) if isinstance(each, Batch) else each for key, each in kept.items()}
            return super().serialize_parameters(as_json)

        def with_options(self, **options: Any) -> Any:
            """Returns such a flow with other options."""
            return LocalFlow.of(super().with_options(**options))


def _answering_server(server: ServerProcess | None, notice: Notice) -> ServerProcess:
    """Returns a server that answers: the given one, or a new one."""
    if server is None:
        check_prefect_database(prefect_database())
        variables = get_current_settings().to_environment_variables(exclude_unset=True)
        server = ServerProcess.start(user=PREFECT_API_AUTH_STRING.value() or "", settings=variables)
    try:
        _wait_until_it_answers(f"{server.api}/health", server.process, notice)
    except ServerStartError:
        server.stop()
        raise
    return server


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables in the block."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


def _wait_until_it_answers(url: str, process: subprocess.Popen[Any], notice: Notice) -> None:
    """Waits for the server, and reports this every REPORT_EVERY_S. Raises ServerStartError."""
    began_s = reported_s = time.monotonic()
    answer = "nothing"
    with httpx.Client() as client:
        while True:
            try:
                response = client.get(url)
                if response.status_code == httpx.codes.OK:
                    return
                answer = f"status {response.status_code}"
            except httpx.TransportError as error:
                answer = str(error)
            if process.poll() is not None:
                what = f"Prefect's server ended with exit code {process.returncode}; its output is above"
                raise ServerStartError(f"{what}. To fix: {REMEDY}")
            waited_s = time.monotonic() - began_s
            if waited_s > LONGEST_START_S:
                what = f"Prefect's server has not answered at {url} for {waited_s:.0f} s (last answer: {answer})"
                remedy = f"see that this machine is not too busy and its disk not full; then {REMEDY}"
                raise ServerStartError(f"{what}. To fix: {remedy}")
            if time.monotonic() - reported_s > REPORT_EVERY_S:
                reported_s = time.monotonic()
                notice(f"Prefect's server has not answered for {waited_s:.0f} s; it is waited for")
            time.sleep(LOOK_EVERY_S)


def as_task(label: str, run: Callable[[], Outcome]) -> Future[Outcome]:
    """Runs a segment as a Prefect task of the current flow run. A `Spawn` of the local engine.

    The task returns the gang's outcome as a value, even if the gang failed. It has no retries of its own: the executor
    decides whether and how the job continues.
    """

    # Without parameters: Prefect would serialise a function among them.
    @task(name="segment", task_run_name=lambda: label, cache_policy=NO_CACHE, persist_result=False)
    def segment() -> Outcome:
        return run()

    # A Prefect future has the two methods of a Future that an executor uses.
    return cast("Future[Outcome]", segment.submit())
