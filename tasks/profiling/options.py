"""Conversion of profiles into the planner's options: the rest of each job, in seconds, under each profile."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.planning import Node, Option, PlanningJob, Problem
from ringmaster.techniques import Job, Profile

# No runtime may be zero, not even that of a job of which only the export is left.
LEAST_RUNTIME_S = 1e-3


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
        Node(
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


def _missing(nodes: Sequence[Node], options: Sequence[Option]) -> Iterator[Node]:
    """Yields nodes of each type for options that the present nodes cannot run, as many and as large as needed."""
    for kind in sorted({option.device_type for option in options}):
        lacking = [
            option
            for option in options
            if option.device_type == kind and sum(option.runs_on(node) for node in nodes) < option.num_nodes
        ]
        size = max((option.num_devices // option.num_nodes for option in lacking), default=0)
        for number in range(max((option.num_nodes for option in lacking), default=0)):
            yield Node(id=f"missing {kind} {number}", num_devices=size, device_type=kind)


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
