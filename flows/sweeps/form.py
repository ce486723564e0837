"""The fields of a sweep, for its form in Prefect's UI and for sweep files alike."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from ringmaster.flows.batch.batch_input import FormSection, titled
from ringmaster.tasks.batch import document
from ringmaster.tasks.batch.references import NAME_PATTERN, Metric
from ringmaster.tasks.sweeping.space import CategoricalRange, Range
from ringmaster.tasks.sweeping.space import Parameter as SpaceParameter
from ringmaster.tasks.sweeping.stopping import StoppingPolicy

SweepName = Annotated[str, titled("Name", pattern=NAME_PATTERN)]
Seed = Annotated[int, Field(ge=0)]
Sampler = Annotated[Literal["random", "grid", "tpe"], titled("Sampler")]
NumTrials = Annotated[int, Field(ge=1, le=1000)]
NumParallel = Annotated[int, Field(ge=1, le=1000)]
Seconds = Annotated[float, Field(gt=0)]

# JSON schema of a line of text, for a field that is a list in a file: Prefect's forms have no field for mixed lists.
TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}], "examples": ["1e-3, 3e-3, 1e-2"]}


def _or_empty(value: Any) -> Any:
    """Turns a file's null into an empty line. In a form, a nullable field is a switch between two kinds of field."""
    return "" if value is None else value


Line = Annotated[str, BeforeValidator(_or_empty)]
OtherName = Annotated[str, BeforeValidator(_or_empty), Field(pattern=rf"^$|{NAME_PATTERN}")]


class JobFromFile(FormSection):
    """A job of a batch file."""

    model_config = ConfigDict(title="A job of a batch file")

    path: str = Field(
        title="Batch file",
        description="The path of the file, absolute or relative to the folder that contains RINGMASTER_HOME.",
    )
    job: Line = Field(
        default="",
        title="Job",
        description="The name of the job or of the grid's template. It may be empty if the file has only one.",
    )


class InlineJob(FormSection):
    """A job that is written out in the form."""

    model_config = ConfigDict(title="A job written out")

    job: dict[str, Any] = Field(
        title="Job",
        description="The job as JSON, with the keys of a batch file: model, data, optimizer, num_steps, ...",
    )
    folder: str = Field(
        default=".", title="Folder", description="Relative paths and factories of the job are resolved in this folder."
    )


def _listed(value: Any) -> Any:
    """Parses "1e-3, 3e-3" into a list, as a form's line holds text. An empty line counts as not given."""
    if not isinstance(value, str):
        return value
    read = document.read(f"values: [{value}]")
    if read.findings or read.data is None or read.data.keys() != {"values"}:
        raise ValueError("must be values between commas, such as 1e-3, 3e-3")
    return read.data["values"] or None


class Parameter(FormSection):
    """The search space of one key of the job: some values, or a range."""

    model_config = ConfigDict(title="Parameter")

    key: str = Field(
        title="Key",
        pattern=r"^[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*$",
        description="The key of the job to vary, such as optimizer.lr, schedule.warmup_steps or seed.",
    )
    values: Annotated[list[Any] | None, BeforeValidator(_listed), WithJsonSchema(TEXT)] = Field(
        default=None,
        title="Values",
        description="The values to choose from, separated by commas. Leave it empty to give a range.",
    )
    low: float | None = Field(default=None, title="From", description="The smallest value of the range.")
    high: float | None = Field(default=None, title="To", description="The largest value of the range.")
    log: bool = Field(
        default=False, title="Logarithmic", description="Draws the logarithm uniformly, as is usual for learning rates."
    )
    step: float | None = Field(
        default=None, gt=0, title="Step", description="The distance between two values of the range. A grid needs it."
    )
    integer: bool = Field(default=False, title="Whole numbers", description="Draws only whole numbers.")

    def fault(self) -> str | None:
        """Returns why the parameter is neither values nor a range, or None."""
        is_range = self.low is not None or self.high is not None
        if self.values is not None and is_range:
            return "has values and a range"
        if self.values is not None:
            return None if self.values else "has no value"
        return None if self.low is not None and self.high is not None else "has neither values nor both low and high"

    def parameter(self) -> SpaceParameter:
        """Returns the parameter in the form that samplers use."""
        if self.values is not None:
            return CategoricalRange(key=self.key, values=tuple(self.values))
        assert self.low is not None and self.high is not None, "its fault is told first"
        return Range(
            key=self.key, low=self.low, high=self.high, is_log=self.log, step=self.step, is_integer=self.integer
        )


def _as_list(value: Any) -> Any:
    """Turns the mapping of files, {optimizer.lr: {low: 1e-4, high: 1e-1}, seed: [0, 1]}, into a list of parameters."""
    if not isinstance(value, dict):
        return value
    return [
        {"key": key, "values": each}
        if isinstance(each, (list, str))
        else {"key": key, **each}
        if isinstance(each, dict)
        else {"key": key, "values": [each]}
        for key, each in value.items()
    ]


Space = Annotated[list[Parameter], BeforeValidator(_as_list), Field(min_length=1)]


class EarlyStopping(FormSection):
    """The policy that stops trials early."""

    model_config = ConfigDict(title="Early stopping")

    policy: Literal["none", "asha", "halving", "median"] = Field(
        default="asha",
        title="Policy",
        description="asha pauses each trial at a rung, and continues the best ones when devices are free. halving "
        "continues them when all trials have reached the rung. median stops a trial that is worse than half of the "
        "others at its step. none trains all trials to their end.",
    )
    min_steps: int | None = Field(
        default=None,
        ge=1,
        title="First rung",
        description="The number of steps before a trial is compared with others. With asha and halving, each further "
        "rung is this number times a power of the reduction factor. By default it is the number of steps divided by "
        "the square of the reduction factor, and at least a tenth of the steps.",
    )
    reduction_factor: int = Field(
        default=4,
        ge=2,
        le=100,
        title="Reduction factor",
        description="One in this many trials continues from each rung.",
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """Also accepts the name of a policy alone."""
        return {"policy": value} if isinstance(value, str) else value

    def stopping(self) -> StoppingPolicy:
        """Returns the policy in the form that the sweep scheduler uses."""
        return StoppingPolicy(policy=self.policy, min_steps=self.min_steps, reduction_factor=self.reduction_factor)


class DeviceChoice(FormSection):
    """The devices of this machine that a sweep may use."""

    model_config = ConfigDict(title="Devices")

    kind: Literal["auto", "gpu", "cpu"] = Field(
        default="auto", title="Kind", description="auto uses the GPUs if there are any, otherwise CPU slots."
    )
    count: int | None = Field(
        default=None,
        ge=1,
        title="How many",
        description="The number of devices, for gpu and cpu. By default all GPUs are used.",
    )

    @model_validator(mode="before")
    @classmethod
    def _as_in_batch_files(cls, value: Any) -> Any:
        """Also accepts `auto`, `{cpu: 2}` and `{gpu: all}`."""
        if value == "auto":
            return {"kind": "auto"}
        if isinstance(value, dict) and len(value) == 1 and value.keys() <= {"cpu", "gpu"}:
            ((kind, count),) = value.items()
            return {"kind": kind, "count": None if count == "all" else count}
        return value

    @model_validator(mode="after")
    def _complete(self) -> DeviceChoice:
        if self.kind == "auto" and self.count is not None:
            raise ValueError("a number goes with gpu or cpu, not with auto")
        if self.kind == "cpu" and self.count is None:
            raise ValueError("say how many cpu slots, or choose auto")
        return self

    def in_batch_file(self) -> Any:
        """Returns the value of `devices` in a batch file."""
        return "auto" if self.kind == "auto" else {self.kind: self.count or "all"}


class Sweep(FormSection):
    """A whole sweep; the docstring of `ringmaster.flows.sweep.sweep` describes each field."""

    name: SweepName = "sweep"
    template: JobFromFile | InlineJob
    space: Space
    sampler: Sampler = "random"
    num_trials: NumTrials | None = 8
    early_stopping: EarlyStopping = EarlyStopping()
    objective: Metric | None = None
    base: Line = ""
    data: dict[str, Any] | None = None
    devices: DeviceChoice = DeviceChoice()
    deadline_s: Seconds | None = None
    challenger_of: OtherName = ""
    num_parallel: NumParallel = 4
    seed: Seed = 0

    @model_validator(mode="before")
    @classmethod
    def _over(cls, value: Any) -> Any:
        """Also accepts `over: {KEY: [...]}` for a grid in which every trial is trained to its end."""
        if not isinstance(value, dict) or "over" not in value or "space" in value:
            return value
        plain = {key: each for key, each in value.items() if key != "over"}
        grid = {"sampler": "grid", "num_trials": None, "early_stopping": {"policy": "none"}}
        return {**grid, **plain, "space": value["over"]}

    def parameters(self) -> dict[str, Any]:
        """Returns the parameters of the flow, as plain values."""
        return self.model_dump(mode="json")
