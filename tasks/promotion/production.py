"""The file of production models: a model's name, how it is trained, and its data; every fault in it told at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from tasks.batch import Batch, BatchFileError, Fault, document, parse_batch
from tasks.batch.faults import Place, got, place_text
from tasks.batch.references import closest
from tasks.batch.schema import Name, Section
from tasks.cluster import Devices
from tasks.promotion.policy_file import Policy, load_policy
from techniques import Job

ELSEWHERE = {
    "name": "write it beside job: it names the registered model",
    "data": "write it beside job",
    "base": "leave it out: a model starts from its champion where there is one, unless warm_start is false",
}
"""Keys of a job that a model's `job` may not have."""


class ModelEntry(Section):
    """One production model."""

    name: Name = Field(description="a name of letters, digits, '-', '_' and '.', such as digits")
    job: dict[str, Any] = Field(description="a job as in a batch file, without name, data and base")
    data: dict[str, Any] = Field(description="the data as in a batch file, such as {path: 'data/*.jsonl', seq_len: 64}")
    compare_on: dict[str, Any] | None = Field(
        default=None, description="data whose held-out part the champion and the challenger are compared on"
    )
    warm_start: bool = Field(default=True, description="false to train from fresh weights every time, else true")
    min_gain: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0, description="by how much a challenger must be better, in its first metric, such as 0.01"
    )


class ProductionEntry(Section):
    """A whole file of production models."""

    name: Name = Field(description="a name that the registered models' names start with, such as production")
    devices: Any = Field(default="auto", description="auto, {cpu: 2}, {gpu: 2} or {gpu: all}")
    policy: str | None = Field(
        default=None, description="a file that says when a challenger is promoted, such as policy.yaml"
    )
    models: Annotated[list[ModelEntry], Field(min_length=1)] = Field(description="a list of models")


@dataclass(frozen=True, kw_only=True)
class ProductionModel:
    """A model that is kept up to date.

    job: how it is trained, with its data and without a base. compare_on: the same job on the data that champion and
    challenger are compared on, where that is not its own. registered_name: in the model registry, for ever.
    """

    registered_name: str
    job: Job
    compare_on: Job | None = None
    warm_start: bool = True
    min_gain: float = 0.0

    @property
    def name(self) -> str:
        """The model's name in its file."""
        return self.job.name

    @property
    def metric(self) -> str:
        """The metric by which its versions are compared: the first one of its evaluation."""
        return self.job.evaluation.metrics[0]


@dataclass(frozen=True, kw_only=True)
class Production:
    """The models of a file. folder: the file's, absolute; relative paths and factories are looked for there.

    policy: that decides of promotions; None for the plain rule: what is better by `min_gain` is promoted.
    """

    name: str
    models: tuple[ProductionModel, ...]
    devices: Devices
    folder: Path
    policy: Policy | None = None

    @property
    def jobs(self) -> list[Job]:
        """All jobs that say what data is needed: the models' own, and those they are compared on."""
        return [job for model in self.models for job in (model.job, model.compare_on) if job is not None]


def load_production(path: Path) -> Production:
    """The production models of a YAML file. Raises BatchFileError with every fault in it, lines included."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fault = Fault("", None, f"cannot be read: {error}", "name a file of models, such as retraining.yaml", str(path))
        raise BatchFileError([fault]) from error
    read = document.read(text)
    faults = [
        Fault(place_text(f.place), f.line or read.line(f.place), f.message, f.remedy, path.name) for f in read.findings
    ]
    if read.data is None:
        raise BatchFileError(faults)
    entry, wrong = _entry(read.data)
    batch, wrong_jobs = _batch(read.data, folder=path.parent)
    policy, wrong_policy = _policy(read.data.get("policy"), folder=path.parent)
    for place, message, remedy in [*wrong, *wrong_jobs, *wrong_policy]:
        if place_text(place) not in {fault.place for fault in faults}:
            faults.append(Fault(place_text(place), read.line(place), message, remedy, path.name))
    if faults:
        raise BatchFileError(sorted(faults, key=lambda fault: fault.line or 0))
    assert entry is not None and batch is not None, "a file without a fault has models"
    return replace(_production(entry, batch), policy=policy)


def with_tokenizer_of(folder: Path | None, model: ProductionModel) -> ProductionModel:
    """The model, its text to be read with the tokenizer in `folder` (a champion's files), where that has one.

    Weights mean the tokens that they learnt: what a champion reads, and what is compared with it or starts from it,
    is tokenised as it was for that. A tokenizer that the file names goes before.
    """
    if folder is None or not (folder / "tokenizer.json").is_file():
        return model

    def read_with(job: Job) -> Job:
        if job.data.tokenizer is not None or job.data.factory is not None:
            return job
        return replace(job, data=replace(job.data, tokenizer=str(folder)))

    compare_on = None if model.compare_on is None else read_with(model.compare_on)
    return replace(model, job=read_with(model.job), compare_on=compare_on)


Wrong = tuple[Place, str, str]
"""A place in the file, what is wrong there, and what to do."""


def _production(entry: ProductionEntry, batch: Batch) -> Production:
    jobs = {job.name: job for job in batch.jobs}
    models = tuple(
        ProductionModel(
            registered_name=f"{entry.name}.{model.name}",
            job=jobs[model.name],
            compare_on=jobs[_compared(model.name)] if model.compare_on is not None else None,
            warm_start=model.warm_start,
            min_gain=model.min_gain,
        )
        for model in entry.models
    )
    return Production(name=entry.name, models=models, devices=batch.devices, folder=batch.folder)


def _entry(raw: Mapping[str, Any]) -> tuple[ProductionEntry | None, list[Wrong]]:
    """The file by its own schema, and what does not fit that."""
    wrong = list(_misplaced(raw))
    try:
        return ProductionEntry.model_validate(raw), wrong
    except ValidationError as error:
        for details in error.errors(include_url=False):
            place = details["loc"]
            section = ModelEntry if len(place) > 2 else ProductionEntry
            key = str(next(part for part in reversed(place) if isinstance(part, str)))
            if details["type"] == "extra_forbidden":
                wrong.append((place, "is an unknown key", closest(key, section.model_fields, what="The keys here are")))
                continue
            said = (
                "is missing" if details["type"] == "missing" else f"{_lower(details['msg'])}, {got(details['input'])}"
            )
            known = section.model_fields.get(key)
            wrong.append((place, said, f"give {known.description if known else 'a name, a job and its data'}"))
        return None, wrong


def _policy(name: Any, *, folder: Path) -> tuple[Policy | None, list[Wrong]]:
    """The policy that a file names, and what is wrong with it."""
    if not isinstance(name, str):
        return None, []
    try:
        return load_policy(folder / name), []
    except BatchFileError as error:
        return None, [(("policy",), f"{f.file}:{f.line or 1}: {f.place} {f.message}", f.remedy) for f in error.faults]


def _misplaced(raw: Mapping[str, Any]) -> Iterator[Wrong]:
    for i, model in enumerate(_list(raw.get("models"))):
        job = model.get("job") if isinstance(model, Mapping) else None
        for key in ELSEWHERE.keys() & (job.keys() if isinstance(job, Mapping) else ()):
            yield ("models", i, "job", key), "does not stand in the job", ELSEWHERE[key]


def _batch(raw: Mapping[str, Any], *, folder: Path) -> tuple[Batch | None, list[Wrong]]:
    """All jobs of the file under the rules of a batch, and what those find, at places of this file."""
    jobs: list[dict[str, Any]] = []
    origins: list[tuple[int, str]] = []  # of each job: its model's position, and the key that its data stands under
    for i, model in enumerate(_list(raw.get("models"))):
        if not isinstance(model, Mapping) or not isinstance(job := model.get("job"), Mapping):
            continue
        own = {key: value for key, value in job.items() if key not in ELSEWHERE}
        for key in ("data", "compare_on"):
            if isinstance(data := model.get(key), Mapping):
                name = model.get("name")
                named = _compared(name) if key == "compare_on" and isinstance(name, str) else name
                jobs.append({**own, "name": named, "data": data})
                origins.append((i, key))
    if not jobs:
        return None, []
    said = {key: raw[key] for key in ("name", "devices") if key in raw}
    try:
        return parse_batch(json.dumps({**said, "jobs": jobs}), folder=folder, name="jobs"), []
    except BatchFileError as error:
        return None, [(_place(fault.place, origins), fault.message, fault.remedy) for fault in error.faults]


def _place(text: str, origins: list[tuple[int, str]]) -> Place:
    """A place of the batch, such as jobs[1].optimizer.lr, as a place in the file."""
    parts = re.findall(r"\[(\d+)\]|([^.\[\]]+)", text)
    place: Place = tuple(int(number) if number else key for number, key in parts)
    if len(place) < 2 or place[0] != "jobs" or not isinstance(place[1], int):
        return place
    i, data_key = origins[place[1]]
    match place[2:]:
        case ("data", *rest):
            return ("models", i, data_key, *rest)
        case ("name", *_):
            return ("models", i, "name")
        case rest:
            return ("models", i, "job", *rest)


def _compared(name: str) -> str:
    return f"{name}.compare_on"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
