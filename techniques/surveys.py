"""What is known of jobs before anything runs: their data, their models' sizes, and what could train them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringmaster.techniques.job import Job
from ringmaster.techniques.technique import GangShape

REHEARSED, ARITHMETIC = "rehearsed", "arithmetic"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes that an option will need on each device, and beside each device in host memory: what lies there of the
    state, and the copy of it from which a checkpoint is written while training goes on (of the rank that writes most).

    source: "rehearsed" (its step was run without values, see `engine.rehearsal`) or "arithmetic", where it could not
    be, because of `message`.
    """

    device_bytes: int
    host_bytes: int = 0
    source: str = REHEARSED
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An option that could train a job, not measured yet; it takes `num_ranks` worker processes.

    least_bytes: that a device needs at the least. forecast: what it will need, None where it surely has it.
    step_s: predicted seconds of a step, None where nothing is known of the devices.
    """

    technique: str
    config: Mapping[str, Any]
    num_devices: int
    num_ranks: int
    least_bytes: int
    forecast: Forecast | None = None
    step_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a technique cannot train a job on so many devices, or not under one `config`.

    is_too_large: it would, on devices with more memory; else it does not apply to such a job or gang.
    """

    technique: str
    num_devices: int
    reason: str
    config: Mapping[str, Any] | None = None
    is_too_large: bool = False


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What is known of a job before any trial; of one technique and gang size, the cheapest-looking candidate first.

    data, facts: the JSON forms of `engine.data.PreparedData` and `engine.models.ModelFacts`.
    """

    job: str
    data: Mapping[str, Any]
    facts: Mapping[str, Any]
    candidates: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, kw_only=True)
class SurveyOrder:
    """Survey `jobs` for gangs of each shape; techniques by name, with the dotted paths of their classes.

    slots: the cores of each CPU slot, whose rates predict step times; none where the devices are not at hand.
    gpu: the uuid of a GPU that is at hand, on which layers may be timed as on the first slot.
    forecast_all: foretell the memory of every candidate, not only of those that may not fit.
    describe_data: take from the job what its data will be like, where that says enough, rather than prepare it.
    patience_s: after which no rehearsal is begun, and arithmetic has to do; None for as long as it takes.
    """

    jobs: tuple[Job, ...]
    shapes: tuple[GangShape, ...]
    techniques: Mapping[str, str]
    cache_dir: str
    cores: tuple[int, ...] = ()
    import_paths: tuple[str, ...] = ()
    slots: tuple[tuple[int, ...], ...] = ()
    gpu: str | None = None
    forecast_all: bool = False
    describe_data: bool = False
    patience_s: float | None = None
