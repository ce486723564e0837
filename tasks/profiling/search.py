"""The search for the fastest configs of a technique, which needs few trials and repeats none."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem
from ringmaster.tasks.profiling.speed_beliefs import GUESS_SPREAD, SpeedBeliefs, SpeedErrors, prediction_errors
from ringmaster.techniques import Job
from ringmaster.techniques.preflight_result import Candidate, Preflight, Refusal
from ringmaster.techniques.profiles import PREDICTED, Profile, ProfileKey
from ringmaster.techniques.technique import GangShape
from ringmaster.techniques.training.fused.group_requirements import NAME

# A technique that is slower than another by this factor is not refined: its next config would not make up for that.
FAR_BEHIND = 1.15
# A technique that is predicted to be slower than the best by this factor is not tried. The factor is large because
# predictions have that error between techniques.
FAR_BEHIND_PREDICTED = 1.6
MAX_MISSES = 4  # configs in a row that are not faster than the best, after which a search ends
TRIED_SHARE, FEWEST_TRIALS = 1 / 4, 3  # the candidates of a gang size that are tried: their share, and at least so many
OUT_OF_MEMORY, FAILED, KILLED, TIMED_OUT, REFUSED = "out_of_memory", "failed", "killed", "timed_out", "refused"

MAX_REASONS = 3
MORE = "--verbose shows all that was left out"


@dataclass(frozen=True, kw_only=True)
class ProfilingFailure:
    """A trial that gave no profile.

    kind: "out_of_memory", which another attempt would repeat; "refused" of kernels; "killed" from outside;
        "timed_out", as it took longer than a trial may; "failed" in any other way.
    """

    kind: str
    message: str

    @property
    def leaves_prediction(self) -> bool:
        """Whether it has no information on the option, so that its prediction remains."""
        return self.kind in (KILLED, TIMED_OUT)


Result = Profile | ProfilingFailure


@dataclass(kw_only=True)
class ConfigSearch:
    """The configs of one speed class under one technique on one number of devices, fastest predicted first.

    A thorough search tries one after another. It passes over configs that run out of memory, and ends after a few
    configs that are not faster than the best so far, because those after them are predicted to be even slower.

    key: the speed class.
    job: one of its jobs, with which trials are made.
    device_kind: the kind of the devices.
    """

    key: str
    job: str
    candidates: Sequence[Candidate]
    fingerprints: Sequence[str]
    device_kind: str = ""
    results: dict[str, Result] = field(default_factory=dict)

    def next_trial(self) -> tuple[str, Candidate] | None:
        """Returns the fingerprint and candidate to try next; None if the search is over."""
        best_s, num_misses = math.inf, 0
        for fingerprint, candidate in zip(self.fingerprints, self.candidates, strict=True):
            result = self.results.get(fingerprint)
            if result is None:
                return fingerprint, candidate
            if isinstance(result, Profile):
                num_misses = num_misses + 1 if result.step_s >= best_s else 0
                if num_misses == MAX_MISSES:
                    return None
                best_s = min(best_s, result.step_s)
            elif result.kind not in (OUT_OF_MEMORY, REFUSED):
                return None
        return None

    def take(self, known: Mapping[str, Result]) -> None:
        """Takes all known results of its configs."""
        for fingerprint, candidate in zip(self.fingerprints, self.candidates, strict=True):
            if isinstance(result := known.get(fingerprint), Profile):  # an earlier release stored less
                key = self.key_of(fingerprint)
                self.results[fingerprint] = replace(result, key=key, predicted_step_s=candidate.step_s)
            elif result is not None:
                self.results[fingerprint] = result

    def key_of(self, fingerprint: str) -> ProfileKey:
        """Returns the key under which the profile of a config is stored."""
        return ProfileKey(fingerprint=fingerprint, speed_class=self.key, device_kind=self.device_kind)

    @property
    def untried(self) -> tuple[str, Candidate] | None:
        """The first config of which nothing is known; None if there is none, or a trial has found the job at fault."""
        if any(failure.kind == FAILED for failure in self.failures):
            return None
        every = zip(self.fingerprints, self.candidates, strict=True)
        return next(((f, c) for f, c in every if f not in self.results), None)

    @property
    def predicted_s(self) -> float | None:
        """The predicted seconds of a step under the first config that has not failed; None without a prediction."""
        for fingerprint, candidate in zip(self.fingerprints, self.candidates, strict=True):
            if not isinstance(self.results.get(fingerprint), ProfilingFailure):
                return candidate.step_s
        return None

    @property
    def best_predicted_s(self) -> float | None:
        """The predicted seconds of a step under the config that was measured as the fastest."""
        by_print = dict(zip(self.fingerprints, self.candidates, strict=True))
        measured = [(r.step_s, by_print[f].step_s) for f, r in self.results.items() if isinstance(r, Profile)]
        return min(measured, key=lambda pair: pair[0])[1] if measured else None

    @property
    def num_devices(self) -> int:
        """The gang size of the search."""
        return self.candidates[0].num_devices

    @property
    def best_s(self) -> float:
        """The seconds of a step under the fastest config so far; infinite if there is none."""
        return min((profile.step_s for profile in self.profiles), default=float("inf"))

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profiles that the search has found."""
        return tuple(result for result in self.results.values() if isinstance(result, Profile))

    @property
    def failures(self) -> tuple[ProfilingFailure, ...]:
        """The failures of the search's trials."""
        return tuple(result for result in self.results.values() if isinstance(result, ProfilingFailure))


def quickest_looking_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sorts by predicted seconds of a step; keeps the technique's order if a candidate has no prediction."""
    if any(candidate.step_s is None for candidate in candidates):
        return list(candidates)
    return sorted(candidates, key=lambda candidate: candidate.step_s or 0.0)


def worthwhile(searches: Iterable[ConfigSearch]) -> list[ConfigSearch]:
    """Returns the searches whose next trial may still give a useful option, in their order.

    Among the techniques that train a speed class on the same number of devices, a plan uses the fastest one (a slower
    one only if memory requires it). So a search whose first config is far slower than another search's best is not
    continued, and one that is predicted to be far slower is not begun. If predictions exist, a quarter of the
    candidates of a gang size are tried at most, but three in any case.
    """
    every = list(searches)
    groups: dict[tuple[str, int], list[ConfigSearch]] = {}
    for search in every:
        groups.setdefault((search.key, search.num_devices), []).append(search)
    ended = {group for group, members in groups.items() if _has_had_its_share(members)}
    return [
        search
        for search in every
        if (group := (search.key, search.num_devices)) not in ended and _is_near(search, groups[group])
    ]


def _is_near(search: ConfigSearch, group: Sequence[ConfigSearch]) -> bool:
    """Returns whether a search is not far behind the best of its group, as measured or else as predicted."""
    if search.results:
        return not search.profiles or search.best_s <= FAR_BEHIND * min(other.best_s for other in group)
    return not _looks_far_behind(search, group)


def _has_had_its_share(group: Sequence[ConfigSearch]) -> bool:
    """Returns whether a quarter of the group's candidates were tried, and some of them could train."""
    candidates = [c for search in group for c in search.candidates]
    if any(c.step_s is None for c in candidates) or not any(search.profiles for search in group):
        return False
    return sum(len(search.results) for search in group) >= max(TRIED_SHARE * len(candidates), FEWEST_TRIALS)


def _looks_far_behind(search: ConfigSearch, group: Sequence[ConfigSearch]) -> bool:
    """Returns whether a search's first config is much slower than the best, by the ratio of their predictions."""
    best = min(group, key=lambda other: other.best_s)
    if search.predicted_s is None or best.best_predicted_s is None:
        return False
    return search.predicted_s > FAR_BEHIND_PREDICTED * best.best_predicted_s


def why_nothing_fits(refusals: Sequence[Refusal], failures: Sequence[ProfilingFailure]) -> str:
    """Returns why no technique can train a job: the failures of its trials, or without trials what was lacking."""
    if failures:
        return _why_trials_failed(failures)
    left_out = [refusal for refusal in refusals if refusal.config is None]
    too_large = [refusal for refusal in left_out if refusal.is_too_large]
    reasons = _by_reason(too_large or left_out)
    causes = "; ".join(f"{reason} ({where})" for reason, where in list(reasons.items())[:MAX_REASONS])
    remedy = "larger devices, or a smaller model" if too_large else "let it use other gang sizes or techniques"
    causes = causes or "no number of devices in num_devices is there"
    return f"no technique can train it here: {causes}. To fix: {remedy}; {MORE}"


def _why_trials_failed(failures: Sequence[ProfilingFailure]) -> str:
    """Returns the distinct errors of a job's trials; out of memory comes last, as it may be the smaller problem."""
    in_order = sorted(failures, key=lambda failure: failure.kind == "out_of_memory")
    listed = "; ".join(list(dict.fromkeys(failure.message for failure in in_order))[:MAX_REASONS])
    return f"{listed} (in its trial)" if len(failures) == 1 else f"{listed} (in each of its {len(failures)} trials)"


def refusal_line(refused: Mapping[str, Iterable[Refusal]]) -> str:
    """Returns which techniques were left out for which jobs, and why, in one line; "" if none was.

    Each reason is listed once, with all jobs and techniques that it concerns.
    """
    jobs: dict[tuple[str, str], list[str]] = {}
    for job, refusals in refused.items():
        for reason, where in _by_reason([refusal for refusal in refusals if refusal.config is None]).items():
            jobs.setdefault((reason, where), []).append(job)
    parts = [f"{where}: {reason}{_for(names, of=len(refused))}" for (reason, where), names in jobs.items()]
    return f"left out: {'; '.join(parts)}" if parts else ""


def _for(names: Sequence[str], *, of: int) -> str:
    """Returns the jobs that a reason concerns, unless these are all."""
    first, *others = names
    if len(names) == of:
        return ""
    return f" (for {first} and {len(others)} more)" if others else f" (for {first})"


def _by_reason(refusals: Iterable[Refusal]) -> dict[str, str]:
    """Returns the techniques and sizes to which each reason applies, as text: "ddp, fsdp on 1; mesh on 2"."""
    where: dict[str, dict[int, list[str]]] = {}
    for refusal in refusals:
        where.setdefault(refusal.reason, {}).setdefault(refusal.num_devices, []).append(refusal.technique)
    return {
        reason: ", ".join(f"{', '.join(names)} on {num_devices}" for num_devices, names in sizes.items())
        for reason, sizes in where.items()
    }


# No runtime may be zero, not even that of a job of which only the export is left.
MIN_RUNTIME_S = 1e-3

# Assumed if nothing is known of a device's speed; corrected by the first steps.
GUESSED_STEP_S = 1.0
GUESSED_STARTUP_S = 15.0
GUESSED_STARTUP_ON_A_NODE_S = 1.0  # a fork from a process that has torch imported, and a GPU's context
NVML_LIMITS, USUAL_POWER = "power limits by NVML", "usual power, as NVML says none"
MIN_MEASUREMENT_ERROR = 0.02  # relative, of a step time that an earlier run measured


def planning_problem(
    jobs: Sequence[Job],
    profiles: Mapping[str, Sequence[Profile]],
    cluster: Cluster,
    *,
    name: str,
    steps_done: Mapping[str, int] | None = None,
    groups: Mapping[str, Sequence[Profile]] | None = None,
    with_missing: bool = False,
) -> Problem:
    """Returns the planning problem of the rest of `jobs`; option k of a job is its profile k.

    A job waits for its parents if they are among `jobs`. A job whose profiles have members that are not among `jobs`
    represents them too: its gang trains them.

    steps_done: the completed steps, by job name.
    groups: by lead job, the profiles of groups that may be formed. They become fused options, numbered after the job's
        own.
    with_missing: whether to add nodes for options that do not fit on the cluster. Such nodes are gone or yet to come,
        and must not be planned on.
    """
    done = steps_done or {}
    names = {job.name for job in jobs}
    profiles = {job.name: _on_trusted(profiles[job.name], cluster) for job in jobs}
    rows = [
        PlanningJob(
            id=job.name,
            options=(
                *(_option(job, profile, done) for profile in profiles[job.name]),
                *(
                    replace(_option(job, profile, done), jobs=_members([profile]))
                    for profile in _on_trusted((groups or {}).get(job.name, ()), cluster)
                ),
            ),
            after=tuple(parent for parent in job.parents if parent in names),
            members=_members(profiles[job.name]),
        )
        for job in jobs
    ]
    every = [profile for job in jobs for profile in profiles[job.name]]
    is_typed = any(profile.device_type for profile in every)
    nodes = tuple(
        PlanningNode(
            id=node.name,
            num_devices=len(node.devices),
            device_type=Cluster(nodes=(node,)).device_kind() if is_typed else "",
            power_w=max((device.power_w for device in node.devices), default=0.0),
            power_source=NVML_LIMITS if all(device.power_limit_w for device in node.devices) else USUAL_POWER,
        )
        for node in cluster.nodes
    )
    if with_missing:
        # One option of each size: a thousand jobs have thousands of options, of a handful of sizes.
        sizes = {
            (o.device_type, o.num_devices, o.num_nodes, o.host_memory_bytes): o for row in rows for o in row.options
        }
        nodes = (*nodes, *_missing(nodes, list(sizes.values())))
    return Problem(name=name, nodes=nodes, jobs=tuple(rows), switch_cost_s=switch_cost_s(every))


def _on_trusted(profiles: Sequence[Profile], cluster: Cluster) -> Sequence[Profile]:
    """Returns profiles that hold for any device as profiles of trusted ones, where there are others."""
    if all(device.is_trusted for device in cluster.devices):
        return profiles
    kinds = sorted(device.device_kind() for device in cluster.devices if device.is_trusted)
    kind = kinds[0] if kinds else "trusted"
    return [each if each.device_type else replace(each, device_type=kind) for each in profiles]


def switch_cost_s(profiles: Sequence[Profile]) -> float:
    """Returns the seconds that a job loses by a switch (a checkpoint and a start), as the median over the profiles."""
    return statistics.median(profile.save_s + profile.startup_s for profile in profiles)


def num_evaluations(job: Job, *, steps_done: int = 0) -> int:
    """Returns the evaluations from `steps_done` to the job's end, the last one included."""
    every = job.evaluation.every_steps
    if not job.trains:
        return 1
    others = [step for step in job.evaluation.at_steps if steps_done < step < job.total_steps]
    if every is None:
        return len(others) + 1
    return (job.total_steps - 1) // every - steps_done // every + sum(step % every != 0 for step in others) + 1


def _missing(nodes: Sequence[PlanningNode], options: Sequence[Option]) -> Iterator[PlanningNode]:
    """Yields nodes of each type for options that the present nodes cannot run, as many and as large as needed."""
    for kind in sorted({option.device_type for option in options}):
        lacking = [
            option
            for option in options
            if option.device_type == kind and sum(option.runs_on(node) for node in nodes) < option.num_nodes
        ]
        size = max((option.num_devices // option.num_nodes for option in lacking), default=0)
        for number in range(max((option.num_nodes for option in lacking), default=0)):
            yield PlanningNode(id=f"missing {kind} {number}", num_devices=size, device_type=kind)


def _members(profiles: Sequence[Profile]) -> tuple[str, ...]:
    """Returns the members of the group that a job leads; all of its profiles belong to that one group."""
    return tuple(member.job for member in profiles[0].members) if profiles else ()


def _option(job: Job, profile: Profile, done: Mapping[str, int]) -> Option:
    steps_done = done.get(job.name, 0)
    runtime_s = profile.runtime_s(
        num_steps=job.total_steps - steps_done,
        num_evaluations=num_evaluations(job, steps_done=steps_done),
        members_left={f.job: max(0, f.num_steps - done.get(f.job, 0)) for f in profile.members},
    )
    return Option(
        technique=profile.technique,
        num_devices=profile.num_devices,
        runtime_s=max(runtime_s, MIN_RUNTIME_S),
        config=dict(profile.config),
        device_type=profile.device_type,
        num_nodes=profile.num_nodes,
    )


def shapes_over_nodes(node: GangShape, *, num_nodes: int) -> tuple[GangShape, ...]:
    """Returns gangs of all devices of 2, 4, ... and all of `num_nodes` nodes; `node` is the gang of one whole node."""
    counts = {2**power for power in range(1, num_nodes.bit_length()) if 2**power <= num_nodes}
    counts |= {num_nodes} - {1}
    return tuple(
        GangShape(
            kind=node.kind,
            num_devices=node.num_devices * count,
            memory_bytes=node.memory_bytes,
            num_nodes=count,
        )
        for count in sorted(counts)
    )


def predicted_profiles(preflight: Preflight, *, shapes: Sequence[GangShape]) -> tuple[Profile, ...]:
    """Returns the option with the shortest predicted step of each technique and shape that can train a job."""
    return tuple(
        _profile(best, startup_s=GUESSED_STARTUP_S + (best.startup_s or 0.0), num_nodes=shape.num_nodes)
        for shape in shapes
        for best in _quickest(preflight, shape)
    )


def option_profiles(searches: Sequence[ConfigSearch], beliefs: SpeedBeliefs) -> tuple[Profile, ...]:
    """Returns the options of a job: those that were measured, and the fastest-looking other one of each search.

    An option that nothing predicts is offered only if nothing is known of any other one.
    """
    measured = [profile for search in searches for profile in search.profiles]
    untried_configs = [(search, *untried) for search in searches if (untried := search.untried) is not None]
    if measured or any(candidate.step_s is not None for _, _, candidate in untried_configs):
        untried_configs = [each for each in untried_configs if each[2].step_s is not None]
    predicted = []
    for search, fingerprint, candidate in untried_configs:
        profile = _profile(candidate, startup_s=candidate.startup_s or GUESSED_STARTUP_ON_A_NODE_S)
        profile = replace(profile, key=search.key_of(fingerprint))
        if candidate.step_s is not None:
            errors = prediction_errors(candidate.technique, is_rough=candidate.is_rough)
            belief = beliefs.of(search.key, fingerprint, technique=candidate.technique, errors=errors)
            profile = replace(profile, step_s=candidate.step_s * belief.ratio(), spread=belief.spread)
            if profile.step_s > search.best_s * math.exp(belief.spread):  # surely slower than a measured one
                continue
        predicted.append(profile)
    return (*measured, *predicted)


def known_speeds(searches: Iterable[ConfigSearch], newest: Iterable[Profile], *, device_kind: str) -> SpeedBeliefs:
    """Returns the beliefs about the options of searches, given what they and earlier jobs have measured.

    newest: measurements of earlier runs, at no load.
    """
    beliefs, listed = SpeedBeliefs(), list(searches)
    own = {search.key for search in listed}
    for number, profile in enumerate(newest):
        key = profile.key
        is_of_group = profile.technique == NAME  # it saves time for other reasons than the machine's
        if key is not None and key.device_kind == device_kind and key.speed_class not in own and not is_of_group:
            errors = prediction_errors(profile.technique)
            _note(beliefs, key.speed_class, str(number), profile, predicted_s=profile.predicted_step_s, errors=errors)
    for search in listed:
        for fingerprint, candidate in zip(search.fingerprints, search.candidates, strict=True):
            if isinstance(result := search.results.get(fingerprint), Profile):
                errors = prediction_errors(result.technique, is_rough=candidate.is_rough)
                _note(beliefs, search.key, fingerprint, result, predicted_s=candidate.step_s, errors=errors)
    return beliefs


def _note(
    beliefs: SpeedBeliefs,
    speed_class: str,
    option: str,
    profile: Profile,
    *,
    predicted_s: float | None,
    errors: SpeedErrors,
) -> None:
    if predicted_s and profile.step_s > 0:
        errors = replace(errors, measurement=max(profile.spread, MIN_MEASUREMENT_ERROR))
        beliefs.note(speed_class, option, profile.step_s / predicted_s, technique=profile.technique, errors=errors)


def _profile(candidate: Candidate, *, startup_s: float, num_nodes: int = 1) -> Profile:
    memory = candidate.memory
    return Profile(
        technique=candidate.technique,
        config=candidate.config,
        num_devices=candidate.num_devices,
        num_ranks=candidate.num_ranks,
        num_nodes=num_nodes,
        step_s=GUESSED_STEP_S if candidate.step_s is None else candidate.step_s,
        peak_bytes=candidate.least_bytes if memory is None else memory.device_bytes,
        startup_s=startup_s,
        save_s=candidate.save_s or 0.0,
        evaluate_s=candidate.evaluate_s or 0.0,
        export_s=candidate.export_s or 0.0,
        stall_s=candidate.stall_s,
        source=PREDICTED,
        spread=_spread(candidate),
        predicted_step_s=candidate.step_s,
    )


def _spread(candidate: Candidate) -> float:
    """Returns the standard deviation of the logarithm of the step's time; 0 where it is the usual one."""
    if candidate.step_s is None:
        return GUESS_SPREAD
    errors = prediction_errors(candidate.technique, is_rough=True)
    return math.hypot(errors.machine, errors.technique, errors.job, errors.option) if candidate.is_rough else 0.0


def _quickest(preflight: Preflight, shape: GangShape) -> Iterator[Candidate]:
    groups: dict[str, list[Candidate]] = {}
    for candidate in preflight.candidates:
        if candidate.num_devices == shape.num_devices:
            groups.setdefault(candidate.technique, []).append(candidate)
    for group in groups.values():
        known = [candidate for candidate in group if candidate.step_s is not None]
        yield min(known, key=lambda candidate: candidate.step_s or 0.0) if known else group[0]
