"""What the commands share: results go to stdout as JSON where a program asks, all else goes to stderr."""

from __future__ import annotations

import json
import math
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

STARTING_SERVERS = "starting Prefect's server for this run, usually 10 s, and opening MLflow's records"
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Tell also which techniques were left out for which jobs, and why.")
]


# Where output goes to a file nobody resizes anything: names and metrics stay on one line.
FILE_WIDTH = 140


def error_console() -> Console:
    """Where people read: stderr, at the terminal's width or wide enough for a table."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else FILE_WIDTH)


def announce(text: str) -> None:
    """Says what is about to be done, where that takes seconds before there is anything else to tell."""
    error_console().print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def output_console() -> Console:
    """Where a result that people read goes: stdout, likewise."""
    return Console(width=None if sys.stdout.isatty() else FILE_WIDTH, highlight=False)


def print_json(value: Any) -> None:
    """Writes one JSON object, a line, to stdout."""
    sys.stdout.write(json.dumps(_finite(value), allow_nan=False) + "\n")  # `dump` encodes in Python, at a tenth of it


def _finite(value: Any) -> Any:
    """The same with null for what JSON has no word for: a metric of no rows is not a number."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
