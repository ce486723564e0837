"""The formats of other programs, which `ringmaster convert` writes too."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ringmaster.codec import to_json
from ringmaster.errors import InputError, input_errors
from ringmaster.extras import require_extra
from ringmaster.features.deployment import GgufType
from ringmaster.flows.commands.parameters import with_parameters
from ringmaster.flows.output import print_outcome

GGUF = "gguf"


def with_gguf(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the format GGUF to `ringmaster convert`."""

    def converted(*, to: str, type: GgufType | None, **options: Any) -> None:
        if to == GGUF:
            _write_gguf(type=type, **options)
            return
        if type is not None:
            raise InputError([f"--type is of gguf, and --to is {to}. To fix: leave out --type"])
        command(to=to, **options)

    (of_command,) = inspect.signature(command, eval_str=True).parameters["to"].annotation.__metadata__
    formats = typer.Option(help=f"{of_command.help.removesuffix('.')}; or gguf, a file for llama.cpp and Ollama.")
    types = typer.Option(help="Of gguf: type of the matrices. Default: bf16 for a model in bf16, else f16.")
    place = typer.Argument(help="Folder to write, or GGUF file; it must not exist yet.")
    empty = inspect.Parameter.empty
    return with_parameters(
        command,
        converted,
        destination=(Annotated[Path, place], empty),
        to=(Annotated[str, formats], empty),
        type=(Annotated[GgufType | None, types], None),
    )


def _write_gguf(*, source: str, destination: Path, type: GgufType | None, as_json: bool) -> None:
    with input_errors():
        require_extra(GGUF, feature=f"the GGUF file {destination}")
        from ringmaster.features.deployment.gguf_file import write_model

        done = write_model(source, destination, type=type)
    text = f"{done.num_tensors} tensors of a {done.architecture} model are now in {done.file}, as {done.type}"
    lines = [f"{text}: {done.num_bytes / 1e6:.1f} MB"]
    if done.num_unquantized:
        lines.append(f"{done.num_unquantized} matrices are f16: their rows are no whole blocks of 32 values")
    print_outcome(to_json(done), lines, as_json=as_json)


OPTIONS = {"convert": with_gguf}
