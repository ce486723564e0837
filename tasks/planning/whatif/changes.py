"""Questions about a problem (more devices, fewer jobs, a deadline), and the changed problems."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ringmaster.errors import ProblemError
from ringmaster.tasks.planning.bounds.job_costs import in_order
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import PlanningNode
from ringmaster.tasks.planning.problems.reductions import only


@dataclass(frozen=True, kw_only=True)
class MoreDevices:
    """A node has `num_devices` more. device_type: of that node; "" where all nodes have the same type."""

    num_devices: int
    device_type: str = ""


@dataclass(frozen=True, kw_only=True)
class MoreNodes:
    """There are `num_nodes` more nodes of `num_devices` devices each."""

    num_devices: int
    device_type: str = ""
    num_nodes: int = 1


@dataclass(frozen=True, kw_only=True)
class FewerJobs:
    """The jobs are left out. Jobs that wait for them must be left out, too."""

    jobs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """All jobs are to end within `due_s` seconds from the start of the plan."""

    due_s: float


Change = MoreDevices | MoreNodes | FewerJobs


def changed(problem: Problem, change: Change, *, on: str = "") -> Problem:
    """Returns the changed problem.

    on: the node that gets more devices; by default the first one of their type.

    Raises ProblemError where the change is impossible, with what would be possible.
    """
    match change:
        case MoreDevices():
            kind = type_of(problem, change.device_type)
            grown = on or next(node.id for node in problem.nodes if node.device_type == kind)
            nodes = tuple(
                replace(node, num_devices=node.num_devices + change.num_devices) if node.id == grown else node
                for node in problem.nodes
            )
            return replace(problem, nodes=nodes)
        case MoreNodes():
            return replace(problem, nodes=(*problem.nodes, *_new_nodes(problem, change)))
        case FewerJobs():
            return _without(problem, change.jobs)


def type_of(problem: Problem, device_type: str) -> str:
    """Returns the type of added devices. Raises ProblemError where it is unknown, or where it is not said which."""
    kinds = problem.device_types
    if device_type in kinds:
        return device_type
    if not device_type and len(kinds) == 1:
        return kinds[0]
    what = f"no node has devices of type {device_type!r}" if device_type else "the nodes have several types of devices"
    remedy = f"name one of {', '.join(map(repr, kinds))}" if any(kinds) else "leave the type out: no node has one"
    raise ProblemError([f"{what}. To fix: {remedy}"])


def dependents(problem: Problem, names: Collection[str]) -> tuple[str, ...]:
    """Returns the jobs that wait for any of these, directly or through others, in the order of the problem."""
    found = set(names)
    for job in in_order(problem):
        if found & set(job.after):
            found.add(job.id)
    return tuple(job.id for job in problem.jobs if job.id in found and job.id not in names)


def _new_nodes(problem: Problem, change: MoreNodes) -> list[PlanningNode]:
    """Returns the nodes: like those of their type and size, if there are any, and without an end."""
    kind = type_of(problem, change.device_type)
    alike = [node for node in problem.nodes if (node.device_type, node.num_devices) == (kind, change.num_devices)]
    model = replace(alike[0], available_until_s=None) if alike else PlanningNode("", change.num_devices, kind)
    taken, number = {node.id for node in problem.nodes}, 1
    found: list[PlanningNode] = []
    while len(found) < change.num_nodes:
        if (name := f"new{number}") not in taken:
            found.append(replace(model, id=name))
        number += 1
    return found


def _without(problem: Problem, names: Collection[str]) -> Problem:
    known = [job.id for job in problem.jobs]
    if wrong := [name for name in names if name not in known]:
        some = ", ".join(known[:20]) + (" and others" if len(known) > 20 else "")
        raise ProblemError([f"there is no job {name!r}. To fix: name some of {some}" for name in wrong])
    if waiting := dependents(problem, names):
        every = ",".join([*names, *waiting])
        raise ProblemError(
            [f"{', '.join(waiting)} would wait for what is left out. To fix: leave all out, with --without {every}"]
        )
    left = [name for name in known if name not in names]
    if not left:
        raise ProblemError(["without these no job is left. To fix: leave out fewer"])
    return only(problem, left)
