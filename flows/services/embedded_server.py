"""Prefect's embedded server for runs without a pool, with a password and a check of the Host header.

Prefect would start it with neither, and would end it at a normal exit only. This server also ends when the run's
process dies.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import httpx
from prefect import Flow
from prefect.context import refresh_global_settings_context
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, get_current_settings, temporary_settings
from prefect.utilities.callables import get_call_parameters

from ringmaster.errors import ServerStartError
from ringmaster.flows.batch.batch_input import as_parameter
from ringmaster.flows.batch.flow_runs import run_with_cancel
from ringmaster.flows.output import announce
from ringmaster.flows.reports.progress import current_view
from ringmaster.flows.services import first_processes
from ringmaster.flows.services.databases import prefect_database
from ringmaster.flows.services.first_processes import ServerProcess, check_prefect_database
from ringmaster.tasks.batch import Batch

LONGEST_START_S = 600  # a busy machine takes minutes; a server that has ended is detected at once
REPORT_EVERY_S = 30.0
LOOK_EVERY_S = 0.1
REMEDY = "run it again, or start the servers with `ringmaster up`, which runs then use"

P = ParamSpec("P")
R = TypeVar("R")


_starting = threading.Lock()
_shared: ServerProcess | None = None


@contextmanager
def embedded_server() -> Iterator[None]:
    """Makes Prefect use the embedded server in the block; does nothing where its settings name another server.

    The first call starts the server, which all later runs of this process use.

    Raises InputError where its database cannot be used, ServerStartError where it does not answer.
    """
    if PREFECT_API_URL.value() is not None:
        yield
        return
    server = _shared_server()
    # The settings of a context, as `temporary_settings` makes one, take precedence over those of the process.
    with temporary_settings({PREFECT_API_URL: server.api, PREFECT_API_AUTH_STRING: server.user}):
        yield


def has_lasting_server() -> bool:
    """Returns whether Prefect's server lasts longer than this process, so that links to its pages are of use."""
    url = PREFECT_API_URL.value()
    return url is not None and (_shared is None or url != _shared.api)


class LocalFlow(Flow[P, R]):
    """A flow of Prefect whose calls start the embedded server where Prefect's settings name no other server."""

    @classmethod
    def of(cls, flow: Flow[P, R]) -> LocalFlow[P, R]:
        """Returns a flow with the function and the options of another one. Use it as a decorator above `@flow`."""
        local = cls.__new__(cls)
        vars(local).update(vars(flow))
        return local

    if not TYPE_CHECKING:  # the types of the base class hold

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Calls the flow while Prefect has a server. On a pool, its page in Prefect can cancel it."""
            with embedded_server():
                options = {key: kwargs.pop(key) for key in ("return_state", "wait_for") if key in kwargs}
                parameters = get_call_parameters(self.fn, args, kwargs)
                if options or (run := run_with_cancel(self, parameters)) is None:
                    return super().__call__(*args, **kwargs, **options)
                return run_flow(self, flow_run=run, parameters=parameters)

        def serialize_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
            """Returns the parameters as Prefect stores them: of a batch its JSON form."""
            as_json = {key: as_parameter(each) if isinstance(each, Batch) else each for key, each in parameters.items()}
            return super().serialize_parameters(as_json)

        def with_options(self, **options: Any) -> Any:
            """Returns such a flow with other options."""
            return LocalFlow.of(super().with_options(**options))


def _shared_server() -> ServerProcess:
    """Returns the server of this process, which the first call starts. All threads of the process then use it."""
    global _shared
    with _starting:
        if _shared is None:
            current_view.get().notice("waiting for Prefect's server")
            _shared = _answering_server()
            # Prefect reads the environment here. Processes that are started later get no password with it.
            with _variables(_shared.environment()):
                refresh_global_settings_context()
        return _shared


def _answering_server() -> ServerProcess:
    """Returns a server that answers: the one that was started ahead of the first flow, or a new one."""
    server = first_processes.take_server()
    if server is None:
        check_prefect_database(prefect_database())
        variables = get_current_settings().to_environment_variables(exclude_unset=True)
        server = ServerProcess.start(user=PREFECT_API_AUTH_STRING.value() or "", settings=variables)
    try:
        _wait_until_it_answers(f"{server.api}/health", server.process)
    except ServerStartError:
        server.stop()
        raise
    return server


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _wait_until_it_answers(url: str, process: subprocess.Popen[Any]) -> None:
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
                what = f"Prefect's server ended with exit code {process.returncode}; what it said stands above"
                raise ServerStartError(f"{what}. To fix: {REMEDY}")
            waited_s = time.monotonic() - began_s
            if waited_s > LONGEST_START_S:
                what = f"Prefect's server has not answered at {url} for {waited_s:.0f} s (last answer: {answer})"
                remedy = f"see that this machine is not too busy and its disk not full; then {REMEDY}"
                raise ServerStartError(f"{what}. To fix: {remedy}")
            if time.monotonic() - reported_s > REPORT_EVERY_S:
                reported_s = time.monotonic()
                announce(f"Prefect's server has not answered for {waited_s:.0f} s; it is waited for")
            time.sleep(LOOK_EVERY_S)
