"""Options that no other option of the same jobs dominates: only these are planned with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ringmaster.tasks.planning.problems.parts import Option, PlanningJob
from ringmaster.tasks.planning.problems.problem import Problem

_Key = TypeVar("_Key")


def useful_options(job: PlanningJob) -> tuple[int, ...]:
    """Returns indices of the options for the job alone that no other option dominates.

    An option dominates another if it is at least as fast with no more devices, spread in the same way. The option that
    the job is running is always included, since continuing under it is free.
    """
    alone = [(k, option) for k, option in enumerate(job.options) if not option.jobs]
    kept = set(_unbeaten(alone))
    if job.running is not None and not job.options[job.running.option].jobs:
        kept.add(job.running.option)
    return tuple(sorted(kept))


def useful_groups(problem: Problem) -> list[tuple[int, int]]:
    """Returns the (index of a job, index of its option) of all undominated options for several jobs.

    Options are compared only with options for the same set of jobs. Options that are running are always included.
    """
    rows: dict[frozenset[str], list[tuple[tuple[int, int], Option]]] = {}
    for j, job in enumerate(problem.jobs):
        for k, option in enumerate(job.options):
            if option.jobs:
                rows.setdefault(frozenset((job.id, *option.jobs)), []).append(((j, k), option))
    running = {(j, job.running.option) for j, job in enumerate(problem.jobs) if job.running is not None}
    every = [pair for row in rows.values() for pair, _ in row]
    unbeaten = {pair for row in rows.values() for pair in _unbeaten(row)}
    return [pair for pair in every if pair in unbeaten | running]


def _unbeaten(rows: Sequence[tuple[_Key, Option]]) -> list[_Key]:
    """Returns the keys of the options that no other option dominates; of equal options, the first."""
    best: dict[tuple[object, ...], tuple[_Key, Option]] = {}
    for key, option in rows:
        shape = (option.num_nodes, option.slot, *_besides(option))
        if shape not in best or option.runtime_s < best[shape][1].runtime_s:
            best[shape] = (key, option)
    return [key for key, option in best.values() if not _is_beaten(option, [other for _, other in best.values()])]


def _besides(option: Option) -> tuple[object, ...]:
    """Returns the attributes that must be equal for two options to differ in speed alone."""
    return (option.device_type, option.startup_s, option.save_s, option.evaluate_s, option.host_memory_bytes)


def _is_beaten(option: Option, others: Sequence[Option]) -> bool:
    """Whether another option, with no larger slots and no more nodes, is at least as fast."""
    return any(
        (other.num_nodes, other.slot) != (option.num_nodes, option.slot)
        and other.num_nodes <= option.num_nodes
        and other.slot <= option.slot
        and other.runtime_s <= option.runtime_s
        and _besides(other) == _besides(option)
        for other in others
    )
