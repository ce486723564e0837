"""Profiles: measured seconds and bytes of a job under one technique, config and number of devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self

from ringmaster.codec import SINCE_LATER, stored_as
from ringmaster.techniques.training.fused.group_requirements import AT_ONCE, num_steps_of_gang

MEASURED, PREDICTED = "measured", "predicted"
"""The sources of a profile: a trial or a segment that trained has measured it, or nothing has."""


UNTRUSTED = ", untrusted"
"""The end of the names of those kinds of devices that untrusted nodes have."""


@dataclass(frozen=True, kw_only=True)
class GroupMemberProfile:
    """A job that a gang trains together with another job, on one base.

    num_steps: steps of the whole job.
    step_s: seconds by which a step of the gang takes longer while this job is in it.
    end_s: seconds of its last checkpoint, evaluation and export.
    """

    job: str
    num_steps: int
    step_s: float
    end_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ProfileKey:
    """Under which a profile is stored.

    fingerprint: of all that affects the option's speed and memory.
    speed_class: equal for jobs that cannot differ in speed; of a group, of its jobs.
    device_kind: the kind of device that it was measured on, or is predicted for.
    """

    fingerprint: str
    speed_class: str
    device_kind: str


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One measured or predicted (technique, config, gang size) of a job, which planning calls an option of the job.

    Plans name an option by its index in the profiles of its job.

    num_ranks: worker processes of the gang.
    num_nodes: nodes over which its devices are spread evenly.
    step_s: median seconds of a step after warm-up, measured while the neighbouring devices were busy.
    peak_bytes: the most memory that one device (one rank's process, for CPU slots) held.
    startup_s, save_s, evaluate_s, export_s: seconds from the lease to the first step, of one checkpoint, of one
        evaluation on held-out data, and of writing the finished model.
    stall_s: seconds for which a checkpoint that is written in the background holds up training; None for `save_s`.
    source: "measured" by a trial or by a segment that trained, or "predicted".
    spread: the standard error of `step_s`, relative to it; 0 where it is unknown.
    load: how many times as long as on a quiet machine the seconds are (`tasks/profiling/machine_load.py`).
    predicted_step_s: the seconds of a step that the preflight predicted; None where it could not.
    num_measured_steps: over how many steps `step_s` was measured; 0 where it was not, or by an earlier release.
    key: under which it is stored; None if it is not.
    members: the jobs that are trained together with this one; empty except under `shared_base`. All other seconds are
        then those of this job in the group: a step takes `step_s`, plus `GroupMemberProfile.step_s` for each member
        that is present.
    own_step_s: the part of `step_s` by which a step of the gang takes longer while this job is present.
    device_type: the kind of devices that the profile holds for, where a pool has several; empty where it holds for all.
    holds_devices: whether its gang ends by itself, which no plan can foresee: while it runs, plans have neither the job
        nor its devices.
    """

    technique: str
    config: Mapping[str, Any] = field(default_factory=dict)
    num_devices: int
    num_ranks: int
    step_s: float
    peak_bytes: int
    startup_s: float = 0.0
    save_s: float = 0.0
    evaluate_s: float = 0.0
    export_s: float = 0.0
    stall_s: float | None = None
    source: str = MEASURED
    device_type: str = ""
    num_nodes: int = 1
    members: tuple[GroupMemberProfile, ...] = stored_as("fellows", default=())
    own_step_s: float = 0.0
    spread: float = field(default=0.0, metadata=SINCE_LATER)
    load: float = field(default=1.0, metadata=SINCE_LATER)
    predicted_step_s: float | None = field(default=None, metadata=SINCE_LATER)
    num_measured_steps: int = field(default=0, metadata=SINCE_LATER)
    key: ProfileKey | None = field(default=None, metadata=SINCE_LATER)
    holds_devices: bool = field(default=False, metadata=SINCE_LATER)

    @property
    def is_untrusted(self) -> bool:
        """Whether it is of devices of untrusted nodes."""
        return self.device_type.endswith(UNTRUSTED)

    @property
    def at_once(self) -> int | None:
        """The number of the gang's jobs that are trained at a time (`fused.group_requirements`); None for all."""
        return self.config.get(AT_ONCE)

    @property
    def gang_step_s(self) -> float:
        """Seconds of a step of the gang with the largest number of members in it."""
        others = islice(self.members, None if self.at_once is None else self.at_once - 1)
        return self.step_s + sum(member.step_s for member in others)

    def runtime_s(
        self,
        *,
        num_steps: int,
        num_evaluations: int = 1,
        members_left: Mapping[str, int] | None = None,
    ) -> float:
        """Returns planned seconds of `num_steps` steps to a job's end.

        They include start, steps, checkpoints, evaluations and export. `members_left` is the number of steps that each
        member has left, by job; by default all of its steps. The gang continues until all jobs have ended.
        """
        left = {member.job: member.num_steps for member in self.members} | dict(members_left or {})
        every = [num_steps, *(left[member.job] for member in self.members)]
        num_in_all = num_steps_of_gang(every, at_once=self.at_once)
        training_s = num_in_all * self.step_s - (num_in_all - num_steps) * self.own_step_s + self.save_s
        members_s = sum(left[member.job] * member.step_s + member.end_s for member in self.members)
        return self.startup_s + training_s + members_s + num_evaluations * self.evaluate_s + self.export_s

    def at_pace(self, ratio: float) -> Self:
        """Returns the same profile with steps that take `ratio` times as long."""
        members = tuple(replace(member, step_s=member.step_s * ratio) for member in self.members)
        return replace(self, step_s=self.step_s * ratio, own_step_s=self.own_step_s * ratio, members=members)

    def under_load(self, load: float) -> Self:
        """Returns the same profile on a machine that is `load` times as slow as a quiet one."""
        ratio = load / self.load
        seconds = {name: getattr(self, name) * ratio for name in ("startup_s", "save_s", "evaluate_s", "export_s")}
        stall_s = None if self.stall_s is None else self.stall_s * ratio
        members = tuple(replace(member, end_s=member.end_s * ratio) for member in self.members)
        return replace(self, **seconds, stall_s=stall_s, members=members, load=load).at_pace(ratio)

    def restricted_to(self, jobs: Collection[str]) -> Self:
        """Returns the same profile with only those members that are among `jobs`.

        The key is that of the whole group. What fewer jobs take is not stored under it.
        """
        if all(member.job in jobs for member in self.members):
            return self
        return replace(self, members=tuple(member for member in self.members if member.job in jobs), key=None)

    def led_by(self, job: str) -> Self:
        """Returns the profile of the same group without the job that led it, and with one of its members as lead."""
        (lead,) = (member for member in self.members if member.job == job)
        return replace(
            self,
            step_s=self.step_s - self.own_step_s + lead.step_s,
            own_step_s=lead.step_s,
            members=tuple(member for member in self.members if member is not lead),
            key=None,
        )

    def as_member(self, job: str, *, lead: str) -> GroupMemberProfile:
        """Returns what a job of the group takes as a member. lead: the lead job."""
        if job == lead:
            end_s = self.save_s + self.evaluate_s + self.export_s
            return GroupMemberProfile(job=job, num_steps=0, step_s=self.own_step_s, end_s=end_s)
        return next(member for member in self.members if member.job == job)

    def is_like(self, other: Profile) -> bool:
        """Whether both profiles are of one option, regardless of the members trained together with the job."""
        return self._option == other._option

    @property
    def _option(self) -> tuple[Any, ...]:
        return self.technique, dict(self.config), self.num_devices, self.device_type, self.num_nodes
