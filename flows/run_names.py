"""Names of flow runs: one that a person typed, else one that says what the run does."""

from __future__ import annotations

import re
from collections.abc import Callable

from prefect import runtime

_DRAWN = re.compile(r"[a-z]+-[a-z]+")  # as Prefect names runs that nobody has named: "amber-otter"


def named(template: str) -> Callable[[], str]:
    """The `flow_run_name` of a flow; template: what Prefect would fill with the run's parameters."""
    return lambda: typed_or(template.format(**runtime.flow_run.parameters))


def typed_or(wanted: str) -> str:
    """The running flow's name where a person gave it one, else `wanted`."""
    name = runtime.flow_run.name
    return wanted if not name or _DRAWN.fullmatch(name) else str(name)
