"""Sweep files, and the translation of a sweep's form into its specification, with all faults at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ringmaster.errors import BatchFileError
from ringmaster.flows.settings import located
from ringmaster.flows.sweeps.form import DeviceChoice, EarlyStopping, InlineJob, JobFromFile, Parameter, Sweep
from ringmaster.tasks.batch import Fault, document, load_batch
from ringmaster.tasks.batch.document import got, place_text
from ringmaster.tasks.batch.references import closest, is_folder
from ringmaster.tasks.batch.yaml_sections import read_document
from ringmaster.tasks.datasets.naming import NamedData
from ringmaster.tasks.files import beside, is_file
from ringmaster.tasks.sweeping.spec import SweepSpec
from ringmaster.techniques import EvaluationSpec

EXAMPLE_FILE = "examples/sweep.yaml"
SECTIONS: Mapping[str, type[BaseModel]] = {"early_stopping": EarlyStopping, "devices": DeviceChoice, "space": Parameter}


def spec_of(form: Sweep) -> SweepSpec:
    """Returns the specification of the sweep in a form. Raises BatchFileError with every fault in it."""
    template, folder = _template(form.template)
    is_base = form.base.startswith("models:/") or is_folder(form.base)
    template = {**template, **({"base": form.base} if is_base else {}), **({"data": form.data} if form.data else {})}
    lame = [(parameter.key, fault) for parameter in form.space if (fault := parameter.fault())]
    evaluation = template.get("evaluation")
    metrics = evaluation.get("metrics") if isinstance(evaluation, Mapping) else None
    metric = str(metrics[0]) if isinstance(metrics, list) and metrics else EvaluationSpec.metrics[0]
    spec = SweepSpec(
        name=form.name,
        template=template,
        folder=folder,
        space=tuple(parameter.parameter() for parameter in form.space if parameter.fault() is None),
        sampler=form.sampler,
        stopping=form.early_stopping.stopping(),
        objective=form.objective or metric,
        num_trials=form.num_trials if form.sampler == "grid" else form.num_trials or 8,
        num_parallel=form.num_parallel,
        devices=form.devices.in_batch_file(),
        deadline_s=form.deadline_s,
        seed=form.seed,
    )
    remedy = "give values, such as [1e-3, 1e-2], or a range by low and high"
    faults = [*(Fault(f"space.{key}", None, fault, remedy) for key, fault in lame), *spec.faults()]
    if form.base and not is_base:  # in a batch file, `base` may name one of its jobs; trials have no other jobs
        remedy = "write models:/NAME@ALIAS, models:/NAME/VERSION or a folder"
        faults.append(Fault("base", None, f"{form.base!r} is neither a registered model nor a folder", remedy))
    if faults:
        raise BatchFileError(faults)
    return spec


def load_sweep(path: Path) -> Sweep:
    """Reads a sweep from a YAML file; relative paths start in its folder. Raises BatchFileError with every fault."""
    read = read_document(path, what=f"a sweep's file, such as {EXAMPLE_FILE}")
    if read.data is None:
        found = [Fault("", f.line, f.message, f.remedy, path.name) for f in read.findings]
        raise BatchFileError(found)
    raw = _from_folder(read.data, folder=path.parent.resolve())
    faults: list[Fault] = []
    form: Sweep | None
    try:
        form = Sweep.model_validate(raw)
    except ValidationError as error:
        faults = _faults(error, read=read, file=path.name)
        form = _what_is_right(raw, error)
    if form is not None:
        try:
            spec_of(form)
        except BatchFileError as error:
            faults += [_placed(fault, read=read, file=path.name) for fault in error.faults]
    if faults:
        raise BatchFileError(sorted(faults, key=lambda fault: fault.line or 0))
    assert form is not None, "a form without a fault"
    return form


def _what_is_right(raw: Mapping[str, Any], error: ValidationError) -> Sweep | None:
    """Returns the form without its invalid parts, so that the faults of the other parts are reported as well."""
    wrong = {str(details["loc"][0]) for details in error.errors() if details["loc"]}
    space = raw.get("space", raw.get("over"))
    left = {key: value for key, value in raw.items() if key not in wrong}
    if "space" in wrong and isinstance(space, dict):
        bad = {place[1] for d in error.errors() if len(place := d["loc"]) > 1 and place[0] == "space"}
        left["space"] = {key: value for i, (key, value) in enumerate(space.items()) if i not in bad}
    try:
        return Sweep.model_validate(left)
    except ValidationError:
        return None


def _from_folder(raw: Mapping[str, Any], *, folder: Path) -> dict[str, Any]:
    """Returns the values with absolute paths in the template."""
    template = raw.get("template")
    if not isinstance(template, dict):
        return dict(raw)
    key, path = ("path", template.get("path")) if "path" in template else ("folder", template.get("folder", "."))
    return {**raw, "template": {**template, key: str(folder / path) if isinstance(path, str) else path}}


def _faults(error: ValidationError, *, read: document.YamlDocument, file: str) -> list[Fault]:
    """Returns one fault for each place; for the template, which has one of two kinds, faults of the intended kind."""
    raw = read.data or {}
    template = raw.get("template")
    meant = JobFromFile if isinstance(template, dict) and "path" in template else InlineJob
    found: dict[tuple[str | int, ...], Fault] = {}
    for details in error.errors(include_url=False):
        place, kind = details["loc"], details["type"]
        if not place:
            continue
        section: type[BaseModel] = SECTIONS.get(str(place[0]), Sweep) if len(place) > 1 else Sweep
        if place[0] == "template" and len(place) > 1:
            if place[1] != meant.__name__:
                continue
            place, section = (place[0], *place[2:]), meant
        place = _by_key(place, raw)
        message = f"{details['msg'][:1].lower()}{details['msg'][1:]}, {got(details['input'])}"
        remedy = f"write it as in {EXAMPLE_FILE}"
        if kind == "missing":
            message = "is missing"
        elif kind == "reference":
            message, remedy = details["msg"], details["ctx"]["remedy"]
        elif kind == "extra_forbidden":
            message, remedy = "is an unknown key", closest(str(place[-1]), section.model_fields, what="The keys are")
        found.setdefault(place, Fault(place_text(place), read.line(place), message, remedy, file))
    return list(found.values())


def _by_key(place: tuple[str | int, ...], raw: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Returns a place in the space by the parameter's key instead of its index, if the file has a mapping there."""
    name = "over" if "over" in raw else "space"
    space = raw.get(name)
    if place[0] != "space" or not isinstance(space, dict):
        return place
    if len(place) == 1:
        return (name,)
    assert isinstance(place[1], int), "the form has a list there"
    key = list(space)[place[1]]
    return (name, key) if isinstance(space[key], list) or len(place) == 2 else (name, key, *place[2:])


def _placed(fault: Fault, *, read: document.YamlDocument, file: str) -> Fault:
    """Returns a fault of the form with its line in the file, if it has one."""
    if fault.file:  # a fault in the batch file of the template
        return fault
    raw = read.data or {}
    name = "over" if "over" in raw else "space"
    place: tuple[str | int, ...] = (fault.place,)
    space = raw.get(name) if isinstance(raw.get(name), dict) else {}
    keys = [key for key in space or {} if fault.place.startswith(f"space.{key}")]
    if keys:
        key = max(keys, key=len)
        rest = fault.place.removeprefix(f"space.{key}").lstrip(".")
        is_plain = space is not None and isinstance(space[key], list)
        place = (name, key, *([] if is_plain or not rest else [rest.partition("[")[0]]))
        text = f"{name}.{key}" + (rest.removeprefix("values") if is_plain else f".{rest}" if rest else "")
        return replace(fault, place=text, line=read.line(place), file=file)
    place = tuple(fault.place.split("."))
    return replace(fault, line=read.line(place) if place[0] in raw else None, file=file)


def _template(choice: JobFromFile | InlineJob) -> tuple[dict[str, Any], Path]:
    """Returns the job that is varied, as plain values, and the folder of its relative paths."""
    if isinstance(choice, InlineJob):
        return choice.job, Path(choice.folder)
    if not is_file(Path(), str(located(choice.path))):
        fault = f"there is no file {choice.path!r}"
        raise BatchFileError([Fault("template.path", None, fault, f"name a batch file, such as in {EXAMPLE_FILE}")])
    path = beside(Path(), str(located(choice.path)))
    batch = load_batch(path)
    raw = document.read(batch.text).data
    assert raw is not None, "a batch that was loaded"
    jobs = [*raw.get("jobs", []), *(entry["template"] for entry in raw.get("grid", []))]
    named = {job["name"]: job for job in jobs}
    found = jobs[0] if not choice.job and len(jobs) == 1 else named.get(choice.job)
    if found is not None:
        # The data sets of that batch file, which trials are not part of.
        datasets = NamedData(raw.get("datasets"), folder=batch.folder)
        return datasets.with_files(found, origin=lambda place: place), batch.folder
    problem = f"names no job of {path.name}" if not choice.job else f"{choice.job!r} is no job of {path.name}"
    remedy = closest(choice.job, named, what="Use one of")
    raise BatchFileError([Fault("template.job", None, problem, remedy)])
