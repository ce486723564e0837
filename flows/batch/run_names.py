"""Names of flow runs: the name that a person typed, else one that describes the run."""

from __future__ import annotations

import re
from collections.abc import Callable

from prefect import runtime

_DRAWN = re.compile(r"[a-z]+-[a-z]+")  # names that Prefect gives to unnamed runs, such as "amber-otter"


def named(template: str) -> Callable[[], str]:
    """Returns the `flow_run_name` of a flow. template: a format string over the run's parameters."""
    return lambda: typed_or(template.format(**runtime.flow_run.parameters))


def typed_or(wanted: str) -> str:
    """Returns the running flow's name if a person typed it, else `wanted`."""
    name = runtime.flow_run.name
    return wanted if not name or _DRAWN.fullmatch(name) else str(name)
