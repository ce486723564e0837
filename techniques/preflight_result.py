"""Results of the preflight: what is known of jobs before any training (data, model sizes, candidate options)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ringmaster.codec import SINCE_LATER
from ringmaster.techniques.job import Job
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.processes.order import Slot
from ringmaster.techniques.technique import GangShape

FROM_META_STEP, ARITHMETIC = "rehearsed", "arithmetic"


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Estimated memory of an option: bytes on each device, and bytes of host memory for each device.

    Host memory holds the part of the state that does not lie on the device, and the copy of the state from which a
    checkpoint is written while training continues (for the rank that writes most).

    source: "rehearsed" where the step was run on meta tensors (`techniques.estimates.rank_memory`), else "arithmetic".
    message: why the step could not be run on meta tensors.
    """

    device_bytes: int
    host_bytes: int = 0
    source: str = FROM_META_STEP
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An option that could train a job and has not been measured yet.

    num_ranks: number of worker processes.
    least_bytes: the least memory that a device needs.
    memory: as estimated; None where the device surely has enough.
    step_s: predicted seconds of a step; None where nothing is known of the devices.
    is_rough: whether `step_s` follows from the operations of code that is not built in, which may take longer.
    launch_share: the predicted part of a step that more rows would not lengthen, such as launching operators.
    startup_s, save_s, stall_s, evaluate_s, export_s: predicted seconds outside the steps, as in a `Profile`; None where
        they are unknown, such as those of a black box.
    """

    technique: str
    config: Mapping[str, Any]
    num_devices: int
    num_ranks: int
    least_bytes: int
    memory: MemoryEstimate | None = field(default=None, metadata={"key": "forecast"})
    step_s: float | None = None
    is_rough: bool = field(default=False, metadata=SINCE_LATER)
    launch_share: float = field(default=0.0, metadata=SINCE_LATER)
    startup_s: float | None = field(default=None, metadata=SINCE_LATER)
    save_s: float | None = field(default=None, metadata=SINCE_LATER)
    stall_s: float | None = field(default=None, metadata=SINCE_LATER)
    evaluate_s: float | None = field(default=None, metadata=SINCE_LATER)
    export_s: float | None = field(default=None, metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a technique, or one `config` of it, cannot train a job on a number of devices.

    is_too_large: the option would work on devices with more memory; otherwise it does not apply to such a job or gang.
    """

    technique: str
    num_devices: int
    reason: str
    config: Mapping[str, Any] | None = None
    is_too_large: bool = False


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What is known of a job before any trial.

    data: the JSON form of `data.PreparedData`.
    candidates: for each technique and gang size, the presumably cheapest one first.
    exact_chunk: of an exact job, as the preflight has chosen it.
    workers: with optimizers of their own, if the job may change to them.
    """

    job: str
    data: Mapping[str, Any]
    facts: ModelFacts
    candidates: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]
    exact_chunk: int | None = field(default=None, metadata=SINCE_LATER)
    workers: int = field(default=1, metadata=SINCE_LATER)

    def settled(self, job: Job) -> Job:
        """Returns the job with the chunk and the workers that were chosen; these stay on any devices."""
        features = tuple(feature.settled(num_workers=self.workers) for feature in job.features)
        return replace(job, features=features, exact_chunk=job.exact_chunk or self.exact_chunk)


@dataclass(frozen=True, kw_only=True)
class PreflightOrder:
    """A request to preflight `jobs` for gangs of each shape.

    techniques: dotted paths of the techniques' classes, by name.
    slots: available devices of one kind, whose rates predict step times; empty where they are not at hand.
    forecast_all: estimate the memory of every candidate, not only of those that may not fit.
    describe_data: derive the data's description from the job, where possible, instead of preparing the data.
    weights: the folders of models that jobs adapt: of bases by the job's name, of other parents by their own.
    evaluated: the names of jobs whose data is only evaluated on, so that there need not be anything to learn.
    timeout_s: seconds after which no memory estimate by a meta step is started, and arithmetic replaces it; None for
        no limit.
    """

    jobs: tuple[Job, ...]
    shapes: tuple[GangShape, ...]
    techniques: Mapping[str, str]
    cache_dir: str
    cores: tuple[int, ...] = ()
    import_paths: tuple[str, ...] = ()
    slots: tuple[Slot, ...] = ()
    forecast_all: bool = False
    describe_data: bool = False
    weights: Mapping[str, str] = field(default_factory=dict)
    evaluated: tuple[str, ...] = ()
    timeout_s: float | None = None
