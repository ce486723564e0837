"""The groups of a job table: jobs that one gang trains together. The planner sees a group as one job, its lead job.

The planner of a batch chooses the groups, which are formed when their jobs are added to the table. A member may leave
the group and is then an ordinary job. If the lead job ends, is paused or rests before the others, another member leads
those that have steps left. If fewer than two have, or the gang cannot continue as it is, the group *parts*: each job
continues alone from its own checkpoint.

Of a sweep's trials few continue from a rung, and those of one group seldom fill a gang. So the trials that continue and
that no gang trains are *regrouped*: divided into as many groups as there are devices for their user, whichever group
they were in. They never become more groups than before, nor than in the plan, which weighed what a further gang costs.
A step of a gang has a part that does not depend on the number of its jobs, and a part for each job; both are those of
the groups that the jobs were in at first, which also bound the number of jobs that fit.

A record stores that its group has parted, and which jobs a job leads in place of those of the plan (`joined`), so that
another executor that takes over finds it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise

from ringmaster.tasks.execution.job_rows import JobRows
from ringmaster.tasks.storage.journal import ENDED, JobStatus
from ringmaster.techniques import Profile
from ringmaster.techniques.training.fused.group_requirements import pair_obstacle


class GroupTable:
    """The groups of the jobs of a job table, and the lead job of each member."""

    def __init__(self, job_table: JobRows) -> None:
        self._job_table = job_table
        self._members: dict[str, tuple[str, ...]] = {}  # by lead job; without those that have ended or left
        self._leads: dict[str, str] = {}  # by member
        self._continuing: dict[str, None] = {}  # the jobs that may train beyond a goal that they had
        self._planned_leads: dict[str, str] = {}  # by job: the lead job of its group in the plan, also of itself

    def form(self) -> None:
        """Forms the groups of jobs that are new in the table, unless they have parted."""
        for lead, entry in self._job_table.entries.items():
            if entry.group_profiles:
                members = (member.job for member in entry.group_profiles[0].members)
                self._planned_leads |= dict.fromkeys((lead, *members), lead)
        self._read_former_leads()
        for lead, record in self._job_table.records.items():
            if not record.parted and record.status not in (*ENDED, JobStatus.PAUSED):
                self.restore(lead)

    def _read_former_leads(self) -> None:
        """Stores whom jobs lead that releases before `joined` have let lead the group of another one."""
        for lead, record in self._job_table.records.items():
            if record.leads_after is None:
                continue
            origin = self._planned_leads.get(self._job_table.name_of(record.leads_after, in_batch_of=lead))
            if origin is not None and record.joined is None:
                others = [name for name, its in self._planned_leads.items() if its == origin and name != lead]
                names = tuple(self._job_table.entries[name].job_in_batch.name for name in others)
                self._job_table.write(lead, joined=names, leads_after=None)

    def restore(self, lead: str) -> None:
        """Forms a group again whose lead job trains no further.

        Its gang still runs; the group parts when that gang has ended.
        """
        profiles = self._group_profiles(lead)
        if profiles and lead not in self._members:
            members = [member.job for member in profiles[0].members]
            assert all(name in self._job_table.entries for name in members), f"{lead} leads jobs that are not listed"
            self._members[lead] = tuple(name for name in members if self._is_there(name))
            self._leads |= dict.fromkeys(self._members[lead], lead)
            self._job_table.profiles[lead] = self._profiles(lead)

    def members(self, lead: str) -> tuple[str, ...]:
        """Returns the other jobs that the gang of `lead` trains."""
        return self._members.get(lead, ())

    def lead_of(self, job: str) -> str | None:
        """Returns the lead job of the gang that trains a job; None for a job that has its own gang."""
        return self._leads.get(job)

    def leads(self, job: str) -> bool:
        """Whether a job has a group's profiles, even if all members have left."""
        return job in self._members

    def remove_member(self, member: str) -> None:
        """Removes a member from its group for good, if it is in one; the others continue without it."""
        if (lead := self._leads.pop(member, None)) is None:
            return
        if self._job_table.records[member].status not in ENDED:
            self._job_table.write(member, left_group=True)
        self._members[lead] = tuple(name for name in self._members[lead] if name != member)
        self._job_table.profiles[lead] = [p.restricted_to(self._members[lead]) for p in self._job_table.profiles[lead]]

    def must_split(self, lead: str) -> bool:
        """Whether the lead job has nothing to train, for good or for now, while other members have."""
        has_ended = self._job_table.records[lead].status in (*ENDED, JobStatus.PAUSED)
        return (has_ended or self._job_table.rests(lead)) and not all(map(self._job_table.rests, self.members(lead)))

    def hand_over(self, lead: str) -> str | None:
        """Makes the member with the most steps left the lead job of a group whose lead job trains no further.

        Returns the new lead job; None where fewer than two members have anything to train now: the group must part.
        """
        members = self.members(lead)
        waiting = [name for name in members if self._steps_left(name) > 0 or self._is_evaluated_again(name)]
        if len(waiting) < 2:
            return None
        kept, new = self._job_table.profiles[lead], max(waiting, key=self._steps_left)
        self.split(lead)
        self._lead(new, _others(new, members), kept=kept)
        return new

    def split(self, lead: str, *, is_final: bool = False) -> None:
        """Dissolves a group: each of its jobs continues alone. is_final: they are not regrouped either."""
        members, left = self._members.pop(lead), {"left_group": True} if is_final else {}
        self._job_table.write_all({lead: {"parted": True, **left}} | (dict.fromkeys(members, left) if is_final else {}))
        for member in members:
            del self._leads[member]
        self._job_table.profiles[lead] = list(self._job_table.entries[lead].profiles)

    def let_continue(self, job: str) -> None:
        """Notes that a job may train beyond a goal that it had, so that it may be regrouped until it is started."""
        self._continuing[job] = None

    def note_started(self, jobs: Iterable[str]) -> None:
        """Notes that gangs that train jobs are started."""
        for job in jobs:
            self._continuing.pop(job, None)

    def regroup(self, *, num_devices: Callable[[str], int], active: Set[str]) -> list[str]:
        """Divides jobs that continue from a goal, and that no gang trains, into groups anew.

        Returns the jobs whose options change.

        Groups that are as many and as large as those stay as they are.

        num_devices: those that the user of a job may hold. active: the jobs that gangs train.
        """
        free = [name for name in self._continuing if self._may_regroup(name, active)]
        classes = [(alike, num_devices(alike[0])) for alike in self._alike(free)]
        return [name for alike, num in classes for name in self._regroup(alike, num_devices=num)]

    def _regroup(self, jobs: Sequence[str], *, num_devices: int) -> list[str]:
        """Divides jobs that may be trained together into groups of neighbours.

        There are at most as many as devices and as in the plan, unless so few do not fit. They never become more: other
        gangs may have the devices, and what is shared in a gang is most of a small step.
        """
        table = self._job_table
        present = list(dict.fromkeys(self._leads.get(name, name) for name in jobs))
        sizes = [sum(name in jobs for name in (lead, *self.members(lead))) for lead in present]
        most = min(num_devices, len(present), self._num_planned(jobs[0]))
        num_groups = min(len(jobs), max(most, math.ceil(len(jobs) / self._most_together(jobs))))
        if len(present) == num_groups and max(sizes) - min(sizes) <= 1:
            return []
        ends = [len(jobs) * k // num_groups for k in range(num_groups + 1)]
        parts = [jobs[start:stop] for start, stop in pairwise(ends)]
        kept = [table.profiles[lead] for lead in present if self.members(lead)]
        leads = {max(part, key=self._steps_left): part for part in parts}
        options = {lead: self._joined_profiles(lead, _others(lead, part)) for lead, part in leads.items()}
        fits = {lead: [p for p in options[lead] if all(any(map(p.is_like, of)) for of in kept)] for lead in leads}
        if not all(fits[lead] for lead, part in leads.items() if len(part) > 1):
            return []
        for lead in present:
            for member in self._members.pop(lead, ()):
                del self._leads[member]
            table.profiles[lead] = list(table.entries[lead].profiles)
        table.write_all({name: {"joined": ()} for name in (*present, *jobs)})
        for lead, part in leads.items():
            if len(part) > 1:
                self._lead(lead, _others(lead, part), kept=fits[lead])
        return list(jobs)

    def renew(self, job: str) -> None:
        """Updates the profiles of a job's group after the job's goal has changed."""
        if (lead := self._leads.get(job)) is not None:
            kept = self._job_table.profiles[lead]  # some options may have been removed after running out of memory
            self._job_table.profiles[lead] = [p for p in self._profiles(lead) if any(p.is_like(k) for k in kept)]

    def forget(self, job: str) -> None:
        """Forgets a job that is removed from the table with all of its batch."""
        for known in (self._leads, self._members, self._planned_leads, self._continuing):
            known.pop(job, None)

    def steps(self) -> Mapping[str, int]:
        """Returns the checkpointed steps of each member."""
        return {member: self._job_table.records[member].step for member in self._leads}

    def _lead(self, lead: str, members: Sequence[str], *, kept: Sequence[Profile]) -> None:
        """Makes a job lead others, under those of the options of their groups that are like `kept`."""
        table = self._job_table
        names = tuple(table.entries[name].job_in_batch.name for name in members)
        table.write(lead, joined=names, parted=False)
        self.restore(lead)
        assert self.leads(lead), f"the group of {lead} has no options"
        table.profiles[lead] = [p for p in table.profiles[lead] if any(p.is_like(k) for k in kept)]

    def _group_profiles(self, lead: str) -> Sequence[Profile]:
        """Returns the options of a job's group: of the one in the plan, or of the jobs that it leads instead."""
        table, joined = self._job_table, self._job_table.records[lead].joined
        if joined is None:
            return table.entries[lead].group_profiles
        return self._joined_profiles(lead, [table.name_of(name, in_batch_of=lead) for name in joined])

    def _joined_profiles(self, lead: str, members: Sequence[str]) -> list[Profile]:
        """Returns the options under which jobs of several groups can run together: those that all these groups have."""
        if not members or not self._planned_leads.keys() >= {lead, *members}:
            return []
        origins = {name: self._planned_leads[name] for name in (lead, *members)}
        options = []
        for own in self._job_table.entries[origins[lead]].group_profiles:
            alike = {origin: self._like(own, origin) for origin in origins.values()}
            known = {origin: profile for origin, profile in alike.items() if profile is not None}
            if known.keys() == alike.keys():
                others = tuple(known[origins[name]].as_member(name, lead=origins[name]) for name in members)
                led = own if origins[lead] == lead else own.led_by(lead)
                peak_bytes = max(profile.peak_bytes for profile in known.values())
                options.append(replace(led, members=others, peak_bytes=peak_bytes, key=None))
        return options

    def _like(self, profile: Profile, lead: str) -> Profile | None:
        return next((p for p in self._job_table.entries[lead].group_profiles if p.is_like(profile)), None)

    def _may_regroup(self, name: str, active: Set[str]) -> bool:
        """Whether a job waits that was planned in a group, and no gang trains it or those that it is grouped with."""
        record = self._job_table.records[name]
        is_there = record.status == JobStatus.WAITING and not record.left_group
        is_free = active.isdisjoint((name, self._leads.get(name, name)))
        return is_there and is_free and name in self._planned_leads

    def _alike(self, jobs: Sequence[str]) -> Iterator[list[str]]:
        """Yields jobs of one batch that can be trained together, those with the most steps left and of one shape
        beside each other."""
        classes: list[list[str]] = []
        entries = self._job_table.entries
        for name in sorted(jobs, key=lambda name: (-self._steps_left(name), self._planned_step_s(name), name)):
            entry = entries[name]
            home = next(
                (
                    each
                    for each in classes
                    if entries[each[0]].batch == entry.batch and pair_obstacle(entries[each[0]].job, entry.job) is None
                ),
                None,
            )
            if home is None:
                classes.append([name])
            else:
                home.append(name)
        yield from classes

    def _planned_step_s(self, name: str) -> float:
        """Returns the seconds that a job adds to a step of its group in the plan: more for larger adapters."""
        lead = self._planned_leads[name]
        return self._job_table.entries[lead].group_profiles[0].as_member(name, lead=lead).step_s

    def _num_planned(self, job: str) -> int:
        """Returns how many groups the plan had of the jobs that can be trained together with a job."""
        entries = self._job_table.entries
        leads = [entries[lead] for lead in set(self._planned_leads.values())]
        own = entries[job]
        return sum(each.batch == own.batch and pair_obstacle(each.job, own.job) is None for each in leads)

    def _most_together(self, jobs: Sequence[str]) -> int:
        """Returns the size of the smallest of the groups in the plan, all of which fit on their devices."""
        leads = {self._planned_leads[name] for name in jobs}
        return min(1 + len(self._job_table.entries[lead].group_profiles[0].members) for lead in leads)

    def _is_evaluated_again(self, name: str) -> bool:
        """Whether a job at its goal, which is not its last step, is to be evaluated there."""
        is_at_rung = self._job_table.totals[name] < (self._job_table.entries[name].job.num_steps or 0)
        return is_at_rung and self._is_there(name) and not self._job_table.rests(name)

    def _steps_left(self, name: str) -> int:
        return self._job_table.totals[name] - self._job_table.records[name].step

    def _is_there(self, member: str) -> bool:
        record = self._job_table.records[member]
        return record.status not in (*ENDED, JobStatus.PAUSED) and not record.left_group

    def _profiles(self, lead: str) -> list[Profile]:
        def up_to_goal(profile: Profile) -> Profile:
            members = tuple(replace(f, num_steps=self._job_table.totals[f.job]) for f in profile.members)
            return replace(profile, members=members).restricted_to(self._members[lead])

        return [up_to_goal(profile) for profile in self._group_profiles(lead)]


def _others(lead: str, part: Sequence[str]) -> list[str]:
    return [name for name in part if name != lead]
