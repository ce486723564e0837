"""The search for groups of one class of jobs in one layout: what is tried of it, and what is offered for that."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ringmaster.tasks.profiling.fingerprint import fingerprint
from ringmaster.tasks.profiling.group_laws import Laws, laws_of, own_bytes, step_s_alone
from ringmaster.tasks.profiling.grouping import MOST_TOGETHER, Group, candidate_groups, even_parts, sample
from ringmaster.tasks.profiling.layouts import ONE_DEVICE, Layout
from ringmaster.tasks.profiling.options import num_evaluations
from ringmaster.tasks.profiling.search import Failure, Result
from ringmaster.tasks.profiling.trials import Trial
from ringmaster.techniques import Profile
from ringmaster.techniques.shared_base import NAME
from ringmaster.techniques.surveys import Candidate
from ringmaster.techniques.values import digest

# What is tried of a class where it has so many jobs, and pairs, and the largest power of two: three trials at the most.
FIRST_SIZE = 8
# Trials of a class may take this share of what training it takes at the least: else they cost what they could gain.
TRIED_SHARE = 0.1
# Jobs that take turns must be several at a time, or they are trained one after another.
LEAST_AT_ONCE = 2
# What a trial takes beside starting and ending, at the least; see `ringmaster.techniques.engine.trials`.
MEASURED_S, MEASURED_STEPS = 1.5, 6


@dataclass(kw_only=True)
class GroupSearch:
    """The trials of a class of jobs on gangs of a layout, and the profiles of its groups.

    num_devices: of the whole cluster. device_kind, memory_bytes: of one device. is_gpu: whether the memory that a trial
    measured is that of the device, and not of a process with all its libraries. plainer: searches in plainer layouts
    for some of the same jobs, the plainest first.
    """

    members: Group
    num_devices: int
    device_kind: str
    memory_bytes: int
    is_gpu: bool
    layout: Layout = ONE_DEVICE
    plainer: Sequence[GroupSearch] = ()
    results: dict[str, Result] = field(default_factory=dict)

    @cached_property
    def first(self) -> GroupSearch:
        """Of the plainest layout in which a group of these jobs fits; this one, where none does in a plainer."""
        return next((search for search in self.plainer if search.tried), self)

    @cached_property
    def tried(self) -> dict[str, Group]:
        """The groups that may be tried, by fingerprint; of sizes that another batch's class has too."""
        largest = 2 ** (min(len(self.members), MOST_TOGETHER).bit_length() - 1)
        sizes = [min(FIRST_SIZE, largest), 2, largest]  # the most telling first, as far as time allows
        if any(search.tried for search in self.plainer):
            sizes = sizes[:1]
        groups = (sample(self.members, size) for size in dict.fromkeys(sizes))
        return {self._fingerprint(group): group for group in groups if self._may_fit(group)}

    @property
    def may_be_tried(self) -> bool:
        """Whether a trial of it is worth making: as the first one it always is."""
        return self.first is self or (self.first.is_sound and bool(self.sorted_out()[0]))

    @property
    def num_slots(self) -> int:
        """How many gangs the devices suffice for at once."""
        return max(1, self.num_devices // self.layout.num_devices)

    @property
    def budget_s(self) -> float:
        """Seconds that all trials of the class may take."""
        return TRIED_SHARE * sum(solo.runtime_s for solo in self.members) / self.num_slots

    def affordable(self, found: Mapping[str, Result], *, budget_s: float) -> tuple[list[Trial], float]:
        """The trials whose answers are not known, as far as the seconds suffice; and those that are left."""
        wanted = []
        for name, group in self.tried.items():
            if name in found:
                continue
            if (seconds := _trial_s(group)) > budget_s:
                break
            budget_s -= seconds
            wanted.append(trial_of(group, fingerprint=name, layout=self.layout))
        return wanted, budget_s

    def take(self, found: Mapping[str, Result]) -> None:
        """Takes in what is known of its trials."""
        self.results = {name: found[name] for name in self.tried if name in found}
        self.__dict__.pop("laws", None)  # which rest on that

    @property
    def is_sound(self) -> bool:
        """Whether a group of it was measured, and none failed."""
        return bool(self._measured()) and self.fault is None

    @property
    def fault(self) -> str | None:
        """Why no group of this class is offered: a trial has failed, and so might a gang."""
        failed = (r.message for r in self.results.values() if isinstance(r, Failure) and r.kind != "out_of_memory")
        return next(failed, None)

    @cached_property
    def laws(self) -> Laws:
        """As far as trials have shown them."""
        kappa = 1.0 if self.first is self else self.first.laws.step.slope
        return laws_of(self.members, self._measured(), layout=self.layout, kappa=kappa)

    def fair_s(self, names: Collection[str] | None = None) -> float:
        """Seconds for which the class, or what of it is named, keeps all devices busy, evenly divided over them."""
        parts = even_parts(self._among(names), self.num_slots)
        return sum(self._runtime_s(part) for part in parts) / self.num_slots

    def has_any(self, groups: Mapping[str, Sequence[Profile]]) -> bool:
        """Whether any of these, by leader, is a group of this class in this layout."""
        mine = (profile for solo in self.members for profile in groups.get(solo.job.name, ()))
        return any(
            p.num_devices == self.layout.num_devices and self.layout.config.items() <= p.config.items() for p in mine
        )

    def sorted_out(self, names: Collection[str] | None = None) -> tuple[list[tuple[str, Profile]], list[Group]]:
        """Profiles of the groups that are worth planning with, by leader; and the groups that do not fit at once.

        Of those as many as fit are trained at a time, in the plainest layout in which that is more than one.
        names: the jobs that there are, where they are not all of the class.
        """
        sizes = {len(group) for group, _ in self._measured()}
        fair_s = self.first.fair_s(names)
        offered: list[tuple[str, Profile]] = []
        too_large: list[Group] = []
        for group in candidate_groups(self._among(names), num_devices=self.num_slots):
            at_once = self._num_that_fit(group)
            if at_once < len(group):
                too_large.append(group)
            may_wait = self.first is self and at_once >= LEAST_AT_ONCE
            if (may_wait or at_once == len(group)) and self._is_worth_it(group, fair_s):
                profile = self.laws.profile(group, is_measured=len(group) in sizes, at_once=at_once)
                offered.append((group[0].job.name, profile))
        return offered, too_large

    def _among(self, names: Collection[str] | None) -> Group:
        return self.members if names is None else tuple(solo for solo in self.members if solo.job.name in names)

    def _is_worth_it(self, group: Group, fair_s: float) -> bool:
        """Whether it is quicker than its jobs one after another, and nothing plainer will do."""
        runtime_s = self._runtime_s(group)
        if runtime_s >= sum(solo.runtime_s for solo in group):
            return False
        known = [search.runtime_s_of({solo.job.name for solo in group}) for search in self.plainer]
        plainer_s = min((seconds for seconds in known if seconds is not None), default=None)
        return plainer_s is None or (runtime_s < plainer_s and plainer_s > fair_s)

    def runtime_s_of(self, jobs: Collection[str]) -> float | None:
        """Seconds of a group of these jobs; None where they do not fit, or are not all of its class."""
        group = self._among(jobs)
        return self._runtime_s(group) if len(group) == len(jobs) and self._fits(group) else None

    def _runtime_s(self, group: Group) -> float:
        """Of a job by itself, or of all steps of a group."""
        leader = group[0].job
        if len(group) == 1:
            return group[0].runtime_s
        profile = self.laws.profile(group, is_measured=False, at_once=self._num_that_fit(group) or None)
        return profile.runtime_s(num_steps=leader.total_steps, num_evaluations=num_evaluations(leader))

    def _measured(self) -> list[tuple[Group, Profile]]:
        every = ((group, self.results.get(name)) for name, group in self.tried.items())
        return [(group, result) for group, result in every if isinstance(result, Profile)]

    def _num_that_fit(self, group: Group) -> int:
        """How many of a group fit at once, whichever of them these are."""
        if self._fits(group):
            return len(group)
        largest_first = sorted(group, key=lambda solo: -solo.own_bytes)
        sizes = range(len(group) - 1, 0, -1)
        return next((size for size in sizes if self._fits(tuple(largest_first[:size]))), 0)

    def _may_fit(self, group: Group) -> bool:
        return group[0].base_bytes + own_bytes(group) <= self.memory_bytes

    def _fits(self, group: Group) -> bool:
        """As far as is known; of a CPU slot only what jobs need is counted, as where they are alone."""
        unfit = [own_bytes(self.tried[name]) for name, r in self.results.items() if isinstance(r, Failure)]
        if unfit and own_bytes(group) >= min(unfit):
            return False
        return self._may_fit(group) and (not self.is_gpu or self.laws.peak.at(own_bytes(group)) <= self.memory_bytes)

    def _fingerprint(self, group: Group) -> str:
        return fingerprint(
            digest(sorted(solo.key for solo in group)),
            technique=NAME,
            config=self.layout.config,
            num_devices=self.layout.num_devices,
            device_kind=self.device_kind,
            memory_bytes=self.memory_bytes,
        )


def trial_of(group: Group, *, fingerprint: str, layout: Layout = ONE_DEVICE) -> Trial:
    """What would measure a group."""
    leader, *others = group
    return Trial(
        fingerprint=fingerprint,
        job=leader.job,
        data=leader.data,
        candidate=Candidate(
            technique=NAME,
            config=layout.config,
            num_devices=layout.num_devices,
            num_ranks=layout.num_devices,
            least_bytes=leader.base_bytes + own_bytes(group),
        ),
        fellows=tuple((solo.job, solo.data) for solo in others),
    )


def _trial_s(group: Group) -> float:
    """Seconds of a trial, at most about."""
    ends_s = sum(solo.profile.save_s + solo.profile.evaluate_s + solo.profile.export_s for solo in group)
    return group[0].profile.startup_s + max(MEASURED_S, MEASURED_STEPS * step_s_alone(group)) + ends_s
