"""Profiles of groups that are trained on one base: a few sizes are tried, and all others are predicted from those.

Each class of jobs is looked at in every layout that can hold it, the plainest first: one device, then several with the
base whole on each or divided, then all of these with activations that are computed again. The first layout in which a
group fits is tried in up to three sizes. Of each later one groups are offered that fit in no plainer layout, or are
quicker than in one where they alone would take longer than the whole class divided over all devices; one size is tried
where there are such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.profiling.group_search import GroupSearch
from ringmaster.tasks.profiling.grouping import Group
from ringmaster.tasks.profiling.layouts import Layout
from ringmaster.tasks.profiling.search import Result
from ringmaster.tasks.profiling.trials import Trial
from ringmaster.techniques import Profile


def group_searches(classes: Mapping[Layout, Sequence[Group]], *, cluster: Cluster, num_nodes: int) -> list[GroupSearch]:
    """A search for each class of jobs in each layout, the plainest layouts first.

    classes: by layout, which come in that order. num_nodes: that are like the cluster's first one.
    """
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
    """Profiles of groups, by the job that would lead each.

    num_jobs: of the batch. find: what earlier batches measured, by fingerprint. measure: carries trials out; None where
    nothing may be tried.
    """
    names = [name for search in searches for name in search.tried]
    found = dict(find(names)) if names else {}
    _take(searches, found)
    if measure is not None:
        # Where every gang has devices to itself, side by side is as good.
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
    """What `group_profiles` would give, by the same measurements, if these were all the jobs that there are."""
    groups: dict[str, tuple[Profile, ...]] = {}
    for search in searches:
        _add(groups, search.sorted_out(names)[0])
    return groups


def _add(groups: dict[str, tuple[Profile, ...]], offered: Sequence[tuple[str, Profile]]) -> None:
    for leader, profile in offered:
        groups[leader] = (*groups.get(leader, ()), profile)


def _take(searches: Sequence[GroupSearch], found: Mapping[str, Result]) -> None:
    for search in searches:
        search.take(found)


def _try(
    searches: Sequence[GroupSearch],
    found: dict[str, Result],
    measure: Callable[[Sequence[Trial]], Mapping[str, Result]],
) -> None:
    """Makes the trials of the first layouts, and then those of others that are worth one; adds what they find."""
    left_s = {id(search.first): search.first.budget_s for search in searches}
    for is_first in (True, False):
        wanted: dict[str, Trial] = {}
        for search in searches:
            if (search.first is search) is is_first and search.may_be_tried:
                trials, left_s[id(search.first)] = search.affordable(found, budget_s=left_s[id(search.first)])
                wanted |= {trial.fingerprint: trial for trial in trials}
        if wanted:
            found |= measure(list(wanted.values()))
        _take(searches, found)


def _names(search: GroupSearch) -> str:
    first, *others = search.members
    return f"{first.job.name} and the {len(others)} like it" if others else first.job.name
