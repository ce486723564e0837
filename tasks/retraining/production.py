"""Production models, loaded from a YAML file with all faults reported at once, and from tags in the registry.

The schema of the file comes first. The models' jobs are validated by the rules of a batch; faults are at places of the
file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, ValidationError, create_model
from pydantic.functional_validators import AfterValidator

from ringmaster.codec import digest, to_json
from ringmaster.errors import BatchFileError
from ringmaster.files import is_file
from ringmaster.findings import Finding, Location, as_list, as_mapping, findings_where
from ringmaster.tasks.batch import Batch, document, parse_batch
from ringmaster.tasks.batch.document import FileKind, parsed_place, place_text
from ringmaster.tasks.batch.file_hooks import file_hooks
from ringmaster.tasks.batch.grid import combinations, num_jobs, too_many
from ringmaster.tasks.batch.references import Distinct, Name, Objective, Positive, wrong
from ringmaster.tasks.batch.sections import Section, keys_of
from ringmaster.tasks.batch.yaml_sections import file_error, read_document
from ringmaster.tasks.batch.yaml_sections import findings as section_findings
from ringmaster.tasks.cluster import Devices
from ringmaster.tasks.planning.objectives import Makespan
from ringmaster.tasks.retraining.due_keys import due_keys
from ringmaster.tasks.retraining.policy import Amount, PromotionPolicy, load_named, load_policy
from ringmaster.tasks.retraining.report import address_of
from ringmaster.tasks.retraining.selection import DueEntry, NumDays
from ringmaster.techniques import Job
from ringmaster.techniques.job_features import feature_kinds, file_keys, is_name


def _hour(value: str) -> str:
    if not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", value):
        raise wrong(f"{value!r} is not a time of day", 'write it in quotes, from "00:00" to "23:59"')
    return value


def _zone(value: str) -> str:
    try:
        ZoneInfo(value)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # zones are files; not every text is a valid file name
        raise wrong(f"{value!r} is not a time zone", "write UTC, or a name such as Europe/Berlin") from None
    return value


def _webhook(value: str) -> str:
    if not value.startswith("$"):  # a variable is resolved when the run sends its report
        try:
            address_of(value)
        except ValueError as error:
            raise wrong(str(error), "write https://..., or $NAME for the variable that has it") from None
    return value


Hour = Annotated[str, AfterValidator(_hour)]


class ModelEntry(Section):
    """One production model."""

    name: Name = Field(description="a name of letters, digits, '-', '_' and '.', such as digits")
    job: dict[str, Any] = Field(description="a job as in a batch file, without name, data and base")
    data: dict[str, Any] = Field(description="the data as in a batch file, such as {path: 'data/*.jsonl', seq_len: 64}")
    compare_on: dict[str, Any] | None = Field(
        default=None, description="data whose held-out part the champion and the challenger are compared on"
    )
    warm_start: bool = Field(default=True, description="false to train from fresh weights every time, else true")
    min_gain: Amount = Field(
        default=0.0, description="by how much a challenger must be better, in its first metric, such as 0.01"
    )
    due: DueEntry = Field(default=DueEntry(), description="what makes it due, such as {max_age_days: 30}")
    window_days: NumDays | None = Field(
        default=None,
        description="of files with a date in their name, those of the days that end with the run's, such as 14",
    )
    sweep: dict[str, Annotated[list[Any], Field(min_length=1), Distinct]] = Field(
        default={},
        description="values to try in addition to its own, by dotted keys, such as {optimizer.lr: [1e-3]}",
    )
    priority: int = Field(default=0, description="a whole number: where time is short, higher ones are trained first")


class RetrainingEntry(Section):
    """The schedule of retraining runs, in local times, and their limits.

    The date on which a run starts identifies it. It ends at the first deadline after its start. A moment between a
    run's deadline and the next start still belongs to that run, but is too late for training.
    """

    starts: Hour = Field(default="00:00", description='the local time at which a run starts, such as "02:00"')
    deadline: Hour | None = Field(
        default=None, description='the local time by which all is trained, such as "06:00", or leave it out'
    )
    timezone: Annotated[str, AfterValidator(_zone)] = Field(
        default="UTC", description="a time zone, such as Europe/Berlin"
    )
    budget: Positive | None = Field(default=None, description="the most that a run may cost, such as 12.5")
    price_per_device_hour: Positive = Field(
        default=1.0, description="what an hour of one device costs, such as 2.5; at 1 the budget is in device-hours"
    )
    webhook: Annotated[str, AfterValidator(_webhook)] | None = Field(
        default=None, description="the address that reports are posted to, https://... or $VARIABLE"
    )

    def run_date_of(self, now_s: float) -> str:
        """Returns the date of the run that started last, in ISO format such as "2026-11-20"."""
        local = datetime.fromtimestamp(now_s, UTC).astimezone(ZoneInfo(self.timezone))
        day = local.date()
        return (day if local.time() >= time.fromisoformat(self.starts) else day - timedelta(days=1)).isoformat()

    def deadline_of(self, run_date: str) -> float | None:
        """Returns the deadline of a run in seconds since the epoch, or None if there is no deadline."""
        if self.deadline is None:
            return None
        zone, day = ZoneInfo(self.timezone), date.fromisoformat(run_date)
        start = datetime.combine(day, time.fromisoformat(self.starts), zone)
        end = datetime.combine(day, time.fromisoformat(self.deadline), zone)
        if end <= start:
            end = datetime.combine(day + timedelta(days=1), time.fromisoformat(self.deadline), zone)
        return end.timestamp()

    def next_date(self, now_s: float) -> str:
        """Returns the date of the run that starts next."""
        return (date.fromisoformat(self.run_date_of(now_s)) + timedelta(days=1)).isoformat()

    def next_in_time(self, now_s: float) -> str:
        """Returns the date of the first run whose deadline has not passed."""
        deadline_s = self.deadline_of(self.run_date_of(now_s))
        is_late = deadline_s is not None and deadline_s <= now_s
        return self.next_date(now_s) if is_late else self.run_date_of(now_s)


class ProductionEntry(Section):
    """A whole file of production models."""

    name: Name = Field(description="a name that the registered models' names start with, such as production")
    devices: Any = Field(default="auto", description="auto, {cpu: 2}, {gpu: 2} or {gpu: all}")
    policy: str | None = Field(
        default=None, description="a file that defines when a challenger is promoted, such as policy.yaml"
    )
    shrink: bool = Field(
        default=False, description="true to train smaller models from one that breaks a limit of the policy, else false"
    )
    datasets: Any = Field(
        default=None, description="data sets by name, or a file with them, as in a batch file (docs/datasets.md)"
    )
    night: RetrainingEntry = Field(
        default=RetrainingEntry(), description='the schedule of runs, such as {deadline: "06:00"}'
    )
    objective: Objective | None = Field(
        default=None, description="what plans minimise, as in a batch file; default: cost with a budget, else makespan"
    )
    registry: bool = Field(
        default=False, description="true for the registered models that have the tag ringmaster.retraining, too"
    )
    models: list[ModelEntry] = Field(default=[], description="a list of models")


BATCH_KEYS = [kind for kind in file_keys("BATCH_KEYS") if not kind.names_jobs]
"""The keys of optional features for the batch of a run."""

if not TYPE_CHECKING:
    entry = ProductionEntry
    ProductionEntry = create_model("ProductionEntry", __base__=entry, __doc__=entry.__doc__, **keys_of(BATCH_KEYS))


def findings(entry: ProductionEntry, *, folder: Path) -> Iterator[Finding]:
    """Yields the faults that remain although each value is of its type. folder: the folder of the file."""
    if not entry.models and not entry.registry:
        yield Finding(("models",), "is empty", "give a list of models, or `registry: true` for tagged ones")
    for i, model in enumerate(entry.models):
        due, at = model.due, ("models", i, "due")
        suite = None if due.assertions is None else due.assertions.suite
        yield from findings_where(
            (
                due.min_new_samples and model.window_days is not None,
                (*at, "min_new_samples"),
                "counts how data grows, and in a window it does not",
                "take one of the two, or max_age_days",
            ),
            (
                due.drift is not None and due.drift.psi is None and due.drift.ks is None,
                (*at, "drift"),
                "has no measure",
                "give psi, such as 0.2, or ks, such as 0.001",
            ),
            (
                suite is not None and not is_file(folder, suite),
                (*at, "assertions", "suite"),
                f"there is no file {suite!r}",
                "name a file with assertions, relative to this one",
            ),
        )
        for kind in due_keys():
            yield from kind.findings(model.model_dump(), at=("models", i))


@dataclass(frozen=True, kw_only=True)
class ProductionModel:
    """A model that is retrained on new data.

    registered_name: the permanent name in the model registry.
    job: how the model is trained, with its data and without a base.
    compare_on: the same job on the data for comparing champion and challenger, if that is not the job's own. All of its
        rows are compared on, unless it has a held-out part of its own (`compares_on_all`).
    variants: the job under the other values of its sweep.
    inputs: a job on recent data, for drift.
    rules: what makes the model due.
    folder: the folder of the file, with the files that `rules` names.
    window_days: the number of days of dated files to read.
    priority: models of higher priority are trained first if not all fit in the run.
    """

    registered_name: str
    job: Job
    compare_on: Job | None = None
    warm_start: bool = True
    min_gain: float = 0.0
    variants: tuple[Job, ...] = ()
    inputs: Job | None = None
    rules: DueEntry = field(default_factory=DueEntry)
    folder: Path = Path()
    window_days: int | None = None
    priority: int = 0

    @property
    def name(self) -> str:
        """The model's name in its file."""
        return self.job.name

    @property
    def trained_jobs(self) -> tuple[Job, ...]:
        """The model's job, and those of its sweep."""
        return (self.job, *self.variants)

    @property
    def metric(self) -> str:
        """The metric by which versions are compared: the first one of the model's evaluation."""
        return self.job.evaluation.metrics[0]

    @property
    def compares_on_all(self) -> bool:
        """Whether all rows of `compare_on` are compared on, rather than the part that it names as held out."""
        if self.compare_on is None:
            return False
        data = self.compare_on.data
        return data.held_out_path is None and data.held_out_split is None and data.factory is None

    @property
    def jobs(self) -> list[Job]:
        """All jobs that need data: the model's own, the one for comparisons, and the one for observed inputs."""
        return [job for job in (self.job, self.compare_on, self.inputs) if job is not None]

    def with_jobs(self, own: Callable[[Job], Job], *, others: Callable[[Job], Job]) -> ProductionModel:
        """Returns the model with changed jobs. own: changes those that are trained; others: those on other data."""
        compare_on, inputs = (None if job is None else others(job) for job in (self.compare_on, self.inputs))
        return replace(
            self,
            job=own(self.job),
            variants=tuple(map(own, self.variants)),
            compare_on=compare_on,
            inputs=inputs,
        )


@dataclass(frozen=True, kw_only=True)
class Production:
    """The models of a file.

    entry: the values of the file, of which those of `night` limit a retraining run.
    models: those of the file, and tagged ones of the registry.
    folder: the folder of the file, absolute; relative paths and factories are resolved there.
    file: the path of the file, absolute.
    digest: of the content of the file, with the absolute paths of its data.
    policy: the promotion policy; None means the plain rule that promotes what is better by `min_gain`.
    broken: the faults of entries of the file and of tags that no model can be made of, by model name.
    """

    entry: ProductionEntry
    models: tuple[ProductionModel, ...]
    devices: Devices
    folder: Path
    file: Path = Path()
    digest: str = ""
    policy: PromotionPolicy | None = None
    broken: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name that those of the registered models start with."""
        return self.entry.name

    @property
    def batch_keys(self) -> dict[str, Any]:
        """The values of the keys of optional features for the batch of a run."""
        return self.entry.model_dump(
            include={key for kind in BATCH_KEYS for key in kind.job_keys()}, exclude_unset=True
        )

    @property
    def objective(self) -> str:
        """What plans minimise: a run is to be cheap if it has a budget, else it is to end soon."""
        return self.entry.objective or _usual_objective(self.entry.night.budget)

    def planning(self) -> dict[str, Any]:
        """Returns the JSON forms of features of the terms of plans, with what the files that they name have now."""
        each = (hook.planning_features(self.entry, folder=self.folder) for hook in file_hooks())
        return {key: value for features in each for key, value in features.items()}

    @property
    def jobs(self) -> list[Job]:
        """All jobs that need data."""
        return [job for model in self.models for job in model.jobs]


def _usual_objective(budget: Any) -> str:
    return Makespan.name if budget is None else "cost"


def load_production(path: Path) -> Production:
    """Loads the production models of a YAML file.

    Entries with faults are recorded in `broken`, so that they affect no other model. Raises BatchFileError with all
    faults and their lines if there are others, or if all entries have faults.
    """
    read = read_document(path, what="a file of models, such as retraining.yaml", kind=FileKind.RETRAINING)
    production, wrong = (None, []) if read.data is None else _of_sound_entries(read.data, folder=path.parent)

    def error_of(findings: Iterable[Finding]) -> BatchFileError:
        first = {place_text(finding.place): finding for finding in reversed(list(findings))}  # one for each place
        return file_error(reversed(first.values()), read, file=path.name)

    if production is None or read.findings:
        raise error_of([*read.findings, *wrong])
    known = {model.name: "" for model in production.models}
    broken: dict[str, str] = {}
    for i, entry in enumerate(as_list((read.data or {}).get("models"))):
        if findings := [finding for finding in wrong if _entry_of(finding) == i]:
            name = _at(entry, ("name",))
            name = name if is_name(name) and name not in known | broken else f"models[{i}]"
            broken[name] = "; ".join(map(str, error_of(findings).faults))
    jobs = [to_json(job) for model in production.models for job in (*model.jobs, *model.variants)]
    content = digest([production.entry.model_dump(mode="json"), jobs])
    return replace(production, file=path.absolute(), digest=content, broken=broken)


def _of_sound_entries(raw: Mapping[str, Any], *, folder: Path) -> tuple[Production | None, list[Finding]]:
    """Returns the models of the entries of a file that have no fault, and all faults of the file.

    Returns None in place of the models if there are faults elsewhere in the file, or no entry is left.
    """
    left, result = list(enumerate(as_list(raw.get("models")))), list[Finding]()
    while True:
        models = [entry for _, entry in left] if isinstance(raw.get("models"), list) else raw.get("models")
        production, wrong = _production({**raw, "models": models} if "models" in raw else raw, folder=folder)
        for finding in wrong:
            i = _entry_of(finding)
            place = finding.place if i is None else ("models", left[i][0], *finding.place[2:])
            result.append(replace(finding, place=place))
        faulty = {_entry_of(finding) for finding in wrong}
        is_last = len(faulty) == len(left) and raw.get("registry") is not True
        if production is not None or None in faulty or is_last:
            return production, result
        # Rules that compare values are applied only where each value is of its type: there may be more faults.
        left = [each for number, each in enumerate(left) if number not in faulty]


def _entry_of(finding: Finding) -> int | None:
    """Returns the position of the entry of `models` in which a fault is; None for other faults."""
    match finding.place:
        case ("models", int() as i, *_):
            return i
    return None


def with_tagged(production: Production, tags: Mapping[str, str]) -> Production:
    """Returns `production` with the models that the registry's tags describe. tags: texts by registered name.

    A text is YAML in the form of an entry of `models` without its name. The name is the part of the registered name
    after `NAME.`; models with another prefix do not belong to this file. The file takes precedence for a model that it
    names. A fault in a tag is recorded in `broken`, so that it affects no other model.
    """
    models, broken = list(production.models), dict(production.broken)
    known = {model.registered_name for model in models} | {f"{production.name}.{name}" for name in broken}
    for registered_name, text in sorted(tags.items()):
        prefix, _, name = registered_name.partition(".")
        if prefix != production.name or not name or registered_name in known:
            continue
        read = document.read(text)
        result = list(read.findings)
        if read.data is not None:
            raw = {"name": production.name, "devices": production.devices, "models": [{**read.data, "name": name}]}
            raw |= {} if production.entry.datasets is None else {"datasets": production.entry.datasets}
            made, wrong = _production(raw, folder=production.folder)
            result += wrong
            models += made.models if made is not None and not result else ()
        if result:
            lines = [f"{place_text(f.place[2:]) or 'it'} {f.message}. To fix: {f.remedy}" for f in result]
            broken[name] = "its tag ringmaster.retraining is wrong: " + "; ".join(lines)
    return replace(production, models=tuple(models), broken=broken)


def with_tokenizer_of(folder: Path | None, model: ProductionModel) -> ProductionModel:
    """Returns the model with its text data set to use the tokenizer in `folder` (a champion's files), if that has one.

    Weights depend on the tokens that they were trained with. The inputs of a champion, and of any model that is
    compared with it or starts from it, must therefore be tokenised in the same way. A tokenizer named in the file takes
    precedence.
    """
    if folder is None or not (folder / "tokenizer.json").is_file():
        return model

    def read_with(job: Job) -> Job:
        if job.data.tokenizer is not None or job.data.factory is not None:
            return job
        return replace(job, data=replace(job.data, tokenizer=str(folder)))

    return model.with_jobs(read_with, others=read_with)


def _production(raw: Mapping[str, Any], *, folder: Path) -> tuple[Production | None, list[Finding]]:
    """Returns a file's plain values as production models (None if there are faults), and all faults."""
    result = list(misplaced(raw))
    entry = None
    try:
        entry = ProductionEntry.model_validate(raw, context={"folder": folder.resolve()})
        result += findings(entry, folder=folder)
    except ValidationError as error:
        result += section_findings(error, root=ProductionEntry)
    batch, variants, wrong = jobs_of(raw, folder=folder)
    result += wrong
    policy = None
    if isinstance(name := raw.get("policy"), str):
        remedy = "name a policy file, relative to this one"
        policy, wrong = load_named(load_policy, folder, name, at=("policy",), remedy=remedy)
        result += wrong
    if entry is not None and entry.shrink and not (policy.limits if policy else entry.policy):
        result.append(Finding(("shrink",), "has no limit to keep", "name a policy with limits, or leave shrink out"))
    if entry is None or result:
        return None, result
    jobs = {} if batch is None else {job.name: job for job in batch.jobs}
    return Production(
        entry=entry,
        models=tuple(_model(entry.name, m, jobs, variants.get(m.name, ()), folder=folder) for m in entry.models),
        devices=entry.devices if batch is None else batch.devices,
        folder=folder.resolve(),
        policy=policy,
    ), []


def _model(
    prefix: str, entry: ModelEntry, jobs: Mapping[str, Job], variants: Iterable[str], *, folder: Path
) -> ProductionModel:
    own = jobs[entry.name]
    return ProductionModel(
        registered_name=f"{prefix}.{entry.name}",
        job=own,
        compare_on=_other_data(jobs.get(f"{entry.name}.compare_on"), own),
        warm_start=entry.warm_start,
        min_gain=entry.min_gain,
        variants=tuple(jobs[name] for name in variants if replace(jobs[name], name=own.name) != own),
        inputs=jobs.get(f"{entry.name}.inputs"),
        rules=entry.due,
        folder=folder,
        window_days=entry.window_days,
        priority=entry.priority,
    )


def _other_data(compare_on: Job | None, own: Job) -> Job | None:
    """Returns the job on the data to compare on; None if that is the model's own data, of which the rest is trained on.

    Then versions are compared on the held-out part of the model's own data.
    """
    if compare_on is None or replace(compare_on.data, held_out=own.data.held_out) == own.data:
        return None
    return compare_on


PLANNED = "leave it out: the models of a run are planned by its deadline and budget"
ELSEWHERE = {
    "name": "write it next to job: it names the registered model",
    "data": "write it next to job",
    "base": "leave it out: a model starts from its champion where there is one, unless warm_start is false",
    "deadline_s": "write deadline at the top of the file: it holds for all models of a run",
    "weight": PLANNED,
    "user": PLANNED,
    **{key: PLANNED for key, kind in feature_kinds().items() if kind.objective},
}
"""The keys that a model's `job` must not have."""

INPUTS, COMPARE_ON = ".inputs", ".compare_on"
DATA: Mapping[str, Location] = {
    "": ("data",),
    COMPARE_ON: ("compare_on",),
    INPUTS: ("due", "drift", "inputs"),
}
"""The suffix of a job's name and the place of its data, for each job of a model."""
HAS_ROWS, HELD_OUT = ("path", "dataset"), ("held_out", "held_out_path", "held_out_split")
"""The keys of data with rows of its own, and of data that names its held-out part."""
MAX_VARIANTS = 64  # of one model: a sweep around its values, not a search


def misplaced(raw: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields a fault for each key of a job that belongs elsewhere in such a file."""
    for i, model in enumerate(as_list(raw.get("models"))):
        job = model.get("job") if isinstance(model, Mapping) else None
        for key in ELSEWHERE.keys() & (job.keys() if isinstance(job, Mapping) else ()):
            yield Finding(("models", i, "job", key), "is not allowed in the job", ELSEWHERE[key])


def jobs_of(raw: Mapping[str, Any], *, folder: Path) -> tuple[Batch | None, dict[str, list[str]], list[Finding]]:
    """Returns all jobs of the file as one batch, the names of the sweep's jobs by model, and all faults."""
    jobs: list[dict[str, Any]] = []
    origins: list[tuple[int, Location]] = []  # for each job: its model's position, and the place of its data or values
    variants: dict[str, list[str]] = {}
    result: list[Finding] = []
    models = as_list(raw.get("models"))
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
            result += wrong
            variants[name] = [variant["name"] for variant in raws]
            jobs += raws
            origins += [(i, ("sweep",))] * len(raws)
    of_features = (key for kind in BATCH_KEYS for key in kind.job_keys())
    fields = {key: raw[key] for key in ("name", "devices", "datasets", "objective", *of_features) if key in raw}
    night = as_mapping(raw.get("night"))
    fields |= {key: night[key] for key in ("price_per_device_hour",) if key in night}
    fields.setdefault("objective", _usual_objective(night.get("budget")))
    if not jobs:  # all models are those of the registry
        of_files = (finding for hook in file_hooks() for finding in hook.file_findings(fields, folder=folder))
        return None, {}, [*result, *(replace(each, place=_place_of_batch(each.place)) for each in of_files)]
    try:
        return parse_batch(json.dumps({**fields, "jobs": jobs}), folder=folder, name="jobs"), variants, result
    except BatchFileError as error:
        result += [Finding(_place(fault.place, origins), fault.message, fault.remedy) for fault in error.faults]
        return None, variants, result


def _swept(template: dict[str, Any], over: Mapping[str, Any], *, at: Location) -> tuple[list[Any], list[Finding]]:
    """Returns the job under every combination of values; none if a value is not a list, which is reported elsewhere."""
    if not all(isinstance(values, list) and values for values in over.values()):
        return [], []
    if (num := num_jobs(over)) > MAX_VARIANTS:
        text = f"makes {num} jobs, and {MAX_VARIANTS} are the most"
        return [], [Finding((*at, "sweep"), text, "try fewer values, or search with `ringmaster sweep`")]
    made, wrong = combinations({"template": template, "over": dict(over)}, at=())
    result = [Finding((*at, "sweep", *finding.place[1:]), finding.message, finding.remedy) for finding in wrong]
    return [combination.raw for combination in made], result


def _place(text: str, origins: list[tuple[int, Location]]) -> Location:
    """Converts a place of the batch, such as jobs[1].optimizer.lr, to a place in the file."""
    place = parsed_place(text)
    if len(place) < 2 or place[0] != "jobs" or not isinstance(place[1], int):
        return _place_of_batch(place)
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


def _place_of_batch(place: Location) -> Location:
    """Returns the place in the file of a key of the batch."""
    return ("night", *place) if place[:1] == ("price_per_device_hour",) else place


def _at(model: Mapping[str, Any], place: Location) -> Any:
    value: Any = model
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
