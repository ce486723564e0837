"""The command that collects what a bug report needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringmaster.flows import settings
from ringmaster.flows.faults import InputError
from ringmaster.flows.output import AsJson, announce, error_console, print_json


def diagnose(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The file to write, a tar.gz; by default one named by the time."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Collect versions, settings, states and logs for a bug report, without secrets; servers may be down."""
    from ringmaster.flows.diagnosis.diagnose import default_file
    from ringmaster.flows.diagnosis.diagnose import diagnose as collected

    file = (output or default_file()).absolute()
    if not file.parent.is_dir() or file.is_dir():
        raise InputError([f"-o {file} cannot be written. To fix: name a file in a folder that is there"])
    announce("collecting versions, settings, states and logs")
    bundle = collected(settings.home())
    try:
        bundle.write(file)
    except OSError as error:
        raise InputError([f"-o {file} cannot be written: {error.strerror}"]) from error
    console = error_console()
    for part in bundle.parts:
        console.print(f"{len(part.text.encode()):>9,} bytes  {part.name}", highlight=False, markup=False)
    for failure in bundle.failures:
        console.print(f"without {failure.part}: {failure.error}", highlight=False, markup=False, soft_wrap=True)
    hint = (
        "passwords, tokens and the values of unknown variables are left out; names, paths and messages are not: read it"
    )
    console.print(f"{hint} before you send it", highlight=False, markup=False, soft_wrap=True)
    if as_json:
        failures = {failure.part: failure.error for failure in bundle.failures}
        print_json({"file": str(file), "parts": [part.name for part in bundle.parts], "failures": failures})
    else:
        typer.echo(str(file))
