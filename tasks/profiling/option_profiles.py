"""Conversion of profiles into the planner's options: the rest of each job, in seconds, under each profile.

Profiles without trials: the predicted step times, corrected by what other options and other jobs have taken.

A job's options are those that were measured and, of each technique and gang size, the config that is predicted to be
the fastest of the others. So that the mixture is not biased towards either, predictions are corrected by the model of
`speed_beliefs`: by the measured options of jobs of the same speed, and by the newest measurements of other jobs on such
devices. What running segments measure corrects them further.

The predictions for gangs over several nodes assume that the network is as fast as the links within a node. Such gangs
are therefore offered only to jobs that no single node can train.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem
from ringmaster.tasks.profiling.search import ConfigSearch
from ringmaster.tasks.profiling.speed_beliefs import OF_PREDICTIONS, SpeedBelief, SpeedBeliefs
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.preflight import Candidate, Preflight
from ringmaster.techniques.profiles import PREDICTED
from ringmaster.techniques.technique import GangShape
from ringmaster.techniques.training.fused.group_requirements import NAME

# No runtime may be zero, not even that of a job of which only the export is left.
LEAST_RUNTIME_S = 1e-3

# Assumed if nothing is known of a device's speed; corrected by the first steps.
GUESSED_STEP_S = 1.0
GUESSED_STARTUP_S = 15.0
GUESSED_STARTUP_ON_A_NODE_S = 1.0  # a fork from a process that has torch imported, and a GPU's context
LEAST_MEASUREMENT_ERROR = 0.02  # relative, of a step time that an earlier run measured


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
    stands for them too: its gang trains them.

    steps_done: the completed steps, by job name.
    groups: by lead job, the profiles of groups that may be formed. They become fused options, numbered after the job's
        own.
    with_missing: whether to add nodes for options that do not fit on the cluster. Such nodes are gone or yet to come,
        and must not be planned on.
    """
    done = steps_done or {}
    names = {job.name for job in jobs}
    rows = [
        PlanningJob(
            id=job.name,
            options=(
                *(_option(job, profile, done) for profile in profiles[job.name]),
                *(_fused(job, profile, done) for profile in (groups or {}).get(job.name, ())),
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


def _fused(job: Job, profile: Profile, done: Mapping[str, int]) -> Option:
    return replace(_option(job, profile, done), jobs=_members([profile]))


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
        runtime_s=max(runtime_s, LEAST_RUNTIME_S),
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
    found = [(search, *untried) for search in searches if (untried := search.untried) is not None]
    if measured or any(candidate.step_s is not None for _, _, candidate in found):
        found = [each for each in found if each[2].step_s is not None]
    predicted = []
    for search, fingerprint, candidate in found:
        profile = _profile(candidate, startup_s=candidate.startup_s or GUESSED_STARTUP_ON_A_NODE_S)
        profile = replace(profile, key=search.key_of(fingerprint))
        if candidate.step_s is not None:
            belief = beliefs.of(search.key, fingerprint, technique=candidate.technique, errors=OF_PREDICTIONS)
            profile = replace(profile, step_s=candidate.step_s * belief.ratio(), spread=belief.spread)
            if _is_slower(profile, search.best_s, belief):
                continue
        predicted.append(profile)
    return (*measured, *predicted)


def _is_slower(profile: Profile, best_s: float, belief: SpeedBelief) -> bool:
    """Returns whether a predicted config is surely slower than a measured one of the same technique and gang size."""
    return profile.step_s > best_s * math.exp(belief.spread)


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
            _note(beliefs, key.speed_class, str(number), profile, predicted_s=profile.predicted_step_s)
    for search in listed:
        for fingerprint, candidate in zip(search.fingerprints, search.candidates, strict=True):
            if isinstance(result := search.results.get(fingerprint), Profile):
                _note(beliefs, search.key, fingerprint, result, predicted_s=candidate.step_s)
    return beliefs


def _note(beliefs: SpeedBeliefs, speed_class: str, option: str, profile: Profile, *, predicted_s: float | None) -> None:
    if predicted_s and profile.step_s > 0:
        errors = replace(OF_PREDICTIONS, measurement=max(profile.spread, LEAST_MEASUREMENT_ERROR))
        beliefs.note(speed_class, option, profile.step_s / predicted_s, technique=profile.technique, errors=errors)


def _profile(candidate: Candidate, *, startup_s: float, num_nodes: int = 1) -> Profile:
    forecast = candidate.forecast
    return Profile(
        technique=candidate.technique,
        config=candidate.config,
        num_devices=candidate.num_devices,
        num_ranks=candidate.num_ranks,
        num_nodes=num_nodes,
        step_s=GUESSED_STEP_S if candidate.step_s is None else candidate.step_s,
        peak_bytes=candidate.least_bytes if forecast is None else forecast.device_bytes,
        startup_s=startup_s,
        save_s=candidate.save_s or 0.0,
        evaluate_s=candidate.evaluate_s or 0.0,
        export_s=candidate.export_s or 0.0,
        stall_s=candidate.stall_s,
        source=PREDICTED,
        predicted_step_s=candidate.step_s,
    )


def _quickest(preflight: Preflight, shape: GangShape) -> Iterator[Candidate]:
    groups: dict[str, list[Candidate]] = {}
    for candidate in preflight.candidates:
        if candidate.num_devices == shape.num_devices:
            groups.setdefault(candidate.technique, []).append(candidate)
    for group in groups.values():
        known = [candidate for candidate in group if candidate.step_s is not None]
        yield min(known, key=lambda candidate: candidate.step_s or 0.0) if known else group[0]
