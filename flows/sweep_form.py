"""Sweep files, and the translation of a sweep's form into its specification, with all faults at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)

from ringmaster.errors import BatchFileError, InputError
from ringmaster.files import is_file, path_in
from ringmaster.findings import Location, as_mapping, got
from ringmaster.flows.form_fields import HIDDEN, FormSection, titled
from ringmaster.flows.settings import resolve_path
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.tasks.batch import Fault, document, load_batch
from ringmaster.tasks.batch.document import FileKind, parsed_place, place_text
from ringmaster.tasks.batch.references import Metric, closest, is_folder
from ringmaster.tasks.batch.yaml_sections import read_document
from ringmaster.tasks.datasets.checking import NamedData
from ringmaster.tasks.sweeping.early_stopping import StoppingPolicy, stopping_policy
from ringmaster.tasks.sweeping.ranking import ranking_of, sections_of_rankings
from ringmaster.tasks.sweeping.results import name_fault
from ringmaster.tasks.sweeping.space import CategoricalRange, Range
from ringmaster.tasks.sweeping.space import Parameter as SpaceParameter
from ringmaster.tasks.sweeping.spec import SweepSpec
from ringmaster.tasks.sweeping.stop_rules import StopRule, stop_rules
from ringmaster.techniques import EvaluationSpec
from ringmaster.techniques.job_features import NAME_PATTERN, file_keys

SweepName = Annotated[str, titled("Name", pattern=NAME_PATTERN)]
Seed = Annotated[int, Field(ge=0, strict=True)]
Sampler = Annotated[Literal["random", "grid", "tpe"], titled("Sampler")]
NumTrials = Annotated[int, Field(ge=1, le=1000, strict=True)]
NumParallel = Annotated[int, Field(ge=1, le=1000, strict=True)]
Seconds = Annotated[float, Field(gt=0, strict=True)]

# JSON schema of a line of text, for a field that is a list in a file: Prefect's forms have no field for mixed lists.
TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}], "examples": ["1e-3, 3e-3, 1e-2"]}
CONDITION = TEXT | {"examples": ["optimizer.name: [sgd, adamw]"]}


def _or_empty(value: Any) -> Any:
    """Turns a file's null into an empty line. In a form, a nullable field is a switch between two kinds of field."""
    return "" if value is None else value


Line = Annotated[str, BeforeValidator(_or_empty)]
OtherName = Annotated[str, BeforeValidator(_or_empty), Field(pattern=rf"^$|{NAME_PATTERN}")]


class JobFromFile(FormSection, title="A job of a batch file"):
    """A job of a batch file."""

    path: str = Field(
        title="Batch file",
        description="The path of the file, absolute or relative to the folder that contains RINGMASTER_HOME.",
    )
    job: Line = Field(
        default="",
        title="Job",
        description="The name of the job or of the grid's template. It may be empty if the file has only one.",
    )


class InlineJob(FormSection, title="A job written out"):
    """A job that is written out in the form."""

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


def _condition(value: Any) -> Any:
    """Parses "optimizer.name: sgd" into a mapping, as a form's line holds text. An empty line counts as not given."""
    if not isinstance(value, str):
        return value
    read = document.read(f"{{{value}}}")
    if read.findings or read.data is None or None in read.data.values():
        raise ValueError("must be keys with their values, such as optimizer.name: [sgd, adamw]")
    return read.data or None


class Parameter(FormSection, title="Parameter"):
    """The search space of one key of the job: some values, or a range."""

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
    low: float | None = Field(default=None, strict=True, title="From", description="The smallest value of the range.")
    high: float | None = Field(default=None, strict=True, title="To", description="The largest value of the range.")
    log: bool = Field(
        default=False, title="Logarithmic", description="Draws the logarithm uniformly, as is usual for learning rates."
    )
    step: float | None = Field(
        default=None,
        gt=0,
        strict=True,
        title="Step",
        description="The distance between two values of the range. A grid needs it.",
    )
    integer: bool = Field(default=False, title="Whole numbers", description="Draws only whole numbers.")
    when: Annotated[dict[str, Any] | None, BeforeValidator(_condition), WithJsonSchema(CONDITION)] = Field(
        default=None,
        title="Only when",
        description="The values of other keys with which the job has this one. Leave it empty if it always has it.",
    )

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
        when = tuple((key, tuple(_in_list(value))) for key, value in (self.when or {}).items())
        if self.values is not None:
            return CategoricalRange(key=self.key, when=when, values=tuple(self.values))
        assert self.low is not None and self.high is not None, "its error is reported first"
        return Range(
            key=self.key,
            when=when,
            low=self.low,
            high=self.high,
            is_log=self.log,
            step=self.step,
            is_integer=self.integer,
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


class DeviceChoice(FormSection, title="Devices"):
    """The devices of this machine that a sweep may use."""

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
            raise ValueError("give the number of cpu slots, or choose auto")
        return self

    def in_batch_file(self) -> Any:
        """Returns the value of `devices` in a batch file."""
        return "auto" if self.kind == "auto" else {self.kind: self.count or "all"}


def _in_list(value: Any) -> Any:
    """Turns one value into a list, so that a file may have one or several."""
    return value if isinstance(value, list) else [value]


if TYPE_CHECKING:
    Stopping = StoppingPolicy
else:
    Stopping = stopping_policy()


def _ranking_keys() -> type[BaseModel]:
    """Returns the model of the keys by which features rank trials; each has a list of sections."""
    fields: dict[str, Any] = {
        key: (
            Annotated[list[section], BeforeValidator(_in_list)],  # type: ignore[valid-type]
            Field(default=[], title=key.capitalize(), description=(section.__doc__ or "").partition("\n")[0]),
        )
        for key, section in sections_of_rankings().items()
    }
    base = type("RankingKeys", (FormSection,), {"__doc__": "How trials are compared."}, title="Comparison of trials")
    return create_model("RankingKeys", __base__=base, **fields)


NO_RANKING = _ranking_keys()()
if TYPE_CHECKING:
    RankingKeys = Any
else:
    RankingKeys = Annotated[type(NO_RANKING), BeforeValidator(lambda value: {} if value is None else value)]


def _stop_when() -> type[BaseModel]:
    """Returns the model of the rules by which a sweep ends before all its trials have; none of them is on."""
    fields: dict[str, Any] = {
        key: (rule | None, Field(default=None, title=rule.model_config.get("title"), description=rule.__doc__))
        for key, rule in stop_rules().items()
    }
    base = type("StopWhen", (FormSection,), {"__doc__": "When the sweep ends early."}, title="End of the sweep")
    return create_model("StopWhen", __base__=base, **fields)


def _named_rule(value: Any) -> Any:
    """Also accepts the name of a rule alone. In a form, a rule that is null is off."""
    return {value: {}} if isinstance(value, str) else {} if value is None else value


NO_STOP_RULES = _stop_when()()
if TYPE_CHECKING:
    StopWhen = Any
else:
    StopWhen = Annotated[type(NO_STOP_RULES), BeforeValidator(_named_rule)]


def keys_of_features() -> set[str]:
    """Returns the keys of batch files that optional features have."""
    return {key for kind in file_keys("BATCH_KEYS") for key in kind.job_keys()}


class Sweep(FormSection):
    """A whole sweep; the docstring of `ringmaster.flows.sweep.sweep` describes each field.

    In a file, the keys of `ranking` are beside the others, and a list of objectives has the key `objective`.
    """

    name: SweepName = "sweep"
    template: JobFromFile | InlineJob
    space: Space
    sampler: Sampler = "random"
    num_trials: NumTrials | None = 8
    early_stopping: Stopping = Stopping()
    objective: Metric | None = None
    base: Line = ""
    data: dict[str, Any] | None = None
    devices: DeviceChoice = DeviceChoice()
    deadline_s: Seconds | None = None
    challenger_of: OtherName = ""
    num_parallel: NumParallel = 4
    seed: Seed = 0
    ranking: RankingKeys = None
    stop_when: StopWhen = NO_STOP_RULES
    batch_keys: Annotated[dict[str, Any], HIDDEN] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _as_one_ranking(cls, value: Any) -> Any:
        """Collects the keys of features."""
        if not isinstance(value, dict):
            return value
        value = _with_objectives(value)
        keys = sections_of_rankings()
        if not keys.keys() & value.keys():
            return {key: each for key, each in value.items() if key != "ranking" or each is not None}
        plain = {key: each for key, each in value.items() if key not in keys}
        own = {key: each for key, each in value.items() if key in keys}
        return {**plain, "ranking": {**as_mapping(value.get("ranking")), **own}}

    @model_validator(mode="before")
    @classmethod
    def _of_features(cls, value: Any) -> Any:
        """Also accepts the keys of batches that optional features have."""
        own = value.keys() & keys_of_features() if isinstance(value, dict) else ()
        if not own:
            return value
        plain = {key: each for key, each in value.items() if key not in own}
        return {**plain, "batch_keys": {key: value[key] for key in own}}

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

    def stop_rules(self) -> list[StopRule]:
        """Returns the rules that end the sweep."""
        return [rule for _, rule in self.stop_when if rule is not None]

    def ranking_sections(self) -> dict[str, list[Any]]:
        """Returns the sections of the keys of features."""
        return {} if self.ranking is None else {key: list(each) for key, each in self.ranking}


def _with_objectives(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a sweep; several objectives have a key of their own, which a feature knows."""
    is_list = isinstance(raw.get("objective"), list) and raw["objective"]
    return {OBJECTIVES if is_list and key == "objective" else key: value for key, value in raw.items()}


OBJECTIVES = "objectives"
INTERNAL = {"ranking", "batch_keys", OBJECTIVES}
"""Fields of `Sweep` that hold what a file writes under other keys."""


EXAMPLE_FILE = "examples/sweep.yaml"
SECTIONS: Mapping[str, type[BaseModel]] = {
    "early_stopping": Stopping,
    "devices": DeviceChoice,
    "space": Parameter,
    "stop_when": type(NO_STOP_RULES),
}


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
        stopping=form.early_stopping,
        ranking=ranking_of(form.objective or metric, form.ranking_sections()),
        num_trials=1 if lame else form.num_trials if form.sampler == "grid" else form.num_trials or 8,
        num_parallel=form.num_parallel,
        devices=form.devices.in_batch_file(),
        deadline_s=form.deadline_s,
        seed=form.seed,
        batch_keys=form.batch_keys,
        is_shuffled=bool(form.stop_rules()),
    )
    remedy = "give values, such as [1e-3, 1e-2], or a range by low and high"
    faults = [*(Fault(f"space.{key}", None, fault, remedy) for key, fault in lame), *spec.faults()]
    if form.base and not is_base:  # in a batch file, `base` may name one of its jobs; trials have no other jobs
        remedy = "write models:/NAME@ALIAS, models:/NAME/VERSION or a folder"
        faults.append(Fault("base", None, f"{form.base!r} is neither a registered model nor a folder", remedy))
    findings = (finding for rule in form.stop_rules() for finding in rule.findings(spec))
    faults += [Fault(place_text(each.place), None, each.message, each.remedy) for each in findings]
    if faults:
        raise BatchFileError(faults)
    return spec


def check_name(form: Sweep, ledger: Ledger) -> None:
    """Raises InputError where the best trial would challenge a registered model that the form does not name."""
    if not form.challenger_of and (fault := name_fault(ledger, form.name)):
        raise InputError([fault])


def load_sweep(path: Path) -> Sweep:
    """Reads a sweep from a YAML file; relative paths start in its folder. Raises BatchFileError with every fault."""
    read = read_document(path, what=f"a sweep's file, such as {EXAMPLE_FILE}", kind=FileKind.SWEEP)
    faults = [
        Fault(place_text(f.place), f.line or read.line(f.place), f.message, f.remedy, path.name) for f in read.findings
    ]
    if read.data is None:
        raise BatchFileError(faults)
    strange = [key for key in read.data if key in INTERNAL]
    faults += [Fault(key, read.line((key,)), "is an unknown key", "remove it", path.name) for key in strange]
    plain = {key: value for key, value in read.data.items() if key not in strange}
    raw = _from_folder(plain, folder=path.parent.resolve())
    form: Sweep | None
    try:
        form = Sweep.model_validate(raw)
    except ValidationError as error:
        faults += _faults(error, read=read, file=path.name)
        form = _what_is_right(raw, error)
    if form is not None:
        try:
            spec_of(form)
        except BatchFileError as error:
            faults += [_placed(fault, read=read, file=path.name) for fault in error.faults]
    if faults or form is None:
        raise BatchFileError(sorted(faults, key=lambda fault: fault.line or 0))
    return form


def _what_is_right(raw: Mapping[str, Any], error: ValidationError) -> Sweep | None:
    """Returns the form without its invalid parts, so that the faults of the other parts are reported as well."""
    wrong = {str(_plain_place(details["loc"])[0]) for details in error.errors() if details["loc"]}
    space = raw.get("space", raw.get("over"))
    left = {key: value for key, value in _with_objectives(raw).items() if key not in wrong}
    if "space" in wrong and isinstance(space, dict):
        bad = {place[1] for d in error.errors() if len(place := d["loc"]) > 1 and place[0] == "space"}
        left["space"] = {key: value for i, (key, value) in enumerate(space.items()) if i not in bad}
        left["num_trials"] = 1  # what is left of the space says nothing of its size
    try:
        return Sweep.model_validate(left)
    except ValidationError:
        return None


def _from_folder(raw: Mapping[str, Any], *, folder: Path) -> dict[str, Any]:
    """Returns the values of a file with absolute paths in the template, and with settings of each rule."""
    template, rules = raw.get("template"), raw.get("stop_when")
    if isinstance(rules, dict):  # `{worthless: }` names a rule without settings
        raw = {**raw, "stop_when": {key: {} if each is None else each for key, each in rules.items()}}
    if not isinstance(template, dict):
        return dict(raw)
    key, path = ("path", template.get("path")) if "path" in template else ("folder", template.get("folder", "."))
    return {**raw, "template": {**template, key: str(folder / path) if isinstance(path, str) else path}}


def _faults(error: ValidationError, *, read: document.YamlDocument, file: str) -> list[Fault]:
    """Returns one fault for each place; for the template, which has one of two kinds, faults of the intended kind."""
    raw = read.data or {}
    template = raw.get("template")
    meant = JobFromFile if isinstance(template, dict) and "path" in template else InlineJob
    result: dict[tuple[str | int, ...], Fault] = {}
    for details in error.errors(include_url=False):
        place, kind = _plain_place(details["loc"]), details["type"]
        if not place:
            continue
        sections = {**SECTIONS, **sections_of_rankings()}
        section: type[BaseModel] = sections.get(str(place[0]), Sweep) if len(place) > 1 else Sweep
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
            known = sections_of_rankings() if section is Sweep else {}
            names = {*section.model_fields, *known} - INTERNAL
            message, remedy = "is an unknown key", closest(str(place[-1]), names, what="The keys are")
        result.setdefault(place, Fault(place_text(place), read.line(place), message, remedy, file))
    return list(result.values())


def _plain_place(place: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Returns a place in a sweep without the field that collects the keys of features."""
    return place[1:] if place[:1] == ("ranking",) and len(place) > 1 else place


def _by_key(place: tuple[str | int, ...], raw: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Returns a place as a file has it: by the parameter's key instead of its index, and by the key `objective`."""
    if place[0] == OBJECTIVES:
        return ("objective", *place[1:])
    if place[1:2] == (0,) and isinstance(raw.get(str(place[0])), dict) and place[0] != "space":  # a list of one
        return (place[0], *place[2:])
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
    space = raw.get(name) if isinstance(raw.get(name), dict) else {}
    keys = [key for key in space or {} if fault.place.startswith(f"space.{key}")]
    if keys:
        key = max(keys, key=len)
        rest = fault.place.removeprefix(f"space.{key}").lstrip(".")
        is_plain = space is not None and isinstance(space[key], list)
        place: Location = (name, key, *([] if is_plain or not rest else [rest.partition("[")[0]]))
        text = f"{name}.{key}" + (rest.removeprefix("values") if is_plain else f".{rest}" if rest else "")
        return replace(fault, place=text, line=read.line(place), file=file)
    place = parsed_place(fault.place)
    of_sweep = Sweep.model_fields.keys() - {"seed", "deadline_s"} - ({"base", "data"} - raw.keys())
    of_sweep |= keys_of_features() | sections_of_rankings().keys()
    if place and place[0] not in of_sweep:  # of the job that is varied
        place = ("template", *(() if "path" in as_mapping(raw.get("template")) else ("job",)), *place)
    return replace(fault, place=place_text(place), line=read.line(place), file=file)


def _template(choice: JobFromFile | InlineJob) -> tuple[dict[str, Any], Path]:
    """Returns the job that is varied, as plain values, and the folder of its relative paths."""
    if isinstance(choice, InlineJob):
        return choice.job, Path(choice.folder)
    if not is_file(Path(), str(resolve_path(choice.path))):
        fault = f"there is no file {choice.path!r}"
        raise BatchFileError([Fault("template.path", None, fault, f"name a batch file, such as in {EXAMPLE_FILE}")])
    path = path_in(Path(), str(resolve_path(choice.path)))
    batch = load_batch(path)
    raw = document.read(batch.text).data or {}
    jobs = [*raw.get("jobs", []), *(entry["template"] for entry in raw.get("grid", []))]
    named = {job["name"]: job for job in jobs}
    result = jobs[0] if not choice.job and len(jobs) == 1 else named.get(choice.job)
    if result is not None:
        # The data sets of that batch file, which trials are not part of.
        datasets = NamedData(raw.get("datasets"), folder=batch.folder)
        return datasets.with_files(result, origin=lambda place: place), batch.folder
    problem = f"names no job of {path.name}" if not choice.job else f"{choice.job!r} is not a job of {path.name}"
    remedy = closest(choice.job, named, what="Use one of")
    raise BatchFileError([Fault("template.job", None, problem, remedy)])
