"""The profiling stage: runs the preflight of all jobs, reuses known measurements, and predicts the rest.

No trials are made of what can be predicted: training itself measures it. Trials are left for jobs of which nothing
could be planned without one, and for groups of jobs; both within limits of time. On request, a thorough search measures
options of each job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ringmaster.codec import to_json
from ringmaster.errors import UntrainableJobs
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.profiling.group_layouts import Group, GroupLayout, classes, layouts
from ringmaster.tasks.profiling.group_search import GroupSearch, group_profiles, group_searches, groups_among
from ringmaster.tasks.profiling.preflight_runs import (
    GangEnvironment,
    ReportFailure,
    data_lines,
    gang_shape,
    ignore_failure,
    preflight_jobs,
    resolve_steps,
)
from ringmaster.tasks.profiling.profile_store import ProfileStore, fingerprint, speed_key, technique_code
from ringmaster.tasks.profiling.search import (
    FAILED,
    ConfigSearch,
    Result,
    known_speeds,
    option_profiles,
    predicted_profiles,
    quickest_looking_first,
    shapes_over_nodes,
    why_nothing_fits,
)
from ringmaster.tasks.profiling.trials import (
    Lend,
    ProfilingLimits,
    ProfilingTrial,
    ProfilingTrialRunner,
    needed_trials,
    of_each_size,
    predicted_batch_s,
    search_thoroughly,
    trial_of_config,
)
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.preflight_result import Preflight
from ringmaster.techniques.profiles import PREDICTED
from ringmaster.text import Notice


@dataclass(frozen=True, kw_only=True)
class ProfilingResult:
    """The result of the profiling stage.

    jobs: the jobs, with epochs resolved into steps.
    preflights: the preflight of each job, by job name.
    profiles: by job name; none for a job that nothing can train. Those of the variants of jobs that may change are
        among them, under the names of `Job.variants`.
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

    def with_ended(self, ended: Mapping[str, Preflight], *, jobs: Sequence[Job]) -> ProfilingResult:
        """Returns this result with jobs that have ended, and have no options, in the order of the batch's `jobs`."""
        resolved = {job.name: job for job in self.jobs}
        resolved |= {job.name: resolve_steps(job, ended[job.name]) for job in jobs if job.name in ended}
        return replace(
            self,
            jobs=tuple(resolved[job.name] for job in jobs if job.name in resolved),
            preflights={**self.preflights, **ended},
            profiles={**self.profiles, **dict.fromkeys(ended, ())},
        )

    def refused(self, job: str) -> list[dict[str, Any]]:
        """Returns the options of a job that were refused before any trial, and why, as JSON forms of Refusal."""
        preflight = self.preflights.get(job)
        return [] if preflight is None else to_json(preflight.refusals)


class ProfilingPolicy(StrEnum):
    """Which trials may be made: none, only those without which nothing is known, or a thorough search."""

    NONE = "none"
    NEEDED = "needed"
    THOROUGH = "thorough"


def profile_jobs(
    jobs: Sequence[Job],
    *,
    environment: GangEnvironment,
    cluster: Cluster,
    profile_store: ProfileStore | None = None,
    notice: Notice = lambda _: None,
    lend: Lend | None = None,
    num_nodes: int = 1,
    policy: ProfilingPolicy = ProfilingPolicy.NEEDED,
    failed: ReportFailure = ignore_failure,
    all_or_none: bool = False,
    share: float = 0.05,
) -> ProfilingResult:
    """Profiles every job under every technique and gang size that can train it: as measured before, or predicted.

    lend: lends devices for each wave of trials; None if all devices are free. If they stay busy, jobs are planned by
        known measurements or predictions.
    num_nodes: the nodes like this one over which a gang may be spread if a job needs it.
    policy: which trials may be made.
    failed: called for each job that cannot be trained.
    all_or_none: whether to raise UntrainableJobs, before the first trial, if one of the jobs cannot take a step.
    share: the share of the batch's predicted time that needed trials may take.
    """
    profile_store = profile_store or ProfileStore()
    preflights, faults = preflight_jobs(
        jobs, environment=environment, cluster=cluster, notice=notice, failed=ignore_failure if all_or_none else failed
    )
    refused = {
        job.name: reason
        for job in jobs
        for feature in job.features
        if job.name in preflights and (reason := feature.why_unfit(job, preflights[job.name].facts))
    }
    faults |= refused
    if all_or_none and faults:
        raise UntrainableJobs(faults)
    for name, reason in refused.items():
        failed(name, reason)
    for line in data_lines(jobs, preflights):
        notice(line)
    for name, preflight in preflights.items():
        if why := preflight.facts.whole_batch:
            notice(f"the batch of {name} stays whole: {why}")
    jobs = [resolve_steps(job, preflights[job.name]) for job in jobs if job.name in preflights]
    options = JobOptions(
        jobs, preflights, cluster=cluster, profile_store=profile_store, import_paths=environment.import_paths
    )
    is_thorough = policy == ProfilingPolicy.THOROUGH
    runner = ProfilingTrialRunner(
        environment,
        profile_store,
        notice,
        lend=lend or (lambda _: nullcontext(environment.devices)),
        limits=None if is_thorough else ProfilingLimits(share=share, batch_s=options.batch_s),
    )
    if is_thorough:
        search_thoroughly(options.searches, options.by_name, runner=runner)
    elif policy == ProfilingPolicy.NEEDED:
        # What the smallest gangs take is known before the share of the batch's time is computed again.
        for trials in of_each_size(needed_trials(options.searches, options.by_name)):
            options.take(runner.measure(trials))
        options.take(runner.measure(options.needed_group_trials(num_nodes=num_nodes)))
    profiles = options.profiles(only_measured=is_thorough)
    groups = group_profiles(
        options.group_searches(profiles, num_nodes=num_nodes),
        num_jobs=len(jobs),
        find=options.results,
        measure=runner.measure if is_thorough else None,
        notice=notice,
    )
    profiles |= _over_nodes(
        _too_large(jobs, profiles, options.searches_of),
        environment=environment,
        cluster=cluster,
        num_nodes=num_nodes,
        notice=notice,
    )
    for name, searches in options.searches_of.items():
        if not profiles[name]:
            faults[name] = why_nothing_fits(preflights[name].refusals, [f for s in searches for f in s.failures])
            failed(name, faults[name])
    num_trials = runner.num_trials
    if variants := [variant for job in jobs if job.name not in faults for variant in job.with_variants()[1:]]:
        offered = profile_jobs(
            variants,
            environment=environment,
            cluster=cluster,
            profile_store=profile_store,
            lend=lend,
            num_nodes=num_nodes,
            policy=policy,
            share=share,
        )
        profiles |= {variant.name: offered.profiles.get(variant.name, ()) for variant in variants}
        num_trials += offered.num_trials
    return ProfilingResult(
        jobs=tuple(jobs),
        preflights=preflights,
        profiles=profiles,
        groups=groups,
        faults=faults,
        num_trials=num_trials,
    )


class JobOptions:
    """What is known of the options of a batch's jobs: measurements of now and before, and predictions.

    searches: one for each speed class, technique and gang size; `searches_of`: those of each job.
    by_name: each job with its preflight.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        preflights: Mapping[str, Preflight],
        *,
        cluster: Cluster,
        profile_store: ProfileStore,
        import_paths: tuple[str, ...],
    ) -> None:
        self._jobs, self._preflights, self._cluster = jobs, preflights, cluster
        self._profile_store = profile_store
        self.by_name = {job.name: (job, preflights[job.name]) for job in jobs}
        self.searches, self.searches_of = _searches(jobs, preflights, cluster, import_paths=import_paths)
        self._keys = {name: searches[0].key for name, searches in self.searches_of.items() if searches}
        self._newest = profile_store.newest_profiles()
        self._measured: dict[str, Result] = {}
        self._looked_up: set[str] = set()
        self.take(self.results([f for search in self.searches.values() for f in search.fingerprints]))

    def take(self, results: Mapping[str, Result]) -> None:
        """Takes measurements, by fingerprint."""
        self._measured |= results
        for search in self.searches.values():
            search.take(results)

    def results(self, fingerprints: Sequence[str]) -> dict[str, Result]:
        """Returns the known measurements, those of now and those that are stored."""
        if unknown := sorted({*fingerprints} - self._looked_up):
            self._looked_up.update(unknown)
            self._measured = self._profile_store.results(unknown) | self._measured
        return {name: self._measured[name] for name in fingerprints if name in self._measured}

    def batch_s(self) -> float | None:
        """Returns the seconds that the batch is predicted to take; None while nothing is known of one of its jobs."""
        return predicted_batch_s(self._jobs, self.searches_of, num_devices=len(self._cluster.devices))

    def profiles(self, *, only_measured: bool = False) -> dict[str, tuple[Profile, ...]]:
        """Returns the options of each job. only_measured: no predicted ones where some are measured."""
        beliefs = known_speeds(self.searches.values(), self._newest, device_kind=self._cluster.device_kind())
        offered = {name: option_profiles(own_searches, beliefs) for name, own_searches in self.searches_of.items()}
        if not only_measured:
            return offered
        return {
            name: tuple(p for p in own_searches if p.source != PREDICTED) or own_searches
            for name, own_searches in offered.items()
        }

    def group_searches(self, profiles: Mapping[str, Sequence[Profile]], *, num_nodes: int) -> list[GroupSearch]:
        """Returns a search for each class of jobs that can be trained together, in each layout."""
        every = _classes(self._jobs, self._preflights, profiles, self._keys, self._cluster)
        return group_searches(every, cluster=self._cluster, num_nodes=num_nodes)

    def needed_group_trials(self, *, num_nodes: int) -> list[ProfilingTrial]:
        """Returns the trials that decide about groups: for each class one of a group, and one of a job of it alone.

        Whether a group is faster than its jobs follows from both: one of them may not be predicted.
        """
        trials: list[ProfilingTrial] = []
        searches = self.group_searches(self.profiles(), num_nodes=num_nodes)
        known = self.results([name for search in searches for name in search.known])
        for search in searches:
            wanted = search.wanted(known, most=1)
            if search.first is not search or len(self._jobs) <= search.num_slots or not wanted:
                continue
            lead = search.members[0]
            key = lead.profile.key
            if lead.profile.source == PREDICTED and key is not None:
                own = next(s for s in self.searches_of[lead.job.name] if key.fingerprint in s.fingerprints)
                trials.append(trial_of_config(own, key.fingerprint, self.by_name))
            trials += wanted
        return trials


def groups_of_some(
    profiled: ProfilingResult, *, environment: GangEnvironment, cluster: Cluster, profile_store: ProfileStore
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
    known_results = profile_store.results([name for search in searches for name in search.known])
    for search in searches:
        search.take(known_results)
    offered = [search for search in searches if search.has_any(profiled.groups)]
    return lambda names: groups_among(names, offered)


def _classes(
    jobs: Sequence[Job],
    preflights: Mapping[str, Preflight],
    profiles: Mapping[str, Sequence[Profile]],
    keys: Mapping[str, str],
    cluster: Cluster,
) -> dict[GroupLayout, list[Group]]:
    """Returns the classes of jobs that can be trained together, by the layout of their gang."""
    every_layout = layouts(len(cluster.nodes[0].devices))
    return {layout: classes(jobs, preflights, profiles, keys=keys, layout=layout) for layout in every_layout}


def _too_large(
    jobs: Sequence[Job], profiles: Mapping[str, Sequence[Profile]], searches_of: Mapping[str, Sequence[ConfigSearch]]
) -> list[Job]:
    """Returns the jobs that one node cannot train for want of memory: another error would end a larger gang, too."""
    failures = {
        name: [failure for search in searches for failure in search.failures] for name, searches in searches_of.items()
    }
    return [
        job
        for job in jobs
        if not profiles[job.name] and not any(failure.kind == FAILED for failure in failures[job.name])
    ]


def _over_nodes(
    jobs: Sequence[Job], *, environment: GangEnvironment, cluster: Cluster, num_nodes: int, notice: Notice
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
                name,
                ConfigSearch(key=key, job=job.name, candidates=candidates, fingerprints=prints, device_kind=kind),
            )
            of_job[job.name].append(search)
    return searches, of_job
