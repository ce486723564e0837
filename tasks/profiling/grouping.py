"""Which jobs of a batch can be trained together on one base, and which groups of them are worth planning with."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

from ringmaster.tasks.profiling.layouts import ONE_DEVICE, Layout
from ringmaster.tasks.profiling.options import num_evaluations
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.shared_base import why_not_together
from ringmaster.techniques.surveys import Survey
from ringmaster.techniques.values import digest

MOST_TOGETHER = 32


@dataclass(frozen=True, kw_only=True)
class Solo:
    """A job that may be in a group, and what is known of it alone on as many devices.

    data: the JSON form of its prepared data. key: equal for jobs that cannot differ in speed. profile: the fastest.
    base_bytes: on each device, of the model's weights. own_bytes: beside them, of the adapter, its training state and
        the activations of its batch, which a group does not divide any further.
    """

    job: Job
    data: Mapping[str, Any]
    key: str
    profile: Profile
    base_bytes: int
    own_bytes: int

    @property
    def end_s(self) -> float:
        """Seconds of its last checkpoint, all its evaluations and its export."""
        return self.profile.save_s + num_evaluations(self.job) * self.profile.evaluate_s + self.profile.export_s

    @property
    def stall_s(self) -> float:
        """Seconds for which a checkpoint on the way holds it up."""
        return self.profile.save_s if self.profile.stall_s is None else self.profile.stall_s

    @property
    def runtime_s(self) -> float:
        """Seconds of the whole job, by itself."""
        return self.profile.startup_s + self.job.total_steps * self.profile.step_s + self.end_s


Group = tuple[Solo, ...]
"""Jobs that one gang would train; the first one leads, which has the most steps."""


def classes(
    jobs: Sequence[Job],
    surveys: Mapping[str, Survey],
    profiles: Mapping[str, Sequence[Profile]],
    *,
    keys: Mapping[str, str],
    layout: Layout = ONE_DEVICE,
) -> list[Group]:
    """The jobs that can be trained together, two at least in each class; the most steps first, likes side by side.

    keys: of speed, by job. layout: of their gang, which their batches must be divisible for. A job whose parents are
    trained in the same batch is in none: its base is not there yet.
    """
    names = {job.name for job in jobs}
    by_base: dict[str, list[list[Solo]]] = {}
    for job in jobs:
        survey = surveys[job.name]
        # ModelFacts itself would need torch; its JSON form leaves out what came later, where that is at its default.
        facts: Any = SimpleNamespace(
            **{"has_experts": False, "undivided": "", "computes_loss": False, "whole_batch": "", **survey.facts}
        )
        if not profiles[job.name] or not _may_join(job, names, num_devices=layout.num_devices):
            continue
        if why_not_together([job], facts, num_ranks=layout.num_devices):
            continue
        if (solo := _solo(job, survey, profiles[job.name], key=keys[job.name], layout=layout)) is None:
            continue
        found = by_base.setdefault(digest([job.model, job.base]), [])
        home = next((each for each in found if not why_not_together([each[0].job, job], facts)), None)
        if home is None:
            found.append([solo])
        else:
            home.append(solo)
    every = [each for found in by_base.values() for each in found]
    return [tuple(sorted(each, key=_by_steps_and_likeness)) for each in every if len(each) > 1]


def candidate_groups(members: Group, *, num_devices: int) -> list[Group]:
    """Groups of neighbours in a class: of n jobs on m devices at most about 2 n of them, not all 2^n.

    All in one; as many equal parts as there are devices, by number and by work; and pairs, fours, eights, ...; none of
    more than `MOST_TOGETHER`.
    """
    if (n := len(members)) < 2:
        return []
    even = num_devices * math.ceil(n / (num_devices * MOST_TOGETHER))
    counts = {math.ceil(n / MOST_TOGETHER), even}
    counts |= {math.ceil(n / 2**power) for power in range(1, MOST_TOGETHER.bit_length())}
    work = list(accumulate(solo.job.total_steps * solo.profile.step_s for solo in members))
    found: dict[tuple[str, ...], Group] = {}
    for group in (
        *(part for count in sorted(counts) for part in _parts(members, range(1, n + 1), count)),
        *_parts(members, work, even),
    ):
        if 1 < len(group) <= MOST_TOGETHER:
            found.setdefault(tuple(solo.job.name for solo in group), group)
    return list(found.values())


def sample(members: Group, size: int) -> Group:
    """The first `size` of a class, with as large a share of each kind of adapter as the class has."""
    kinds: dict[str, list[int]] = {}
    for i, solo in enumerate(members):
        assert solo.job.adapter is not None
        kinds.setdefault(solo.job.adapter.kind, []).append(i)
    by_share = sorted(((n + 0.5) / len(mine), i) for mine in kinds.values() for n, i in enumerate(mine))
    return tuple(members[i] for i in sorted(i for _, i in by_share[:size]))


def even_parts(members: Group, count: int) -> list[Group]:
    """Consecutive parts of about as many members, none of them empty."""
    return [part for part in _parts(members, range(1, len(members) + 1), count) if part] if members else []


def _parts(members: Group, measure: Sequence[float], count: int) -> Iterator[Group]:
    """Consecutive parts of about equal measure; measure: of each member and all before it, summed up."""
    ends = [bisect_right(measure, measure[-1] * i / count * (1 + 1e-9)) for i in range(count + 1)]
    for start, stop in pairwise(ends):
        yield members[start:stop]


def _may_join(job: Job, names: Collection[str], *, num_devices: int) -> bool:
    """Whether it may run on so many devices, on a base that is there before the batch begins."""
    if job.adapter is None or any(parent in names for parent in job.parents):
        return False
    return job.num_devices is None or num_devices in job.num_devices


def _solo(job: Job, survey: Survey, profiles: Sequence[Profile], *, key: str, layout: Layout) -> Solo | None:
    """None where such devices cannot train the job, or not its whole batch at once."""
    profile, own_bytes = layout.profile(job, survey, profiles), layout.own_bytes(job, survey)
    if profile is None or own_bytes is None:
        return None
    return Solo(
        job=job,
        data=survey.data,
        key=key,
        profile=profile,
        base_bytes=layout.base_bytes(survey.facts),
        own_bytes=own_bytes,
    )


def _by_steps_and_likeness(solo: Solo) -> tuple[Any, ...]:
    """Adapters of one shape are computed side by side, so that neighbours should be alike."""
    job = solo.job
    assert job.adapter is not None
    adapter = job.adapter
    return (-job.total_steps, job.data.seq_len or 0, job.global_batch_size, adapter.kind, adapter.rank, solo.key)
