"""The search for groups of one class of jobs in one layout: its trials, and the groups that it offers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ringmaster.codec import digest
from ringmaster.tasks.profiling.fingerprint import fingerprint
from ringmaster.tasks.profiling.groups.candidates import MOST_TOGETHER, Group, candidate_groups, even_parts, sample
from ringmaster.tasks.profiling.groups.layouts import ONE_DEVICE, Layout
from ringmaster.tasks.profiling.groups.scaling import Laws, laws_of, own_bytes, step_s_alone
from ringmaster.tasks.profiling.options import num_evaluations
from ringmaster.tasks.profiling.search import FAILED, Failure, Result
from ringmaster.tasks.profiling.trials import Trial
from ringmaster.techniques import Profile
from ringmaster.techniques.preflight import Candidate
from ringmaster.techniques.profile import ProfileKey
from ringmaster.techniques.training.fused.group_requirements import NAME

# The size of the first group that is tried, if a class has so many jobs. A pair and the largest power of two follow:
# at most three trials.
FIRST_SIZE = 8
# The least number of jobs at a time in a group whose jobs take turns; one at a time is no better than without a group.
LEAST_AT_ONCE = 2


@dataclass(kw_only=True)
class GroupSearch:
    """The trials of a class of jobs on gangs of one layout, and the profiles of its groups.

    num_devices: the devices of the whole cluster.
    device_kind, memory_bytes: those of one device.
    is_gpu: whether a trial measures the memory of the device, and not that of a process with all its libraries.
    plainer: searches in plainer layouts for some of the same jobs, the plainest first.
    kappa: what a step of a group takes of the steps of its jobs alone, as long as no group was measured.
    """

    members: Group
    num_devices: int
    device_kind: str
    memory_bytes: int
    is_gpu: bool
    layout: Layout = ONE_DEVICE
    plainer: Sequence[GroupSearch] = ()
    kappa: float = 1.0
    results: dict[str, Result] = field(default_factory=dict)

    @cached_property
    def first(self) -> GroupSearch:
        """The search in the plainest layout in which a group of these jobs fits; this one, if no plainer one does."""
        return next((search for search in self.plainer if search.tried), self)

    @cached_property
    def tried(self) -> dict[str, Group]:
        """The groups that may be tried, by fingerprint. Their sizes also occur in the classes of other batches."""
        largest = 2 ** (min(len(self.members), MOST_TOGETHER).bit_length() - 1)
        sizes = [min(FIRST_SIZE, largest), 2, largest]  # the most informative first, as often only that one is tried
        if any(search.tried for search in self.plainer):
            sizes = sizes[:1]
        groups = (sample(self.members, size) for size in dict.fromkeys(sizes))
        return {self._key(group).fingerprint: group for group in groups if self._may_fit(group)}

    @property
    def may_be_tried(self) -> bool:
        """Whether a trial in this layout is worth making; in the first layout it always is."""
        return self.first is self or (self.first.is_sound and bool(self.sorted_out()[0]))

    @property
    def num_slots(self) -> int:
        """The number of gangs that the devices can hold at once."""
        return max(1, self.num_devices // self.layout.num_devices)

    def wanted(self, found: Mapping[str, Result], *, most: int) -> list[Trial]:
        """Returns the first trials without a known result, so that no more than `most` groups are known then."""
        num_known = sum(name in found for name in self.known)
        left = [group for name, group in self.tried.items() if name not in found]
        return [self.trial(group) for group in left[: max(most - num_known, 0)]]

    @cached_property
    def known(self) -> dict[str, Group]:
        """The groups that may have been measured, by fingerprint: by a trial, or while a batch trained them."""
        groups = candidate_groups(self.members, num_devices=self.num_slots) if self.tried else ()
        return {self._key(group).fingerprint: group for group in groups} | self.tried

    def take(self, found: Mapping[str, Result]) -> None:
        """Takes the known results of its groups."""
        self.results = {name: found[name] for name in self.known if name in found}
        self.__dict__.pop("laws", None)  # computed from the results

    @property
    def is_sound(self) -> bool:
        """Whether a group of it was measured, and no trial failed except for lack of memory."""
        return bool(self._measured()) and self.fault is None

    @property
    def fault(self) -> str | None:
        """The reason why no group of this class is offered: a trial has failed, and so might a gang."""
        failed = (r.message for r in self.results.values() if isinstance(r, Failure) and r.kind == FAILED)
        return next(failed, None)

    @cached_property
    def laws(self) -> Laws:
        """The fitted lines, as far as trials have measured them."""
        kappa = self.kappa if self.first is self else self.first.laws.step.slope
        return laws_of(self.members, self._measured(), layout=self.layout, kappa=kappa)

    def fair_s(self, names: Collection[str] | None = None) -> float:
        """Returns the seconds for which the class, or its named jobs, occupies all devices if divided evenly."""
        parts = even_parts(self._among(names), self.num_slots)
        return sum(self._runtime_s(part) for part in parts) / self.num_slots

    def has_any(self, groups: Mapping[str, Sequence[Profile]]) -> bool:
        """Returns whether any of these profiles, by lead job, is of a group of this class in this layout."""
        mine = (profile for solo in self.members for profile in groups.get(solo.job.name, ()))
        return any(
            p.num_devices == self.layout.num_devices and self.layout.config.items() <= p.config.items() for p in mine
        )

    def sorted_out(self, names: Collection[str] | None = None) -> tuple[list[tuple[str, Profile]], list[Group]]:
        """Returns profiles of the groups worth planning, by lead job, and the groups that do not fit at once.

        In a group that does not fit, as many jobs as fit are trained at a time, in the plainest layout that holds more
        than one.

        names: the jobs of the batch, if they are not all of the class.
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
                if at_once == len(group):  # how long turns take depends on the steps of the jobs
                    profile = replace(profile, key=self._key(group), predicted_step_s=step_s_alone(group))
                offered.append((group[0].job.name, profile))
        return offered, too_large

    def _among(self, names: Collection[str] | None) -> Group:
        return self.members if names is None else tuple(solo for solo in self.members if solo.job.name in names)

    def _is_worth_it(self, group: Group, fair_s: float) -> bool:
        """Returns whether a group is faster than its jobs one after another, and no plainer layout suffices."""
        runtime_s = self._runtime_s(group)
        if runtime_s >= sum(solo.runtime_s for solo in group):
            return False
        known = [search.runtime_s_of({solo.job.name for solo in group}) for search in self.plainer]
        plainer_s = min((seconds for seconds in known if seconds is not None), default=None)
        return plainer_s is None or (runtime_s < plainer_s and plainer_s > fair_s)

    def runtime_s_of(self, jobs: Collection[str]) -> float | None:
        """Returns the seconds of a group of these jobs; None if they do not fit, or are not all in the class."""
        group = self._among(jobs)
        return self._runtime_s(group) if len(group) == len(jobs) and self._fits(group) else None

    def _runtime_s(self, group: Group) -> float:
        """Returns the seconds of a job alone, or of all steps of a group."""
        lead = group[0].job
        if len(group) == 1:
            return group[0].runtime_s
        profile = self.laws.profile(group, is_measured=False, at_once=self._num_that_fit(group) or None)
        return profile.runtime_s(num_steps=lead.total_steps, num_evaluations=num_evaluations(lead))

    def _measured(self) -> list[tuple[Group, Profile]]:
        every = ((group, self.results.get(name)) for name, group in self.known.items())
        return [(group, result) for group, result in every if isinstance(result, Profile)]

    def _num_that_fit(self, group: Group) -> int:
        """Returns how many jobs of a group fit at once, for any choice of them."""
        if self._fits(group):
            return len(group)
        largest_first = sorted(group, key=lambda solo: -solo.own_bytes)
        sizes = range(len(group) - 1, 0, -1)
        return next((size for size in sizes if self._fits(tuple(largest_first[:size]))), 0)

    def _may_fit(self, group: Group) -> bool:
        return group[0].base_bytes + own_bytes(group) <= self.memory_bytes

    def _fits(self, group: Group) -> bool:
        """Returns whether a group fits, as far as known. On a CPU slot only the memory that the jobs need counts."""
        unfit = [own_bytes(self.known[name]) for name, r in self.results.items() if isinstance(r, Failure)]
        if unfit and own_bytes(group) >= min(unfit):
            return False
        return self._may_fit(group) and (not self.is_gpu or self.laws.peak.at(own_bytes(group)) <= self.memory_bytes)

    def _key(self, group: Group) -> ProfileKey:
        """Returns the key under which the profile of a group is stored."""
        speed_class = digest(sorted(solo.key for solo in group))
        name = fingerprint(
            speed_class,
            technique=NAME,
            config=self.layout.config,
            num_devices=self.layout.num_devices,
            device_kind=self.device_kind,
            memory_bytes=self.memory_bytes,
        )
        return ProfileKey(fingerprint=name, speed_class=speed_class, device_kind=self.device_kind)

    def trial(self, group: Group) -> Trial:
        """Returns the trial that measures a group."""
        lead, *others = group
        return Trial(
            key=self._key(group),
            job=lead.job,
            data=lead.data,
            candidate=Candidate(
                technique=NAME,
                config=self.layout.config,
                num_devices=self.layout.num_devices,
                num_ranks=self.layout.num_devices,
                least_bytes=lead.base_bytes + own_bytes(group),
                step_s=step_s_alone(group),
            ),
            members=tuple((solo.job, solo.data) for solo in others),
        )
