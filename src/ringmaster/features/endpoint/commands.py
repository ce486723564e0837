"""The command `ringmaster serve`, the schema of its files, and its clients in `ringmaster status`."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringmaster.features.endpoint.server.client_rows import endpoint_runs
from ringmaster.flows import settings
from ringmaster.flows.exit_codes import SIGNALLED
from ringmaster.flows.output import error_console, notice, print_json, styled

if TYPE_CHECKING:
    from ringmaster.features.endpoint.server.endpoint_file import EndpointFile
    from ringmaster.features.endpoint.server.endpoint_server import ServedEndpoint

KIND = "endpoint"


def serve(
    file: Annotated[Path, typer.Argument(metavar="ENDPOINT_FILE", help="File of an endpoint.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with the URL and the key, once it answers.")
    ] = False,
    on_pool: Annotated[
        bool, typer.Option("--pool", help="Serve on a node of the pool, as a job, and return once it answers.")
    ] = False,
) -> None:
    """Serve clients of the Tinker API, here or on a pool: each trains an adapter of a base by its own loop."""
    from ringmaster.errors import input_errors
    from ringmaster.extras import require_extra
    from ringmaster.features.endpoint.server.compute_link import RecordingProcess
    from ringmaster.features.endpoint.server.endpoint_file import load_endpoint_file
    from ringmaster.features.endpoint.server.endpoint_server import EndpointServer, served_devices

    entry = load_endpoint_file(file)
    with input_errors():
        require_extra("serve", feature=f"the endpoint {entry.name}")
    settings.check_folders(settings.home())
    if on_pool:
        _serve_on_pool(entry, as_json=as_json)
        return
    recording = RecordingProcess(file)
    devices = served_devices(entry.serve)
    server = EndpointServer(entry, home=settings.home(), devices=devices, record=recording.start)
    received: list[int] = []

    def stop(number: int, _: Any) -> None:
        received.append(number)
        threading.Thread(target=server.end, name="stop", daemon=True).start()  # the handler interrupts what it sets

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    server.run(lambda served: _announce(served, keys_file=server.keys_file, as_json=as_json))
    if received:
        raise typer.Exit(SIGNALLED + received[0])
    recording.wait()
    recording.start()  # clients that have ended since
    recording.wait()


def _announce(served: ServedEndpoint, *, keys_file: Path, as_json: bool) -> None:
    if as_json:
        others = {"keys": served.keys} if len(served.keys) > 1 else {}
        print_json({"url": served.url, "key": served.key, **others})
    elif error_console().is_terminal:
        for owner, key in served.keys.items():
            error_console().print(styled(f"{owner}:", "bold"), f"TINKER_BASE_URL={served.url} TINKER_API_KEY={key}")
    else:  # others may read a file
        error_console().print(f"{served.url}, keys: `cat {keys_file}`", soft_wrap=True)


def _serve_on_pool(entry: EndpointFile, *, as_json: bool) -> None:
    """Submits an endpoint to the pool, and returns once it answers. It goes on until it is idle or cancelled."""
    from ringmaster.features.endpoint.server.endpoint_server import KEYS_FILE
    from ringmaster.features.endpoint.server.pool_submission import submit_endpoint, wait_until_served
    from ringmaster.flows.pool.batch_requests import open_database, pool_address

    pool = pool_address()
    with open_database(pool) as database:
        endpoint = submit_endpoint(entry, database, home=settings.home())
        notice(f"{entry.name} is submitted; `ringmaster jobs cancel {entry.name}` ends it")
        served = wait_until_served(endpoint, database, pool=pool, notice=notice)
    _announce(served, keys_file=endpoint.folder / KEYS_FILE, as_json=as_json)


def file_schema() -> dict[str, Any]:
    """Returns the schema of files of endpoints."""
    from ringmaster.features.endpoint.server.endpoint_file import endpoint_schema

    return endpoint_schema()


COMMANDS = {"Train": (serve,)}
FILE_SCHEMAS = ((KIND, file_schema),)
STATUS_RUNS = (endpoint_runs,)
