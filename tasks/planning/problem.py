"""What is planned: nodes, jobs, and for each job the table of options that the planner may choose from.

A problem is checked as a whole when it is made, and every fault is told at once. Its JSON form keeps the
short keys of the benchmark files of this field ("gpus", "nodes", "runtime", "switch_cost"); seconds are the
unit throughout, though nothing depends on it.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ringmaster.model_lineage.faults import RingmasterError
from ringmaster.tasks.messages import listed
from ringmaster.tasks.planning.problem_faults import faults_of


class ProblemError(RingmasterError, ValueError):
    """A problem that cannot be planned; `faults` says in words everything that is wrong with it."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults: tuple[str, ...] = tuple(faults)
        super().__init__(listed(self.faults, between="; "))


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
    jobs: ids of further jobs that this *fused group* trains beside its owner: each second does the same share of each.
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
class Running:
    """What a job is doing at time 0: `option` (an index) on `devices` ((node id, (device ids...)), ...).

    A first segment that goes on with just that at time 0 pays neither the switch cost nor the option's start-up.
    pinned_until_s: it must go on so at least until then, or until the job is done.
    """

    option: int
    devices: tuple[tuple[str, tuple[int, ...]], ...]
    pinned_until_s: float = 0.0

    @property
    def gang(self) -> frozenset[tuple[str, int]]:
        """The devices as (node id, device id)."""
        return frozenset((node, device) for node, ids in self.devices for device in ids)


@dataclass(frozen=True)
class PlanningJob:
    """A job with its options; it starts only after every job named in `after` has ended.

    release_s: it does not start before. deadline_s: it must end by then, None for no deadline. weight: of the moment
    when it ends, in the objective `weighted`. running: what it does at time 0, None where it stands still. started: it
    has a checkpoint, so that its first segment pays the switch cost, unless that goes on with what is running; a job
    that is running has always started. fellows: further jobs that it stands for: whatever trains it trains them too.
    """

    id: str
    options: tuple[Option, ...]
    after: tuple[str, ...] = ()
    release_s: float = 0.0
    deadline_s: float | None = None
    weight: float = 1.0
    running: Running | None = None
    started: bool = False
    fellows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.running is not None and self.started is False:
            object.__setattr__(self, "started", True)

    def goes_on(self, option: int, start_s: float, devices: Iterable[tuple[str, Iterable[int]]]) -> bool:
        """Whether a segment goes on at time 0 with what the job is doing: its first segment then pays nothing."""
        gang = frozenset((node, device) for node, ids in devices for device in ids)
        return (
            self.running is not None and (option, start_s) == (self.running.option, 0.0) and gang == self.running.gang
        )


@dataclass(frozen=True)
class Problem:
    """Which jobs to plan on which nodes. Raises ProblemError, with every fault, when made of impossible
    values.

    switch_cost_s: paid by a job that goes on under another option, on other devices or after a pause.
    Every job has an option of its own, beside those of fused groups.
    """

    name: str
    nodes: tuple[Node, ...]
    jobs: tuple[PlanningJob, ...]
    switch_cost_s: float = 60.0

    def __post_init__(self) -> None:
        if faults := list(faults_of(self)):
            raise ProblemError(faults)

    @cached_property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return sum(node.num_devices for node in self.nodes)

    @cached_property
    def device_types(self) -> tuple[str, ...]:
        """The types of devices that there are."""
        return tuple(sorted({node.device_type for node in self.nodes}))

    @cached_property
    def is_plain(self) -> bool:
        """Whether jobs may run at any time, in any order, anywhere, at no cost but their time."""
        return (
            not any(job.after or job.release_s or job.deadline_s is not None for job in self.jobs)
            and not any(job.started for job in self.jobs)
            and not self.is_fused
            and not any(node.available_until_s is not None or node.host_memory_bytes is not None for node in self.nodes)
            and not any(o.startup_s or o.save_s or o.evaluate_s for job in self.jobs for o in job.options)
        )

    @cached_property
    def is_fused(self) -> bool:
        """Whether some option carries several jobs."""
        return any(option.jobs for job in self.jobs for option in job.options)

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Indices of jobs that differ in nothing but their id, as the jobs of a sweep do; each job is in one class.

        Swapping two jobs of a class in a plan changes nothing that is measured. A job that others wait for, that runs
        already or that is carried by a fused group is alone in its class. Classes come in the order of their first job.
        """
        special = {other for job in self.jobs for other in job.after}
        special |= {other for job in self.jobs for option in job.options for other in option.jobs}
        found: dict[Hashable, list[int]] = {}
        for j, job in enumerate(self.jobs):
            is_alone = job.id in special or job.running or any(option.jobs for option in job.options)
            found.setdefault(job.id if is_alone else likeness(job), []).append(j)
        return tuple(map(tuple, found.values()))

    def job(self, job_id: str) -> PlanningJob:
        """The job of that id; KeyError if there is none."""
        return self._jobs[job_id]

    @cached_property
    def _jobs(self) -> dict[str, PlanningJob]:
        return {job.id: job for job in self.jobs}

    @classmethod
    def from_json(cls, data: Any) -> "Problem":
        """The problem that a JSON object describes. Raises ProblemError with every fault, its place named."""
        from ringmaster.tasks.planning.problem_file import read_problem

        return read_problem(data)

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads; what is at its default is left out."""
        from ringmaster.tasks.planning.problem_file import write_problem

        return write_problem(self)


def likeness(job: PlanningJob) -> Hashable:
    """Equal for jobs that the planner cannot tell apart."""
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
        )
        for o in job.options
    )
    return options, job.after, job.release_s, job.deadline_s, job.weight, job.started
