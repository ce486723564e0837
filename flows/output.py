"""Output of the commands: a JSON result goes to stdout, everything else goes to stderr."""

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
    bool, typer.Option("--verbose", "-v", help="Also list which techniques were left out for which jobs, and why.")
]


# The width where output goes to a file, which cannot be resized: names and metrics stay on one line.
FILE_WIDTH = 140


def error_console() -> Console:
    """Returns the console on stderr for text that people read. Its width is the terminal's, or FILE_WIDTH in a file."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else FILE_WIDTH)


def announce(text: str) -> None:
    """Prints what is about to happen, before an operation that takes seconds without any output."""
    error_console().print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def output_console() -> Console:
    """Returns the console on stdout for results that people read, with the width of `error_console`."""
    return Console(width=None if sys.stdout.isatty() else FILE_WIDTH, highlight=False)


def print_json(value: Any) -> None:
    """Writes one JSON object, as one line, to stdout."""
    # `json.dump` would encode in Python, ten times slower.
    sys.stdout.write(json.dumps(_finite(value), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """Replaces infinite floats and NaN by None, as JSON has neither: a metric of no rows is NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
