"""The events that gangs and the workers of a preflight report, and their JSON form, in which they are sent and stored.

Ranks send events to their supervisor, which passes on those of rank 0. A node adds the telemetry of its devices and the
outcome of its part of the gang. `event_from_json` is called where an event enters a process; from there on it is a
value of one of these classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

from ringmaster.techniques.interface.preflight import Preflight
from ringmaster.techniques.interface.values import SINCE_LATER, from_json, to_json
from ringmaster.text import storable_values


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
class Event:
    """An event of a gang. NAME: the value of "event" in its JSON form."""

    NAME: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class JobEvent(Event):
    """An event about one job. job: its name within the batch; None for the job of the gang's order."""

    job: str | None = field(default=None, metadata=SINCE_LATER)


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
    """The rank has started a phase, in which it may be silent for `patience_s` seconds."""

    NAME = "phase"
    phase: str
    patience_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class RankFailed(Event):
    """The rank is about to end because of an error."""

    NAME = "failed"
    kind: OutcomeStatus
    message: str


@dataclass(frozen=True, kw_only=True)
class RankResult(Event):
    """The rank has completed its order. result: status, step, metrics and seconds, or a trial's status."""

    NAME = "result"
    result: Mapping[str, Any]


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
    """The data of a job is being prepared. progress: what is read and written so far, for people."""

    NAME = "preparing"
    progress: str


@dataclass(frozen=True, kw_only=True)
class PreflightDone(Event):
    """The preflight of a job is done. survey: its result."""

    NAME = "survey"
    survey: Preflight


@dataclass(frozen=True, kw_only=True)
class PreflightFailed(JobEvent):
    """A job cannot be trained. message: the cause, and what to correct."""

    NAME = "fault"
    message: str


# -- of a trial ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measured(Event):
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
class Ready(JobEvent):
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
    """

    NAME = "steps"
    first_step: int
    seconds: tuple[float, ...]
    losses: tuple[float, ...] = field(default=(), metadata=SINCE_LATER)
    rewards: tuple[float, ...] = field(default=(), metadata=SINCE_LATER)
    wall_s: float = field(default=0.0, metadata=SINCE_LATER)

    @property
    def step(self) -> int:
        """The step that the job has reached."""
        return self.first_step + len(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Metrics(JobEvent):
    """The job was evaluated after a step. wall_s: the time of the report in seconds since the epoch."""

    NAME = "metrics"
    step: int
    metrics: Mapping[str, float]
    wall_s: float | None = field(default=None, metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(JobEvent):
    """A checkpoint was published. seconds: the duration of the save; stall_s: how long training waited for it."""

    NAME = "checkpoint"
    step: int
    seconds: float | None = field(default=None, metadata=SINCE_LATER)
    stall_s: float | None = field(default=None, metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(JobEvent):
    """A checkpoint could not be saved, or is damaged. waits: whether training stands still until it can be saved."""

    NAME = "checkpoint_failed"
    step: int
    message: str
    waits: bool = field(default=False, metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class JobOfGroupEnded(JobEvent):
    """One job of a group has ended, and the gang continues. outcome: in the form of a `RankResult.result`."""

    NAME = "ended"
    outcome: Mapping[str, Any]


# -- of a node -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DeviceTelemetry(Event):
    """The use of a gang's devices, which `tasks/devices/monitor.py` describes. devices: by number on the node.

    node: the name of the node for a gang over several nodes, and empty otherwise.
    """

    NAME = "telemetry"
    wall_s: float
    node: str
    devices: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ShareEnded(Event):
    """The last event of a node's share of a gang: its outcome, with the fields of `Outcome`."""

    NAME = "outcome"
    status: OutcomeStatus
    message: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)
    was_killed: bool = False


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


_CLASSES: Mapping[str, type[Event]] = {
    cls.NAME: cls
    for cls in (
        *(RankStarted, Beat, PhaseStarted, RankFailed, RankResult, RankExited),
        *(PreflightStarted, DataProgress, PreflightDone, PreflightFailed, Measured, ReferenceTimed),
        *(Ready, Steps, Metrics, CheckpointSaved, CheckpointFailed, JobOfGroupEnded),
        *(DeviceTelemetry, ShareEnded),
        *(RowsScored, ScoringProgress, ModelFailed),
    )
}
_KEYS = {cls: frozenset(f.name for f in fields(cls)) for cls in _CLASSES.values()}


def event_to_json(event: Event) -> dict[str, Any]:
    """Returns the JSON form of an event: its name as "event", and its fields."""
    if isinstance(event, OtherEvent):
        return dict(event.content)
    return {"event": event.NAME, **to_json(event)}


def event_from_json(content: Mapping[str, Any]) -> Event:
    """Returns the event whose JSON form is `content`. Ignores fields that the event does not have.

    Raises ValueError where a field is missing or has a wrong shape.
    """
    cls = _CLASSES.get(content["event"])
    if cls is None:
        return OtherEvent(content=storable_values(dict(content)))
    return from_json(cls, {key: storable_values(value) for key, value in content.items() if key in _KEYS[cls]})
