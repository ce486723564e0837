"""The command `ringmaster techniques`."""

from pathlib import Path
from typing import Annotated

import typer

from ringmaster.errors import InputError
from ringmaster.flows.output import AsJson, output_console, plain_table, print_json


def techniques(
    model: Annotated[
        Path | None,
        typer.Option(help="File with a job, or batch file: list what would fit, and why others would not."),
    ] = None,
    job: Annotated[str | None, typer.Option(help="Name of the only job to look at.")] = None,
    devices: Annotated[
        int | None, typer.Option(help="Number of GPUs, with --memory; default: the devices of this machine.", min=1)
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each GPU, such as 80GiB.")] = None,
    nodes: Annotated[int, typer.Option(help="Number of machines over which the GPUs are divided.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """List the techniques and what each needs; with --model, which of them could train it, in how much memory."""
    from ringmaster.techniques import registry

    if model is not None:
        from ringmaster.features.technique_report.technique_report import look_ahead, print_technique_report

        result = look_ahead(model, job=job, num_devices=devices, memory=memory, num_nodes=nodes)
        print_json(result.to_json()) if as_json else print_technique_report(result)
        raise typer.Exit(1 if result.faults else 0)
    if job is not None or devices is not None or memory is not None:
        raise InputError(["--job, --devices and --memory say how a model would be trained. To fix: name it by --model"])
    every = [(name, registry.load(registry.dotted_path(name))) for name in registry.names()]
    if as_json:
        print_json([{"name": name, "summary": t.summary, "needs": t.needs} for name, t in every])
        return
    rows = [(name, technique.summary, technique.needs) for name, technique in every]
    output_console().print(plain_table("technique", "what it does", "what it needs", rows=rows))


COMMANDS = {"Plan": (techniques,)}
