"""Prefect's embedded server for runs without a pool, with a password and a check of the Host header.

Prefect would start it with neither, and would end it at a normal exit only. This server also ends when the run's
process dies.
"""

from __future__ import annotations

import atexit
import os
import secrets
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import prefect.context
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, get_current_settings

from ringmaster.flows.faults import RingmasterError
from ringmaster.flows.output import announce
from ringmaster.flows.services.hosts import ALLOWED_HOSTS, LOOPBACK
from ringmaster.flows.settings import PoolAddress

PASSWORD = "PREFECT_API_AUTH_STRING"
LONGEST_START_S = 600  # a busy machine takes minutes; a server that has ended is detected at once
TOLD_EVERY_S = 30.0
LOOK_EVERY_S = 0.1
REMEDY = "run it again, or start the servers with `ringmaster up`, which runs then use"


class ServerNotStarted(RingmasterError):
    """Prefect's embedded server does not answer."""


def protect_embedded_server() -> None:
    """Makes Prefect start the protected server instead of its own; does nothing where its settings name another server.

    Call it before the first flow run, which starts the server.
    """
    if PREFECT_API_URL.value() is not None:
        return
    if PREFECT_API_AUTH_STRING.value() is None:
        os.environ[PASSWORD] = f"{PoolAddress.username}:{secrets.token_urlsafe(24)}"
        prefect.context.refresh_global_settings_context()
    from prefect.server.api.server import SubprocessASGIServer  # its import takes seconds, which other runs are spared

    class EmbeddedServer(SubprocessASGIServer):
        """Prefect's embedded server with another process and another start timeout."""

        def start(self, timeout: int | None = None) -> None:
            """Starts the server, waits until it answers, and reports a slow start. Raises ServerNotStarted."""
            if self.running:
                return
            self.port = self.port or self.find_available_port()
            self.server_process = start_server(self.port)
            atexit.register(self.stop)
            self.running = True
            try:
                _wait_until_it_answers(f"{self.api_url}/health", self.server_process)
            except ServerNotStarted:
                self.stop()
                raise

    # `SubprocessASGIServer()` first looks in `_instances`. A server that runs already belongs to a flow that calls
    # ours.
    if not ((there := SubprocessASGIServer._instances.pop(None, None)) and there.running):
        there = EmbeddedServer()
    SubprocessASGIServer._instances[None] = there


def _wait_until_it_answers(url: str, process: subprocess.Popen[Any]) -> None:
    """Waits for the server, and reports this every TOLD_EVERY_S. Raises ServerNotStarted."""
    began_s = told_s = time.monotonic()
    with httpx.Client() as client:
        while True:
            with suppress(httpx.TransportError):
                if client.get(url).status_code == httpx.codes.OK:
                    return
            if process.poll() is not None:
                what = f"Prefect's server ended with exit code {process.returncode}; what it said stands above"
                raise ServerNotStarted(f"{what}. To fix: {REMEDY}")
            waited_s = time.monotonic() - began_s
            if waited_s > LONGEST_START_S:
                what = f"Prefect's server has not answered for {waited_s:.0f} s: this machine is busy, or its disk full"
                raise ServerNotStarted(f"{what}. To fix: {REMEDY}")
            if time.monotonic() - told_s > TOLD_EVERY_S:
                told_s = time.monotonic()
                announce(f"Prefect's server has not answered for {waited_s:.0f} s; it is waited for")
            time.sleep(LOOK_EVERY_S)


def start_server(port: int) -> subprocess.Popen[Any]:
    """Starts the server on loopback, with the password of this process. The server ends when this process ends.

    Raises RuntimeError where this process has no password.
    """
    password = PREFECT_API_AUTH_STRING.value()
    if password is None:
        raise RuntimeError(f"Prefect's embedded server needs a password. To fix: set {PASSWORD}=USER:PASSWORD")
    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    source = str(Path(__file__).absolute().parents[3])  # the child must find the same import root
    environment = {
        **os.environ,
        **settings,
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        "PREFECT_SERVER_API_AUTH_STRING": password,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{LOOPBACK[0]}:{port}",
        ALLOWED_HOSTS: ",".join(LOOPBACK),
    }
    command = [
        sys.executable,
        "-P",
        "-m",
        "ringmaster.flows.services.prefect_server",
        "--port",
        str(port),
        "--until-stdin-ends",
    ]
    # The pipe stays open for as long as this process lives. The server has a session of its own, so Ctrl-C at a
    # terminal reaches the run alone, which still has to report its final state to the server.
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
