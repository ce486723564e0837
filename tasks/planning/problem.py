"""What is planned: nodes, jobs, and for each job the table of options that the planner may choose from.

A problem is checked as a whole when it is made, and every fault is told at once. Its JSON form keeps the
short keys of the benchmark files of this field ("gpus", "nodes", "runtime", "switch_cost"); seconds are the
unit throughout, though nothing depends on it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.planning.problem_faults import faults_of


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
        if faults := list(faults_of(self)):
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
        from tasks.planning.problem_file import read_problem

        return read_problem(data)

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads; what is at its default is left out."""
        from tasks.planning.problem_file import write_problem

        return write_problem(self)
