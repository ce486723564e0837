"""Unedited scripts as jobs. A command with `adopt` gets this folder as the first of its Python path.

Python imports `sitecustomize` from it when it starts, in each process of the command.
"""

import math
from collections.abc import Mapping
from typing import Any

TIMEOUT_S = 3600.0  # for what a script does before its first step, and after its last
TIMES = ("_runtime", "_per_second", "epoch", "_time", "num_tokens")


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Returns what can be recorded as metrics of what a trainer logs: finite numbers that are not times."""
    return {
        name.removeprefix("eval_"): float(value)
        for name, value in logs.items()
        if isinstance(value, int | float) and math.isfinite(value) and not name.endswith(TIMES)
    }
