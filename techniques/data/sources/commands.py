"""Data that a command reads on its own: nothing is known about it, and nothing is prepared."""

from __future__ import annotations

from pathlib import Path

from ringmaster.codec import digest
from ringmaster.techniques.data.prepared import Preparation
from ringmaster.techniques.data.stored_source import StoredSource
from ringmaster.techniques.interface.data_source import PreparedData
from ringmaster.techniques.interface.job import DataSpec


class CommandsOwn(StoredSource):
    """No samples, and a constant digest."""

    name = "command"

    def preparation(self, spec: DataSpec, *, cache_dir: Path) -> Preparation:
        """Returns a preparation that writes nothing."""
        name = self.name

        def write(folder: Path) -> PreparedData:
            return PreparedData(
                name=name, digest=digest(name), num_samples=0, num_held_out=0, kind="other", source=name
            )

        return Preparation(name=name, location=name, state=None, write=write)
