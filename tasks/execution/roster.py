"""The jobs that an executor has on its list, and where each of them stands.

The journal is the record; this keeps in memory what the executor alone writes there, so that a list of a thousand jobs
is not read anew at each word of a gang.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.execution.journal import CANCELLED, DONE, ENDED, FAILED, PAUSED, RUNNING, WAITING, JobRecord, Journal
from tasks.execution.workplace import Workplace
from techniques import Job, Profile


@dataclass(frozen=True, kw_only=True)
class Enlisted:
    """A job on the list.

    job: its name is unique on the list, in a pool "BATCH/JOB"; likewise its base where that is on the list too.
    profiles: what it can run under. place: the folders of its batch, which knows the job by its name within the batch.
    """

    job: Job
    profiles: tuple[Profile, ...]
    place: Workplace
    batch: str = ""

    @property
    def local_job(self) -> Job:
        """The job as its batch and its gangs know it."""
        return self.job if not self.batch else _renamed(self.job, self.batch)


class Roster:
    """The list. Changes are written into the journal first."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.entries: dict[str, Enlisted] = {}
        self.records: dict[str, JobRecord] = {}
        self.profiles: dict[str, list[Profile]] = {}
        self.totals: dict[str, int] = {}  # steps of each job
        self.after: dict[str, tuple[str, ...]] = {}  # the jobs that each job waits for
        self.attempts: dict[str, int] = {}  # crashes without progress

    def add(self, entries: Iterable[Enlisted]) -> None:
        """Puts jobs on the list, as the journal knows them."""
        for entry in entries:
            name = entry.job.name
            self.entries[name] = entry
            self.profiles[name] = list(entry.profiles)
            # One that could not even be looked at has no number of steps; nor will it run.
            self.totals[name] = entry.job.num_steps or 0
        for name, entry in self.entries.items():
            base = entry.job.base
            if base is not None and base in self.entries:
                self.after[name] = (base,)
        self.refresh()

    def refresh(self) -> None:
        """Reads the journal anew: somebody else has written there."""
        known = self.journal.jobs(batches={entry.batch for entry in self.entries.values()})
        self.records = {name: known.get(name, JobRecord(name=name)) for name in self.entries}

    def remove(self, jobs: Iterable[str]) -> None:
        """Takes jobs off the list."""
        for name in list(jobs):
            for kept in (self.entries, self.records, self.profiles, self.totals, self.after, self.attempts):
                kept.pop(name, None)

    def write(self, job: str, **changes: Any) -> JobRecord:
        """Changes what is known of a job."""
        record = self.records[job] = self.journal.write_job(job, **changes)
        return record

    def base_of(self, job: str) -> str | None:
        """The job on the list whose finished model a job adapts."""
        return next(iter(self.after.get(job, ())), None)

    def place_of(self, job: str) -> Workplace:
        """Where a job's batch keeps what it makes."""
        return self.entries[job].place

    def of_batch(self, batch: str) -> list[str]:
        """The jobs of a batch."""
        return [name for name, entry in self.entries.items() if entry.batch == batch]

    def done(self) -> set[str]:
        """The jobs that are done."""
        return {name for name, record in self.records.items() if record.status == DONE}

    def left(self) -> list[Job]:
        """The jobs that run or wait: neither ended nor paused, nor waiting for a base that is paused."""
        alive = [name for name, record in self.records.items() if record.status in (WAITING, RUNNING)]
        return [self.entries[name].job for name in alive if not self._waits_for_paused(name)]

    def _waits_for_paused(self, job: str) -> bool:
        """Whether a base that a job comes to wait for is paused: a plan must keep no devices for it meanwhile."""
        bases = self.after.get(job, ())
        return any(self.records[base].status == PAUSED or self._waits_for_paused(base) for base in bases)

    def orphans(self) -> list[tuple[str, str]]:
        """(job, reason) of those that adapt a model which will not come."""
        gone = {FAILED: "has failed", CANCELLED: "was cancelled"}
        found = []
        for job, bases in self.after.items():
            for base in bases:
                status = self.records[base].status
                if status in gone and self.records[job].status not in ENDED:
                    found.append((job, f"its base {base} {gone[status]}"))
        return found

    def standing_still(self, jobs: Sequence[str], *, paused: bool) -> list[str]:
        """Of `jobs`, those that are paused, or those that have neither ended nor are paused."""
        return [j for j in jobs if (status := self.records[j].status) not in ENDED and (status == PAUSED) == paused]

    def strike_out(self, job: str, profile: Profile) -> bool:
        """Takes an option from a job for good; returns whether another one is left."""
        self.profiles[job] = [p for p in self.profiles[job] if p is not profile]
        return bool(self.profiles[job])

    def count_crash(self, job: str, *, made_progress: bool) -> int:
        """Counts a crash of a job; returns how many it has had without getting any further."""
        self.attempts[job] = 1 if made_progress else self.attempts.get(job, 0) + 1
        return self.attempts[job]


def _renamed(job: Job, batch: str) -> Job:
    prefix = f"{batch}/"
    base = job.base.removeprefix(prefix) if job.base is not None else None
    return replace(job, name=job.name.removeprefix(prefix), base=base)
