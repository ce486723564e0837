"""The command `ringmaster diagnose`."""

from pathlib import Path
from typing import Annotated

import typer

from ringmaster.errors import InputError, input_errors
from ringmaster.flows import settings
from ringmaster.flows.output import AsJson, announce, error_console, print_lines, print_result


def diagnose(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File to write, a tar.gz; default: one named by the time."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Collect versions, settings, states and logs for a bug report, without secrets; servers may be down."""
    from ringmaster.features.diagnosis.diagnose import default_file
    from ringmaster.features.diagnosis.diagnose import diagnose as collected

    file = (output or default_file()).absolute()
    if not file.parent.is_dir() or file.is_dir():
        raise InputError([f"-o {file} cannot be written. To fix: name a file in a folder that is there"])
    announce("collecting versions, settings, states and logs")
    bundle = collected(settings.home())
    with input_errors(OSError, about=f"-o {file} cannot be written: "):
        bundle.write(file)
    lines = [
        *(f"{len(part.text.encode()):>9,} bytes  {part.name}" for part in bundle.parts),
        *(f"without {name}: {fault}" for name, fault in bundle.failures.items()),
        "passwords, tokens and the values of unknown variables are left out; names, paths and messages are not: read "
        "it before you send it",
    ]
    print_lines(error_console(), lines)
    names = [part.name for part in bundle.parts]
    print_result({"file": str(file), "parts": names, "failures": bundle.failures}, [str(file)], as_json=as_json)


COMMANDS = {"Pool": (diagnose,)}
