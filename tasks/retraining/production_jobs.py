"""The jobs of a file of production models, validated by the rules of a batch; faults are at places of the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch import Batch, parse_batch
from ringmaster.tasks.batch.faults import Finding, Place
from ringmaster.tasks.batch.grid import combinations, num_jobs, too_many

ELSEWHERE = {
    "name": "write it beside job: it names the registered model",
    "data": "write it beside job",
    "base": "leave it out: a model starts from its champion where there is one, unless warm_start is false",
    "deadline_s": "write deadline at the top of the file: it holds for all models of a run",
    "weight": "leave it out: the models of a run are planned by its deadline and budget",
    "user": "leave it out: the models of a run are planned by its deadline and budget",
}
"""The keys that a model's `job` must not have."""

INPUTS, COMPARE_ON = ".inputs", ".compare_on"
DATA: Mapping[str, Place] = {
    "": ("data",),
    COMPARE_ON: ("compare_on",),
    INPUTS: ("due", "drift", "inputs"),
}
"""The suffix of a job's name and the place of its data, for each job of a model."""
HAS_ROWS, HELD_OUT = ("path", "dataset"), ("held_out", "held_out_path", "held_out_split")
"""The keys of data with rows of its own, and of data that names its held-out part."""
MOST_VARIANTS = 64  # of one model: a sweep around its values, not a search


def misplaced(raw: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields a fault for each key of a job that belongs elsewhere in such a file."""
    for i, model in enumerate(_list(raw.get("models"))):
        job = model.get("job") if isinstance(model, Mapping) else None
        for key in ELSEWHERE.keys() & (job.keys() if isinstance(job, Mapping) else ()):
            yield Finding(("models", i, "job", key), "does not stand in the job", ELSEWHERE[key])


def jobs_of(raw: Mapping[str, Any], *, folder: Path) -> tuple[Batch | None, dict[str, list[str]], list[Finding]]:
    """Returns all jobs of the file as one batch, the names of the sweep's jobs by model, and all faults."""
    jobs: list[dict[str, Any]] = []
    origins: list[tuple[int, Place]] = []  # for each job: its model's position, and the place of its data or values
    variants: dict[str, list[str]] = {}
    found: list[Finding] = []
    models = _list(raw.get("models"))
    grids = [{"over": model.get("sweep")} for model in models if isinstance(model, Mapping)]
    if (fault := too_many(models, grids)) is not None:
        return None, {}, [replace(fault, place=("models",))]
    for i, model in enumerate(models):
        if not isinstance(model, Mapping) or not isinstance(job := model.get("job"), Mapping):
            continue
        own = {key: value for key, value in job.items() if key not in ELSEWHERE}
        name = model.get("name")
        for suffix, place in DATA.items():
            if isinstance(data := _at(model, place), Mapping):
                if suffix == INPUTS:  # no models are compared on them
                    data = {"held_out": 0, **data}
                elif suffix == COMPARE_ON and not data.keys().isdisjoint(HAS_ROWS) and data.keys().isdisjoint(HELD_OUT):
                    data = {**data, "held_out": 0}  # all rows are compared on
                jobs.append({**own, "name": f"{name}{suffix}" if isinstance(name, str) else name, "data": data})
                origins.append((i, place))
        over, data = model.get("sweep"), model.get("data")
        if isinstance(over, Mapping) and over and isinstance(name, str) and isinstance(data, Mapping):
            raws, wrong = _swept({**own, "name": name, "data": data}, over, at=("models", i))
            found += wrong
            variants[name] = [variant["name"] for variant in raws]
            jobs += raws
            origins += [(i, ("sweep",))] * len(raws)
    if not jobs:
        return None, {}, found
    said = {key: raw[key] for key in ("name", "devices", "datasets") if key in raw}
    try:
        return parse_batch(json.dumps({**said, "jobs": jobs}), folder=folder, name="jobs"), variants, found
    except BatchFileError as error:
        found += [Finding(_place(fault.place, origins), fault.message, fault.remedy) for fault in error.faults]
        return None, variants, found


def _swept(template: dict[str, Any], over: Mapping[str, Any], *, at: Place) -> tuple[list[Any], list[Finding]]:
    """Returns the job under every combination of values; none if a value is not a list, which is reported elsewhere."""
    if not all(isinstance(values, list) and values for values in over.values()):
        return [], []
    if (num := num_jobs(over)) > MOST_VARIANTS:
        said = f"makes {num} jobs, and {MOST_VARIANTS} are the most"
        return [], [Finding((*at, "sweep"), said, "try fewer values, or search with `ringmaster sweep`")]
    made, wrong = combinations({"template": template, "over": dict(over)}, at=())
    found = [Finding((*at, "sweep", *finding.place[1:]), finding.message, finding.remedy) for finding in wrong]
    return [combination.raw for combination in made], found


def _place(text: str, origins: list[tuple[int, Place]]) -> Place:
    """Converts a place of the batch, such as jobs[1].optimizer.lr, to a place in the file."""
    parts = re.findall(r"\[(\d+)\]|([^.\[\]]+)", text)
    place: Place = tuple(int(number) if number else key for number, key in parts)
    if len(place) < 2 or place[0] != "jobs" or not isinstance(place[1], int):
        return place
    i, data_place = origins[place[1]]
    if data_place == ("sweep",):
        return ("models", i, "sweep")
    match place[2:]:
        case ("data", *rest):
            return ("models", i, *data_place, *rest)
        case ("name", *_):
            return ("models", i, "name")
        case rest:
            return ("models", i, "job", *rest)


def _at(model: Mapping[str, Any], place: Place) -> Any:
    value: Any = model
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
