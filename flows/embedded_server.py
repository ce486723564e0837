"""Prefect's embedded server, which a run without a pool starts: here with a password and a check of the Host header.

Prefect would start it with neither, and ends it at a normal exit only; this one ends when the run's process does.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import prefect.context
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, get_current_settings

from flows.services.hosts import ALLOWED_HOSTS, LOOPBACK
from flows.settings import PoolAddress

PASSWORD = "PREFECT_API_AUTH_STRING"


def protect_embedded_server() -> None:
    """Has Prefect start the protected server in place of its own; nothing where its settings name another server.

    To be called before the first flow run, which starts the server.
    """
    if PREFECT_API_URL.value() is not None:
        return
    if PREFECT_API_AUTH_STRING.value() is None:
        os.environ[PASSWORD] = f"{PoolAddress.username}:{secrets.token_urlsafe(24)}"
        prefect.context.refresh_global_settings_context()
    from prefect.server.api.server import SubprocessASGIServer  # takes seconds, which only such a run has to spend

    class EmbeddedServer(SubprocessASGIServer):
        """Prefect's, but for the process."""

        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            assert self.port is not None, "chosen by `start`"
            return start_server(self.port)

    # Where `SubprocessASGIServer()` looks first. One that runs already is that of a flow that calls ours.
    if not ((there := SubprocessASGIServer._instances.pop(None, None)) and there.running):
        there = EmbeddedServer()
    SubprocessASGIServer._instances[None] = there


def start_server(port: int) -> subprocess.Popen[Any]:
    """Starts the server on loopback, for who knows the password of this process, and for as long as this process lives.

    Raises RuntimeError where this process has no password.
    """
    password = PREFECT_API_AUTH_STRING.value()
    if password is None:
        raise RuntimeError(f"Prefect's embedded server needs a password. To fix: set {PASSWORD}=USER:PASSWORD")
    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    source = str(Path(__file__).resolve().parents[1])  # our packages are to be found where they are now
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
    command = [sys.executable, "-P", "-m", "flows.services.prefect_server", "--port", str(port), "--until-stdin-ends"]
    # The pipe stays open for as long as this process lives. A session of its own: Ctrl-C at a terminal is for the run,
    # which still has to tell the server how it ends.
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
