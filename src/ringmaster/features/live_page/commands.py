"""The command `ringmaster page`, and the option `--page` of the commands that train."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urljoin

import typer

from ringmaster.files import write_atomically
from ringmaster.flows import settings
from ringmaster.flows.commands.parameters import with_parameters
from ringmaster.flows.file_permissions import keep_to_owner
from ringmaster.flows.output import error_console, styled

PORT = 9465  # where it is free, so that an open page continues with the next run
END_TIMEOUT_S = 5


def page() -> None:
    """Serve a live page of the batches of this home until Ctrl-C; where a pool is up, say where its page is."""
    if (url := _page_of_pool()) is not None:
        _show(url)
        return
    with _served(since_s=0.0) as process, suppress(KeyboardInterrupt):  # Ctrl-C is how one stops looking
        raise typer.Exit(1 if process.wait() else 0)


def with_page(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the option `--page` to a command."""

    def served(*, page: bool, **options: Any) -> None:
        url = _page_of_pool() if page else None
        if url is not None:
            _show(url)
        with _served(since_s=time.time()) if page and url is None else nullcontext():
            command(**options)

    option = typer.Option("--page", help="Serve a live page of it: plan, curves, jobs, decisions.")
    return with_parameters(command, served, page=(Annotated[bool, option], False))


def _page_of_pool() -> str | None:
    """Returns the address of the page of the home's pool; None without a pool."""
    pool = settings.checked_pool()
    return None if pool is None or not pool.metrics_url else urljoin(pool.metrics_url, "/page/")


@contextmanager
def _served(*, since_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """Serves the page of this home by a child process, and shows its address."""
    from ringmaster.features.live_page.server import PASSWORD, USERNAME

    port, password = _free_port(), _password(settings.home())
    arguments = ("ringmaster.features.live_page.server", "--port", str(port), "--since", str(since_s))
    source = str(Path(__file__).absolute().parents[3])  # the child must find the same import root
    environment = {
        **os.environ,
        PASSWORD: password,
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", *arguments, "--until-stdin-ends"],
        env=environment,
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C at a terminal reaches the command alone, which then ends the server
    )
    # A terminal is its user's alone; others may read a file.
    if error_console().is_terminal:
        _show(f"http://{USERNAME}:{password}@127.0.0.1:{port}/page/")
    else:
        _show(f"http://127.0.0.1:{port}/page/, user {USERNAME}, password: `cat {_password_file(settings.home())}`")
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _show(url: str) -> None:
    error_console().print(styled("page:", "bold"), url, soft_wrap=True)


def _free_port() -> int:
    """Returns `PORT`, or any other port where that is in use."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", PORT))
        except OSError:
            trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port


def _password(home: Path) -> str:
    """Returns the password of the home's page, which is drawn once: a browser that knows it can show later runs."""
    keep_to_owner(home)
    file = _password_file(home)
    if not file.exists():
        write_atomically(file, secrets.token_urlsafe(24).encode(), mode=0o600)
    return file.read_text()


def _password_file(home: Path) -> Path:
    return home / "page-password"


COMMANDS = {"Train": (page,)}
OPTIONS = dict.fromkeys(("run", "sweep", "retrain"), with_page)
