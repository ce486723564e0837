"""The profiling stage: runs the preflight of all jobs, reuses known measurements, and makes trials for the rest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.profiling.budget import TrialBudget, predicted_batch_s
from ringmaster.tasks.profiling.data_lines import data_lines
from ringmaster.tasks.profiling.fingerprint import fingerprint, speed_key, technique_code
from ringmaster.tasks.profiling.groups.candidates import Group, classes
from ringmaster.tasks.profiling.groups.layouts import Layout, layouts
from ringmaster.tasks.profiling.groups.profiles import group_profiles, group_searches, groups_among
from ringmaster.tasks.profiling.lending import DevicesBusy, DevicesWanted, Lend
from ringmaster.tasks.profiling.over_nodes import foretold, predicted_profiles, shapes_over_nodes
from ringmaster.tasks.profiling.reasons import why_nothing_fits
from ringmaster.tasks.profiling.search import (
    KILLED,
    LONG_STEPS,
    ConfigSearch,
    Failure,
    Result,
    quickest_looking_first,
    worthwhile,
)
from ringmaster.tasks.profiling.trials import Trial, TrialEnvironment, gang_shape, run_wave, waves
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.interface import registry
from ringmaster.techniques.interface.preflight import Preflight, PreflightOrder
from ringmaster.techniques.interface.technique import GangShape
from ringmaster.techniques.interface.values import from_json, to_json
from ringmaster.techniques.runtime.processes.channel import ChannelClosed
from ringmaster.techniques.runtime.processes.events import (
    PreflightDone,
    PreflightFailed,
    PreflightStarted,
    RankExited,
    event_from_json,
)
from ringmaster.techniques.runtime.processes.forkserver_client import ForkServer
from ringmaster.techniques.runtime.processes.gang import was_killed

PREFLIGHT_TARGET = "ringmaster.techniques.runtime.estimates.preflight:main"
# The attempts of a trial, or of a job's preflight, that is killed from outside.
MAX_ATTEMPTS = 3

Notice = Callable[[str], None]
"""Takes a line of progress for a person."""

Failed = Callable[[str, str], None]
"""Takes the name of a job that cannot be trained, and the cause, as soon as it is known."""


def untold(job: str, why: str) -> None:
    """Ignores the failure of a job; the caller reads it from the faults."""


@dataclass(frozen=True, kw_only=True)
class ProfileStore:
    """The store of earlier measurements, in JSON forms of Profile and Failure.

    find: returns the stored measurements among some fingerprints.
    keep: stores a new measurement under its fingerprint.
    """

    find: Callable[[Sequence[str]], Mapping[str, Mapping[str, Any]]] = lambda _: {}
    keep: Callable[[str, Mapping[str, Any]], None] = lambda *_: None

    def results(self, fingerprints: Sequence[str]) -> dict[str, Result]:
        """Returns the stored measurements, by fingerprint."""
        return {name: _result(data) for name, data in self.find(fingerprints).items()}


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
    bench = _TrialRunner(environment, known, notice, lend=lend or (lambda _: nullcontext(environment.devices)))
    budget = TrialBudget(
        share=share if may_try else 0.0,
        num_devices=len(environment.devices),
        batch_s=partial(predicted_batch_s, jobs, searches_of, num_devices=len(environment.devices)),
    )
    if may_try:
        _run(searches, found, by_name, bench=bench, budget=budget)
    else:
        _take_known(searches, found)
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
    homeless = [job for job in jobs if not profiles[job.name]]
    profiles |= _over_nodes(homeless, environment=environment, cluster=cluster, num_nodes=num_nodes, notice=notice)
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


def _over_nodes(
    jobs: Sequence[Job], *, environment: TrialEnvironment, cluster: Cluster, num_nodes: int, notice: Notice
) -> dict[str, tuple[Profile, ...]]:
    """Returns profiles, by job, of gangs over several nodes for jobs that one node cannot train."""
    shapes = shapes_over_nodes(gang_shape(cluster.nodes[0].devices), num_nodes=num_nodes)
    if not jobs or not shapes:
        return {}
    preflights, _ = preflight_jobs(jobs, environment=environment, cluster=cluster, notice=notice, shapes=shapes)
    return {name: predicted_profiles(preflight, shapes=shapes) for name, preflight in preflights.items()}


def preflight_jobs(
    jobs: Sequence[Job],
    *,
    environment: TrialEnvironment,
    cluster: Cluster,
    notice: Notice,
    shapes: Sequence[GangShape] | None = None,
    failed: Failed = untold,
) -> tuple[dict[str, Preflight], dict[str, str]]:
    """Prepares data and estimates memory in worker processes; returns preflights and faults, by job name.

    One process handles all jobs. If a job ends the process, another process continues with the jobs after that one.

    shapes: the shapes of gangs; by default the first n devices of one node, for every n.
    """
    node = cluster.nodes[0]
    order = PreflightOrder(
        jobs=tuple(jobs),
        shapes=tuple(shapes or (gang_shape(node.devices[:n]) for n in range(1, len(node.devices) + 1))),
        techniques=registry.dotted_paths(),
        cache_dir=str(environment.cache_dir),
        cores=tuple(sorted({core for device in node.devices for core in device.cores})),
        import_paths=environment.import_paths,
        slots=tuple(device.cores for device in node.devices if device.kind == "cpu"),
        gpu=next((device.uuid for device in node.devices if device.kind == "gpu"), None),
    )
    return run_preflight(order, server=environment.server, notice=notice, failed=failed)


def run_preflight(
    order: PreflightOrder, *, server: ForkServer, notice: Notice, failed: Failed = untold
) -> tuple[dict[str, Preflight], dict[str, str]]:
    """Carries out a preflight order in worker processes; returns preflights and faults, by job name."""
    Path(order.cache_dir).mkdir(parents=True, exist_ok=True)
    preflights: dict[str, Preflight] = {}
    faults: dict[str, str] = {}

    def fail(job: str, why: str) -> None:
        faults[job] = why
        failed(job, why)

    left, num_kills = list(order.jobs), Counter[str]()
    while left:
        status = _preflight(replace(order, jobs=tuple(left)), preflights, fail, server=server, notice=notice)
        left = [job for job in left if job.name not in preflights and job.name not in faults]
        if left:
            num_kills[left[0].name] += was_killed(status)
            if not was_killed(status) or num_kills[left[0].name] == MAX_ATTEMPTS:
                fail(left.pop(0).name, f"the process that inspected it {_how_it_ended(status)}")
    return preflights, faults


def _how_it_ended(status: int | None) -> str:
    if was_killed(status):
        return f"was killed {MAX_ATTEMPTS} times: the machine may have too little memory for the model"
    return f"ended with status {status}"


def _preflight(
    order: PreflightOrder, preflights: dict[str, Preflight], fail: Failed, *, server: ForkServer, notice: Notice
) -> int | None:
    """Inspects jobs in order in one worker process; returns its exit status, None if it vanished."""
    log = Path(order.cache_dir) / "survey.log"
    channel = server.spawn(target=PREFLIGHT_TARGET, argument=to_json(order), log=log)
    try:
        while True:
            match event_from_json(channel.receive()):
                case PreflightStarted(job=job):
                    notice(f"inspecting {job}")
                case PreflightDone(survey=preflight):
                    preflights[preflight.job] = preflight
                case PreflightFailed(job=str(job), message=message):
                    fail(job, message)
                case RankExited(status=status):
                    return status
    except ChannelClosed:  # the fork server itself has ended; the next call starts another one
        return None
    finally:
        channel.close()


def resolve_steps(job: Job, preflight: Preflight) -> Job:
    """Returns the job with its epochs converted into steps, by the number of samples in the preflight."""
    if job.num_steps is not None:
        return job
    assert job.num_epochs is not None
    num_steps = round(job.num_epochs * preflight.data["num_samples"] / job.global_batch_size)
    return replace(job, num_steps=max(num_steps, 1), num_epochs=None)


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


class _TrialRunner:
    """Makes and counts trials.

    num_trials: the number of trials that were made.
    spent_s: the seconds that trials took, without the waiting for devices.
    is_closed: whether no devices are available, so that no more trials are made.
    """

    def __init__(self, environment: TrialEnvironment, known: ProfileStore, notice: Notice, *, lend: Lend) -> None:
        self._environment, self._known, self._notice, self._lend = environment, known, notice, lend
        self.num_trials = 0
        self.spent_s = 0.0
        self.is_closed = False

    def measure(self, trials: Sequence[Trial]) -> dict[str, Result]:
        """Makes trials, smallest gangs first and several side by side; returns the results, by fingerprint."""
        found: dict[str, Result] = {}
        left = sorted(trials, key=lambda trial: trial.candidate.num_devices)
        while left and not self.is_closed:
            try:
                results = self._next_wave(left)
            except DevicesBusy as error:
                self._notice(f"{error}: what is left is planned by predictions")
                self.is_closed = True
                break
            found |= results
            left = [trial for trial in left if trial.fingerprint not in results]
        return found

    def _next_wave(self, left: Sequence[Trial]) -> dict[str, Result]:
        """Makes the first trials of equal size that fit on idle devices; stores results that other batches may use."""
        size = left[0].candidate.num_devices
        alike = [trial for trial in left if trial.candidate.num_devices == size]
        with self._lend(DevicesWanted(least=size, most=size * len(alike), fills=True)) as devices:
            wave = waves(alike, num_devices=len(devices))[0]
            self._notice("trying " + ", ".join(str(trial) for trial in wave))
            began_s = time.monotonic()
            results = self._outcomes(replace(self._environment, devices=devices), wave)
            self.spent_s += time.monotonic() - began_s
        for name, result in results.items():
            if isinstance(result, Profile) or result.kind == "out_of_memory":
                self._known.keep(name, _json(result))
        return results

    def _outcomes(self, environment: TrialEnvironment, wave: Sequence[Trial]) -> dict[str, Result]:
        """Makes the trials of a wave; repeats those that were killed from outside, which is not the job's fault."""
        found: dict[str, Result] = {}
        for attempt in range(1, MAX_ATTEMPTS + 1):
            found |= run_wave(environment, wave)
            self.num_trials += len(wave)
            wave = [trial for trial in wave if _was_killed(found[trial.fingerprint])]
            if not wave:
                break
            if attempt < MAX_ATTEMPTS:
                names = ", ".join(str(trial) for trial in wave)
                self._notice(f"trying again what was killed (attempt {attempt + 1} of {MAX_ATTEMPTS}): {names}")
        return found


def _run(
    searches: Mapping[str, ConfigSearch],
    found: dict[str, Result],
    jobs: Mapping[str, tuple[Job, Preflight]],
    *,
    bench: _TrialRunner,
    budget: TrialBudget,
) -> None:
    """Makes trials in waves until no search wants one, or the budget allows no more."""
    while True:
        _take_known(searches, found)  # for all searches, before they are compared
        trials = []
        for search in worthwhile(searches.values()):
            if (wanted := search.next_trial(found)) is not None:
                job, preflight = jobs[search.job]
                trials.append(Trial(fingerprint=wanted[0], job=job, data=preflight.data, candidate=wanted[1]))
        measured = {search.key for search in searches.values() if search.profiles}
        known = {search.job for search in searches.values() if search.key in measured}
        trials = budget.affordable(trials, measured=known)
        if not trials or bench.is_closed:
            return
        before_s = bench.spent_s
        found |= bench.measure(trials)
        budget.spend(bench.spent_s - before_s, trials)


def _was_killed(result: Result) -> bool:
    return isinstance(result, Failure) and result.kind == KILLED


def _has_failed(searches: Sequence[ConfigSearch]) -> bool:
    """Returns whether a trial has failed for another reason than lack of memory."""
    return any(failure.kind != "out_of_memory" for search in searches for failure in search.failures)


def _take_known(searches: Mapping[str, ConfigSearch], found: Mapping[str, Result]) -> None:
    for search in searches.values():
        search.next_trial(found)


def _json(result: Result) -> dict[str, Any]:
    data: dict[str, Any] = to_json(result)
    return data


def _result(data: Mapping[str, Any]) -> Result:
    return from_json(Failure, data) if "kind" in data else from_json(Profile, data)
