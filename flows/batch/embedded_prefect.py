"""The Prefect server of runs without a pool, which a run starts for itself, and flows that start it.

It has a password and a check of the Host header. Prefect would start one with neither, and would end it at a normal
exit only. This server also ends when the run's process dies.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import httpx
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.context import refresh_global_settings_context
from prefect.flow_engine import run_flow
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_UI_ENABLED,
    get_current_settings,
    temporary_settings,
)
from prefect.utilities.callables import get_call_parameters

from ringmaster.compat.prefect import SETTINGS_FILES, copy_flow, process_settings
from ringmaster.errors import ServerStartError
from ringmaster.flows import settings
from ringmaster.flows.batch.batch_input import as_parameter
from ringmaster.flows.batch.flow_runs import (
    current_flow_run,
    for_prefect,
    is_started_by_prefect,
    prefect_is_away,
    run_with_cancel,
)
from ringmaster.flows.caller import Caller
from ringmaster.flows.services.first_processes import ServerProcess, check_prefect_database
from ringmaster.flows.services.pool_processes import PREFECT
from ringmaster.flows.services.server_answers import responds
from ringmaster.flows.services.serving import prefect_database
from ringmaster.tasks.batch import Batch
from ringmaster.text import Notice

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
        if has_lasting_server() and settings.checked_pool() is None:
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
    files = [name for name in SETTINGS_FILES if Path(name).is_file() and url in Path(name).read_text()]
    places = ["PREFECT_API_URL"] if os.environ.get("PREFECT_API_URL") else files or ["Prefect's profile"]
    raise ServerStartError(
        f"Prefect's server at {url}, which {' and '.join(places)} names, does not answer: {fault}. To fix: start it, "
        "or take its address out of there: a run then has a server of its own"
    )


def has_lasting_server() -> bool:
    """Returns whether Prefect's server has pages to link to: one that lasts longer than this process."""
    return PREFECT_API_URL.value() is not None and PREFECT_UI_ENABLED.value()


class FlowWithServer(Flow[P, R]):
    """A flow of Prefect whose calls start the embedded server where Prefect's settings name no other server."""

    @classmethod
    def of(cls, flow: Flow[P, R]) -> FlowWithServer[P, R]:
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
            return FlowWithServer.of(super().with_options(**options))


def _answering_server(server: ServerProcess | None, notice: Notice) -> ServerProcess:
    """Returns a server that answers: the given one, or a new one."""
    if server is not None and server.process is None and not responds(f"{server.api}/health"):
        server = None  # that of an earlier command, which has ended meanwhile
    if server is None:
        check_prefect_database(prefect_database())
        variables = get_current_settings().to_environment_variables(exclude_unset=True)
        server = ServerProcess.start(user=PREFECT_API_AUTH_STRING.value() or "", settings=variables)
    try:
        _wait_until_it_answers(server, notice)
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


def _wait_until_it_answers(server: ServerProcess, notice: Notice) -> None:
    """Waits for the server, and reports this every REPORT_EVERY_S. Raises ServerStartError."""
    url, process = f"{server.api}/health", server.process
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
            if process is not None and process.poll() is not None:
                output = "its output is above" if server.log is None else f"its log {server.log} has the reason"
                what = f"Prefect's server ended with exit code {process.returncode}; {output}"
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
