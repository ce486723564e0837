"""Groups: jobs that one gang trains together. The planner sees a group as one job, its lead job.

A group is formed when its jobs are added to the job table, and is never formed again. A member may leave the group and
is then an ordinary job. If the lead job ends, is paused or rests before the others, the group *parts*: each job
continues alone from its own checkpoint. The lead job's record stores that its group has parted, so that another
executor that takes over finds it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from ringmaster.tasks.storage.journal import ENDED, JobRecord, JobStatus
from ringmaster.techniques import Profile

PARTED, LEFT = "parted", "left_group"
"""Keys of a job's details: on a lead job, that its group has parted; on a member, that it has left its group."""


class GroupedJob(Protocol):
    """A job, with the options under which it can run alone, and with its group if it is a lead job."""

    @property
    def profiles(self) -> tuple[Profile, ...]: ...  # noqa: D102
    @property
    def together(self) -> tuple[Profile, ...]: ...  # noqa: D102


class GroupedJobs(Protocol):
    """The job table, as far as groups use it."""

    records: dict[str, JobRecord]
    profiles: dict[str, list[Profile]]
    totals: dict[str, int]

    @property
    def entries(self) -> Mapping[str, GroupedJob]: ...  # noqa: D102
    def write(self, job: str, **changes: Any) -> JobRecord: ...  # noqa: D102
    def rests(self, job: str) -> bool: ...  # noqa: D102


class GroupTable:
    """The groups of the jobs of a job table, and the lead job of each member."""

    def __init__(self, job_table: GroupedJobs) -> None:
        self._job_table = job_table
        self._members: dict[str, tuple[str, ...]] = {}  # by lead job; without those that have ended or left
        self._leads: dict[str, str] = {}  # by member

    def form(self) -> None:
        """Forms the groups of jobs that are new in the table, unless they have parted."""
        for lead, entry in self._job_table.entries.items():
            if entry.together and lead not in self._members and not self._has_parted(lead):
                self._form(lead)

    def restore(self, lead: str) -> None:
        """Forms a group again whose lead job trains no further.

        Its gang still runs; the group parts when that gang has ended.
        """
        if self._job_table.entries[lead].together and lead not in self._members:
            self._form(lead)

    def members(self, lead: str) -> tuple[str, ...]:
        """Returns the other jobs that the gang of `lead` trains."""
        return self._members.get(lead, ())

    def lead_of(self, job: str) -> str | None:
        """Returns the lead job of the gang that trains a job; None for a job that has its own gang."""
        return self._leads.get(job)

    def leads(self, job: str) -> bool:
        """Whether a job has a group's profiles, even if all members have left."""
        return job in self._members

    def leave(self, member: str) -> str | None:
        """Removes a member from its group for good. Returns its lead job, None if it was in no group."""
        lead = self._leads.get(member)
        if lead is not None:
            if self._job_table.records[member].status not in ENDED:
                self._job_table.write(member, details={LEFT: True})
            self._drop(member, lead)
        return lead

    def ended(self, member: str) -> None:
        """Removes a member that has ended; the others continue without it."""
        if (lead := self._leads.get(member)) is not None:
            self._drop(member, lead)

    def must_part(self, lead: str) -> bool:
        """Whether the lead job has nothing to train for now while other members have."""
        if not self.members(lead):
            return False
        status = self._job_table.records[lead].status
        others_rest = all(self._job_table.rests(member) for member in self.members(lead))
        return status in (*ENDED, JobStatus.PAUSED) or (self._job_table.rests(lead) and not others_rest)

    def part(self, lead: str) -> None:
        """Dissolves a group: each of its jobs continues alone."""
        self._job_table.write(lead, details={PARTED: True})
        for member in self._members.pop(lead):
            del self._leads[member]
        self._job_table.profiles[lead] = list(self._job_table.entries[lead].profiles)

    def renew(self, job: str) -> None:
        """Updates the profiles of a job's group after the job's goal has changed."""
        lead = self._leads.get(job)
        if lead is not None:
            kept = self._job_table.profiles[lead]  # some options may have been removed after running out of memory
            self._job_table.profiles[lead] = [p for p in self._profiles(lead) if any(p.is_like(k) for k in kept)]

    def forget(self, job: str) -> None:
        """Forgets a job that is removed from the table with all of its batch."""
        self._leads.pop(job, None)
        self._members.pop(job, None)

    def steps(self) -> Mapping[str, int]:
        """Returns the checkpointed steps of each member."""
        return {member: self._job_table.records[member].step for member in self._leads}

    def _form(self, lead: str) -> None:
        members = [member.job for member in self._job_table.entries[lead].together[0].members]
        assert all(name in self._job_table.entries for name in members), f"{lead} leads jobs that are not listed"
        self._members[lead] = tuple(name for name in members if self._is_there(name))
        self._leads |= dict.fromkeys(self._members[lead], lead)
        self._job_table.profiles[lead] = self._profiles(lead)

    def _has_parted(self, lead: str) -> bool:
        record = self._job_table.records[lead]
        return bool(record.details.get(PARTED)) or record.status in (*ENDED, JobStatus.PAUSED)

    def _is_there(self, member: str) -> bool:
        record = self._job_table.records[member]
        return record.status not in (*ENDED, JobStatus.PAUSED) and not record.details.get(LEFT)

    def _drop(self, member: str, lead: str) -> None:
        del self._leads[member]
        self._members[lead] = tuple(name for name in self._members[lead] if name != member)
        self._job_table.profiles[lead] = [p.beside(self._members[lead]) for p in self._job_table.profiles[lead]]

    def _profiles(self, lead: str) -> list[Profile]:
        def up_to_goal(profile: Profile) -> Profile:
            members = tuple(replace(f, num_steps=self._job_table.totals[f.job]) for f in profile.members)
            return replace(profile, members=members).beside(self._members[lead])

        return [up_to_goal(profile) for profile in self._job_table.entries[lead].together]
