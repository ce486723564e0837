"""The search for groups of one class of jobs in one layout: its trials, and the groups that it offers.

Prediction of a group's speed and memory from its jobs' own profiles and measurements of a few groups.

A step of a group S takes

    fixed_s + kappa * sum of alone_s(i) for i in S

where alone_s(i) is the time of a step of job i when it runs alone. Kernels are started, and the base's weights are
read, once for all jobs, while the arithmetic adds up. Memory is that of the base, plus an amount for each job. Both are
lines through the measurements; a job alone is a group of one. If no group was measured, fixed_s is the part of a job's
step that launches operators, as it was predicted.

On several devices alone_s(i) is the time of a step of job i alone on as many devices, with its batch divided as in the
group. Until a group was measured there, kappa is that of fewer devices: the same share of a step is paid once for all
jobs.

Profiles of groups of jobs that are trained on one base: few sizes are measured, and all others are predicted.

Each class of jobs is considered in every layout that can hold it, the plainest first: one device, then several devices
with the base whole or sharded, then all of these with recomputed activations. In the first layout in which a group
fits, one size is tried, by a thorough search up to three. A later layout offers a group only if it fits in no plainer
layout, or if it is faster than in the plainer ones and alone would take longer there than the whole class divided over
all devices. There, only a thorough search tries a size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ringmaster.codec import digest
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.profiling import group_layouts
from ringmaster.tasks.profiling.profile_store import fingerprint
from ringmaster.tasks.profiling.search import FAILED, ProfilingFailure, Result, num_evaluations
from ringmaster.tasks.profiling.trials import ProfilingTrial
from ringmaster.techniques import Profile
from ringmaster.techniques.preflight_result import Candidate
from ringmaster.techniques.profiles import PREDICTED, GroupMemberProfile, ProfileKey
from ringmaster.techniques.technique import SHARDED
from ringmaster.techniques.training.fused.group_requirements import AT_ONCE, NAME

Point = tuple[float, float]
MIN_STARTUP_S = 1e-3
# The size of the first group that is tried, if a class has so many jobs. A pair and the largest power of two follow:
# at most three trials.
FIRST_SIZE = 8
# The least number of jobs at a time in a group whose jobs take turns; one at a time is no better than without a group.
MIN_AT_ONCE = 2
MAX_SIZES = 3  # of a thorough search, in the first layout of a class


@dataclass(frozen=True)
class LinearFit:
    """The line y = `fixed` + `slope` x."""

    fixed: float
    slope: float

    def at(self, x: float) -> float:
        """Returns y at x."""
        return self.fixed + self.slope * x


def fitted(points: Sequence[Point], *, lone_slope: float) -> LinearFit:
    """Returns the least-squares line of relative errors, with a slope and an intercept of at least zero.

    lone_slope: the slope of a line through a single point, or through points of one x. All y are positive.
    """
    xs = {x for x, _ in points}
    if len(xs) == 1:
        x, y = xs.pop(), sum(y for _, y in points) / len(points)
        slope = min(lone_slope, y / x) if x else lone_slope
        return LinearFit(y - slope * x, slope)
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    xx = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = max(sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / xx, 0.0)
    if (fixed := mean_y - slope * mean_x) >= 0:
        return LinearFit(fixed, slope)
    through_zero = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True))
    return LinearFit(0.0, through_zero / sum(w * x * x for w, (x, _) in zip(weights, points, strict=True)))


@dataclass(frozen=True, kw_only=True)
class GroupScaling:
    """The fitted lines of a class of jobs.

    step: the seconds of a group's step, by the sum of its jobs' step seconds when they run alone.
    startup: the seconds of a group's start, by the number of jobs.
    peak: the bytes on a device, by the bytes that the jobs need there in addition to the base.
    layout: the layout for which the lines hold.
    """

    step: LinearFit
    startup: LinearFit
    peak: LinearFit
    layout: group_layouts.GroupLayout = group_layouts.ONE_DEVICE

    def profile(self, group: group_layouts.Group, *, is_measured: bool, at_once: int | None = None) -> Profile:
        """Returns the profile of a group; the seconds that do not depend on its members are those of the lead job.

        at_once: the number of jobs that are trained at a time. A job that joins later takes as long as one that is
            there from the start.
        """
        lead, *others = group
        ends = lead.profile
        in_turns = at_once is not None and at_once < len(group)
        largest = sorted(group, key=lambda solo: -solo.own_bytes)[:at_once]
        return Profile(
            technique=NAME,
            config={**self.layout.config, AT_ONCE: at_once} if in_turns else self.layout.config,
            num_devices=self.layout.num_devices,
            num_ranks=self.layout.num_devices,
            step_s=self.step.at(lead.profile.step_s),
            peak_bytes=int(self.peak.at(own_bytes(largest))),
            startup_s=self.startup.at(len(group)),
            save_s=ends.save_s,
            evaluate_s=ends.evaluate_s,
            export_s=ends.export_s,
            stall_s=sum(solo.stall_s for solo in group),  # all jobs are saved
            source="measured" if is_measured and not in_turns else PREDICTED,
            own_step_s=self.step.slope * lead.profile.step_s,
            members=tuple(
                GroupMemberProfile(
                    job=solo.job.name,
                    num_steps=solo.job.total_steps,
                    step_s=self.step.slope * solo.profile.step_s,
                    end_s=solo.end_s,
                )
                for solo in others
            ),
        )


def scaling_of(
    members: group_layouts.Group,
    measured: Sequence[tuple[group_layouts.Group, Profile]],
    *,
    layout: group_layouts.GroupLayout = group_layouts.ONE_DEVICE,
    kappa: float = 1.0,
) -> GroupScaling:
    """Fits the lines of a class of jobs on gangs of a layout.

    measured: groups of its jobs, with the profile that a trial measured; its step is that of the whole group.
    kappa: the slope of the step's line if nothing was measured.
    """
    alone_s = statistics.mean(solo.profile.step_s for solo in members)
    start_s = statistics.mean(solo.profile.startup_s for solo in members)
    own = statistics.mean(solo.own_bytes for solo in members)
    peak = statistics.mean(_peak_bytes(solo, layout) for solo in members)
    return GroupScaling(
        step=fitted([(alone_s, alone_s), *((step_s_alone(g), p.step_s) for g, p in measured)], lone_slope=kappa),
        startup=fitted(
            [(x, max(y, MIN_STARTUP_S)) for x, y in [(1, start_s), *((len(g), p.startup_s) for g, p in measured)]],
            lone_slope=0.0,
        ),
        peak=fitted([(own, peak), *((own_bytes(g), p.peak_bytes) for g, p in measured)], lone_slope=1.0),
        layout=layout,
    )


def step_s_alone(group: group_layouts.Group) -> float:
    """Returns the seconds of one step of each job alone, one after another."""
    return sum(solo.profile.step_s for solo in group)


def own_bytes(group: Sequence[group_layouts.SoloProfile]) -> int:
    """Returns the bytes that the jobs need in addition to the base."""
    return sum(solo.own_bytes for solo in group)


def _peak_bytes(solo: group_layouts.SoloProfile, layout: group_layouts.GroupLayout) -> int:
    """Returns the peak bytes of a group of one job.

    A profile whose step divides the batch further, or stores the base otherwise, does not show this peak.
    """
    if layout.is_of(solo.profile.config, solo.job):
        return solo.profile.peak_bytes
    needed = solo.base_bytes + solo.own_bytes
    needs_less = layout.base == SHARDED or layout.recompute == group_layouts.AGAIN
    return needed if needs_less else max(solo.profile.peak_bytes, needed)


@dataclass(kw_only=True)
class GroupSearch:
    """The trials of a class of jobs on gangs of one layout, and the profiles of its groups.

    num_devices: the devices of the whole cluster.
    device_kind, memory_bytes: those of one device.
    is_gpu: whether a trial measures the memory of the device, and not that of a process with all its libraries.
    plainer: searches in plainer layouts for some of the same jobs, the plainest first.
    """

    members: group_layouts.Group
    num_devices: int
    device_kind: str
    memory_bytes: int
    is_gpu: bool
    layout: group_layouts.GroupLayout = group_layouts.ONE_DEVICE
    plainer: Sequence[GroupSearch] = ()
    results: dict[str, Result] = field(default_factory=dict)

    @cached_property
    def first(self) -> GroupSearch:
        """The search in the plainest layout in which a group of these jobs fits; this one, if no plainer one does."""
        return next((search for search in self.plainer if search.tried), self)

    @cached_property
    def tried(self) -> dict[str, group_layouts.Group]:
        """The groups that may be tried, by fingerprint. Their sizes also occur in the classes of other batches."""
        largest = 2 ** (min(len(self.members), group_layouts.MAX_TOGETHER).bit_length() - 1)
        sizes = [min(FIRST_SIZE, largest), 2, largest]  # the most informative first, as often only that one is tried
        if any(search.tried for search in self.plainer):
            sizes = sizes[:1]
        groups = (group_layouts.sample(self.members, size) for size in dict.fromkeys(sizes))
        return {self._key(group).fingerprint: group for group in groups if self._may_fit(group)}

    @property
    def may_be_tried(self) -> bool:
        """Whether a trial in this layout is worth making; in the first layout it always is."""
        return self.first is self or (self.first.is_sound and bool(self.sorted_out()[0]))

    @property
    def num_slots(self) -> int:
        """The number of gangs that the devices can hold at once."""
        return max(1, self.num_devices // self.layout.num_devices)

    def wanted(self, results: Mapping[str, Result], *, most: int) -> list[ProfilingTrial]:
        """Returns the first trials without a known result, so that no more than `most` groups are known then."""
        num_known = sum(name in results for name in self.known)
        left = [group for name, group in self.tried.items() if name not in results]
        return [self.trial(group) for group in left[: max(most - num_known, 0)]]

    @cached_property
    def known(self) -> dict[str, group_layouts.Group]:
        """The groups that may have been measured, by fingerprint: by a trial, or while a batch trained them."""
        groups = group_layouts.candidate_groups(self.members, num_devices=self.num_slots) if self.tried else ()
        return {self._key(group).fingerprint: group for group in groups} | self.tried

    def take(self, results: Mapping[str, Result]) -> None:
        """Takes the known results of its groups."""
        self.results = {name: results[name] for name in self.known if name in results}
        self.__dict__.pop("laws", None)  # computed from the results

    @property
    def is_sound(self) -> bool:
        """Whether a group of it was measured, and no trial failed except for lack of memory."""
        return bool(self._measured()) and self.fault is None

    @property
    def fault(self) -> str | None:
        """The reason why no group of this class is offered: a trial has failed, and so might a gang."""
        return next(
            (r.message for r in self.results.values() if isinstance(r, ProfilingFailure) and r.kind == FAILED), None
        )

    @cached_property
    def laws(self) -> GroupScaling:
        """The fitted lines, as far as trials have measured them."""
        if self.first is self:
            kappa = 1 - statistics.mean(solo.launch_share for solo in self.members)
        else:
            kappa = self.first.laws.step.slope
        return scaling_of(self.members, self._measured(), layout=self.layout, kappa=kappa)

    def fair_s(self, names: Collection[str] | None = None) -> float:
        """Returns the seconds for which the class, or its named jobs, occupies all devices if divided evenly."""
        return (
            sum(self._runtime_s(part) for part in group_layouts.even_parts(self._among(names), self.num_slots))
            / self.num_slots
        )

    def has_any(self, groups: Mapping[str, Sequence[Profile]]) -> bool:
        """Returns whether any of these profiles, by lead job, is of a group of this class in this layout."""
        own_profiles = (profile for solo in self.members for profile in groups.get(solo.job.name, ()))
        return any(
            p.num_devices == self.layout.num_devices and self.layout.config.items() <= p.config.items()
            for p in own_profiles
        )

    def sorted_out(
        self, names: Collection[str] | None = None
    ) -> tuple[list[tuple[str, Profile]], list[group_layouts.Group]]:
        """Returns profiles of the groups worth planning, by lead job, and the groups that do not fit at once.

        In a group that does not fit, as many jobs as fit are trained at a time, in the plainest layout that holds more
        than one.

        names: the jobs of the batch, if they are not all of the class.
        """
        sizes = {len(group) for group, _ in self._measured()}
        fair_s = self.first.fair_s(names)
        offered: list[tuple[str, Profile]] = []
        too_large: list[group_layouts.Group] = []
        for group in group_layouts.candidate_groups(self._among(names), num_devices=self.num_slots):
            at_once = self._num_that_fit(group)
            if at_once < len(group):
                too_large.append(group)
            may_wait = self.first is self and at_once >= MIN_AT_ONCE
            if (may_wait or at_once == len(group)) and self._is_worth_it(group, fair_s):
                profile = self.laws.profile(group, is_measured=len(group) in sizes, at_once=at_once)
                if at_once == len(group):  # how long turns take depends on the steps of the jobs
                    profile = replace(profile, key=self._key(group), predicted_step_s=step_s_alone(group))
                offered.append((group[0].job.name, profile))
        return offered, too_large

    def _among(self, names: Collection[str] | None) -> group_layouts.Group:
        return self.members if names is None else tuple(solo for solo in self.members if solo.job.name in names)

    def _is_worth_it(self, group: group_layouts.Group, fair_s: float) -> bool:
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

    def _runtime_s(self, group: group_layouts.Group) -> float:
        """Returns the seconds of a job alone, or of all steps of a group."""
        lead = group[0].job
        if len(group) == 1:
            return group[0].runtime_s
        profile = self.laws.profile(group, is_measured=False, at_once=self._num_that_fit(group) or None)
        return profile.runtime_s(num_steps=lead.total_steps, num_evaluations=num_evaluations(lead))

    def _measured(self) -> list[tuple[group_layouts.Group, Profile]]:
        every = ((group, self.results.get(name)) for name, group in self.known.items())
        return [(group, result) for group, result in every if isinstance(result, Profile)]

    def _num_that_fit(self, group: group_layouts.Group) -> int:
        """Returns how many jobs of a group fit at once, for any choice of them."""
        if self._fits(group):
            return len(group)
        largest_first = sorted(group, key=lambda solo: -solo.own_bytes)
        sizes = range(len(group) - 1, 0, -1)
        return next((size for size in sizes if self._fits(tuple(largest_first[:size]))), 0)

    def _may_fit(self, group: group_layouts.Group) -> bool:
        return group[0].base_bytes + own_bytes(group) <= self.memory_bytes

    def _fits(self, group: group_layouts.Group) -> bool:
        """Returns whether a group fits, as far as known. On a CPU slot only the memory that the jobs need counts."""
        unfit = [own_bytes(self.known[name]) for name, r in self.results.items() if isinstance(r, ProfilingFailure)]
        if unfit and own_bytes(group) >= min(unfit):
            return False
        return self._may_fit(group) and (not self.is_gpu or self.laws.peak.at(own_bytes(group)) <= self.memory_bytes)

    def _key(self, group: group_layouts.Group) -> ProfileKey:
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

    def trial(self, group: group_layouts.Group) -> ProfilingTrial:
        """Returns the trial that measures a group."""
        lead, *others = group
        return ProfilingTrial(
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


def group_searches(
    classes: Mapping[group_layouts.GroupLayout, Sequence[group_layouts.Group]], *, cluster: Cluster, num_nodes: int
) -> list[GroupSearch]:
    """Returns a search for each class of jobs in each layout, the plainest layouts first.

    classes: by layout, in the order of the layouts.
    num_nodes: the number of nodes that are like the cluster's first one.
    """
    devices = cluster.nodes[0].devices
    searches: list[GroupSearch] = []
    for layout, members in ((layout, members) for layout, groups in classes.items() for members in groups):
        names = {solo.job.name for solo in members}
        plainer = [s for s in searches if s.layout != layout and any(solo.job.name in names for solo in s.members)]
        searches.append(
            GroupSearch(
                members=members,
                num_devices=max(len(cluster.devices), len(devices) * num_nodes),
                device_kind=cluster.device_kind(),
                memory_bytes=min(device.memory_bytes for device in cluster.devices),
                is_gpu=devices[0].kind == "gpu",
                layout=layout,
                plainer=plainer,
            )
        )
    return searches


def group_profiles(
    searches: Sequence[GroupSearch],
    *,
    num_jobs: int,
    find: Callable[[Sequence[str]], Mapping[str, Result]],
    measure: Callable[[Sequence[ProfilingTrial]], Mapping[str, Result]] | None,
    notice: Callable[[str], None],
) -> dict[str, tuple[Profile, ...]]:
    """Returns profiles of groups, by lead job.

    num_jobs: the number of jobs in the batch.
    find: returns what earlier batches measured, by fingerprint.
    measure: makes trials; None if no trials may be made.
    """
    names = [name for search in searches for name in search.known]
    known = dict(find(names)) if names else {}
    _take(searches, known)
    if measure is not None:
        # If the devices suffice for a gang per job, running the jobs side by side is as good as a group.
        _try([search for search in searches if num_jobs > search.first.num_slots], known, measure)
        _take(searches, known)
    groups: dict[str, tuple[Profile, ...]] = {}
    fewest: dict[str, float] = {}
    for search in searches:
        if search.fault is not None:
            where = "" if search.first is search else f" on {search.layout}"
            notice(f"{_names(search)} are not trained together{where}, as a trial failed: {search.fault}")
        if any(each.fault is not None for each in (search, *search.plainer)):
            continue
        offered, too_large = search.sorted_out()
        of_all = _names(search.plainer[0] if search.plainer else search)
        fewest[of_all] = max(fewest.get(of_all, 0), min(map(len, too_large), default=math.inf))
        _add(groups, offered)
    for of_all, number in fewest.items():
        if number < math.inf:
            notice(f"{of_all} are not trained {number} or more together: a device has too little memory")
    return groups


def groups_among(names: Collection[str], searches: Sequence[GroupSearch]) -> dict[str, tuple[Profile, ...]]:
    """Returns the result of `group_profiles` on the same measurements if `names` were all the jobs of the batch."""
    groups: dict[str, tuple[Profile, ...]] = {}
    for search in searches:
        _add(groups, search.sorted_out(names)[0])
    return groups


def _add(groups: dict[str, tuple[Profile, ...]], offered: Sequence[tuple[str, Profile]]) -> None:
    for lead, profile in offered:
        groups[lead] = (*groups.get(lead, ()), profile)


def _take(searches: Sequence[GroupSearch], results: Mapping[str, Result]) -> None:
    for search in searches:
        search.take(results)


def _try(
    searches: Sequence[GroupSearch],
    results: dict[str, Result],
    measure: Callable[[Sequence[ProfilingTrial]], Mapping[str, Result]],
) -> None:
    """Makes the trials of the first layouts, then those of other layouts that are worth one; adds their results."""
    for is_first in (True, False):
        chosen = [s for s in searches if (s.first is s) is is_first and s.may_be_tried]
        trials = {trial.fingerprint: trial for search in chosen for trial in search.wanted(results, most=MAX_SIZES)}
        if trials:
            results |= measure(list(trials.values()))
        _take(searches, results)


def _names(search: GroupSearch) -> str:
    first, *others = search.members
    return f"{first.job.name} and the {len(others)} like it" if others else first.job.name
