"""What a run without a pool starts first: Prefect's server and the fork server, its child processes.

This module imports nothing of Prefect, which takes seconds: the fork server imports torch, and Prefect's server creates
or opens its database, while this process imports Prefect and opens MLflow's records.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringmaster.compat.prefect import MIGRATIONS
from ringmaster.errors import InputError
from ringmaster.flows.services.serving import ALLOWED_HOSTS, LOOPBACK
from ringmaster.flows.settings import PoolAddress
from ringmaster.model_lineage.sqlite_files import exclusive_lock, fault_of
from ringmaster.techniques import Job
from ringmaster.techniques.processes.forkserver_client import ForkServer

LONGEST_STOP_S = 5
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL"
"""Environment variables with the URL of another database than the SQLite file in Prefect's home."""
NO_PAGES = {"PREFECT_UI_ENABLED": "0"}
# A flow registers the types of blocks that it stores. A server that registers all imports all collections for that, one
# of which is Kubernetes's: a third of its start. The server of `ringmaster up` registers them.
NO_BLOCKS = {"PREFECT_API_BLOCKS_REGISTER_ON_START": "0", "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "0"}


@dataclass(frozen=True, kw_only=True)
class KeptServers:
    """The servers that an earlier command has started.

    fork_server: the socket of the server that forks ranks.
    prefect_api, prefect_user: URL and USER:PASSWORD of Prefect's server; empty where the environment names another one.
    """

    fork_server: str
    prefect_api: str = ""
    prefect_user: str = ""


def fork_server_for(jobs: Iterable[Job], *, kept: KeptServers | None = None) -> ForkServer:
    """Returns a fork server that imports the architectures of jobs, so that no worker needs to.

    kept: what an earlier command has left, which is used instead for as long as it runs.
    """
    architectures = [job.model.architecture for job in jobs if job.model.architecture]
    preload = tuple(f"transformers:{name}" for name in dict.fromkeys(architectures))
    return ForkServer(preload=preload, kept=Path(kept.fork_server) if kept is not None else None)


def start_prefect(*, kept: KeptServers | None = None, stays: bool = False) -> ServerProcess | None:
    """Starts a Prefect server for the flows of this process; returns None where the environment names another one.

    Call it once PREFECT_HOME is set. Raises InputError where its database cannot be used.

    kept: what an earlier command has left, whose server is returned if there is one.
    stays: whether the server may outlive this process, and its terminal: its output then goes to a file.
    """
    if os.environ.get("PREFECT_API_URL"):
        return None
    if kept is not None and kept.prefect_api:
        return ServerProcess(api=kept.prefect_api, user=kept.prefect_user, process=None)
    if not any(map(os.environ.get, DATABASE)):
        check_prefect_database(Path(os.environ["PREFECT_HOME"]) / "prefect.db")
    log = Path(os.environ["PREFECT_HOME"]) / "server.log" if stays else None
    return ServerProcess.start(user=os.environ.get("PREFECT_API_AUTH_STRING", ""), log=log)


def check_prefect_database(file: Path | None) -> None:
    """Raises InputError, with a remedy, where Prefect's server cannot use its SQLite file."""
    if file is not None and file.parent.is_dir():
        with exclusive_lock(file.parent):  # no other process is about to create it
            fault = fault_of(file, contents="the pages of earlier runs in Prefect", versions=MIGRATIONS)
        if fault:
            raise InputError([f"Prefect's database {fault}"])


@dataclass(frozen=True, kw_only=True)
class ServerProcess:
    """A Prefect server for the flows of this process.

    api: URL of its API.
    user: its USER:PASSWORD.
    process: its process; None where an earlier command has started it.
    log: the file of its output; None where that is this process's stderr.
    """

    api: str
    user: str = field(repr=False)
    process: subprocess.Popen[Any] | None
    log: Path | None = None

    @classmethod
    def start(
        cls, *, user: str = "", settings: Mapping[str, str] | None = None, log: Path | None = None
    ) -> ServerProcess:
        """Starts a server on loopback, which ends when this process ends; does not wait until it answers.

        Args:
            user: Its USER:PASSWORD; by default one that is drawn.
            settings: Environment variables with the settings of Prefect that are not in this process's environment.
            log: The file for its output, of a server that may outlive the terminal; by default stderr.
        """
        user = user or f"{PoolAddress.username}:{secrets.token_urlsafe(24)}"
        with socket.socket() as trial:
            trial.bind((LOOPBACK[0], 0))
            port: int = trial.getsockname()[1]
        source = str(Path(__file__).absolute().parents[3])  # the child must find the same import root
        environment = {
            **os.environ,
            **(settings or {}),
            "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
            "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
            **NO_PAGES,
            **NO_BLOCKS,
            "PREFECT_API_AUTH_STRING": user,
            "PREFECT_SERVER_API_AUTH_STRING": user,
            ALLOWED_HOSTS: ",".join(LOOPBACK),
        }
        arguments = ("ringmaster.flows.services.prefect_server", "--port", str(port), "--until-stdin-ends")
        # The pipe stays open for as long as this process lives. The server has a session of its own, so Ctrl-C at a
        # terminal reaches the run alone, which still has to report its final state to the server.
        with nullcontext() if log is None else log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        server = cls(api=f"http://{LOOPBACK[0]}:{port}/api", user=user, process=process, log=log)
        atexit.register(server.stop)
        return server

    def let_go(self) -> None:
        """Lets the server outlive this process, where another one holds its stdin open."""
        atexit.unregister(self.stop)

    def stop(self) -> None:
        """Ends the server. A server that has ended already is left alone, and so is that of an earlier command."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout=LONGEST_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that make Prefect's clients use the server."""
        return {"PREFECT_API_URL": self.api, "PREFECT_API_AUTH_STRING": self.user, **NO_PAGES}
