"""The command `ringmaster adopt`, which trains with an unedited script."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ringmaster.errors import input_errors
from ringmaster.flows.commands.running import show_result, train_and_show
from ringmaster.flows.interrupts import Interrupts
from ringmaster.flows.output import AsJson, Verbose, announce, write_file


def adopt(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Script with Hugging Face's Trainer, TRL, Accelerate, or a loop.")],
    arguments: Annotated[list[str], typer.Argument(metavar="-- ARGUMENT...", help="Arguments of the script.")] = [],  # noqa: B006
    name: Annotated[str, typer.Option(help="Name of the job; default: that of the script.")] = "",
    devices: Annotated[int, typer.Option(help="Devices that train it together, one process each.", min=1)] = 1,
    steps: Annotated[
        int | None, typer.Option(help="Steps that it trains; default: read from a script with a Trainer.", min=1)
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(help="Samples of a step; default: read from a script with a Trainer.", min=1)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Only write the batch file of this job.")
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train with an unedited script as a job: planned, stopped and resumed, and recorded with its lineage."""
    import yaml

    from ringmaster.tasks.batch import parse_batch

    launcher = ["{python}"] if devices == 1 else ["torchrun", "--standalone", "--nproc-per-node", "{num_devices}"]
    job: dict[str, Any] = {
        "name": name or re.sub(r"[^A-Za-z0-9_-]+", "-", script.stem).strip("-"),
        "model": {"command": [*launcher, str(script), *arguments], "adopt": True},
        "data": {"source": "command"},
        "num_steps": steps or 1,
        "num_devices": [devices],
    }
    document = {"name": job["name"], "jobs": [job]}
    if steps is None:
        from ringmaster.features.external_trainers.child import inspect_script

        (draft,) = parse_batch(yaml.safe_dump(document), folder=Path.cwd(), name=str(script)).jobs
        announce(f"starting {script} to learn how many steps it trains")
        with input_errors(about=f"{script}: "):
            job |= inspect_script(draft, num_devices=devices)
    if global_batch_size is not None:
        job["global_batch_size"] = global_batch_size
    text = yaml.safe_dump(document, sort_keys=False)
    if output is not None:
        write_file(output, text)
        return
    batch = parse_batch(text, folder=Path.cwd(), name=str(script))
    interrupts = context.ensure_object(Interrupts)
    result = train_and_show(batch, is_verbose=verbose, interrupts=interrupts)
    raise typer.Exit(show_result(result, as_json=as_json))


COMMANDS = {"Train": (adopt,)}
