"""Jobs that one gang trains together: to the planner, a group is the job that leads it.

A group is formed when its jobs come on the list, and is never formed anew. A fellow may leave it, and is a job like any
other from then on; where the leader ends, stands still or rests before the others, it *parts*: each goes on by itself,
from its own checkpoint. That a group has parted stands in its leader's record, so that whoever takes over finds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ringmaster.tasks.execution.journal import ENDED, PAUSED
from ringmaster.techniques import Profile

if TYPE_CHECKING:
    from ringmaster.tasks.execution.roster import Roster

PARTED, LEFT = "parted", "left_group"
"""Keys of a job's details: of a leader, that its group has parted; of a fellow, that it has left its group."""


class Groups:
    """The groups of the jobs of a roster, and which job is trained by whose gang."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._fellows: dict[str, tuple[str, ...]] = {}  # by leader; without those that have ended or left
        self._leaders: dict[str, str] = {}  # by fellow

    def form(self) -> None:
        """Forms the groups of those that are new on the list, as far as they have not parted."""
        for leader, entry in self._roster.entries.items():
            if entry.together and leader not in self._fellows and not self._has_parted(leader):
                self._form(leader)

    def restore(self, leader: str) -> None:
        """Forms a group though its leader trains no further: its gang runs still, and it parts when that has ended."""
        if self._roster.entries[leader].together and leader not in self._fellows:
            self._form(leader)

    def fellows(self, leader: str) -> tuple[str, ...]:
        """The jobs that the gang of `leader` trains too."""
        return self._fellows.get(leader, ())

    def leader_of(self, job: str) -> str | None:
        """Whose gang trains a job; None for a job that has its own."""
        return self._leaders.get(job)

    def leads(self, job: str) -> bool:
        """Whether a job has a group's profiles, be it that all fellows have gone."""
        return job in self._fellows

    def leave(self, fellow: str) -> str | None:
        """Takes a fellow out of its group for good; returns who leads that, None where it was in none."""
        leader = self._leaders.get(fellow)
        if leader is not None:
            if self._roster.records[fellow].status not in ENDED:
                self._roster.write(fellow, details={LEFT: True})
            self._drop(fellow, leader)
        return leader

    def ended(self, fellow: str) -> None:
        """A fellow has ended: the others go on without it."""
        if (leader := self._leaders.get(fellow)) is not None:
            self._drop(fellow, leader)

    def must_part(self, leader: str) -> bool:
        """Whether the leader has nothing to train for now, and others have."""
        if not self.fellows(leader):
            return False
        status = self._roster.records[leader].status
        others_rest = all(self._roster.rests(fellow) for fellow in self.fellows(leader))
        return status in (*ENDED, PAUSED) or (self._roster.rests(leader) and not others_rest)

    def part(self, leader: str) -> None:
        """Has each job of a group go on by itself."""
        self._roster.write(leader, details={PARTED: True})
        for fellow in self._fellows.pop(leader):
            del self._leaders[fellow]
        self._roster.profiles[leader] = list(self._roster.entries[leader].profiles)

    def renew(self, job: str) -> None:
        """How far a job may train has changed, which its group's profiles say."""
        leader = self._leaders.get(job)
        if leader is not None:
            kept = self._roster.profiles[leader]  # some may have run out of memory
            self._roster.profiles[leader] = [p for p in self._profiles(leader) if any(p.is_like(k) for k in kept)]

    def forget(self, job: str) -> None:
        """A job is taken off the list, with all of its batch."""
        self._leaders.pop(job, None)
        self._fellows.pop(job, None)

    def steps(self) -> Mapping[str, int]:
        """The steps that each fellow has checkpointed."""
        return {fellow: self._roster.records[fellow].step for fellow in self._leaders}

    def _form(self, leader: str) -> None:
        fellows = [fellow.job for fellow in self._roster.entries[leader].together[0].fellows]
        assert all(name in self._roster.entries for name in fellows), f"{leader} leads jobs that are not listed"
        self._fellows[leader] = tuple(name for name in fellows if self._is_there(name))
        self._leaders |= dict.fromkeys(self._fellows[leader], leader)
        self._roster.profiles[leader] = self._profiles(leader)

    def _has_parted(self, leader: str) -> bool:
        record = self._roster.records[leader]
        return bool(record.details.get(PARTED)) or record.status in (*ENDED, PAUSED)

    def _is_there(self, fellow: str) -> bool:
        record = self._roster.records[fellow]
        return record.status not in (*ENDED, PAUSED) and not record.details.get(LEFT)

    def _drop(self, fellow: str, leader: str) -> None:
        del self._leaders[fellow]
        self._fellows[leader] = tuple(name for name in self._fellows[leader] if name != fellow)
        self._roster.profiles[leader] = [p.beside(self._fellows[leader]) for p in self._roster.profiles[leader]]

    def _profiles(self, leader: str) -> list[Profile]:
        def up_to_goal(profile: Profile) -> Profile:
            fellows = tuple(replace(f, num_steps=self._roster.totals[f.job]) for f in profile.fellows)
            return replace(profile, fellows=fellows).beside(self._fellows[leader])

        return [up_to_goal(profile) for profile in self._roster.entries[leader].together]
