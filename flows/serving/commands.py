"""The command `ringmaster serve`, the schema of its files, and its clients in `ringmaster status`."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ringmaster.flows import settings
from ringmaster.flows.commands.parameters import with_parameters
from ringmaster.flows.exit_codes import SIGNALLED
from ringmaster.flows.output import error_console, print_json, styled, write_document
from ringmaster.flows.serving.client_rows import endpoint_runs

KIND = "endpoint"


def serve(
    file: Annotated[Path, typer.Argument(metavar="ENDPOINT_FILE", help="File of an endpoint.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with the URL and the key, once it answers.")
    ] = False,
) -> None:
    """Serve clients of the Tinker API on this machine: each trains an adapter of a base by its own loop."""
    from ringmaster.errors import input_errors
    from ringmaster.extras import require_extra
    from ringmaster.flows.serving.compute_link import RecordingProcess
    from ringmaster.flows.serving.endpoint_file import load_endpoint_file
    from ringmaster.flows.serving.endpoint_server import EndpointServer, ServedEndpoint, served_device

    entry = load_endpoint_file(file)
    with input_errors():
        require_extra("serve", feature=f"the endpoint {entry.name}")
    settings.check_folders(settings.home())
    recording = RecordingProcess(file)
    device = entry.serve.device or served_device()
    server = EndpointServer(entry, home=settings.home(), device=device, record=recording.start)
    received: list[int] = []

    def stop(number: int, _: Any) -> None:
        received.append(number)
        threading.Thread(target=server.end, name="stop", daemon=True).start()  # the handler interrupts what it sets

    def announce(served: ServedEndpoint) -> None:
        if as_json:
            others = {"keys": served.keys} if len(served.keys) > 1 else {}
            print_json({"url": served.url, "key": served.key, **others})
        elif error_console().is_terminal:
            for owner, key in served.keys.items():
                error_console().print(styled(f"{owner}:", "bold"), f"TINKER_BASE_URL={served.url} TINKER_API_KEY={key}")
        else:  # others may read a file
            error_console().print(f"{served.url}, keys: `cat {server.keys_file}`", soft_wrap=True)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    server.run(announce)
    if received:
        raise typer.Exit(SIGNALLED + received[0])
    recording.wait()
    recording.start()  # clients that have ended since
    recording.wait()


def with_endpoint_schema(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the files of endpoints to `ringmaster schema`."""

    def schema(*, kind: str) -> None:
        if kind != KIND:
            command(kind=kind)
            return
        from ringmaster.flows.serving.endpoint_file import endpoint_schema
        from ringmaster.tasks.batch.schema import DIALECT

        write_document(json.dumps({"$schema": DIALECT, **endpoint_schema()}, indent=1) + "\n")

    kinds = Literal["batch", "sweep", "retraining", "policy", "tests", "endpoint"]
    return with_parameters(command, schema, kind=(Annotated[kinds, typer.Argument(help="Kind of the files.")], "batch"))


COMMANDS = {"Train": (serve,)}
OPTIONS = {"schema": with_endpoint_schema}
STATUS_RUNS = (endpoint_runs,)
