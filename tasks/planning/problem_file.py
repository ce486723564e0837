"""The JSON form of problems, with the short keys that the benchmark files of this field use."""

from collections.abc import Mapping
from typing import Any

from tasks.planning.problem import Node, Option, PlanningJob, Problem, ProblemError

# JSON key -> (attribute, is it required)
_PROBLEM_KEYS = {
    "name": ("name", True),
    "nodes": ("nodes", True),
    "jobs": ("jobs", True),
    "switch_cost": ("switch_cost_s", False),
}
_NODE_KEYS = {
    "id": ("id", True),
    "gpus": ("num_devices", True),
    "type": ("device_type", False),
    "until": ("available_until_s", False),
    "price": ("price", False),
    "host_memory": ("host_memory_bytes", False),
}
_JOB_KEYS = {
    "id": ("id", True),
    "options": ("options", True),
    "after": ("after", False),
    "release": ("release_s", False),
    "deadline": ("deadline_s", False),
    "weight": ("weight", False),
}
_OPTION_KEYS = {
    "technique": ("technique", True),
    "gpus": ("num_devices", True),
    "runtime": ("runtime_s", True),
    "nodes": ("num_nodes", False),
    "config": ("config", False),
    "type": ("device_type", False),
    "startup": ("startup_s", False),
    "save": ("save_s", False),
    "evaluate": ("evaluate_s", False),
    "host_memory": ("host_memory_bytes", False),
}
_MISSING: Any = None  # stands for a required value that a file lacks; the value checks name it


def read_problem(data: Any) -> Problem:
    """The problem that a JSON object describes. Raises ProblemError with every fault, its place named."""
    faults: list[str] = []
    fields = _read(data, "problem", faults, _PROBLEM_KEYS, strict=False)
    nodes, jobs = [], []
    for i, item in enumerate(_items(fields.get("nodes"), "nodes", faults)):
        nodes.append(Node(**_read(item, f"node {i}", faults, _NODE_KEYS)))
    for i, item in enumerate(_items(fields.get("jobs"), "jobs", faults)):
        row = _read(item, f"job {i}", faults, _JOB_KEYS)
        place = f"job {row['id']}"
        options = [
            Option(**_read(option, f"{place}, option {k}", faults, _OPTION_KEYS))
            for k, option in enumerate(_items(row["options"], f"{place}: options", faults))
        ]
        after = tuple(_items(row.get("after", []), f"{place}: after", faults))
        jobs.append(PlanningJob(**{**row, "options": tuple(options), "after": after}))
    fields |= {"nodes": tuple(nodes), "jobs": tuple(jobs)}
    try:
        problem = Problem(**fields)
    except ProblemError as error:
        raise ProblemError([*faults, *error.faults]) from None
    if faults:
        raise ProblemError(faults)
    return problem


def write_problem(problem: Problem) -> dict[str, Any]:
    """The JSON object that `read_problem` reads; what is at its default is left out."""
    return {
        "name": problem.name,
        "switch_cost": problem.switch_cost_s,
        "nodes": [_write(node, _NODE_KEYS) for node in problem.nodes],
        "jobs": [
            _write(job, _JOB_KEYS) | {"options": [_write(option, _OPTION_KEYS) for option in job.options]}
            for job in problem.jobs
        ],
    }


def _read(
    data: Any, place: str, faults: list[str], keys: Mapping[str, tuple[str, bool]], *, strict: bool = True
) -> dict[str, Any]:
    """The attributes that a JSON object gives, with None for each required one that it lacks."""
    fields: dict[str, Any] = {name: _MISSING for name, required in keys.values() if required}
    if not isinstance(data, dict):
        faults.append(f"{place}: must be an object, not {data!r:.60}")
        return fields
    for key, value in data.items():
        if key in keys:
            fields[keys[key][0]] = value
        elif strict:
            faults.append(f"{place}: unknown key {key!r}; there are {sorted(keys)}")
    return fields


def _items(data: Any, place: str, faults: list[str]) -> list[Any]:
    if isinstance(data, list):
        return data
    faults.append(f"{place}: must be a list" + ("" if data is None else f", not {data!r:.60}"))
    return []


def _write(value: Any, keys: Mapping[str, tuple[str, bool]]) -> dict[str, Any]:
    row = {}
    for key, (name, required) in keys.items():
        item = getattr(value, name)
        if required or (item != type(value).__dataclass_fields__[name].default and item not in ((), {})):
            row[key] = list(item) if isinstance(item, tuple) else item
    return row
