"""The profiling stage: runs the preflight of all jobs, reuses known measurements, and makes trials for the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.profiling.budget import TrialBudget, predicted_batch_s
from ringmaster.tasks.profiling.fingerprint import fingerprint, speed_key, technique_code
from ringmaster.tasks.profiling.groups.candidates import Group, classes
from ringmaster.tasks.profiling.groups.layouts import Layout, layouts
from ringmaster.tasks.profiling.groups.profiles import group_profiles, group_searches, groups_among
from ringmaster.tasks.profiling.lending import Lend
from ringmaster.tasks.profiling.over_nodes import foretold, predicted_profiles, shapes_over_nodes
from ringmaster.tasks.profiling.preflight import Failed, Notice, data_lines, preflight_jobs, resolve_steps, untold
from ringmaster.tasks.profiling.reasons import why_nothing_fits
from ringmaster.tasks.profiling.search import (
    LONG_STEPS,
    ConfigSearch,
    quickest_looking_first,
)
from ringmaster.tasks.profiling.trial_runner import ProfileStore, TrialRunner, run_trials, take_known
from ringmaster.tasks.profiling.trials import TrialEnvironment, gang_shape
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.interface.preflight import Preflight
from ringmaster.techniques.interface.values import to_json


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """The result of the profiling stage.

    jobs: the jobs, with epochs resolved into steps.
    preflights: the preflight of each job, by job name.
    profiles: by job name; none for a job that nothing can train.
    groups: by lead job, the profiles of jobs that can be trained together on one base. They are in addition to
        `profiles`.
    faults: by job name, why it cannot be trained.
    num_trials: the number of trials that were made.
    """

    jobs: tuple[Job, ...]
    preflights: Mapping[str, Preflight]
    profiles: Mapping[str, tuple[Profile, ...]]
    groups: Mapping[str, tuple[Profile, ...]] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    num_trials: int = 0

    @property
    def unfit(self) -> tuple[str, ...]:
        """The jobs that cannot take a step, whatever the devices: their data, model or settings are at fault."""
        return tuple(job for job in self.faults if job not in self.preflights)

    def refused(self, job: str) -> list[dict[str, Any]]:
        """Returns the options of a job that were refused before any trial, and why, as JSON forms of Refusal."""
        preflight = self.preflights.get(job)
        return [] if preflight is None else to_json(preflight.refusals)


class UnfitJobs(ValueError):
    """Raised for jobs that cannot take a single step; `faults` holds the causes, by job."""

    def __init__(self, faults: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"job {name}: {why}" for name, why in faults.items()))
        self.faults = dict(faults)


def profile_jobs(
    jobs: Sequence[Job],
    *,
    environment: TrialEnvironment,
    cluster: Cluster,
    known: ProfileStore | None = None,
    notice: Notice = lambda _: None,
    lend: Lend | None = None,
    num_nodes: int = 1,
    may_try: bool = True,
    failed: Failed = untold,
    all_or_none: bool = False,
    share: float | None = None,
) -> Profiled:
    """Profiles every job under every technique and gang size that can train it, with as few trials as possible.

    lend: lends devices for each wave of trials; None if all devices are free. If they stay busy, jobs are planned by
        known measurements or predictions.
    num_nodes: the nodes like this one over which a gang may be spread if a job needs it.
    may_try: False for no trials at all. Jobs without earlier measurements then get predicted profiles.
    failed: called for each job that cannot be trained.
    all_or_none: whether to raise UnfitJobs, before the first trial, if one of the jobs cannot take a step.
    share: the share of the batch's predicted time that trials may take, None for no limit. With a limit, a job that got
        no trial gets predicted profiles too.
    """
    known = known or ProfileStore()
    told = untold if all_or_none else failed
    preflights, faults = preflight_jobs(jobs, environment=environment, cluster=cluster, notice=notice, failed=told)
    if all_or_none and faults:
        raise UnfitJobs(faults)
    for line in data_lines(jobs, preflights):
        notice(line)
    for name, preflight in preflights.items():
        if why := preflight.facts.get("whole_batch"):
            notice(f"the batch of {name} stays whole: {why}")
    jobs = [resolve_steps(job, preflights[job.name]) for job in jobs if job.name in preflights]
    searches, searches_of = _searches(jobs, preflights, cluster, import_paths=environment.import_paths)
    every = sorted({f for search in searches.values() for f in search.fingerprints})
    found = known.results(every)
    by_name = {job.name: (job, preflights[job.name]) for job in jobs}
    bench = TrialRunner(environment, known, notice, lend=lend or (lambda _: nullcontext(environment.devices)))
    budget = TrialBudget(
        share=share if may_try else 0.0,
        num_devices=len(environment.devices),
        batch_s=partial(predicted_batch_s, jobs, searches_of, num_devices=len(environment.devices)),
    )
    if may_try:
        run_trials(searches, found, by_name, bench=bench, budget=budget)
    else:
        take_known(searches, found)
    profiles = {name: tuple(p for s in mine for p in s.profiles) for name, mine in searches_of.items()}
    if budget.share is not None or bench.is_closed:
        left = [name for name, mine in searches_of.items() if not profiles[name] and not _has_failed(mine)]
        profiles |= {name: foretold(searches_of[name]) for name in left}
    keys = {name: mine[0].key for name, mine in searches_of.items() if mine}
    groups = group_profiles(
        group_searches(_classes(jobs, preflights, profiles, keys, cluster), cluster=cluster, num_nodes=num_nodes),
        num_jobs=len(jobs),
        find=known.results,
        measure=bench.measure if may_try else None,
        notice=notice,
    )
    profiles |= _over_nodes(
        _too_large(jobs, profiles, searches_of),
        environment=environment,
        cluster=cluster,
        num_nodes=num_nodes,
        notice=notice,
    )
    for name, mine in searches_of.items():
        if not profiles[name]:
            faults[name] = why_nothing_fits(preflights[name].refusals, [f for s in mine for f in s.failures])
            failed(name, faults[name])
    return Profiled(
        jobs=tuple(jobs),
        preflights=preflights,
        profiles=profiles,
        groups=groups,
        faults=faults,
        num_trials=bench.num_trials,
    )


def groups_of_some(
    profiled: Profiled, *, environment: TrialEnvironment, cluster: Cluster, known: ProfileStore
) -> Callable[[Collection[str]], dict[str, tuple[Profile, ...]]]:
    """Returns a function that gives, by lead job, the groups of some of the profiled jobs as a batch of their own.

    It makes no trials. It uses the measurements of groups of all the jobs, so `profiled` must be for this cluster
    alone. If `profiled` offers no groups of a class in a layout, some of its jobs have none there either.
    """
    preflights = profiled.preflights
    keys = {
        job.name: speed_key(
            job, preflights[job.name].data, facts=preflights[job.name].facts, import_paths=environment.import_paths
        )
        for job in profiled.jobs
    }
    every = _classes(profiled.jobs, preflights, profiled.profiles, keys, cluster)
    searches = group_searches(every, cluster=cluster, num_nodes=1)
    for search in searches:
        search.take(known.results(list(search.tried)))
    offered = [search for search in searches if search.has_any(profiled.groups)]
    return lambda names: groups_among(names, offered)


def _classes(
    jobs: Sequence[Job],
    preflights: Mapping[str, Preflight],
    profiles: Mapping[str, Sequence[Profile]],
    keys: Mapping[str, str],
    cluster: Cluster,
) -> dict[Layout, list[Group]]:
    """Returns the classes of jobs that can be trained together, by the layout of their gang."""
    found = layouts(len(cluster.nodes[0].devices))
    return {layout: classes(jobs, preflights, profiles, keys=keys, layout=layout) for layout in found}


def _too_large(
    jobs: Sequence[Job], profiles: Mapping[str, Sequence[Profile]], searches_of: Mapping[str, Sequence[ConfigSearch]]
) -> list[Job]:
    """Returns the jobs that one node cannot train for want of memory: another error would end a larger gang, too."""
    failures = {name: [failure for search in mine for failure in search.failures] for name, mine in searches_of.items()}
    return [
        job
        for job in jobs
        if not profiles[job.name] and not any(failure.kind == "failed" for failure in failures[job.name])
    ]


def _over_nodes(
    jobs: Sequence[Job], *, environment: TrialEnvironment, cluster: Cluster, num_nodes: int, notice: Notice
) -> dict[str, tuple[Profile, ...]]:
    """Returns profiles, by job, of gangs over several nodes for jobs that one node cannot train."""
    shapes = shapes_over_nodes(gang_shape(cluster.nodes[0].devices), num_nodes=num_nodes)
    if not jobs or not shapes:
        return {}
    preflights, _ = preflight_jobs(jobs, environment=environment, cluster=cluster, notice=notice, shapes=shapes)
    return {name: predicted_profiles(preflight, shapes=shapes) for name, preflight in preflights.items()}


def _searches(
    jobs: Sequence[Job], preflights: Mapping[str, Preflight], cluster: Cluster, *, import_paths: tuple[str, ...]
) -> tuple[dict[str, ConfigSearch], dict[str, list[ConfigSearch]]]:
    """Returns one search per (speed class, technique, gang size), and the searches that apply to each job."""
    searches: dict[str, ConfigSearch] = {}
    of_job: dict[str, list[ConfigSearch]] = {}
    kind, memory_bytes = cluster.device_kind(), min(device.memory_bytes for device in cluster.devices)
    for job in jobs:
        preflight = preflights[job.name]
        key = speed_key(job, preflight.data, facts=preflight.facts, import_paths=import_paths)
        groups: dict[tuple[str, int], list[Any]] = {}
        for candidate in preflight.candidates:
            groups.setdefault((candidate.technique, candidate.num_devices), []).append(candidate)
        of_job[job.name] = []
        for (technique, num_devices), listed in groups.items():
            candidates = quickest_looking_first(listed)
            name = f"{key} {technique} {num_devices}"
            prints = [
                fingerprint(
                    key,
                    technique=technique,
                    config=c.config,
                    num_devices=num_devices,
                    device_kind=kind,
                    memory_bytes=memory_bytes,
                    code=technique_code(technique, import_paths),
                )
                for c in candidates
            ]
            search = searches.setdefault(
                name, ConfigSearch(key=key, job=job.name, candidates=candidates, fingerprints=prints)
            )
            search.is_thorough = search.is_thorough or job.total_steps >= LONG_STEPS
            of_job[job.name].append(search)
    return searches, of_job


def _has_failed(searches: Sequence[ConfigSearch]) -> bool:
    """Returns whether a trial has failed for another reason than lack of memory."""
    return any(failure.kind != "out_of_memory" for search in searches for failure in search.failures)
