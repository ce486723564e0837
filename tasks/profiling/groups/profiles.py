"""Profiles of groups of jobs that are trained on one base: few sizes are measured, and all others are predicted.

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

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.profiling.groups.candidates import Group
from ringmaster.tasks.profiling.groups.layouts import Layout
from ringmaster.tasks.profiling.groups.search import GroupSearch
from ringmaster.tasks.profiling.search import Result
from ringmaster.tasks.profiling.trials import Trial
from ringmaster.techniques import Profile
from ringmaster.techniques.training.fused.group_requirements import NAME

MOST_SIZES = 3  # of a thorough search, in the first layout of a class


def group_searches(
    classes: Mapping[Layout, Sequence[Group]], *, cluster: Cluster, num_nodes: int, newest: Sequence[Profile] = ()
) -> list[GroupSearch]:
    """Returns a search for each class of jobs in each layout, the plainest layouts first.

    classes: by layout, in the order of the layouts.
    num_nodes: the number of nodes that are like the cluster's first one.
    newest: measurements of earlier runs: groups of other jobs say what a group saves as long as none of these was
        measured.
    """
    ratios = [
        profile.step_s / profile.predicted_step_s
        for profile in newest
        if profile.technique == NAME and profile.predicted_step_s
        if profile.key is not None and profile.key.device_kind == cluster.device_kind()
    ]
    kappa = min(statistics.median(ratios), 1.0) if ratios else 1.0
    devices = cluster.nodes[0].devices
    searches: list[GroupSearch] = []
    for layout, members in ((layout, members) for layout, mine in classes.items() for members in mine):
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
                kappa=kappa,
            )
        )
    return searches


def group_profiles(
    searches: Sequence[GroupSearch],
    *,
    num_jobs: int,
    find: Callable[[Sequence[str]], Mapping[str, Result]],
    measure: Callable[[Sequence[Trial]], Mapping[str, Result]] | None,
    notice: Callable[[str], None],
) -> dict[str, tuple[Profile, ...]]:
    """Returns profiles of groups, by lead job.

    num_jobs: the number of jobs in the batch.
    find: returns what earlier batches measured, by fingerprint.
    measure: makes trials; None if no trials may be made.
    """
    names = [name for search in searches for name in search.known]
    found = dict(find(names)) if names else {}
    _take(searches, found)
    if measure is not None:
        # If the devices suffice for a gang per job, running the jobs side by side is as good as a group.
        _try([search for search in searches if num_jobs > search.first.num_slots], found, measure)
        _take(searches, found)
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


def _take(searches: Sequence[GroupSearch], found: Mapping[str, Result]) -> None:
    for search in searches:
        search.take(found)


def _try(
    searches: Sequence[GroupSearch],
    found: dict[str, Result],
    measure: Callable[[Sequence[Trial]], Mapping[str, Result]],
) -> None:
    """Makes the trials of the first layouts, then those of other layouts that are worth one; adds their results."""
    for is_first in (True, False):
        chosen = [s for s in searches if (s.first is s) is is_first and s.may_be_tried]
        trials = {trial.fingerprint: trial for search in chosen for trial in search.wanted(found, most=MOST_SIZES)}
        if trials:
            found |= measure(list(trials.values()))
        _take(searches, found)


def _names(search: GroupSearch) -> str:
    first, *others = search.members
    return f"{first.job.name} and the {len(others)} like it" if others else first.job.name
