"""What the commands share: results go to stdout as JSON where a program asks, all else goes to stderr."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def print_json(value: Any) -> None:
    """Writes one JSON object, a line, to stdout."""
    json.dump(value, sys.stdout)
    sys.stdout.write("\n")
