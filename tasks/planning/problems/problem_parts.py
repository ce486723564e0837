"""Validation of problems: a message for each fault, with its place by the keys of the JSON form."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from ringmaster.text import MAX_IN_NAME, is_printable_name

Steps = tuple[tuple[float, float], ...]
"""A value over time, as (start in seconds, value) of its steps; empty where there is none (`series`)."""


@dataclass(frozen=True)
class PlanningNode:
    """A machine with `num_devices` devices of one type, numbered from 0.

    device_type: such as "a100"; options may require one.
    available_until_s: time at which its devices become unavailable; None for never.
    price: of one device for one second, in any currency.
    host_memory_bytes: limit for all gangs on the node together; None for no limit.
    price_steps: the price over time, instead of `price`.
    energy_price_steps: the price of a kWh over time, in addition to that of devices.
    carbon_steps: grams of CO2 equivalents of a kWh over time.
    power_w: of one device that a job holds; options may give their own.
    power_source: who says so, in words; planners do not read it.
    """

    id: str
    num_devices: int
    device_type: str = ""
    available_until_s: float | None = None
    price: float = 0.0
    host_memory_bytes: int | None = None
    price_steps: Steps = ()
    energy_price_steps: Steps = ()
    carbon_steps: Steps = ()
    power_w: float = 0.0
    power_source: str = ""


@dataclass(frozen=True)
class Option:
    """A way to run a whole job in `runtime_s` seconds on a gang of `num_devices`, spread evenly over `num_nodes` nodes.

    technique, config: passed on to the executor of the plan; the planner does not read them.
    device_type: the only type of devices that the option runs on; "" for any.
    startup_s: seconds that every segment pays at its start.
    save_s: seconds that every segment pays at its end.
    evaluate_s: seconds that the job's last segment pays.
    host_memory_bytes: host memory that the option takes on each of its nodes.
    jobs: ids of further jobs that this *fused group* trains together with the option's owner; in any second, it does
        the same share of each job.
    power_w: of one device; None for that of the node.
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
    jobs: tuple[str, ...] = ()
    power_w: float | None = None

    @property
    def whole_s(self) -> float:
        """Seconds of the whole job in one segment, including start-up, save and evaluation."""
        return self.startup_s + self.runtime_s + self.save_s + self.evaluate_s

    def runs_on(self, node: PlanningNode) -> bool:
        """Whether the node has devices of the option's type, and enough devices and host memory for its slot."""
        return (
            self.device_type in ("", node.device_type)
            and self.slot <= node.num_devices
            and (node.host_memory_bytes is None or self.host_memory_bytes <= node.host_memory_bytes)
        )

    @property
    def slot(self) -> int:
        """Number of devices that the gang takes on each of its nodes."""
        return self.num_devices // self.num_nodes


@dataclass(frozen=True)
class CurrentRun:
    """The option under which a job runs at time 0, and its devices.

    A first segment that continues under the same option on the same devices at time 0 pays neither the switch cost nor
    the option's start-up.

    option: index into the job's options.
    devices: ((node id, (device ids...)), ...), one entry per node.
    pinned_until_s: the job must continue unchanged at least until then, or until it is done.
    """

    option: int
    devices: tuple[tuple[str, tuple[int, ...]], ...]
    pinned_until_s: float = 0.0

    @property
    def gang(self) -> frozenset[tuple[str, int]]:
        """The devices as a set of (node id, device id)."""
        return frozenset((node, device) for node, ids in self.devices for device in ids)


@dataclass(frozen=True)
class PlanningJob:
    """A job with its options; it starts only after every job named in `after` has ended.

    release_s: earliest start.
    deadline_s: latest end; None for no deadline.
    weight: factor of the job's end in the objective `weighted`.
    user: the user or batch whose job it is, for the objective `fairness` and quotas; "" for a user without other jobs.
        In files, it is `group`.
    running: what the job runs at time 0; None where it does not run.
    started: the job has a checkpoint, so its first segment pays the switch cost, unless that segment continues what is
        running. A running job has always started.
    members: ids of further jobs that this job represents; every option of this job trains them too.
    """

    id: str
    options: tuple[Option, ...]
    after: tuple[str, ...] = ()
    release_s: float = 0.0
    deadline_s: float | None = None
    weight: float = 1.0
    user: str = ""
    running: CurrentRun | None = None
    started: bool = False
    members: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.running is not None and self.started is False:
            object.__setattr__(self, "started", True)

    def goes_on(self, option: int, start_s: float, devices: Iterable[tuple[str, Iterable[int]]]) -> bool:
        """Whether a segment continues at time 0 what the job is running; it then pays no switch cost or start-up."""
        gang = frozenset((node, device) for node, ids in devices for device in ids)
        return (
            self.running is not None and (option, start_s) == (self.running.option, 0.0) and gang == self.running.gang
        )


MAX_DEVICES = 4096  # per node: tables of the bounds grow with it
MAX_AMOUNT = 1e15  # limit of seconds, bytes and prices: sums and ratios of such numbers are still exact enough
MIN_RUNTIME_S = 1e-6
MIN_FACTOR = 1e-100  # of weights and prices other than 0: products of smaller ones lose their digits

# JSON key -> attribute
_NODE_AMOUNTS = {
    "until": "available_until_s",
    "price": "price",
    "host_memory": "host_memory_bytes",
    "power": "power_w",
}
_JOB_AMOUNTS = {"release": "release_s", "deadline": "deadline_s", "weight": "weight"}
_OPTION_AMOUNTS = {
    "startup": "startup_s",
    "save": "save_s",
    "evaluate": "evaluate_s",
    "host_memory": "host_memory_bytes",
    "power": "power_w",
}
_NAME = f"text of at most {MAX_IN_NAME} visible characters"
_FACTORS = ("price", "weight")
_SECONDS = "a number of seconds >= 0"


def faults_of(
    *, name: str, nodes: Sequence[PlanningNode], jobs: Sequence[PlanningJob], switch_cost_s: float
) -> Iterator[str]:
    """Yields a message for everything that is wrong with a problem."""
    if not is_printable_name(name):
        yield f"problem: name must be {_NAME}, not {shown(name)}"
    if not is_amount(switch_cost_s):
        yield f"problem: switch_cost must be {_SECONDS}, not {shown(switch_cost_s)}"
    yield from _id_faults("node", [node.id for node in nodes])
    yield from _id_faults("job", [job.id for job in jobs])
    valid = []
    for i, node in enumerate(nodes):
        faults = list(_node_faults(f"node {_name(node.id, i)}", node))
        yield from faults
        is_only_too_large = len(faults) == 1 and _is_count(node.num_devices) and node.num_devices > MAX_DEVICES
        valid += [node] if not faults or is_only_too_large else []
    by_id = {job.id: job for job in jobs if _is_text(job.id)}
    room = _NodeCapacity(valid)
    for j, job in enumerate(jobs):
        place = f"job {_name(job.id, j)}"
        if not job.options:
            yield f"{place}: has no options; give at least one"
        elif all(option.jobs for option in job.options):
            yield f"{place}: every option carries further jobs; give at least one that does the job alone"
        for k, option in enumerate(job.options):
            yield from _option_faults(f"{place}, option {k}", option, room)
            if option.jobs:
                yield from _fused_faults(f"{place}, option {k}", job, option, by_id)
        yield from _amount_faults(place, job, _JOB_AMOUNTS)
        if job.user != "" and not is_printable_name(job.user):
            yield f"{place}: group must be {_NAME}, such as that of a user, not {shown(job.user)}"
        if not _is_a(bool, job.started):
            yield f"{place}: started must be true or false, not {shown(job.started)}"
        if job.running is not None:
            yield from _running_faults(f"{place}, running", job, job.running, room)
            yield from _carried_faults(f"{place}, running", job, job.running, by_id)
    yield from _shared_device_faults(jobs)
    yield from _after_faults(jobs)


def quota_faults(quotas: Any, jobs: Sequence[PlanningJob]) -> Iterator[str]:
    """Yields what is wrong with quotas: they are not numbers of devices, or a job can never run within its own."""
    if not _is_a(Mapping, quotas):
        yield f"problem: quotas must be an object with a number of devices for each group, not {shown(quotas)}"
        return
    for user, most in quotas.items():
        if not (is_printable_name(user) and _is_count(most)):
            yield f"problem: quotas must give a group a whole number > 0 of devices, not {shown(user)}: {shown(most)}"
            continue
        for job in jobs:
            sizes = [option.num_devices for option in job.options if not option.jobs and _is_count(option.num_devices)]
            if job.user == user and sizes and min(sizes) > most:
                yield f"job {shown(job.id)}: needs {min(sizes)} devices, the quota of {user} is {most}"


def shown(value: Any) -> str:
    """Formats a value for a message: short, however large or deep it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to format integers with so many digits
        return "a number with thousands of digits"


def _name(value: Any, index: int) -> str:
    return value if is_printable_name(value) else str(index)


def _id_faults(kind: str, ids: list[Any]) -> Iterator[str]:
    if not ids:
        yield f"problem: has no {kind}s; give at least one"
    seen: set[str] = set()
    for i, name in enumerate(ids):
        if not is_printable_name(name):
            yield f"{kind} {i}: id must be {_NAME}, not {shown(name)}"
        elif name in seen:
            yield f"{kind} {name}: this id is used more than once"
        else:
            seen.add(name)


def _node_faults(place: str, node: PlanningNode) -> Iterator[str]:
    if not _is_count(node.num_devices):
        yield f"{place}: gpus must be a whole number > 0, not {shown(node.num_devices)}"
    elif node.num_devices > MAX_DEVICES:
        yield f"{place}: has {shown(node.num_devices)} gpus; a node may have {MAX_DEVICES}"
    yield from _amount_faults(place, node, _NODE_AMOUNTS)
    yield from _type_faults(place, node.device_type)
    if node.power_source != "" and not is_printable_name(node.power_source):
        yield f"{place}: power_source must be {_NAME}, not {shown(node.power_source)}"


def _option_faults(place: str, option: Option, room: _NodeCapacity) -> Iterator[str]:
    if not _is_text(option.technique):
        yield f"{place}: technique must be text, not {shown(option.technique)}"
    if not _is_a(Mapping, option.config):
        yield f"{place}: config must be an object, not {shown(option.config)}"
    if not is_amount(option.runtime_s) or option.runtime_s <= 0:
        yield f"{place}: runtime must be a number of seconds > 0, not {shown(option.runtime_s)}"
    elif option.runtime_s < MIN_RUNTIME_S:
        yield f"{place}: runtime must be at least {MIN_RUNTIME_S} seconds, not {shown(option.runtime_s)}"
    faults = [*_amount_faults(place, option, _OPTION_AMOUNTS), *_type_faults(place, option.device_type)]
    for key, value in (("gpus", option.num_devices), ("nodes", option.num_nodes)):
        if not _is_count(value):
            faults.append(f"{place}: {key} must be a whole number > 0, not {shown(value)}")
    yield from faults
    if not faults:
        yield from _gang_faults(place, option, room)


def _gang_faults(place: str, option: Option, room: _NodeCapacity) -> Iterator[str]:
    if option.num_devices % option.num_nodes:
        gpus, spread = shown(option.num_devices), shown(option.num_nodes)
        yield f"{place}: {gpus} gpus cannot be spread evenly over {spread} nodes"
    elif room.nodes and room.num_nodes_for(option) < option.num_nodes:
        sizes = sorted((node.num_devices for node in room.nodes), reverse=True)
        kind = f" of type {option.device_type!r}" if option.device_type else ""
        yield (
            f"{place}: needs {shown(option.num_nodes)} node(s) with {shown(option.slot)} gpus or more{kind} and its "
            f"host memory; the nodes have {sizes[:8]}{' ...' if len(sizes) > 8 else ''} gpus; "
            "remove the option or add nodes"
        )


class _NodeCapacity:
    """Counts the nodes that can hold an option's slot, once for each kind of option."""

    def __init__(self, nodes: Sequence[PlanningNode]) -> None:
        self.nodes = nodes
        self._known: dict[Hashable, int] = {}

    def num_nodes_for(self, option: Option) -> int:
        """Number of nodes of the option's type with enough devices and host memory."""
        kind = (option.device_type, option.slot, option.host_memory_bytes)
        if kind not in self._known:
            self._known[kind] = sum(option.runs_on(node) for node in self.nodes)
        return self._known[kind]


def _fused_faults(place: str, job: PlanningJob, option: Option, jobs: Mapping[str, PlanningJob]) -> Iterator[str]:
    """Yields faults of the further jobs that a fused group trains together with its owner."""
    names = [name for name in option.jobs if _is_text(name)]
    for name in option.jobs:
        if not _is_text(name) or name not in jobs:
            yield f"{place}: jobs names {shown(name)}, which is not a job of this problem"
    for name, count in Counter(names).items():
        if name == job.id:
            yield f"{place}: jobs names its own job {shown(name)}; name only further ones"
        elif count > 1:
            yield f"{place}: jobs names {shown(name)} {count} times"
    members = {job.id, *names} if _is_text(job.id) else set(names)
    for name in sorted(members & jobs.keys()):
        if waits := sorted(other for other in jobs[name].after if _is_text(other) and other in members - {name}):
            yield f"{place}: contains both {name} and {', '.join(waits)}, which it waits for"


def _running_faults(place: str, job: PlanningJob, running: CurrentRun, room: _NodeCapacity) -> Iterator[str]:
    """Yields faults of the state in which a job is declared to run at time 0."""
    if not is_amount(running.pinned_until_s):
        yield f"{place}: until must be {_SECONDS}, not {shown(running.pinned_until_s)}"
    if job.release_s or job.after:
        yield f"{place}: it runs already, but has a release or waits for other jobs; remove one or the other"
    if not _is_index(running.option, len(job.options)):
        yield f"{place}: option must be the index of one of its {len(job.options)} options, not {shown(running.option)}"
    elif not any(_option_faults(place, job.options[running.option], room)):
        nodes = {node.id: node for node in room.nodes if _is_text(node.id)}
        yield from _gang_place_faults(place, running, job.options[running.option], nodes)


def _carried_faults(
    place: str, job: PlanningJob, running: CurrentRun, jobs: Mapping[str, PlanningJob]
) -> Iterator[str]:
    """Yields faults of the jobs in a running group: they are being trained, so they must have started too."""
    if _is_index(running.option, len(job.options)):
        for name in job.options[running.option].jobs:
            if _is_text(name) and name in jobs and jobs[name].started is False:
                yield f"{place}: its group carries {name}, which is not `started`"
            elif _is_text(name) and name in jobs and jobs[name].running is not None:
                yield f"{place}: its group carries {name}, which is declared to run on its own"


def _gang_place_faults(
    place: str, running: CurrentRun, option: Option, nodes: Mapping[str, PlanningNode]
) -> Iterator[str]:
    """Yields faults of the devices that a gang is declared to run on."""
    names = [name for name, _ in running.devices if _is_text(name)]
    if len(running.devices) != option.num_nodes or len(set(names)) != len(names):
        yield f"{place}: is on nodes {shown(names)}, its option takes {option.num_nodes} different one(s)"
    for name, ids in running.devices:
        if not _is_text(name) or name not in nodes:
            yield f"{place}: is on node {shown(name)}, which this problem does not have"
            continue
        node = nodes[name]
        are_there = all(_is_index(device, node.num_devices) for device in ids)
        if not are_there or len(set(ids)) != len(ids) or len(ids) != option.slot:
            yield (
                f"{place}: has devices {shown(list(ids))} of node {name}; its option takes {option.slot} there, "
                f"different ones of 0 to {node.num_devices - 1}"
            )
        if option.device_type not in ("", node.device_type):
            yield f"{place}: is on {name}, whose devices are {node.device_type!r}, not {option.device_type!r}"
        ends_s = option.runtime_s + option.save_s + option.evaluate_s
        pinned_s = min(running.pinned_until_s, ends_s) if is_amount(running.pinned_until_s) else 0.0
        if node.available_until_s is not None and pinned_s > node.available_until_s:
            yield f"{place}: is pinned until {running.pinned_until_s} s, but node {name} goes away before"


def _shared_device_faults(jobs: Sequence[PlanningJob]) -> Iterator[str]:
    """Yields a fault for each device on which several jobs are declared to run."""
    holders: dict[Hashable, str] = {}
    for job in jobs:
        for name, ids in job.running.devices if job.running else ():
            for device in ids:
                is_known = _is_text(name) and isinstance(device, int)
                if is_known and (holder := holders.setdefault((name, device), job.id)) != job.id:
                    yield f"jobs {shown(holder)} and {shown(job.id)}: both are running on {name}:{device}"


def _amount_faults(place: str, value: Any, attributes: Mapping[str, str]) -> Iterator[str]:
    """Yields faults of optional values that must be numbers >= 0 where they are given."""
    for key, attribute in attributes.items():
        amount = getattr(value, attribute)
        default = type(value).__dataclass_fields__[attribute].default
        if not (amount is None and default is None) and not is_amount(amount):
            yield f"{place}: {key} must be a number >= 0 (and at most {MAX_AMOUNT:g}), not {shown(amount)}"
        elif key in _FACTORS and 0 < amount < MIN_FACTOR:
            yield f"{place}: {key} must be 0 or at least {MIN_FACTOR:g}, not {shown(amount)}"


def _type_faults(place: str, device_type: Any) -> Iterator[str]:
    if not isinstance(device_type, str):
        yield f"{place}: type must be text, not {shown(device_type)}"


def _after_faults(jobs: Sequence[PlanningJob]) -> Iterator[str]:
    known = {job.id for job in jobs if _is_text(job.id)}
    waits: dict[str, set[str]] = {}
    for j, job in enumerate(jobs):
        for other in job.after:
            if not _is_text(other) or other not in known:
                yield f"job {_name(job.id, j)}: after names {shown(other)}, which is not a job of this problem"
        if _is_text(job.id):
            waits[job.id] = {other for other in job.after if _is_text(other) and other in known}
    if on_cycle := cycle_in(waits):
        yield f"jobs {', '.join(sorted(on_cycle))}: wait for each other in a cycle; remove one `after`"


def cycle_in(waits: Mapping[str, Collection[str]]) -> set[str]:
    """Returns the nodes of a cycle of a graph; empty if there is no cycle.

    waits: waits[a] are the nodes that a waits for.
    """
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()


def is_amount(value: Any) -> bool:
    """Whether a value is a number of seconds, bytes or such."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_AMOUNT


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_a(kind: type, value: Any) -> bool:  # whatever type the value is declared to have
    return isinstance(value, kind)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_index(value: Any, length: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < length
