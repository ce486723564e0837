"""Planning problems: nodes, jobs, and for each job the options that the planner may choose from.

A problem is validated as a whole when it is created, and all faults are reported at once. Its JSON form uses the short
keys of the benchmark files of this field ("gpus", "nodes", "runtime", "switch_cost"). All times are in seconds, but
nothing depends on that unit.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

from ringmaster.errors import ProblemError
from ringmaster.tasks.planning.problems import problem_parts, series

BISECTIONS = 100  # halve the interval until it has no further float inside

Frontier = Sequence[tuple[float, float]]
"""(seconds, cost) of a job, such as device-seconds, from its fastest option to its cheapest one, convex."""


def user_key(job: problem_parts.PlanningJob) -> tuple[bool, str]:
    """Returns what identifies the user of a job. A job without a user has one of its own, whatever its name."""
    return (True, job.user) if job.user else (False, job.id)


def fair_seconds(jobs: Sequence[problem_parts.PlanningJob], num_devices: int) -> dict[str, float]:
    """Returns, by job id, the seconds in which the jobs of its user could be done on an equal share of the devices.

    jobs: in a topological order.
    """
    of_users: dict[tuple[bool, str], list[problem_parts.PlanningJob]] = defaultdict(list)
    for job in jobs:
        of_users[user_key(job)].append(job)
    heads_s = _heads_s(jobs)
    seconds: dict[str, float] = {}
    for own in of_users.values():
        rows = [(heads_s[job.id], _frontier_on(job, num_devices / len(of_users))) for job in own]
        seconds |= dict.fromkeys((job.id for job in own), _least_s(rows, num_devices / len(of_users)))
    return seconds


def _frontier_on(job: problem_parts.PlanningJob, share: float) -> Frontier:
    """Returns the (seconds, device-seconds) that mixes of a job's options for a share of the devices reach."""
    alone = [option for option in job.options if not option.jobs]
    most = max(share, min(option.num_devices for option in alone))
    return frontier((o.whole_s, o.whole_s * o.num_devices) for o in alone if o.num_devices <= most)


def frontier(points: Iterable[tuple[float, float]]) -> Frontier:
    """Returns the (seconds, cost) of a job's options that no mix of others beats, by ascending seconds."""
    hull: list[tuple[float, float]] = []
    for t, cost in sorted(points):
        if hull and cost >= hull[-1][1]:
            continue
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], (t, cost)):
            hull.pop()
        hull.append((t, cost))
    return hull


def _is_above(middle: tuple[float, float], left: tuple[float, float], right: tuple[float, float]) -> bool:
    """Whether the middle point is on or above the line between the other two."""
    return (middle[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (middle[0] - left[0])


def least_within(points: Frontier, within_s: float) -> float:
    """Returns the least cost of a job within some seconds; infinite where no option is fast enough."""
    if within_s < points[0][0]:
        return math.inf
    for (t0, a0), (t1, a1) in pairwise(points):
        if within_s < t1:
            return a0 + (a1 - a0) * (within_s - t0) / (t1 - t0)
    return points[-1][1]


def _least_s(rows: Sequence[tuple[float, Frontier]], share: float) -> float:
    low = max(head_s + points[0][0] for head_s, points in rows)
    high = max(low, max(head_s + points[-1][0] for head_s, points in rows), sum(p[-1][1] for _, p in rows) / share)

    def fits(end_s: float) -> bool:
        return sum(least_within(points, end_s - head_s) for head_s, points in rows) <= end_s * share

    if fits(low):
        return low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _heads_s(jobs: Sequence[problem_parts.PlanningJob]) -> dict[str, float]:
    """Returns when each job could start if every job had all devices to itself, by job id.

    jobs: in a topological order.
    """
    heads: dict[str, float] = {}
    shortest = {job.id: min(option.whole_s for option in job.options) for job in jobs}
    for job in jobs:
        heads[job.id] = max([job.release_s, *(heads[other] + shortest[other] for other in job.after)])
    return heads


# JSON key -> (attribute, whether it is required)
_PROBLEM_KEYS = {
    "name": ("name", True),
    "nodes": ("nodes", True),
    "jobs": ("jobs", True),
    "switch_cost": ("switch_cost_s", False),
    "quotas": ("quotas", False),
    "budgets": ("budgets", False),
    "factors": ("factors", False),
}
_NODE_KEYS = {
    "id": ("id", True),
    "gpus": ("num_devices", True),
    "type": ("device_type", False),
    "until": ("available_until_s", False),
    "price": ("price", False),
    "host_memory": ("host_memory_bytes", False),
    "power": ("power_w", False),
    "power_source": ("power_source", False),
    **{key: (attribute, False) for key, attribute in series.SERIES.items()},
}
_JOB_KEYS = {
    "id": ("id", True),
    "options": ("options", True),
    "after": ("after", False),
    "release": ("release_s", False),
    "deadline": ("deadline_s", False),
    "weight": ("weight", False),
    "group": ("user", False),
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
    "power": ("power_w", False),
}
_MISSING: Any = None  # replaces a required value that the file lacks; validation then reports it


def read_fields(data: Any) -> tuple[dict[str, Any], list[str]]:
    """Reads a problem's attributes from a JSON object; returns them, and a message for each fault with its place."""
    faults: list[str] = []
    fields = _read(data, "problem", faults, _PROBLEM_KEYS, strict=False)
    nodes = []
    for i, item in enumerate(_items(fields.get("nodes"), "nodes", faults)):
        row = _read(item, f"node {i}", faults, _NODE_KEYS)
        steps = {name: series.as_steps(row[name]) for name in series.SERIES.values() if name in row}
        empty = [key for key, name in series.SERIES.items() if row.get(name) == []]
        faults += [f"node {i}: {key} is empty. Leave it out, or give a step that starts at 0" for key in empty]
        nodes.append(problem_parts.PlanningNode(**row | steps))
    jobs = tuple(_read_job(item, i, faults) for i, item in enumerate(_items(fields.get("jobs"), "jobs", faults)))
    return fields | {"nodes": tuple(nodes), "jobs": jobs}, faults


def _read_job(data: Any, index: int, faults: list[str]) -> problem_parts.PlanningJob:
    row = _read(data, f"job {index}", faults, _JOB_KEYS)
    place = f"job {row['id'] if isinstance(row['id'], str) else index}"
    options = []
    for k, item in enumerate(_items(row["options"], f"{place}: options", faults)):
        option = _read(item, f"{place}, option {k}", faults, _OPTION_KEYS)
        if "jobs" in option:
            option["jobs"] = tuple(_items(option["jobs"], f"{place}, option {k}: jobs", faults))
        options.append(problem_parts.Option(**option))
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
            faults.append(
                f"{place}, running: gpus must be a list of [node, [devices]], not {problem_parts.shown(gpus)}"
            )
            gpus = []
        row["running"] = problem_parts.CurrentRun(
            **running | {"devices": tuple((node, tuple(ids)) for node, ids in gpus)}
        )
    return problem_parts.PlanningJob(**row)


def _read(
    data: Any, place: str, faults: list[str], keys: Mapping[str, tuple[str, bool]], *, strict: bool = True
) -> dict[str, Any]:
    """Returns the attributes that a JSON object gives, with None for each required one that is missing."""
    fields: dict[str, Any] = {name: _MISSING for name, required in keys.values() if required}
    if not isinstance(data, dict):
        faults.append(f"{place}: must be an object, not {problem_parts.shown(data)}")
        return fields
    for key, value in data.items():
        if key in keys:
            fields[keys[key][0]] = value
        elif strict:
            faults.append(f"{place}: unknown key {problem_parts.shown(key)}; there are {sorted(keys)}")
    return fields


def _items(data: Any, place: str, faults: list[str]) -> list[Any]:
    if isinstance(data, list):
        return data
    faults.append(f"{place}: must be a list" + ("" if data is None else f", not {problem_parts.shown(data)}"))
    return []


def _write(value: Any, keys: Mapping[str, tuple[str, bool]]) -> dict[str, Any]:
    row = {}
    for key, (name, required) in keys.items():
        item = getattr(value, name)
        if required or (item != type(value).__dataclass_fields__[name].default and item not in ((), {})):
            row[key] = list(item) if isinstance(item, tuple) else item
    return row


@dataclass(frozen=True)
class Problem:
    """The jobs to plan and the nodes to plan them on. Raises ProblemError with all faults where values are impossible.

    Every job has an option of its own, in addition to those of fused groups.

    switch_cost_s: seconds that a job pays when it continues under another option, on other devices or after a pause.
    quotas: by user (`PlanningJob.user`), the most devices that their jobs may hold at the same time.
    budgets: by measure ("cost", "emissions" in grams), what the whole plan may take of it.
    factors: by measure, or "end" for the last end, its factor in the objective `trade-off`.
    """

    name: str
    nodes: tuple[problem_parts.PlanningNode, ...]
    jobs: tuple[problem_parts.PlanningJob, ...]
    switch_cost_s: float = 60.0
    quotas: Mapping[str, int] = field(default_factory=dict)
    budgets: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        faults = problem_parts.faults_of(
            name=self.name, nodes=self.nodes, jobs=self.jobs, switch_cost_s=self.switch_cost_s
        )
        further = series.series_faults(self.nodes, self.jobs, budgets=self.budgets, factors=self.factors)
        if messages := [*faults, *problem_parts.quota_faults(self.quotas, self.jobs), *further]:
            raise ProblemError(messages)

    @cached_property
    def has_series(self) -> bool:
        """Whether what some node costs or emits depends on the time."""
        return any(node.price_steps or node.energy_price_steps or node.carbon_steps for node in self.nodes)

    @cached_property
    def num_devices(self) -> int:
        """Number of devices of all nodes together."""
        return sum(node.num_devices for node in self.nodes)

    @cached_property
    def device_types(self) -> tuple[str, ...]:
        """The device types of the nodes, sorted."""
        return tuple(sorted({node.device_type for node in self.nodes}))

    @cached_property
    def node_groups(self) -> Mapping[tuple[str, int, float | None], int]:
        """The number of nodes by device type, number of devices and end of availability."""
        return Counter((node.device_type, node.num_devices, node.available_until_s) for node in self.nodes)

    def types_of(self, option: problem_parts.Option) -> tuple[str, ...]:
        """Returns the types of devices that an option may run on."""
        return tuple(kind for kind in self.device_types if option.device_type in ("", kind))

    @cached_property
    def limits(self) -> Mapping[str, int]:
        """The quotas that can bind: of users with jobs, and of fewer devices than there are."""
        users = {job.user for job in self.jobs}
        return {user: most for user, most in self.quotas.items() if user in users and most < self.num_devices}

    @cached_property
    def is_fused(self) -> bool:
        """Whether some option trains several jobs."""
        return any(option.jobs for job in self.jobs for option in job.options)

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Classes of jobs that differ only in their id, such as the jobs of a sweep, as tuples of indices.

        Each job is in one class. Two jobs of a class can be swapped in a plan without changing any measure of it. A job
        is alone in its class if others wait for it, if it runs at time 0, or if a fused group includes it. Classes are
        in the order of their first job.
        """
        special = {other for job in self.jobs for other in job.after}
        special |= {other for job in self.jobs for option in job.options for other in option.jobs}
        alike: dict[Hashable, list[int]] = {}
        for j, job in enumerate(self.jobs):
            is_alone = job.id in special or job.running or any(option.jobs for option in job.options)
            alike.setdefault(job.id if is_alone else likeness(job), []).append(j)
        return tuple(map(tuple, alike.values()))

    @cached_property
    def fair_s(self) -> Mapping[str, float]:
        """By job, seconds in which its user's jobs could be done on an equal share of the devices (`fair_seconds`)."""
        return fair_seconds(self.in_order, self.num_devices)

    def job(self, job_id: str) -> problem_parts.PlanningJob:
        """The job with that id. Raises KeyError if there is none."""
        return self._jobs[job_id]

    @cached_property
    def in_order(self) -> tuple[problem_parts.PlanningJob, ...]:
        """The jobs in a topological order: each one after those that it waits for."""
        order = TopologicalSorter({job.id: job.after for job in self.jobs}).static_order()
        return tuple(map(self.job, order))

    @cached_property
    def ancestors(self) -> Mapping[str, frozenset[str]]:
        """By job id, the jobs that must have ended before it starts."""
        before: dict[str, frozenset[str]] = {}
        for job in self.in_order:
            before[job.id] = frozenset(job.after).union(*(before[other] for other in job.after))
        return before

    @cached_property
    def _jobs(self) -> dict[str, problem_parts.PlanningJob]:
        return {job.id: job for job in self.jobs}

    @classmethod
    def from_json(cls, data: Any) -> Problem:
        """Reads a problem from a JSON object. Raises ProblemError with every fault and its place."""
        fields, faults = read_fields(data)
        try:
            problem = cls(**fields)
        except ProblemError as error:
            raise ProblemError([*faults, *error.faults]) from None
        if faults:
            raise ProblemError(faults)
        return problem

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads, without values that are at their default."""
        return {
            "name": self.name,
            "switch_cost": self.switch_cost_s,
            **{key: dict(value) for key in ("quotas", "budgets", "factors") if (value := getattr(self, key))},
            "nodes": [_write(node, _NODE_KEYS) for node in self.nodes],
            "jobs": [
                _write(job, _JOB_KEYS)
                | {"options": [_write(option, _OPTION_KEYS) for option in job.options]}
                | (
                    {
                        "running": _write(job.running, _RUNNING_KEYS)
                        | {"gpus": [[n, list(ids)] for n, ids in job.running.devices]}
                    }
                    if job.running
                    else {}
                )
                for job in self.jobs
            ],
        }


def likeness(job: problem_parts.PlanningJob) -> Hashable:
    """Returns a key that is equal for jobs that the planner cannot distinguish."""
    options = tuple(
        (
            o.num_devices,
            o.num_nodes,
            o.runtime_s,
            o.device_type,
            o.startup_s,
            o.save_s,
            o.evaluate_s,
            o.host_memory_bytes,
            o.power_w,
        )
        for o in job.options
    )
    return options, job.after, job.release_s, job.deadline_s, job.weight, job.user, job.started


def overhead_s(
    problem: Problem,
    job: problem_parts.PlanningJob,
    option: problem_parts.Option,
    *,
    is_first: bool,
    is_last: bool,
    continues: bool = False,
) -> float:
    """Returns the seconds of a job's segment that do no work.

    continues: the segment continues what the job is running at time 0.
    """
    paid_s = option.save_s + (option.evaluate_s if is_last else 0.0)
    if continues:
        return paid_s
    return paid_s + option.startup_s + (0.0 if is_first and not job.started else problem.switch_cost_s)
