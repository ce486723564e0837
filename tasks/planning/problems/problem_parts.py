"""Parts of a planning problem: nodes, options, and jobs with what they run at time 0."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PlanningNode:
    """A machine with `num_devices` devices of one type, numbered from 0.

    device_type: such as "a100"; options may require one.
    available_until_s: time at which its devices become unavailable; None for never.
    price: of one device for one second, in any currency.
    host_memory_bytes: limit for all gangs on the node together; None for no limit.
    """

    id: str
    num_devices: int
    device_type: str = ""
    available_until_s: float | None = None
    price: float = 0.0
    host_memory_bytes: int | None = None


@dataclass(frozen=True)
class Option:
    """A way to run a whole job in `runtime_s` seconds on a gang of `num_devices`, spread evenly over `num_nodes` nodes.

    technique, config: passed on to the executor of the plan; the planner does not read them.
    device_type: the only type of devices that the option runs on; "" for any.
    startup_s: seconds that every segment pays at its start.
    save_s: seconds that every segment pays at its end.
    evaluate_s: seconds that the job's last segment pays.
    host_memory_bytes: host memory that the option takes on each of its nodes.
    jobs: ids of further jobs that this *fused group* trains beside the option's owner; in any second, it does the same
        share of each job.
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
    group: the user or batch whose job it is, for the objective `fairness`; "" where the job is a group of its own.
    running: what the job runs at time 0; None where it does not run.
    started: the job has a checkpoint, so its first segment pays the switch cost, unless that segment continues what is
        running. A running job has always started.
    members: ids of further jobs that this job stands for; every option of this job trains them too.
    """

    id: str
    options: tuple[Option, ...]
    after: tuple[str, ...] = ()
    release_s: float = 0.0
    deadline_s: float | None = None
    weight: float = 1.0
    group: str = ""
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
