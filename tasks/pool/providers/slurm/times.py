"""Time limits in the notations of Slurm, and in the short ones of Ringmaster: 8h, 30m, 2d."""

from __future__ import annotations

import math
import re

_SHORT = re.compile(r"(\d+)\s*([mhd])")
_MINUTES = {"m": 1, "h": 60, "d": 1440}
_UNLIMITED = frozenset({"UNLIMITED", "INFINITE"})
# Without days: minutes, minutes:seconds, hours:minutes:seconds. With days: days-hours[:minutes[:seconds]].
_LONG = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")


def slurm_time(text: str) -> str:
    """Returns a time limit as sbatch reads it, from a text such as 8h, 30m or 2d; returns other texts unchanged."""
    found = _SHORT.fullmatch(text.strip().lower())
    return str(int(found[1]) * _MINUTES[found[2]]) if found else text.strip()


def seconds_of(text: str) -> float:
    """Returns a time limit in seconds, infinity for none. Raises ValueError for a text that is no time."""
    text = slurm_time(text)
    if text.upper() in _UNLIMITED:
        return math.inf
    found = _LONG.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no time")
    parts = [int(part) for part in found["parts"].split(":")]
    has_hours = found["days"] is not None or len(parts) == len("HMS")
    units = (3600, 60, 1) if has_hours else (60, 1)
    days_s = int(found["days"] or 0) * 86400
    return float(days_s + sum(part * unit for part, unit in zip(parts, units, strict=False)))
