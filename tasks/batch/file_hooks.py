"""What optional features do with batch files: entries that they write out, further jobs, rules between jobs.

The module `batch` of a feature lists its hooks in `BATCH_FILE_HOOKS`. The keys that only files have are in its module
`job`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ringmaster.codec import from_json
from ringmaster.features import listed
from ringmaster.findings import Finding, Location, Raw
from ringmaster.tasks.batch.sections import Section
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_features import file_keys

PlacedJob = tuple[Callable[[Location], Location], Any]
"""A job's plain values, and a function that maps a place in the job to its place in the batch."""


class BatchFileHook:
    """What a feature does with batch files. By default a method changes nothing, and finds nothing.

    file_key: the key of a job's entry whose value may be a whole file, which is then a batch of one job.
    """

    file_key: ClassVar[str] = ""

    def expanded(self, entry: Any, *, folder: Path) -> tuple[Any, Sequence[Finding]]:
        """Returns the entry of a job with what one of its keys represents, and faults at places within the entry."""
        return entry, ()

    def job_findings(self, job: Raw) -> Iterator[Finding]:
        """Yields the faults between the values of one job; places are relative to the job."""
        yield from ()

    def batch_findings(self, batch: Raw, jobs: Sequence[PlacedJob]) -> Iterator[Finding]:
        """Yields the faults between jobs, and between jobs and keys of the batch; places are relative to the batch."""
        yield from ()

    def file_findings(self, batch: Raw, *, folder: Path) -> Iterator[Finding]:
        """Yields the faults of keys of the batch that name files in a folder; places are relative to the batch."""
        yield from ()

    def planning_features(self, batch: Section, *, folder: Path) -> Mapping[str, Any]:
        """Returns the JSON forms of features of the terms of plans (`TermsFeature`), by their keys."""
        return {}

    def job_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of a job, as an entry has them, completed."""
        return fields

    def entry_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of a job's entry for those of a job, without what `job_fields` has made."""
        return fields

    def divided(self, job: Job, entry: Section) -> list[Job]:
        """Returns the jobs by which the job of an entry is trained, in order; the last one has its name."""
        return [job]

    def made_for(self, batch: Section) -> Mapping[str, str]:
        """Returns the names of jobs that a batch makes, each with that of a job whose user is its user."""
        return {}

    def completed(self, jobs: Sequence[Job], batch: Section) -> Sequence[Job]:
        """Returns the jobs of a batch with those that it makes."""
        return jobs


def file_hooks() -> Iterator[BatchFileHook]:
    """Returns the hooks of all features, in the order in which they are called."""
    return listed("batch", "BATCH_FILE_HOOKS")


def job_of(fields: dict[str, Any]) -> Job:
    """Returns the job of plain values, as an entry has them. Keys that only files have are left out."""
    for hook in file_hooks():
        fields = hook.job_fields(fields)
    only_files = {key for kind in file_keys("ENTRY_KEYS") for key in kind.job_keys()}
    return from_json(Job, {key: value for key, value in fields.items() if key not in only_files})
