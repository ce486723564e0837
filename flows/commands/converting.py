"""The command that converts models between formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringmaster.flows.faults import input_errors
from ringmaster.flows.output import AsJson, error_console, print_json


def convert(
    source: Annotated[
        str,
        typer.Argument(help="A checkpoint (or a job's folder or URL of them), or a model of Hugging Face or Megatron."),
    ],
    destination: Annotated[Path, typer.Argument(help="The folder to write; it must not be there yet.")],
    to: Annotated[str, typer.Option(help="hf, which from_pretrained loads, or megatron, Megatron-LM's layout.")],
    tp: Annotated[int, typer.Option(help="Megatron's tensor-parallel ranks.", min=1)] = 1,
    pp: Annotated[int, typer.Option(help="Megatron's pipeline stages.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Convert a Llama between checkpoints, Hugging Face and Megatron-LM, bit by bit, tensor by tensor."""
    from ringmaster.techniques.runtime.models.conversion import convert as convert_model

    with input_errors():
        done = convert_model(source, destination, to=to, tp=tp, pp=pp)
    error_console().print(
        f"{done['num_tensors']} tensors ({done['num_bytes'] / 1e6:.1f} MB) of a {done['from']} model are now in "
        f"{done['destination']}, with {', '.join(done['tokenizer_files']) or 'no tokenizer'}."
    )
    if as_json:
        print_json(done)
