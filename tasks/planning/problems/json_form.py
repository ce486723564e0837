"""JSON form of problems, with the short keys of this field's benchmark files."""

from collections.abc import Mapping, Sequence
from typing import Any

from ringmaster.tasks.planning.problems.faults import shown
from ringmaster.tasks.planning.problems.parts import Node, Option, PlanningJob, Running

# JSON key -> (attribute, whether it is required)
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
    "group": ("group", False),
    "running": ("running", False),
    "started": ("started", False),
    "fellows": ("members", False),
}
_RUNNING_KEYS = {
    "option": ("option", True),
    "gpus": ("devices", True),
    "until": ("pinned_until_s", False),
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
    "jobs": ("jobs", False),
}
_MISSING: Any = None  # replaces a required value that the file lacks; validation then reports it


def read_fields(data: Any) -> tuple[dict[str, Any], list[str]]:
    """Reads a problem's attributes from a JSON object; returns them, and a message for each fault with its place."""
    faults: list[str] = []
    fields = _read(data, "problem", faults, _PROBLEM_KEYS, strict=False)
    nodes = tuple(
        Node(**_read(item, f"node {i}", faults, _NODE_KEYS))
        for i, item in enumerate(_items(fields.get("nodes"), "nodes", faults))
    )
    jobs = tuple(_read_job(item, i, faults) for i, item in enumerate(_items(fields.get("jobs"), "jobs", faults)))
    return fields | {"nodes": nodes, "jobs": jobs}, faults


def write_fields(
    *, name: str, nodes: Sequence[Node], jobs: Sequence[PlanningJob], switch_cost_s: float
) -> dict[str, Any]:
    """The JSON object that `read_fields` reads, without values that are at their default."""
    return {
        "name": name,
        "switch_cost": switch_cost_s,
        "nodes": [_write(node, _NODE_KEYS) for node in nodes],
        "jobs": [
            _write(job, _JOB_KEYS)
            | {"options": [_write(option, _OPTION_KEYS) for option in job.options]}
            | ({"running": _write_running(job.running)} if job.running else {})
            for job in jobs
        ],
    }


def _read_job(data: Any, index: int, faults: list[str]) -> PlanningJob:
    row = _read(data, f"job {index}", faults, _JOB_KEYS)
    place = f"job {row['id'] if isinstance(row['id'], str) else index}"
    options = []
    for k, item in enumerate(_items(row["options"], f"{place}: options", faults)):
        option = _read(item, f"{place}, option {k}", faults, _OPTION_KEYS)
        if "jobs" in option:
            option["jobs"] = tuple(_items(option["jobs"], f"{place}, option {k}: jobs", faults))
        options.append(Option(**option))
    lists = {
        name: tuple(_items(row.get(name, []), f"{place}: {key}", faults))
        for key, (name, _) in _JOB_KEYS.items()
        if key in ("after", "fellows")
    }
    row |= {"options": tuple(options), **lists}
    if row.get("running") is not None:
        running = _read(row["running"], f"{place}: running", faults, _RUNNING_KEYS)
        gpus = _items(running["devices"], f"{place}, running: gpus", faults)
        if not all(isinstance(item, list) and len(item) == 2 and isinstance(item[1], list) for item in gpus):
            faults.append(f"{place}, running: gpus must be a list of [node, [devices]], not {shown(gpus)}")
            gpus = []
        row["running"] = Running(**running | {"devices": tuple((node, tuple(ids)) for node, ids in gpus)})
    return PlanningJob(**row)


def _write_running(running: Running) -> dict[str, Any]:
    return _write(running, _RUNNING_KEYS) | {"gpus": [[node, list(ids)] for node, ids in running.devices]}


def _read(
    data: Any, place: str, faults: list[str], keys: Mapping[str, tuple[str, bool]], *, strict: bool = True
) -> dict[str, Any]:
    """Returns the attributes that a JSON object gives, with None for each required one that is missing."""
    fields: dict[str, Any] = {name: _MISSING for name, required in keys.values() if required}
    if not isinstance(data, dict):
        faults.append(f"{place}: must be an object, not {shown(data)}")
        return fields
    for key, value in data.items():
        if key in keys:
            fields[keys[key][0]] = value
        elif strict:
            faults.append(f"{place}: unknown key {shown(key)}; there are {sorted(keys)}")
    return fields


def _items(data: Any, place: str, faults: list[str]) -> list[Any]:
    if isinstance(data, list):
        return data
    faults.append(f"{place}: must be a list" + ("" if data is None else f", not {shown(data)}"))
    return []


def _write(value: Any, keys: Mapping[str, tuple[str, bool]]) -> dict[str, Any]:
    row = {}
    for key, (name, required) in keys.items():
        item = getattr(value, name)
        if required or (item != type(value).__dataclass_fields__[name].default and item not in ((), {})):
            row[key] = list(item) if isinstance(item, tuple) else item
    return row
