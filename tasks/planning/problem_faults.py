"""Everything that can be wrong with a problem, in words: each fault with its place, by the keys of the JSON form."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.planning.problem import Node, Option, PlanningJob, Problem


# JSON key -> attribute
_NODE_AMOUNTS = {"until": "available_until_s", "price": "price", "host_memory": "host_memory_bytes"}
_JOB_AMOUNTS = {"release": "release_s", "deadline": "deadline_s", "weight": "weight"}
_OPTION_AMOUNTS = {
    "startup": "startup_s",
    "save": "save_s",
    "evaluate": "evaluate_s",
    "host_memory": "host_memory_bytes",
}


def faults_of(problem: "Problem") -> Iterator[str]:
    """Everything that is wrong with a problem, in words."""
    if not _is_text(problem.name):
        yield f"problem: name must be text, not {problem.name!r}"
    if not _is_number(problem.switch_cost_s) or problem.switch_cost_s < 0:
        yield f"problem: switch_cost must be a number of seconds >= 0, not {problem.switch_cost_s!r}"
    yield from _id_faults("node", [node.id for node in problem.nodes])
    yield from _id_faults("job", [job.id for job in problem.jobs])
    for node in problem.nodes:
        if not _is_count(node.num_devices):
            yield f"node {node.id}: gpus must be a whole number > 0, not {node.num_devices!r}"
        yield from _amount_faults(f"node {node.id}", node, _NODE_AMOUNTS)
        yield from _type_faults(f"node {node.id}", node.device_type)
    nodes = [node for node in problem.nodes if _is_count(node.num_devices)]
    for job in problem.jobs:
        if not job.options:
            yield f"job {job.id}: has no options; give at least one"
        for k, option in enumerate(job.options):
            yield from _option_faults(f"job {job.id}, option {k}", option, nodes)
        yield from _amount_faults(f"job {job.id}", job, _JOB_AMOUNTS)
    yield from _after_faults(problem.jobs)


def _id_faults(kind: str, ids: list[Any]) -> Iterator[str]:
    if not ids:
        yield f"problem: has no {kind}s; give at least one"
    seen: set[str] = set()
    for i, name in enumerate(ids):
        if not _is_text(name):
            yield f"{kind} {i}: id must be text, not {name!r}"
        elif name in seen:
            yield f"{kind} {name}: this id is used more than once"
        else:
            seen.add(name)


def _option_faults(place: str, option: "Option", nodes: list["Node"]) -> Iterator[str]:
    if not _is_text(option.technique):
        yield f"{place}: technique must be text, not {option.technique!r}"
    if not _is_mapping(option.config):
        yield f"{place}: config must be an object, not {option.config!r}"
    if not _is_number(option.runtime_s) or option.runtime_s <= 0:
        yield f"{place}: runtime must be a number of seconds > 0, not {option.runtime_s!r}"
    if faults := [*_amount_faults(place, option, _OPTION_AMOUNTS), *_type_faults(place, option.device_type)]:
        yield from faults
        return
    counts_are_right = True
    for key, value in (("gpus", option.num_devices), ("nodes", option.num_nodes)):
        if not _is_count(value):
            counts_are_right = False
            yield f"{place}: {key} must be a whole number > 0, not {value!r}"
    if not counts_are_right:
        return
    if option.num_devices % option.num_nodes:
        yield f"{place}: {option.num_devices} gpus cannot be spread evenly over {option.num_nodes} nodes"
    elif sum(option.runs_on(node) for node in nodes) < option.num_nodes:
        sizes = sorted((node.num_devices for node in nodes), reverse=True)
        kind = f" of type {option.device_type!r}" if option.device_type else ""
        yield (
            f"{place}: needs {option.num_nodes} node(s) with {option.slot} gpus or more{kind} and its host memory; "
            f"the nodes have {sizes[:8]}{' ...' if len(sizes) > 8 else ''} gpus; remove the option or add nodes"
        )


def _amount_faults(place: str, value: Any, attributes: Mapping[str, str]) -> Iterator[str]:
    """Faults of what may be left out, but is a number >= 0 where it is given."""
    for key, attribute in attributes.items():
        amount = getattr(value, attribute)
        default = type(value).__dataclass_fields__[attribute].default
        if not (amount is None and default is None) and (not _is_number(amount) or amount < 0):
            yield f"{place}: {key} must be a number >= 0, not {amount!r}"


def _type_faults(place: str, device_type: Any) -> Iterator[str]:
    if not isinstance(device_type, str):
        yield f"{place}: type must be text, not {device_type!r}"


def _after_faults(jobs: tuple["PlanningJob", ...]) -> Iterator[str]:
    known = {job.id for job in jobs if _is_text(job.id)}
    waits: dict[str, set[str]] = {}
    for job in jobs:
        for other in job.after:
            if not _is_text(other) or other not in known:
                yield f"job {job.id}: after names {other!r}, which is no job of this problem"
        if _is_text(job.id):
            waits[job.id] = {other for other in job.after if _is_text(other) and other in known}
    while ready := {job for job, others in waits.items() if not others}:
        waits = {job: others - ready for job, others in waits.items() if job not in ready}
    if waits:
        on_cycle = set(waits)
        while waiting_only := on_cycle - {other for job in on_cycle for other in waits[job]}:
            on_cycle -= waiting_only
        yield f"jobs {', '.join(sorted(on_cycle))}: wait for each other in a cycle; remove one `after`"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
