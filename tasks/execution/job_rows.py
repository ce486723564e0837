"""The rows of a job table: the jobs of an executor, with their records, options and goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringmaster.tasks.execution.run_paths import RunPaths
from ringmaster.tasks.storage.journal import JobRecord, Journal, changed
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.job import Variant


@dataclass(frozen=True, kw_only=True)
class JobTableEntry:
    """A job of the table.

    job_in_batch: the job under its name within its batch, which its gangs use too.
    job: the same job under its name in the table, which is unique there: in a pool "BATCH/JOB", and so are its
        parents' names if they are in the table.
    profiles: the options under which the job can run alone.
    paths: the folders of its batch, which use the job's name within the batch.
    batch: the batch of a pool; empty without a pool.
    variants: the options of each variant of a job that may change.
    group_profiles: for the lead job of a group, the options under which the group can run; its members are in the
        table too.
    """

    job_in_batch: Job
    job: Job
    profiles: tuple[Profile, ...]
    paths: RunPaths
    batch: str = ""
    group_profiles: tuple[Profile, ...] = ()
    variants: Mapping[Variant, tuple[Profile, ...]] = field(default_factory=dict)


class JobRows:
    """The jobs of an executor by their names in the table. Each change is written into the journal first.

    profiles: the options under which a job runs: of a lead job, those of its group.
    totals: the steps of each job, up to its goal.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.entries: dict[str, JobTableEntry] = {}
        self.records: dict[str, JobRecord] = {}
        self.profiles: dict[str, list[Profile]] = {}
        self.totals: dict[str, int] = {}

    def write(self, job: str, **changes: Any) -> JobRecord:
        """Writes changes to a job's record."""
        self.write_all({job: changes})
        return self.records[job]

    def write_all(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes changes to the records of several jobs."""
        self.journal.change_jobs(changes)
        self.records |= {job: changed(self.records[job], its) for job, its in changes.items()}

    def rests(self, name: str) -> bool:
        """Whether a job has nothing to train until its goal is raised."""
        goal = self.totals[name]
        is_whole = goal >= (self.entries[name].job.num_steps or 0)
        return not is_whole and (goal == 0 or self.records[name].rested == goal)

    def name_of(self, local_name: str, *, in_batch_of: str) -> str:
        """Returns the name in the table of a job of the batch of `in_batch_of`, which gangs call `local_name`."""
        batch = self.entries[in_batch_of].batch
        return f"{batch}/{local_name}" if batch else local_name
