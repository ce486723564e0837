"""What a sweep is asked for: the form in Prefect's UI and a sweep's file, which say the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tasks.batch import Batch, BatchFileError, Fault, document, load_batch, parse_batch
from tasks.batch.faults import got, place_text
from tasks.batch.references import closest
from tasks.batch.schema import NAME_PATTERN

Values = Annotated[list[Any], Field(min_length=1)]
Over = Annotated[dict[str, Values], Field(min_length=1)]
SweepName = Annotated[str, Field(pattern=NAME_PATTERN)]
Seed = Annotated[int, Field(ge=0)]


class Part(BaseModel):
    """What all parts of the form keep to."""

    model_config = ConfigDict(extra="forbid")


class JobFromFile(Part):
    """A job of a batch file."""

    model_config = ConfigDict(title="A job of a batch file")

    path: str = Field(title="Batch file", description="Its path, seen from the folder that is worked in.")
    job: str | None = Field(
        default=None,
        title="Job",
        description="The name of one of its jobs, or of a grid's template; may be left out where there is only one.",
    )


class InlineJob(Part):
    """A job that is written out."""

    model_config = ConfigDict(title="A job written out")

    job: dict[str, Any] = Field(
        title="Job", description="With the keys of a job in a batch file: model, data, optimizer, num_steps, ..."
    )
    folder: str = Field(
        default=".", title="Folder", description="Where relative paths and factories of the job are looked for."
    )


class DeviceChoice(Part):
    """What the sweep may use of this machine."""

    model_config = ConfigDict(title="Devices")

    kind: Literal["auto", "gpu", "cpu"] = Field(
        default="auto", title="Kind", description="auto: the GPUs where there are any, else CPU slots."
    )
    count: int | None = Field(
        default=None, ge=1, title="How many", description="All where it is left out; goes with gpu and cpu."
    )

    @model_validator(mode="before")
    @classmethod
    def _as_in_batch_files(cls, value: Any) -> Any:
        """Takes `auto`, `{cpu: 2}` and `{gpu: all}` too."""
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
        """The same as a batch file says it."""
        return "auto" if self.kind == "auto" else {self.kind: self.count or "all"}


class Sweep(Part):
    """A whole sweep: a template of a job, and the values to try."""

    name: SweepName = "sweep"
    template: JobFromFile | InlineJob
    over: Over
    devices: DeviceChoice = DeviceChoice()
    seed: Seed = 0

    def parameters(self) -> dict[str, Any]:
        """The parameters of the flow, as plain values."""
        return self.model_dump(mode="json")

    def batch(self) -> Batch:
        """Every combination as a job of one batch. Raises BatchFileError with every fault."""
        template, folder = _template(self.template)
        raw = {
            "name": self.name,
            "devices": self.devices.in_batch_file(),
            "grid": [{"template": {"name": self.name, **template}, "over": self.over}],
        }
        try:
            return parse_batch(json.dumps(raw), folder=folder, name=self.name)
        except BatchFileError as error:
            faults = [replace(f, place=f.place.removeprefix("grid[0]."), line=None, file="") for f in error.faults]
            raise BatchFileError(faults) from error


def load_sweep(path: Path) -> Sweep:
    """The sweep of a YAML file; relative paths in it start in its folder. Raises BatchFileError with every fault."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fault = Fault("", None, f"cannot be read: {error}", "name a sweep's file, such as sweep.yaml", str(path))
        raise BatchFileError([fault]) from error
    read = document.read(text)
    faults = [
        Fault(place_text(found.place), found.line or read.line(found.place), found.message, found.remedy, path.name)
        for found in read.findings
    ]
    if faults:
        raise BatchFileError(faults)
    try:
        sweep = Sweep.model_validate(_from_folder(read.data, folder=path.parent.resolve()))
    except ValidationError as error:
        raise BatchFileError(_faults(error, read=read, file=path.name)) from error
    sweep.batch()  # tells what is wrong with the jobs
    return sweep


def _from_folder(raw: Mapping[str, Any], *, folder: Path) -> dict[str, Any]:
    """The values with the paths of the template made absolute."""
    template = raw.get("template")
    if not isinstance(template, dict):
        return dict(raw)
    key, path = ("path", template.get("path")) if "path" in template else ("folder", template.get("folder", "."))
    return {**raw, "template": {**template, key: str(folder / path) if isinstance(path, str) else path}}


def _faults(error: ValidationError, *, read: document.Document, file: str) -> list[Fault]:
    """One fault a place; of a template, which is one of two kinds, those of the kind that is meant."""
    template = read.data.get("template")
    meant = JobFromFile if isinstance(template, dict) and "path" in template else InlineJob
    found: dict[tuple[str | int, ...], Fault] = {}
    for details in error.errors(include_url=False):
        place, kind = details["loc"], details["type"]
        if place[0] == "template" and len(place) > 1:
            if place[1] != meant.__name__:
                continue
            place = (place[0], *place[2:])
        message = f"{details['msg'][:1].lower()}{details['msg'][1:]}, {got(details['input'])}"
        remedy = "write it as in examples/sweep.yaml"
        if kind == "missing":
            message = "is missing"
        elif kind == "extra_forbidden":
            section = {"template": meant, "devices": DeviceChoice}.get(str(place[0]), Sweep)
            message, remedy = "is an unknown key", closest(str(place[-1]), section.model_fields, what="The keys are")
        found.setdefault(place, Fault(place_text(place), read.line(place), message, remedy, file))
    return sorted(found.values(), key=lambda fault: fault.line or 0)


def _template(choice: JobFromFile | InlineJob) -> tuple[dict[str, Any], Path]:
    """The job that is varied, as plain values, and the folder where its paths start."""
    if isinstance(choice, InlineJob):
        return choice.job, Path(choice.folder)
    path = Path(choice.path)
    batch = load_batch(path)
    raw = document.read(batch.text).data
    jobs = [*raw.get("jobs", []), *(entry["template"] for entry in raw.get("grid", []))]
    named = {job["name"]: job for job in jobs}
    if choice.job is None and len(jobs) == 1:
        return jobs[0], batch.folder
    if choice.job in named:
        return named[choice.job], batch.folder
    problem = f"names no job of {path.name}" if choice.job is None else f"{choice.job!r} is no job of {path.name}"
    remedy = closest(choice.job or "", named, what="Use one of")
    raise BatchFileError([Fault("template.job", None, problem, remedy)])
