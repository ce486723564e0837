"""The profiling stage: survey the jobs, take what is known, try the rest."""

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
from ringmaster.tasks.profiling.fingerprint import fingerprint, speed_key, technique_code
from ringmaster.tasks.profiling.grouping import Group, classes
from ringmaster.tasks.profiling.groups import group_profiles, group_searches, groups_among
from ringmaster.tasks.profiling.layouts import Layout, layouts
from ringmaster.tasks.profiling.lending import DevicesBusy, DevicesWanted, Lend
from ringmaster.tasks.profiling.over_nodes import foretold, predicted_profiles, shapes_over_nodes
from ringmaster.tasks.profiling.reasons import why_nothing_fits
from ringmaster.tasks.profiling.search import (
    KILLED,
    LONG_STEPS,
    Failure,
    Result,
    Search,
    quickest_looking_first,
    worthwhile,
)
from ringmaster.tasks.profiling.trials import Site, Trial, gang_shape, run_wave, waves
from ringmaster.techniques import Job, Profile, registry
from ringmaster.techniques.engine.channel import ChannelClosed
from ringmaster.techniques.engine.gang import was_killed
from ringmaster.techniques.engine.processes import ForkServer
from ringmaster.techniques.surveys import Survey, SurveyOrder
from ringmaster.techniques.technique import GangShape
from ringmaster.techniques.values import from_json, to_json

SURVEYOR = "ringmaster.techniques.engine.survey:main"
# Of a trial, or of the first look at a job, that is killed from outside.
MAX_ATTEMPTS = 3

Notice = Callable[[str], None]
"""Takes a line of progress for a person."""

Failed = Callable[[str, str], None]
"""Takes the name of a job that cannot be trained, and why, as soon as that is known."""


def untold(job: str, why: str) -> None:
    """Tells nobody: whoever asked reads the faults."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What earlier batches measured: `find` by fingerprints, `keep` a new one. JSON forms of Profile and Failure."""

    find: Callable[[Sequence[str]], Mapping[str, Mapping[str, Any]]] = lambda _: {}
    keep: Callable[[str, Mapping[str, Any]], None] = lambda *_: None

    def results(self, fingerprints: Sequence[str]) -> dict[str, Result]:
        """What was measured, by fingerprint."""
        return {name: _result(data) for name, data in self.find(fingerprints).items()}


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """The stage's answer.

    jobs: with epochs resolved into steps. profiles: by job name, none where nothing can train the job.
    groups: of jobs that can be trained together on one base, by the job that would lead each; no job's own profiles.
    faults: by job name, why it cannot be trained.
    """

    jobs: tuple[Job, ...]
    surveys: Mapping[str, Survey]
    profiles: Mapping[str, tuple[Profile, ...]]
    groups: Mapping[str, tuple[Profile, ...]] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    num_trials: int = 0

    def refused(self, job: str) -> list[dict[str, Any]]:
        """What was left out for a job before any trial, and why: JSON forms of Refusal."""
        survey = self.surveys.get(job)
        return [] if survey is None else to_json(survey.refusals)


class UnfitJobs(ValueError):
    """Jobs that cannot take a single step; `faults` says why, by job."""

    def __init__(self, faults: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"job {name}: {why}" for name, why in faults.items()))
        self.faults = dict(faults)


def profile_jobs(
    jobs: Sequence[Job],
    *,
    site: Site,
    cluster: Cluster,
    known: Known | None = None,
    notice: Notice = lambda _: None,
    lend: Lend | None = None,
    num_nodes: int = 1,
    may_try: bool = True,
    failed: Failed = untold,
    all_or_none: bool = False,
    share: float | None = None,
) -> Profiled:
    """Profiles every job under every technique and gang size that can train it, with as few trials as will do.

    lend: lends devices for each wave of trials; None where all are free. Where they stay busy, jobs are planned by what
    is known, or predicted. num_nodes: nodes like this one that a gang may be spread over where a job needs it. may_try:
    False for no trials at all: jobs of which nothing was measured before get predicted profiles. failed: is told of
    each job that cannot be trained. all_or_none: raise UnfitJobs, before the first trial, where one of them cannot take
    a step. share: the most of the batch's predicted time that trials may take, None for no such bound; a job that has
    none then gets predicted profiles, too.
    """
    known = known or Known()
    told = untold if all_or_none else failed
    surveys, faults = survey_jobs(jobs, site=site, cluster=cluster, notice=notice, failed=told)
    if all_or_none and faults:
        raise UnfitJobs(faults)
    for name, survey in surveys.items():
        if why := survey.facts.get("whole_batch"):
            notice(f"the batch of {name} stays whole: {why}")
    jobs = [resolve_steps(job, surveys[job.name]) for job in jobs if job.name in surveys]
    searches, searches_of = _searches(jobs, surveys, cluster, import_paths=site.import_paths)
    every = sorted({f for search in searches.values() for f in search.fingerprints})
    found = known.results(every)
    by_name = {job.name: (job, surveys[job.name]) for job in jobs}
    bench = _Bench(site, known, notice, lend=lend or (lambda _: nullcontext(site.devices)))
    budget = TrialBudget(
        share=share if may_try else 0.0,
        num_devices=len(site.devices),
        batch_s=partial(predicted_batch_s, jobs, searches_of, num_devices=len(site.devices)),
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
        group_searches(_classes(jobs, surveys, profiles, keys, cluster), cluster=cluster, num_nodes=num_nodes),
        num_jobs=len(jobs),
        find=known.results,
        measure=bench.measure if may_try else None,
        notice=notice,
    )
    homeless = [job for job in jobs if not profiles[job.name]]
    profiles |= _over_nodes(homeless, site=site, cluster=cluster, num_nodes=num_nodes, notice=notice)
    for name, mine in searches_of.items():
        if not profiles[name]:
            faults[name] = why_nothing_fits(surveys[name].refusals, [f for s in mine for f in s.failures])
            failed(name, faults[name])
    return Profiled(
        jobs=tuple(jobs),
        surveys=surveys,
        profiles=profiles,
        groups=groups,
        faults=faults,
        num_trials=bench.num_trials,
    )


def groups_of_some(
    profiled: Profiled, *, site: Site, cluster: Cluster, known: Known
) -> Callable[[Collection[str]], dict[str, tuple[Profile, ...]]]:
    """What tells, by leader, the groups that some of the profiled jobs would be offered as a batch of their own.

    Nothing is tried for it: it goes by what was measured of groups of all the jobs, so that `profiled` is to be of this
    cluster alone. Classes of which `profiled` offers no groups in a layout have none among some of their jobs, either.
    """
    surveys = profiled.surveys
    keys = {
        job.name: speed_key(job, surveys[job.name].data, facts=surveys[job.name].facts, import_paths=site.import_paths)
        for job in profiled.jobs
    }
    every = _classes(profiled.jobs, surveys, profiled.profiles, keys, cluster)
    searches = group_searches(every, cluster=cluster, num_nodes=1)
    for search in searches:
        search.take(known.results(list(search.tried)))
    offered = [search for search in searches if search.has_any(profiled.groups)]
    return lambda names: groups_among(names, offered)


def _classes(
    jobs: Sequence[Job],
    surveys: Mapping[str, Survey],
    profiles: Mapping[str, Sequence[Profile]],
    keys: Mapping[str, str],
    cluster: Cluster,
) -> dict[Layout, list[Group]]:
    """Jobs that can be trained together, by how their gang would be."""
    found = layouts(len(cluster.nodes[0].devices))
    return {layout: classes(jobs, surveys, profiles, keys=keys, layout=layout) for layout in found}


def _over_nodes(
    jobs: Sequence[Job], *, site: Site, cluster: Cluster, num_nodes: int, notice: Notice
) -> dict[str, tuple[Profile, ...]]:
    """Profiles, by job, of gangs over several nodes for jobs that one node cannot train."""
    shapes = shapes_over_nodes(gang_shape(cluster.nodes[0].devices), num_nodes=num_nodes)
    if not jobs or not shapes:
        return {}
    surveys, _ = survey_jobs(jobs, site=site, cluster=cluster, notice=notice, shapes=shapes)
    return {name: predicted_profiles(survey, shapes=shapes) for name, survey in surveys.items()}


def survey_jobs(
    jobs: Sequence[Job],
    *,
    site: Site,
    cluster: Cluster,
    notice: Notice,
    shapes: Sequence[GangShape] | None = None,
    failed: Failed = untold,
) -> tuple[dict[str, Survey], dict[str, str]]:
    """Prepares data and sizes models in worker processes; surveys, and faults, by job name.

    shapes: of gangs; by default of the first devices of one node, as many as there are. One process looks at all jobs;
    where one of them ends it, another goes on with the jobs after that one.
    """
    node = cluster.nodes[0]
    order = SurveyOrder(
        jobs=tuple(jobs),
        shapes=tuple(shapes or (gang_shape(node.devices[:n]) for n in range(1, len(node.devices) + 1))),
        techniques=registry.dotted_paths(),
        cache_dir=str(site.cache_dir),
        cores=tuple(sorted({core for device in node.devices for core in device.cores})),
        import_paths=site.import_paths,
        slots=tuple(device.cores for device in node.devices if device.kind == "cpu"),
        gpu=next((device.uuid for device in node.devices if device.kind == "gpu"), None),
    )
    return run_survey(order, server=site.server, notice=notice, failed=failed)


def run_survey(
    order: SurveyOrder, *, server: ForkServer, notice: Notice, failed: Failed = untold
) -> tuple[dict[str, Survey], dict[str, str]]:
    """Carries out an order in worker processes; surveys, and faults, by job name."""
    Path(order.cache_dir).mkdir(parents=True, exist_ok=True)
    surveys: dict[str, Survey] = {}
    faults: dict[str, str] = {}

    def fail(job: str, why: str) -> None:
        faults[job] = why
        failed(job, why)

    left, num_kills = list(order.jobs), Counter[str]()
    while left:
        status = _survey(replace(order, jobs=tuple(left)), surveys, fail, server=server, notice=notice)
        left = [job for job in left if job.name not in surveys and job.name not in faults]
        if left:
            num_kills[left[0].name] += was_killed(status)
            if not was_killed(status) or num_kills[left[0].name] == MAX_ATTEMPTS:
                fail(left.pop(0).name, f"the process that looked at it {_how_it_ended(status)}")
    return surveys, faults


def _how_it_ended(status: int | None) -> str:
    if was_killed(status):
        return f"was killed {MAX_ATTEMPTS} times: the machine may have too little memory for the model"
    return f"ended with status {status}"


def _survey(
    order: SurveyOrder, surveys: dict[str, Survey], fail: Failed, *, server: ForkServer, notice: Notice
) -> int | None:
    """Looks at jobs in order in one worker process; returns its exit status, None where it vanished."""
    log = Path(order.cache_dir) / "survey.log"
    channel = server.spawn(target=SURVEYOR, argument=to_json(order), log=log)
    try:
        while (event := channel.receive())["event"] != "exit":
            match event["event"]:
                case "surveying":
                    notice(f"looking at {event['job']}")
                case "survey":
                    survey = from_json(Survey, event["survey"])
                    surveys[survey.job] = survey
                case "fault":
                    fail(event["job"], event["message"])
    except ChannelClosed:  # the fork server itself is gone; the next call starts another
        return None
    finally:
        channel.close()
    status: int = event["status"]
    return status


def resolve_steps(job: Job, survey: Survey) -> Job:
    """The job with its epochs turned into steps, now that the number of samples is known."""
    if job.num_steps is not None:
        return job
    assert job.num_epochs is not None
    num_steps = round(job.num_epochs * survey.data["num_samples"] / job.global_batch_size)
    return replace(job, num_steps=max(num_steps, 1), num_epochs=None)


def _searches(
    jobs: Sequence[Job], surveys: Mapping[str, Survey], cluster: Cluster, *, import_paths: tuple[str, ...]
) -> tuple[dict[str, Search], dict[str, list[Search]]]:
    """One search for each (speed class, technique, gang size), and which of them answer for which job."""
    searches: dict[str, Search] = {}
    of_job: dict[str, list[Search]] = {}
    kind, memory_bytes = cluster.device_kind(), min(device.memory_bytes for device in cluster.devices)
    for job in jobs:
        survey = surveys[job.name]
        key = speed_key(job, survey.data, facts=survey.facts, import_paths=import_paths)
        groups: dict[tuple[str, int], list[Any]] = {}
        for candidate in survey.candidates:
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
                name, Search(key=key, job=job.name, candidates=candidates, fingerprints=prints)
            )
            search.is_thorough = search.is_thorough or job.total_steps >= LONG_STEPS
            of_job[job.name].append(search)
    return searches, of_job


class _Bench:
    """Where trials are made and counted.

    is_closed: no devices are to be had, and no more trials are made. spent_s: what trials took, without the waiting.
    """

    def __init__(self, site: Site, known: Known, notice: Notice, *, lend: Lend) -> None:
        self._site, self._known, self._notice, self._lend = site, known, notice, lend
        self.num_trials = 0
        self.spent_s = 0.0
        self.is_closed = False

    def measure(self, trials: Sequence[Trial]) -> dict[str, Result]:
        """Makes trials, the smallest gangs first and several side by side; what was found, by fingerprint."""
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
        """Makes as many of the first trials, all of one size, as idle devices take; keeps what others may use."""
        size = left[0].candidate.num_devices
        alike = [trial for trial in left if trial.candidate.num_devices == size]
        with self._lend(DevicesWanted(least=size, most=size * len(alike), fills=True)) as devices:
            wave = waves(alike, num_devices=len(devices))[0]
            self._notice("trying " + ", ".join(str(trial) for trial in wave))
            began_s = time.monotonic()
            results = self._outcomes(replace(self._site, devices=devices), wave)
            self.spent_s += time.monotonic() - began_s
        for name, result in results.items():
            if isinstance(result, Profile) or result.kind == "out_of_memory":
                self._known.keep(name, _json(result))
        return results

    def _outcomes(self, site: Site, wave: Sequence[Trial]) -> dict[str, Result]:
        """Makes the trials of a wave; those that were killed from outside again, as that is no fault of the job."""
        found: dict[str, Result] = {}
        for attempt in range(1, MAX_ATTEMPTS + 1):
            found |= run_wave(site, wave)
            self.num_trials += len(wave)
            wave = [trial for trial in wave if _was_killed(found[trial.fingerprint])]
            if not wave:
                break
            if attempt < MAX_ATTEMPTS:
                names = ", ".join(str(trial) for trial in wave)
                self._notice(f"trying again what was killed (attempt {attempt + 1} of {MAX_ATTEMPTS}): {names}")
        return found


def _run(
    searches: Mapping[str, Search],
    found: dict[str, Result],
    jobs: Mapping[str, tuple[Job, Survey]],
    *,
    bench: _Bench,
    budget: TrialBudget,
) -> None:
    """Runs trials in waves until no search wants one, or no more are to be paid for."""
    while True:
        _take_known(searches, found)  # of all, before any is compared with the others
        trials = []
        for search in worthwhile(searches.values()):
            if (wanted := search.next_trial(found)) is not None:
                job, survey = jobs[search.job]
                trials.append(Trial(fingerprint=wanted[0], job=job, data=survey.data, candidate=wanted[1]))
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


def _has_failed(searches: Sequence[Search]) -> bool:
    """Whether a trial has ended in another way than for want of memory."""
    return any(failure.kind != "out_of_memory" for search in searches for failure in search.failures)


def _take_known(searches: Mapping[str, Search], found: Mapping[str, Result]) -> None:
    for search in searches.values():
        search.next_trial(found)


def _json(result: Result) -> dict[str, Any]:
    data: dict[str, Any] = to_json(result)
    return data


def _result(data: Mapping[str, Any]) -> Result:
    return from_json(Failure, data) if "kind" in data else from_json(Profile, data)
