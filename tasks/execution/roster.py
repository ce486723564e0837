"""The jobs that an executor has on its list, and where each of them stands.

The journal is the record; this keeps in memory what the executor alone writes there, so that a list of a thousand jobs
is not read anew at each word of a gang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringmaster.tasks.execution.directions import EVALUATED, GOAL, LIKE, RESTED, SETTLED
from ringmaster.tasks.execution.groups import Groups
from ringmaster.tasks.execution.journal import (
    CANCELLED,
    DONE,
    ENDED,
    FAILED,
    PAUSED,
    RUNNING,
    STOPPED,
    WAITING,
    JobRecord,
    Journal,
)
from ringmaster.tasks.execution.workplace import Workplace
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.values import from_json, to_json


@dataclass(frozen=True, kw_only=True)
class Enlisted:
    """A job on the list.

    job: its name is unique on the list, in a pool "BATCH/JOB"; likewise its parents where they are on the list too.
    profiles: what it can run under by itself. place: the folders of its batch, which knows the job by its name within
    the batch. together: where it leads a group, what that can run under; the fellows are on the list too.
    """

    job: Job
    profiles: tuple[Profile, ...]
    place: Workplace
    batch: str = ""
    together: tuple[Profile, ...] = ()

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
        self.totals: dict[str, int] = {}  # steps of each job, up to its goal
        self.after: dict[str, tuple[str, ...]] = {}  # the jobs that each job waits for
        self.attempts: dict[str, int] = {}  # crashes without progress
        self.groups = Groups(self)

    def add(self, entries: Iterable[Enlisted]) -> None:
        """Puts jobs on the list, as the journal knows them."""
        for entry in entries:
            name = entry.job.name
            self.entries[name] = entry
            self.profiles[name] = list(entry.profiles)
        for name, entry in self.entries.items():
            if parents := tuple(parent for parent in entry.job.parents if parent in self.entries):
                self.after[name] = parents
        self.refresh()

    def refresh(self) -> None:
        """Reads the journal anew: somebody else has written there."""
        known = self.journal.jobs(batches={entry.batch for entry in self.entries.values()})
        self.records = {name: known.get(name, JobRecord(name=name)) for name in self.entries}
        for name in self.entries:
            self._take_in(name)
        self.groups.form()

    def _take_in(self, name: str) -> None:
        """Has a job as its record says: settled since its place was kept, and up to its goal."""
        entry, details = self.entries[name], self.records[name].details
        if SETTLED in details:
            entry = self.entries[name] = self._settled(entry, details)
        # One that could not even be looked at has no number of steps; nor will it run.
        total = entry.job.num_steps or 0
        self.totals[name] = min(details.get(GOAL, total), total)
        self.groups.renew(name)

    def _settled(self, entry: Enlisted, details: Mapping[str, Any]) -> Enlisted:
        """What a place was kept for: another job, with the profiles and the data of one that is of its shape."""
        name, job = entry.job.name, from_json(Job, details[SETTLED])
        like = self.entries[f"{entry.batch}/{details[LIKE]}" if entry.batch else details[LIKE]]
        data = {job.name: like.place.data[details[LIKE]]} if details[LIKE] in like.place.data else {}
        place = replace(entry.place, data={**entry.place.data, **data})
        # Of its own shape already, it may have lost options that ran out of memory, and keeps what is left.
        is_alike = bool(entry.profiles) and all(profile in like.profiles for profile in entry.profiles)
        profiles = entry.profiles if is_alike else like.profiles
        if not is_alike:
            self.profiles[name] = list(profiles)
        return replace(entry, job=replace(job, name=name), profiles=profiles, place=place)

    def remove(self, jobs: Iterable[str]) -> None:
        """Takes jobs off the list."""
        for name in list(jobs):
            self.groups.forget(name)
            for kept in (self.entries, self.records, self.profiles, self.totals, self.after, self.attempts):
                kept.pop(name, None)

    def write(self, job: str, **changes: Any) -> JobRecord:
        """Changes what is known of a job."""
        record = self.records[job] = self.journal.write_job(job, **changes)
        return record

    # -- goals, where somebody steers ----------------------------------------------------------------------------------

    def settle(self, name: str, job: Job, *, like: str) -> None:
        """Says what a job is whose place was kept; one that has begun, or has ended, stays as it is.

        It adapts no other job of the list. like: a job of its batch of the same shape, by the batch's own name for it.
        """
        record = self.records[name]
        if record.step == 0 and record.status == WAITING and not record.details.get(GOAL):
            self.write(name, details={SETTLED: to_json(job), LIKE: like})
            self._take_in(name)

    def allow(self, name: str, goal: int) -> None:
        """Raises how far a job may train."""
        if goal > self.records[name].details.get(GOAL, 0):
            self.write(name, details={GOAL: goal})
            self._take_in(name)

    def rest(self, name: str, step: int) -> None:
        """Notes that a job has come to its goal, and been evaluated there."""
        self.write(name, status=WAITING, step=step, details={RESTED: step})

    def evaluated(self, name: str, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps what was measured of a job that has a goal."""
        if GOAL in self.records[name].details:
            self.write(name, details={EVALUATED: {"step": step, "metrics": dict(metrics)}})

    def rests(self, name: str) -> bool:
        """Whether a job has nothing to train until its goal is raised."""
        goal = self.totals[name]
        is_whole = goal >= (self.entries[name].job.num_steps or 0)
        return not is_whole and (goal == 0 or self.records[name].details.get(RESTED) == goal)

    def is_whole(self, name: str, step: int) -> bool:
        """Whether a job is at its end after a step, and not only at its goal."""
        return step == (self.entries[name].job.num_steps or 0)

    def place_of(self, job: str) -> Workplace:
        """Where a job's batch keeps what it makes."""
        return self.entries[job].place

    def listed(self, name: str, *, beside: str) -> str:
        """What the list calls a job of the same batch as `beside`, which its gang calls `name`."""
        batch = self.entries[beside].batch
        return f"{batch}/{name}" if batch else name

    def of_batch(self, batch: str) -> list[str]:
        """The jobs of a batch."""
        return [name for name, entry in self.entries.items() if entry.batch == batch]

    def done(self) -> set[str]:
        """The jobs that are done."""
        return {name for name, record in self.records.items() if record.status == DONE}

    def left(self) -> list[Job]:
        """The jobs that run or wait, up to their goals: neither ended nor paused, nor resting, nor waiting for a base
        that is paused; those that another one's gang trains are left to that."""
        alive = [name for name, record in self.records.items() if record.status in (WAITING, RUNNING)]
        alive = [name for name in alive if self.groups.leader_of(name) is None]  # whose gang trains them
        left = [name for name in alive if not self._waits_for_paused(name) and not self.rests(name)]
        return [self._up_to_goal(name) for name in left]

    def _up_to_goal(self, name: str) -> Job:
        job, goal = self.entries[name].job, self.totals[name]
        return job if job.num_steps in (None, goal) else replace(job, num_steps=goal)

    def _waits_for_paused(self, job: str) -> bool:
        """Whether a base that a job comes to wait for is paused: a plan must keep no devices for it meanwhile."""
        bases = self.after.get(job, ())
        return any(self.records[base].status == PAUSED or self._waits_for_paused(base) for base in bases)

    def orphans(self) -> list[tuple[str, str]]:
        """(job, reason) of those that adapt a model which will not come."""
        gone = {FAILED: "has failed", CANCELLED: "was cancelled", STOPPED: "was stopped early"}
        found = []
        for job, bases in self.after.items():
            for base in bases:
                status = self.records[base].status
                if status in gone and self.records[job].status not in ENDED:
                    what = "base" if base == self.entries[job].job.base else "parent"
                    found.append((job, f"its {what} {base} {gone[status]}"))
        return found

    def standing_still(self, jobs: Sequence[str], *, paused: bool) -> list[str]:
        """Of `jobs`, those that are paused, or those that have neither ended nor are paused."""
        return [j for j in jobs if (status := self.records[j].status) not in ENDED and (status == PAUSED) == paused]

    def strike_out(self, job: str, profile: Profile) -> bool:
        """Takes an option from a job for good; returns whether another one is left."""
        self.profiles[job] = [p for p in self.profiles[job] if not p.is_like(profile)]
        return bool(self.profiles[job])

    def count_crash(self, job: str, *, made_progress: bool) -> int:
        """Counts a crash of a job; returns how many it has had without getting any further."""
        self.attempts[job] = 1 if made_progress else self.attempts.get(job, 0) + 1
        return self.attempts[job]


def _renamed(job: Job, batch: str) -> Job:
    prefix = f"{batch}/"
    return job.renamed(job.name.removeprefix(prefix), lambda name: name.removeprefix(prefix))
