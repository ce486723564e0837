"""The events that gangs and the workers of a preflight report, and their JSON form, in which they are sent and stored.

Ranks send events to their supervisor, which passes on those of rank 0. A node adds the telemetry of its devices and the
outcome of its part of the gang. `event_from_json` is called where an event enters a process; from there on it is a
value of one of these classes. They check themselves, as a user's trainer may send any: ValueError describes what is
wrong.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, ClassVar, Self

from ringmaster.codec import SINCE_LATER, from_json, stored_as, stored_flat, to_json
from ringmaster.techniques.metric import checked_values
from ringmaster.techniques.preflight_result import Preflight
from ringmaster.text import printable_lines, storable_values

MAX_STEPS = 2**53  # JSON's whole numbers; a job has fewer
MAX_IN_REFUSED = 200  # characters of a refused event that a message quotes


ENDED_EARLY = "reached_target"  # the stored name, kept for earlier releases
"""The key of a result with whether the target is reached, of a job that has ended and has one."""
NUM_ROWS = "num_evaluated_rows"
"""The key of a result, and of jobs' records, with the number of held-out rows that the metrics were computed of."""


class OutcomeStatus(StrEnum):
    """How a gang, or one job of a group, ended."""

    DONE = "done"
    PREEMPTED = "preempted"  # stopped by a command, and checkpointed
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"  # a rank died, hung or raised: another try may succeed
    INVALID = "invalid"  # the user has to correct something: another try would end the same way
    LOST = "lost"  # its node is lost, or the fork server's fence ended the ranks: this machine's part was given up
    LEFT = "left"  # of one job of a group: it left the group, whose other jobs continue


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """What a gang reports of one of its jobs at its end. Fields that were not reported have their defaults.

    status, message: how the job ended in the gang. step: so many steps are done and checkpointed.
    first_step: the step from which the gang trained the job.
    metrics, num_rows: of the last evaluation, and the number of its rows.
    compared: the metrics of the model and of the models that it was made of, on the same rows.
    ended_early: of a job that may end before its last step, whether it has reached what it trains for.
    startup_s, save_s, evaluate_s, export_s: the duration of the start, the last save, the last evaluation, the export.
    members: the results of the other jobs of the gang, by name; their stored key is kept for earlier releases.
    others: what features add.
    """

    OMITS_DEFAULTS: ClassVar[bool] = True

    status: OutcomeStatus | None = None
    message: str = ""
    first_step: int | None = None
    step: int | None = None
    metrics: Mapping[str, Any] | None = None
    num_rows: int | None = stored_as(NUM_ROWS, default=None)
    compared: tuple[Mapping[str, Any], ...] | None = None
    ended_early: bool | None = stored_as(ENDED_EARLY, default=None)
    startup_s: float | None = None
    save_s: float | None = None
    evaluate_s: float | None = None
    export_s: float | None = None
    members: "Mapping[str, JobResult] | None" = stored_as("fellows", default=None)  # noqa: RUF009 - it makes a field
    others: Mapping[str, Any] = stored_flat({})

    def extended(self, values: Mapping[str, Any]) -> Self:
        """Returns the result with further values: those of fields by the fields' names, and `others`."""
        own = {each.name for each in fields(self)} - {"others"}
        others = {**self.others, **{key: value for key, value in values.items() if key not in own}}
        return replace(self, others=others, **{key: value for key, value in values.items() if key in own})

    @property
    def steps_done(self) -> int:
        """The steps that are done. Raises ValueError where the gang has not reported them."""
        if self.step is None:
            raise ValueError("the result has no step")
        return self.step

    @property
    def final_metrics(self) -> Mapping[str, Any]:
        """The metrics of a job that is done. Raises ValueError where the gang has not reported any."""
        if self.metrics is None:
            raise ValueError("the result has no metrics")
        return self.metrics


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event of a gang, whose fields are checked by their names. NAME: the value of "event" in its JSON form."""

    NAME: ClassVar[str]

    def __post_init__(self) -> None:
        for each in fields(self):
            if check := _CHECKS.get(each.name):
                object.__setattr__(self, each.name, check(getattr(self, each.name)))


@dataclass(frozen=True, kw_only=True)
class JobEvent(Event):
    """An event about one job. job: its name within the batch; None for the job of the gang's order."""

    job: str | None = field(default=None, metadata=SINCE_LATER)


def _checked_step(step: Any) -> Any:
    if type(step) is not int or not 0 <= step <= MAX_STEPS:
        raise ValueError(f"a step is a whole number from 0, not {step!r:.100}")
    return step


def _checked_count(number: Any) -> Any:
    if type(number) is not int or number < 0:
        raise ValueError(f"numbers of samples, tokens and bytes are whole numbers from 0, not {number!r:.100}")
    return number


def _checked_seconds(seconds: Any) -> Any:
    for value in seconds if isinstance(seconds, tuple) else (seconds,):
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise ValueError(f"seconds are a number from 0, not {value!r:.100}")
    return seconds


def _checked_load(load: Any) -> Any:
    if load is not None and not (isinstance(load, (int, float)) and 1 <= load < math.inf):
        raise ValueError(f"a load is a number from 1, not {load!r:.100}")
    return load


def _checked_result(result: JobResult) -> JobResult:
    """Checks what a rank returns for its job, and for each member of a group."""
    for step in (result.step, result.first_step):
        if step is not None:
            _checked_step(step)
    if result.metrics is not None:
        checked_values(result.metrics)
    if result.num_rows is not None:
        _checked_count(result.num_rows)
    _checked_seconds((result.startup_s, result.save_s, result.evaluate_s, result.export_s))
    for member in (result.members or {}).values():
        _checked_result(member)
    return result


def _printable_message(message: Any) -> str:
    """Returns a message that may quote a user's exception or a file name, of any length and with any characters."""
    return printable_lines(str(message))


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("step", "first_step"), _checked_step),
    **dict.fromkeys(("seconds", "startup_s", "stall_s", "wall_s"), _checked_seconds),
    **dict.fromkeys(("num_samples", "num_tokens", "peak_bytes"), _checked_count),
    **dict.fromkeys(("result", "outcome"), _checked_result),
    "metrics": checked_values,
    "load": _checked_load,
    "num_rows": lambda number: number if number is None else _checked_count(number),
    **dict.fromkeys(("message", "note"), _printable_message),
}


# -- for the supervisor of a rank ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankStarted(Event):
    """The process of a rank has started."""

    NAME = "started"
    pid: int


@dataclass(frozen=True, kw_only=True)
class Beat(Event):
    """The rank is alive."""

    NAME = "beat"


@dataclass(frozen=True, kw_only=True)
class PhaseStarted(Event):
    """The rank has started a phase, in which it may be silent for `timeout_s` seconds."""

    NAME = "phase"
    phase: str
    timeout_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class RankFailed(Event):
    """The rank is about to end because of an error. is_of_code: whether it is the job's, and not the machine's."""

    NAME = "failed"
    kind: OutcomeStatus
    message: str
    is_of_code: bool = field(default=False, metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class RankResult(Event):
    """The rank has completed its order. result: of a trial, its status alone."""

    NAME = "result"
    result: JobResult


@dataclass(frozen=True, kw_only=True)
class RankExited(Event):
    """The process of a rank has ended. status: its exit status, negative for a signal.

    fenced: whether the fork server's fence ended it.
    """

    NAME = "exit"
    status: int
    fenced: bool = False


# -- of a preflight --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PreflightStarted(JobEvent):
    """The preflight of a job has started."""

    NAME = "surveying"


@dataclass(frozen=True, kw_only=True)
class DataProgress(JobEvent):
    """The data of a job is being prepared. progress: what is read and written so far, for users."""

    NAME = "preparing"
    progress: str


@dataclass(frozen=True, kw_only=True)
class PreflightDone(Event):
    """The preflight of a job is done, with its result."""

    NAME = "survey"
    preflight: Preflight = stored_as("survey")  # noqa: RUF009 - it makes a field


@dataclass(frozen=True, kw_only=True)
class PreflightFailed(JobEvent):
    """A job cannot be trained. message: the cause, and what to correct."""

    NAME = "fault"
    message: str


# -- of a trial ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrialMeasured(Event):
    """A trial has been measured.

    profile: the measured fields of `Profile`.
    mean_step_s: the mean seconds of the measured steps, of which the profile has the median; None where it is unknown.
    """

    NAME = "measured"
    profile: Mapping[str, Any]
    mean_step_s: float | None = field(default=None, metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class ReferenceTimed(Event):
    """The reference kernel was timed on the devices of a gang, before or after a trial.

    kind: the kind of device, and the number of threads that used it.
    mean_s, fastest_s: mean and least seconds of a repetition.
    spread: the standard error of the mean, relative to it.
    """

    NAME = "reference"
    kind: str
    mean_s: float
    fastest_s: float
    spread: float = 0.0


# -- of the jobs of a gang -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JobReady(JobEvent):
    """The job is about to take its first step, from `step` on. startup_s: the seconds since it was ordered."""

    NAME = "ready"
    step: int = 0
    startup_s: float | None = field(default=None, metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class Steps(JobEvent):
    """Steps were done, from `first_step` on.

    losses, seconds: of each step; the losses are empty where only the progress is stored.
    rewards: the mean reward of each step's completions; empty for losses that generate none.
    wall_s: the time of the report in seconds since the epoch.
    measurements: what features have measured in some of the steps, as plain values; their stored key is kept for
        earlier releases.
    num_samples, num_tokens: of these steps on all ranks; tokens without padding, 0 where the samples have none.
    peak_bytes: the most memory that the device of rank 0 (its process, on CPU slots) has held so far; 0 if unknown.
    load: how many times as long as on cores of its own rank 0 has computed (`core_load`); None if unknown.
    """

    NAME = "steps"
    first_step: int
    seconds: tuple[float, ...]
    losses: tuple[float, ...] = field(default=(), metadata=SINCE_LATER)
    rewards: tuple[float, ...] = field(default=(), metadata=SINCE_LATER)
    wall_s: float = field(default=0.0, metadata=SINCE_LATER)
    num_samples: int = field(default=0, metadata=SINCE_LATER)
    num_tokens: int = field(default=0, metadata=SINCE_LATER)
    peak_bytes: int = field(default=0, metadata=SINCE_LATER)
    load: float | None = field(default=None, metadata=SINCE_LATER)
    measurements: tuple[Mapping[str, Any], ...] = field(default=(), metadata={"key": "noise", **SINCE_LATER})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.losses and len(self.losses) != len(self.seconds):
            raise ValueError(f"{len(self.losses)} losses are of {len(self.seconds)} steps")
        if not all(isinstance(loss, (int, float)) and math.isfinite(loss) for loss in self.losses):
            raise ValueError("a loss is a finite number")

    @property
    def step(self) -> int:
        """The step that the job has reached."""
        return self.first_step + len(self.seconds)

    def newest(self, most: int) -> Self:
        """Returns the report of its newest steps, at most so many."""
        num_left_out = max(0, len(self.seconds) - most)
        share = 1 - num_left_out / max(1, len(self.seconds))
        return replace(
            self,
            first_step=self.first_step + num_left_out,
            seconds=self.seconds[num_left_out:],
            losses=self.losses[num_left_out:],
            rewards=self.rewards[num_left_out:],
            measurements=(),
            num_samples=round(self.num_samples * share),
            num_tokens=round(self.num_tokens * share),
        )


@dataclass(frozen=True, kw_only=True)
class RowValues:
    """What held-out rows contribute to a metric that is a mean: the sum of `values` by that of `counts`."""

    values: tuple[float, ...]
    counts: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raises ValueError where they are not of the same rows."""
        if len(self.values) != len(self.counts):
            raise ValueError(f"{len(self.values)} values of rows have {len(self.counts)} counts")


@dataclass(frozen=True, kw_only=True)
class PartialEvaluation:
    """The part of the held-out rows that an evaluation has computed.

    begin: of its first row in their random order. whole: the number of rows of a whole evaluation.
    rows: the values of its rows, in order, of the job's first metric.
    """

    begin: int
    whole: int
    rows: RowValues


@dataclass(frozen=True, kw_only=True)
class EvaluationReported(JobEvent):
    """The job was evaluated after a step.

    wall_s: the time of the report in seconds since the epoch.
    num_rows: the number of held-out rows; None where it is unknown.
    part: of an evaluation of a part of them, whose metrics are of its rows alone; None for a whole one.
    note: what lines about it say of that; empty where the metrics of a part are no figures by themselves.
    """

    NAME = "metrics"
    step: int
    metrics: Mapping[str, float]
    wall_s: float | None = field(default=None, metadata=SINCE_LATER)
    num_rows: int | None = field(default=None, metadata=SINCE_LATER)
    part: PartialEvaluation | None = field(default=None, metadata=SINCE_LATER)
    note: str = field(default="", metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(JobEvent):
    """A checkpoint was published. seconds: the duration of the save; stall_s: how long training waited for it."""

    NAME = "checkpoint"
    step: int
    seconds: float | None = field(default=None, metadata=SINCE_LATER)
    stall_s: float | None = field(default=None, metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(JobEvent):
    """A checkpoint could not be saved, or is damaged. waits: whether training waits until it can be saved."""

    NAME = "checkpoint_failed"
    step: int
    message: str
    waits: bool = field(default=False, metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class KernelsRefused(JobEvent):
    """Kernels that a job's `numerics` permit differ from the plain ones on these devices, which compute the segment."""

    NAME = "kernels_refused"
    message: str


@dataclass(frozen=True, kw_only=True)
class JobOfGroupEnded(JobEvent):
    """One job of a group has ended, and the gang continues."""

    NAME = "ended"
    outcome: JobResult


# -- of a node -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DeviceTelemetry(Event):
    """The use of a gang's devices, which `tasks/device_monitor.py` describes. devices: by number on the node.

    node: the name of the node for a gang over several nodes, and empty otherwise.
    """

    NAME = "telemetry"
    wall_s: float
    node: str
    devices: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Outcome(Event):
    """How a gang, or a node's share of it, ended; the last event of a share.

    message: explanation for a person.
    result: the last result of rank 0, about the job of the gang's order.
    was_killed: whether an external cause (a signal, or the end of its launcher) ended it, so that another try may
        succeed.
    is_of_code: whether the job's code raised an error, which repeats itself where nothing else changes.
    """

    NAME = "outcome"
    status: OutcomeStatus
    message: str = ""
    result: JobResult = field(default_factory=JobResult)
    was_killed: bool = False
    is_of_code: bool = field(default=False, metadata=SINCE_LATER)

    @classmethod
    def of(cls, result: JobResult) -> Self:
        """Returns the outcome of a gang that has ended with a result. Raises ValueError where that has no status."""
        return cls(status=OutcomeStatus(result.status or ""), message=result.message, result=result)


# -- of scoring and evaluation on request ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RowsScored(Event):
    """A model has been scored. kind: of the model; file: an .npz file with its arrays of rows."""

    NAME = "scores"
    model: str
    kind: str
    file: str


@dataclass(frozen=True, kw_only=True)
class ScoringProgress(Event):
    """Rows that are scored so far, summed over all models."""

    NAME = "scoring_progress"
    num_done: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class ModelFailed(Event):
    """A model cannot be scored or evaluated. message: the cause."""

    NAME = "model_failed"
    model: str
    message: str


# -- of others -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OtherEvent(Event):
    """An event that only the trainer that sent it knows: it is stored and passed on as it is."""

    NAME = ""
    content: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RefusedEvent(Event):
    """What a gang has sent that is not an event. message: what is wrong with it. name: of the event it was to be.

    It is never sent or stored: whoever reads the event makes it again.
    """

    NAME = "refused"
    message: str
    name: str = ""


_CLASSES: Mapping[str, type[Event]] = {
    cls.NAME: cls
    for cls in (
        *(RankStarted, Beat, PhaseStarted, RankFailed, RankResult, RankExited),
        *(PreflightStarted, DataProgress, PreflightDone, PreflightFailed, TrialMeasured, ReferenceTimed),
        *(JobReady, Steps, EvaluationReported, CheckpointSaved, CheckpointFailed, KernelsRefused, JobOfGroupEnded),
        *(DeviceTelemetry, Outcome),
        *(RowsScored, ScoringProgress, ModelFailed),
    )
}
_KEYS = {cls: frozenset(f.metadata.get("key", f.name) for f in fields(cls)) for cls in _CLASSES.values()}


def event_to_json(event: Event) -> dict[str, Any]:
    """Returns the JSON form of an event: its name as "event", and its fields."""
    if isinstance(event, OtherEvent):
        return dict(event.content)
    return {"event": event.NAME, **to_json(event)}


def event_from_json(content: Mapping[str, Any]) -> Event:
    """Returns the event whose JSON form is `content`. Ignores fields that the event does not have.

    Raises ValueError where a field is missing or has a wrong shape or value.
    """
    name = content.get("event") if isinstance(content, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(f"an event is an object with its name as 'event', not {content!r:.{MAX_IN_REFUSED}}")
    cls = _CLASSES.get(name)
    if cls is None:
        return OtherEvent(content=storable_values(dict(content)))
    return from_json(cls, {key: storable_values(value) for key, value in content.items() if key in _KEYS[cls]})


def event_or_refusal(content: Any) -> Event:
    """Returns the event whose JSON form is `content`, or a `RefusedEvent` with the reason why there is none."""
    try:
        return event_from_json(content)
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        name = str(content.get("event", "")) if isinstance(content, Mapping) else ""
        message = f"an event of its gang was refused: {error} (it was {content!r:.{MAX_IN_REFUSED}})"
        return RefusedEvent(message=printable_lines(message), name=name)
