"""The data sets that the jobs of one batch file name: their files in place of the names, and every fault at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ringmaster.tasks.batch.data_schema import Data
from ringmaster.tasks.batch.faults import Finding, Place
from ringmaster.tasks.datasets.catalogue import Catalogue, catalogue_of
from ringmaster.tasks.datasets.checking import data_findings
from ringmaster.tasks.datasets.resolving import resolved
from ringmaster.techniques.job import DataSpec
from ringmaster.techniques.values import digest, from_json

READ = ("name", "version", "path", "held_out_path", "window", "held_out", "text_column")
"""What decides which rows are read of a data set."""


@dataclass(init=False)
class NamedData:
    """The catalogue of a batch file, and what is wrong with it and with what its jobs take from it.

    findings: grows while jobs are looked at. Each data set is looked into once for each way in which it is read.
    """

    catalogue: Catalogue
    findings: list[Finding] = field(default_factory=list)

    def __init__(self, raw: Any, *, folder: Path) -> None:
        self.catalogue, self.findings = catalogue_of(raw, folder=folder)
        self._folder = folder
        self._seen: set[str] = set()
        self._resolved: set[Place] = set()

    def with_files(self, job: Any, *, origin: Callable[[Place], Place]) -> Any:
        """A job's plain values with the files of the data set that it names. origin: of the job's places in the file.

        What is wrong is added to the findings.
        """
        data = job.get("data") if isinstance(job, Mapping) else None
        if not isinstance(data, Mapping):
            return job
        found_data, wrong = resolved(data, self.catalogue)
        if found_data is not data:
            self._resolved.add(origin(("data",)))
            wrong += self._rows(found_data)
        self.findings += [replace(finding, place=origin(("data", *finding.place))) for finding in wrong]
        return {**job, "data": found_data}

    def named(self, found: Iterable[Finding]) -> list[Finding]:
        """Findings about the files of data sets, at the names by which a job has them."""
        return [replace(f, place=(*f.place[:-1], "name")) if self._is_file(f.place) else f for f in found]

    def _is_file(self, place: Place) -> bool:
        return place[-1:] in (("path",), ("held_out_path",)) and place[:-1] in self._resolved

    def _rows(self, data: Mapping[str, Any]) -> list[Finding]:
        try:
            entry = Data.model_validate(data, context={"folder": self._folder})
        except ValidationError:  # told when the job is looked at
            return []
        spec = from_json(DataSpec, entry.model_dump(exclude_unset=True))
        key = digest([getattr(spec, name) for name in READ])
        if key in self._seen:
            return []
        self._seen.add(key)
        return data_findings(spec, self.catalogue.entries[data["name"]])
