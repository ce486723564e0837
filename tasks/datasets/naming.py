"""Resolution of the data sets that the jobs of a batch file name, with all faults collected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ringmaster.codec import digest, from_json, set_fields
from ringmaster.tasks.batch.data_schema import Data
from ringmaster.tasks.batch.faults import Finding, Place
from ringmaster.tasks.datasets.catalogue import Catalogue, catalogue_of
from ringmaster.tasks.datasets.checking import data_findings
from ringmaster.tasks.datasets.resolving import resolved
from ringmaster.techniques.job import DataSpec

NOT_READ = frozenset({"seq_len", "vocab_size", "tokenizer", "padding", "sampling", "packing"})
"""The fields that do not affect which rows of a data set are read, nor what is checked in them."""


@dataclass(init=False)
class NamedData:
    """The catalogue of a batch file, and the faults in it and in its use by the jobs.

    findings: grows while jobs are resolved. A data set's rows are checked once for each distinct way of reading them.
    """

    catalogue: Catalogue
    findings: list[Finding] = field(default_factory=list)

    def __init__(self, raw: Any, *, folder: Path) -> None:
        self.catalogue, self.findings = catalogue_of(raw, folder=folder)
        self._folder = folder
        self._seen: set[str] = set()
        self._resolved: set[Place] = set()

    def with_files(self, job: Any, *, origin: Callable[[Place], Place]) -> Any:
        """Returns a job's plain values with the files of its named data set; adds faults to the findings.

        origin: maps places of the job to places in the file.
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
        """Returns findings about the files of named data sets, moved to the place of the name in the job."""
        return [replace(f, place=(*f.place[:-1], "name")) if self._is_file(f.place) else f for f in found]

    def _is_file(self, place: Place) -> bool:
        return place[-1:] in (("path",), ("held_out_path",)) and place[:-1] in self._resolved

    def _rows(self, data: Mapping[str, Any]) -> list[Finding]:
        try:
            entry = Data.model_validate(data, context={"folder": self._folder})
        except ValidationError:  # reported by the validation of the job
            return []
        spec = from_json(DataSpec, entry.model_dump(exclude_unset=True))
        key = digest(set_fields(spec, but=NOT_READ))
        if key in self._seen:
            return []
        self._seen.add(key)
        return data_findings(spec, self.catalogue.entries[data["name"]])
