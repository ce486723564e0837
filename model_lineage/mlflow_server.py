"""MLflow's server in one process: `python -m ringmaster.model_lineage.mlflow_server OPTIONS`, those of `mlflow server`.

`mlflow server` prepares the databases and the users, and then starts uvicorn as a child process, which imports all of
MLflow once more. Its own process only waits for the child from then on, with 215 MB. Here it serves itself.

With `--app-name basic-auth`, MLflow still tells everybody how it is configured (`server-info`). Here health checks
alone are open. MLflow also lets pages of all ports of loopback addresses act as whoever has signed in with the browser.
Here its own pages alone may do so, whatever `--cors-allowed-origins` says.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import uvicorn
from mlflow.cli import cli
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ringmaster.compat.mlflow import AUTHENTICATING, OPEN, authenticating_app, open_app, start_server_by
from ringmaster.model_lineage.tensors import artifacts
from ringmaster.origins import OwnOrigin

OPEN_TO_ALL, CLOSED = "/mlflow/server-info", "/api/2.0/mlflow/users/current"
UNAUTHORIZED = 401
OWN, OWN_OPEN = (f"ringmaster.model_lineage.mlflow_server:{factory}" for factory in ("create_app", "create_open_app"))
"""What takes the place of MLflow's applications with basic authentication, and without."""


class PasswordForAll:
    """An ASGI application that answers requests for `OPEN_TO_ALL` only with the credentials that `CLOSED` requires."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] == "http" and OPEN_TO_ALL in scope["path"]:
            requested = {**scope, "method": "GET", "path": CLOSED, "raw_path": CLOSED.encode(), "query_string": b""}
            answer: list[Message] = []

            async def keep(message: Message) -> None:
                answer.append(message)

            async def no_body() -> Message:
                return {"type": "http.request", "body": b"", "more_body": False}

            await self.app(requested, no_body, keep)
            if not answer or answer[0].get("status") != 200:
                for message in answer or [{"type": "http.response.start", "status": UNAUTHORIZED, "headers": []}]:
                    await send(message)
                return
        await self.app(scope, receive, send)


def create_app() -> ASGIApp:
    """Returns MLflow's application with basic authentication, and a password required everywhere."""
    return OwnOrigin(PasswordForAll(authenticating_app()))


def create_open_app() -> ASGIApp:
    """Returns MLflow's application without authentication, for its own pages alone."""
    return OwnOrigin(open_app())


def main(arguments: Sequence[str]) -> None:
    """Serves until SIGTERM."""
    start_server_by(_serve)
    artifacts.register()
    cli(["server", *arguments])


def _serve(command: Sequence[str], *, extra_env: Mapping[str, str], **_: Any) -> NoReturn:
    """Runs `python -m uvicorn ...` in this process."""
    module = command.index("uvicorn")
    assert list(command[:module]) == [sys.executable, "-m"], command
    os.environ.update(extra_env)
    original, own = (AUTHENTICATING, [OWN]) if AUTHENTICATING in command else (OPEN, ["--factory", OWN_OPEN])
    assert command.count(original) == 1, command
    assert original == AUTHENTICATING or not any("basic-auth" in each for each in sys.argv), command
    place = command.index(original)
    parser = ["--http", "h11", "--loop", "asyncio"]  # whatever else is installed: httptools takes two Host headers
    uvicorn.main([*command[module + 1 : place], *own, *parser, *command[place + 1 :]])
    raise AssertionError("uvicorn's command line does not return")


if __name__ == "__main__":
    main(sys.argv[1:])
