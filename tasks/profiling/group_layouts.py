"""Layouts of a group on its gang: number of devices, base whole or sharded, activations stored or recomputed.

On several devices each job's batch is divided, so that a group behaves like its jobs alone under data parallelism. The
jobs' own profiles under data parallelism therefore predict the group.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from ringmaster.codec import digest
from ringmaster.tasks.profiling.search import num_evaluations
from ringmaster.techniques import Job, Profile, registry
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.preflight_result import Candidate, Preflight
from ringmaster.techniques.technique import GRADIENT_BYTES, OPTIMIZER_STATE_BYTES, SHARDED, WEIGHT_BYTES, WHOLE
from ringmaster.techniques.training.fused.group_requirements import grouping_obstacle

KEPT, AGAIN = "none", "full"
# The usual slowdown of a step by recomputation: of three passes of equal work, one is computed twice.
LONGER = 4 / 3

MAX_TOGETHER = 32


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """A number of devices, and how the base is stored on them: `whole` on each, or `sharded` by layers.

    recompute: "none" if the layers' activations are stored, or "full" if they are recomputed.
    """

    num_devices: int = 1
    base: str = WHOLE
    recompute: str = KEPT

    @property
    def config(self) -> dict[str, Any]:
        """The config of the technique `shared_base` for this layout."""
        return {"recompute": self.recompute} | ({} if self.num_devices == 1 else {"base": self.base})

    def profile(self, job: Job, preflight: Preflight, profiles: Sequence[Profile]) -> Profile | None:
        """Returns the fastest of a job's own profiles that is like this layout; None if the job cannot run alone on it.

        If only other techniques were measured on as many devices, it is the fastest of those, with the step time
        predicted for a technique like this layout. If only stored activations were measured, the step is longer by the
        predicted factor.
        """
        if self.recompute == AGAIN:
            return self._computed_again(job, preflight, profiles)
        here = [p for p in profiles if p.num_devices == self.num_devices and p.num_nodes == 1]
        alike = [p for p in here if self._is_like(p.technique)]
        if alike or not here:
            return min(alike, key=_step_s, default=None)
        fastest, foretold_s = min(here, key=_step_s), self._foretold_s(job, preflight)
        return fastest if foretold_s is None else replace(fastest, step_s=foretold_s)

    def _computed_again(self, job: Job, preflight: Preflight, profiles: Sequence[Profile]) -> Profile | None:
        measured = [p for p in profiles if p.num_nodes == 1 and self.is_of(p.config, job)]
        alike = [p for p in measured if p.num_devices == self.num_devices and self._is_like(p.technique)]
        kept = replace(self, recompute=KEPT)
        if alike or (fastest := kept.profile(job, preflight, profiles)) is None:
            return min(alike, key=_step_s, default=None)
        again_s, kept_s = self._foretold_s(job, preflight), kept._foretold_s(job, preflight)
        return replace(fastest, step_s=fastest.step_s * (max(again_s / kept_s, 1.0) if again_s and kept_s else LONGER))

    def _is_like(self, technique: str) -> bool:
        if self.num_devices == 1:
            return True
        path = registry.TECHNIQUES.paths().get(technique)  # None of a technique that is no longer installed
        return path is not None and registry.load(path).base_of_group == self.base

    def _foretold_s(self, job: Job, preflight: Preflight) -> float | None:
        candidate = self.candidate(job, preflight)
        return None if candidate is None else candidate.step_s

    def base_bytes(self, facts: ModelFacts) -> int:
        """Returns the bytes of the base's weights on each device.

        A sharded base needs its share, and the layers that are gathered.

        facts: of the model, whose parameters include those of an adapter.
        """
        whole = facts.parameter_bytes
        return whole if self.base == WHOLE else whole // self.num_devices + min(2 * facts.largest_layer_bytes, whole)

    def own_bytes(self, job: Job, preflight: Preflight) -> int | None:
        """Returns the bytes on each device in addition to the base; None if a device has too little memory.

        They are those of the adapter, its training state and the activations of the job's batch. The batch is divided
        over the devices and no further.
        """
        if (candidate := self.candidate(job, preflight)) is None:
            return None
        needed = candidate.least_bytes if candidate.memory is None else candidate.memory.device_bytes
        own = needed - self.base_bytes(preflight.facts)
        if self.base == SHARDED:  # a job that runs alone has its adapter sharded too
            state = WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_STATE_BYTES[job.optimizer.name]
            own += (preflight.facts.num_trained or 0) * state * (self.num_devices - 1) // self.num_devices
        return max(own, 1)

    def is_of(self, config: Mapping[str, Any], job: Job) -> bool:
        """Returns whether a job's own config matches this layout.

        Such a config computes its share of the batch at once, and treats the activations and the base as this layout
        does.
        """
        if config.get("recompute", KEPT) != self.recompute or "micro_batch" not in config:
            return False
        if self.base == SHARDED and (not config.get("reshard") or {"num_replicas", "offload"} & set(config)):
            return False
        return bool(config["micro_batch"] * self.num_devices == job.global_batch_size)

    def candidate(self, job: Job, preflight: Preflight) -> Candidate | None:
        """Returns the job's own option that is like this layout, or None where the preflight has none."""
        return next(
            (
                each
                for each in preflight.candidates
                if each.num_devices == self.num_devices
                and self._is_like(each.technique)
                and self.is_of(each.config, job)
            ),
            None,
        )

    def __str__(self) -> str:
        """Returns a readable description."""
        devices = "one device" if self.num_devices == 1 else f"{self.num_devices} devices"
        divided = ", the base divided" if self.base == SHARDED else ""
        return devices + divided + (", activations computed again" if self.recompute == AGAIN else "")


ONE_DEVICE = GroupLayout()


def layouts(num_devices: int) -> list[GroupLayout]:
    """Returns the layouts to try on a node of so many devices: 1, 2, 4, ... devices, and all.

    Layouts with the least communication come first. Layouts that recompute activations come last, as they are used only
    if memory requires it.
    """
    sizes = sorted({2**power for power in range(num_devices.bit_length())} | {num_devices})
    several = [GroupLayout(num_devices=size, base=base) for size in sizes if size > 1 for base in (WHOLE, SHARDED)]
    kept = [ONE_DEVICE, *several]
    return [*kept, *(replace(layout, recompute=AGAIN) for layout in kept)]


def _step_s(profile: Profile) -> float:
    return profile.step_s


@dataclass(frozen=True, kw_only=True)
class SoloProfile:
    """A job that can be in a group, and its properties when it runs alone on as many devices.

    data: the JSON form of its prepared data.
    key: equal for jobs that cannot differ in speed.
    profile: its fastest profile.
    base_bytes: the bytes of the base model's weights on each device.
    own_bytes: the bytes on each device in addition to the base: the adapter, its training state and the activations of
        its batch, which a group does not divide any further.
    launch_share: the predicted part of its step that launches operators, whatever the rows.
    """

    job: Job
    data: Mapping[str, Any]
    key: str
    profile: Profile
    base_bytes: int
    own_bytes: int
    launch_share: float = 0.0

    @property
    def end_s(self) -> float:
        """The seconds of the job's last checkpoint, all its evaluations and its export."""
        return self.profile.save_s + num_evaluations(self.job) * self.profile.evaluate_s + self.profile.export_s

    @property
    def stall_s(self) -> float:
        """The seconds for which a checkpoint during training delays the job."""
        return self.profile.save_s if self.profile.stall_s is None else self.profile.stall_s

    @property
    def runtime_s(self) -> float:
        """The seconds of the whole job when it runs alone."""
        return self.profile.startup_s + self.job.total_steps * self.profile.step_s + self.end_s


Group = tuple[SoloProfile, ...]
"""Jobs that one gang would train. The first one, which has the most steps, is the lead job."""


def classes(
    jobs: Sequence[Job],
    preflights: Mapping[str, Preflight],
    profiles: Mapping[str, Sequence[Profile]],
    *,
    keys: Mapping[str, str],
    layout: GroupLayout = ONE_DEVICE,
) -> list[Group]:
    """Returns the classes of at least two jobs that can be trained together, sorted by steps and similarity.

    A job whose parents are trained in the same batch is in no class, because its base does not exist yet.

    keys: the speed key of each job.
    layout: the layout of their gang. Their batches must be divisible among its devices.
    """
    names = {job.name for job in jobs}
    by_base: dict[str, list[list[SoloProfile]]] = {}
    for job in jobs:
        preflight = preflights[job.name]
        facts = preflight.facts
        if not profiles[job.name] or not _may_join(job, names, num_devices=layout.num_devices):
            continue
        if grouping_obstacle([job], facts, num_ranks=layout.num_devices):
            continue
        if (solo := _solo(job, preflight, profiles[job.name], key=keys[job.name], layout=layout)) is None:
            continue
        alike = by_base.setdefault(digest([job.model, job.base]), [])
        home = next((each for each in alike if not grouping_obstacle([each[0].job, job], facts)), None)
        if home is None:
            alike.append([solo])
        else:
            home.append(solo)
    every = [each for alike in by_base.values() for each in alike]
    return [tuple(sorted(each, key=_by_steps_and_likeness)) for each in every if len(each) > 1]


def candidate_groups(members: Group, *, num_devices: int) -> list[Group]:
    """Returns groups of neighbours in a class: for n jobs on m devices at most about 2 n groups, not all 2^n.

    The groups are: all jobs in one; as many equal parts as there are devices, by number and by work; and pairs, fours,
    eights, ...; none with more than `MAX_TOGETHER` jobs.
    """
    if (n := len(members)) < 2:
        return []
    even = num_devices * math.ceil(n / (num_devices * MAX_TOGETHER))
    counts = {math.ceil(n / MAX_TOGETHER), even}
    counts |= {math.ceil(n / 2**power) for power in range(1, MAX_TOGETHER.bit_length())}
    work = list(accumulate(solo.job.total_steps * solo.profile.step_s for solo in members))
    groups: dict[tuple[str, ...], Group] = {}
    for group in (
        *(part for count in sorted(counts) for part in _parts(members, range(1, n + 1), count)),
        *_parts(members, work, even),
    ):
        if 1 < len(group) <= MAX_TOGETHER:
            groups.setdefault(tuple(solo.job.name for solo in group), group)
    return list(groups.values())


def sample(members: Group, size: int) -> Group:
    """Returns the first `size` jobs of a class, in which each kind of adapter has the same share as in the class."""
    kinds: dict[str, list[int]] = {}
    for i, solo in enumerate(members):
        assert solo.job.adapter is not None
        kinds.setdefault(solo.job.adapter.kind, []).append(i)
    by_share = sorted(((n + 0.5) / len(indices), i) for indices in kinds.values() for n, i in enumerate(indices))
    return tuple(members[i] for i in sorted(i for _, i in by_share[:size]))


def even_parts(members: Group, count: int) -> list[Group]:
    """Returns consecutive parts of about as many members, none of them empty."""
    return [part for part in _parts(members, range(1, len(members) + 1), count) if part] if members else []


def _parts(members: Group, measure: Sequence[float], count: int) -> Iterator[Group]:
    """Yields consecutive parts of about equal measure. measure: the cumulative sums over the members."""
    ends = [bisect_right(measure, measure[-1] * i / count * (1 + 1e-9)) for i in range(count + 1)]
    for start, stop in pairwise(ends):
        yield members[start:stop]


def _may_join(job: Job, names: Collection[str], *, num_devices: int) -> bool:
    """Returns whether a job may run on so many devices, on a base that exists before the batch begins."""
    if job.adapter is None or any(parent in names for parent in job.parents):
        return False
    return job.num_devices is None or num_devices in job.num_devices


def _solo(
    job: Job, preflight: Preflight, profiles: Sequence[Profile], *, key: str, layout: GroupLayout
) -> SoloProfile | None:
    """Returns None if such devices cannot train the job, or not its whole batch at once."""
    profile, own_bytes = layout.profile(job, preflight, profiles), layout.own_bytes(job, preflight)
    if profile is None or own_bytes is None:
        return None
    return SoloProfile(
        job=job,
        data=preflight.data,
        key=key,
        profile=profile,
        base_bytes=layout.base_bytes(preflight.facts),
        own_bytes=own_bytes,
        launch_share=candidate.launch_share if (candidate := layout.candidate(job, preflight)) else 0.0,
    )


def _by_steps_and_likeness(solo: SoloProfile) -> tuple[Any, ...]:
    """Sorts similar jobs next to each other, because adapters of one shape are computed side by side."""
    job = solo.job
    assert job.adapter is not None
    adapter = job.adapter
    return (-job.total_steps, job.data.seq_len or 0, job.global_batch_size, adapter.kind, adapter.rank, solo.key)
