"""What people are shown of the data of jobs before these are planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ringmaster.techniques.interface.data_source import PreparedData
from ringmaster.techniques.interface.job import Job
from ringmaster.techniques.interface.preflight import Preflight
from ringmaster.techniques.interface.values import from_json


def data_lines(jobs: Sequence[Job], preflights: Mapping[str, Preflight]) -> list[str]:
    """Returns a line for each data set whose samples are made of rows, with the jobs that read it."""
    readers: dict[str, list[str]] = {}
    for job in jobs:
        if job.name in preflights and job.data.kind is not None:
            data = from_json(PreparedData, preflights[job.name].data)
            readers.setdefault(data.summary(job.data.kind), []).append(job.name)
    return [f"{_few(names)}: {line}" for line, names in readers.items()]


def _few(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
