"""What is planned: nodes, jobs, and for each job the table of options that the planner may choose from.

A problem is checked as a whole when it is made, and every fault is told at once. Its JSON form keeps the
short keys of the benchmark files of this field ("gpus", "nodes", "runtime", "switch_cost"); seconds are the
unit throughout, though nothing depends on it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class ProblemError(ValueError):
    """A problem that cannot be planned; `faults` says in words everything that is wrong with it."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults: tuple[str, ...] = tuple(faults)
        super().__init__("; ".join(self.faults))


@dataclass(frozen=True)
class Node:
    """A machine with `num_devices` like devices, numbered from 0.

    device_type: such as "a100"; options may ask for one. available_until_s: when its devices go away, None for never.
    price: of one device for a second, in any currency. host_memory_bytes: for all gangs on it together, None: no limit.
    """

    id: str
    num_devices: int
    device_type: str = ""
    available_until_s: float | None = None
    price: float = 0.0
    host_memory_bytes: int | None = None


@dataclass(frozen=True)
class Option:
    """A gang of `num_devices`, spread evenly over `num_nodes` nodes, would do the whole job in `runtime_s` seconds.

    `technique` and `config` are carried along for whoever runs the plan; the planner does not read them.
    device_type: the only type of devices that it runs on, "" for any. startup_s, save_s: paid by every segment at its
    head and end; evaluate_s: by the job's last one. host_memory_bytes: that it takes on each of its nodes.
    """

    technique: str
    num_devices: int
    runtime_s: float
    num_nodes: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    device_type: str = ""
    startup_s: float = 0.0
    save_s: float = 0.0
    evaluate_s: float = 0.0
    host_memory_bytes: int = 0

    @property
    def whole_s(self) -> float:
        """Seconds of the whole job in one segment, all that it pays included."""
        return self.startup_s + self.runtime_s + self.save_s + self.evaluate_s

    def runs_on(self, node: Node) -> bool:
        """Whether a node has devices of the option's type, and enough of them and of memory for its slot."""
        return (
            self.device_type in ("", node.device_type)
            and self.slot <= node.num_devices
            and (node.host_memory_bytes is None or self.host_memory_bytes <= node.host_memory_bytes)
        )

    @property
    def slot(self) -> int:
        """Devices that the gang takes on each of its nodes."""
        return self.num_devices // self.num_nodes


@dataclass(frozen=True)
class PlanningJob:
    """A job with its options; it starts only after every job named in `after` has ended.

    release_s: it does not start before. deadline_s: it must end by then, None for no deadline. weight: of the moment
    when it ends, in the objective `weighted`.
    """

    id: str
    options: tuple[Option, ...]
    after: tuple[str, ...] = ()
    release_s: float = 0.0
    deadline_s: float | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Problem:
    """Which jobs to plan on which nodes. Raises ProblemError, with every fault, when made of impossible
    values.

    switch_cost_s: paid by a job that goes on under another option, on other devices or after a pause.
    """

    name: str
    nodes: tuple[Node, ...]
    jobs: tuple[PlanningJob, ...]
    switch_cost_s: float = 60.0

    def __post_init__(self) -> None:
        if faults := list(_faults(self)):
            raise ProblemError(faults)

    @property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return sum(node.num_devices for node in self.nodes)

    @property
    def device_types(self) -> tuple[str, ...]:
        """The types of devices that there are."""
        return tuple(sorted({node.device_type for node in self.nodes}))

    @property
    def is_plain(self) -> bool:
        """Whether jobs may run at any time, in any order, anywhere, at no cost but their time."""
        return (
            not any(job.after or job.release_s or job.deadline_s is not None for job in self.jobs)
            and not any(node.available_until_s is not None or node.host_memory_bytes is not None for node in self.nodes)
            and not any(o.startup_s or o.save_s or o.evaluate_s for job in self.jobs for o in job.options)
        )

    def job(self, job_id: str) -> PlanningJob:
        """The job of that id; KeyError if there is none."""
        for job in self.jobs:
            if job.id == job_id:
                return job
        raise KeyError(job_id)

    @classmethod
    def from_json(cls, data: Any) -> "Problem":
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
            problem = cls(**fields)
        except ProblemError as error:
            raise ProblemError([*faults, *error.faults]) from None
        if faults:
            raise ProblemError(faults)
        return problem

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads; what is at its default is left out."""
        return {
            "name": self.name,
            "switch_cost": self.switch_cost_s,
            "nodes": [_write(node, _NODE_KEYS) for node in self.nodes],
            "jobs": [
                _write(job, _JOB_KEYS) | {"options": [_write(option, _OPTION_KEYS) for option in job.options]}
                for job in self.jobs
            ],
        }


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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _faults(problem: Problem) -> Iterator[str]:
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
        yield from _amount_faults(f"node {node.id}", node, ("until", "price", "host_memory"), _NODE_KEYS)
        yield from _type_faults(f"node {node.id}", node.device_type)
    nodes = [node for node in problem.nodes if _is_count(node.num_devices)]
    for job in problem.jobs:
        if not job.options:
            yield f"job {job.id}: has no options; give at least one"
        for k, option in enumerate(job.options):
            yield from _option_faults(f"job {job.id}, option {k}", option, nodes)
        yield from _amount_faults(f"job {job.id}", job, ("release", "deadline", "weight"), _JOB_KEYS)
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


def _option_faults(place: str, option: Option, nodes: list[Node]) -> Iterator[str]:
    if not _is_text(option.technique):
        yield f"{place}: technique must be text, not {option.technique!r}"
    if not _is_mapping(option.config):
        yield f"{place}: config must be an object, not {option.config!r}"
    if not _is_number(option.runtime_s) or option.runtime_s <= 0:
        yield f"{place}: runtime must be a number of seconds > 0, not {option.runtime_s!r}"
    seconds = ("startup", "save", "evaluate", "host_memory")
    if faults := [*_amount_faults(place, option, seconds, _OPTION_KEYS), *_type_faults(place, option.device_type)]:
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


def _amount_faults(
    place: str, value: Any, keys: tuple[str, ...], names: Mapping[str, tuple[str, bool]]
) -> Iterator[str]:
    """Faults of what may be left out, but is a number >= 0 where it is given."""
    for key in keys:
        amount = getattr(value, names[key][0])
        default = type(value).__dataclass_fields__[names[key][0]].default
        if not (amount is None and default is None) and (not _is_number(amount) or amount < 0):
            yield f"{place}: {key} must be a number >= 0, not {amount!r}"


def _type_faults(place: str, device_type: Any) -> Iterator[str]:
    if not isinstance(device_type, str):
        yield f"{place}: type must be text, not {device_type!r}"


def _after_faults(jobs: tuple[PlanningJob, ...]) -> Iterator[str]:
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
