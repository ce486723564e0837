"""What a run on this machine starts first, before anything is imported that takes seconds: its child processes.

The fork server imports torch, and Prefect's server creates or opens its database, while this process imports Prefect
and opens MLflow's records.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from ringmaster.flows.services import server_process
from ringmaster.tasks.batch import Batch
from ringmaster.techniques.processes.forkserver_client import ForkServer

_fork_servers: dict[str, ForkServer] = {}  # started ahead of the flow that will use them, by batch name


def start_first_processes(batch: Batch) -> None:
    """Starts Prefect's server and the fork server of a batch; waits for neither.

    Raises InputError where Prefect's database cannot be used.
    """
    server_process.start_ahead()
    server = _fork_servers[batch.name] = _fork_server(batch)

    def start() -> None:
        with suppress(RuntimeError):  # its first user starts it again, and gets the error
            server.start()

    threading.Thread(target=start, name="fork server", daemon=True).start()


def fork_server_ahead(batch: Batch) -> ForkServer:
    """Returns the fork server that was started ahead for a batch; its user will take it later."""
    return _fork_servers[batch.name]


def fork_server_of(batch: Batch) -> ForkServer:
    """Returns the fork server that was started ahead for a batch, or a new one; the caller closes it."""
    return _fork_servers.pop(batch.name, None) or _fork_server(batch)


def close_unused() -> None:
    """Closes the fork servers that were started ahead and not used."""
    while _fork_servers:
        _fork_servers.popitem()[1].close()


def _fork_server(batch: Batch) -> ForkServer:
    """Returns a fork server that imports the architectures of a batch, so that no worker needs to."""
    return ForkServer(
        preload=tuple(f"transformers:{job.model.architecture}" for job in batch.jobs if job.model.architecture)
    )
