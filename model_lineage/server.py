"""MLflow's server with every route behind the password: `python -m ringmaster.model_lineage.server OPTIONS`.

The options are those of `mlflow server`. MLflow with basic authentication still tells everybody how it is configured
(`server-info`). Health checks alone are open here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_TO_ALL, CLOSED = "/mlflow/server-info", "/api/2.0/mlflow/users/current"
UNAUTHORIZED = 401
APPLICATION = "ringmaster.model_lineage.server:create_app"


class PasswordForAll:
    """An ASGI application that answers requests for `OPEN_TO_ALL` only with the credentials that `CLOSED` asks for."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] == "http" and OPEN_TO_ALL in scope["path"]:
            asked = {**scope, "method": "GET", "path": CLOSED, "raw_path": CLOSED.encode(), "query_string": b""}
            answer: list[Message] = []

            async def keep(message: Message) -> None:
                answer.append(message)

            async def no_body() -> Message:
                return {"type": "http.request", "body": b"", "more_body": False}

            await self.app(asked, no_body, keep)
            if not answer or answer[0].get("status") != 200:
                for message in answer or [{"type": "http.response.start", "status": UNAUTHORIZED, "headers": []}]:
                    await send(message)
                return
        await self.app(scope, receive, send)


def create_app() -> Any:
    """Returns MLflow's application with basic authentication, and the password asked for everywhere."""
    from mlflow.server import auth

    return PasswordForAll(auth.create_app())


def main(arguments: Sequence[str]) -> None:
    """Runs `mlflow server` with this application."""
    from mlflow import server
    from mlflow.cli import cli

    # MLflow finds applications by entry points of installed distributions, of which this is none.
    assert hasattr(server, "_find_app"), "MLflow finds its applications in another way now"
    server._find_app = lambda name: APPLICATION
    cli.main(["server", *arguments, "--app-name", "basic-auth"], prog_name="mlflow")


if __name__ == "__main__":
    main(sys.argv[1:])
