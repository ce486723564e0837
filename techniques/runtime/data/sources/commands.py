"""Data that a command reads on its own: nothing is known about it, and nothing is prepared."""

from __future__ import annotations

from pathlib import Path

from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.interface.values import digest
from ringmaster.techniques.runtime.data.prepared import PreparedData, Source

NAME = "command"


def of_command(spec: DataSpec) -> Source:
    """Returns the source of `data: {source: command}`: no samples, and a constant digest."""

    def write(folder: Path) -> PreparedData:
        return PreparedData(name=NAME, digest=digest(NAME), num_samples=0, num_held_out=0, kind="other", source=NAME)

    return Source(name=NAME, location=NAME, state=None, write=write)
