"""A batch of jobs that are planned together, read from a file or built in Python under the same rules."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from ringmaster.codec import digest, from_json, to_json
from ringmaster.errors import BatchFileError
from ringmaster.feature_check import feature_findings
from ringmaster.findings import Finding, Location, as_list, findings_where, got
from ringmaster.tasks.batch import document, grid, rules, yaml_sections
from ringmaster.tasks.batch.document import Fault, place_text
from ringmaster.tasks.batch.file_hooks import PlacedJob, file_hooks, job_of
from ringmaster.tasks.batch.parent_rules import with_declared_parents
from ringmaster.tasks.batch.references import NAME_REMEDY, split_loss
from ringmaster.tasks.batch.schema import PLANNER_KEYS, PROFILING_SHARE, BatchEntry, GridEntry, JobEntry
from ringmaster.tasks.cluster import Devices
from ringmaster.tasks.planning.objectives import PlanningTerms
from ringmaster.tasks.planning.term_features import terms_features
from ringmaster.techniques.data import inference
from ringmaster.techniques.data.row_files import has_tokenizer
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_features import is_name
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.loss import loss_function
from ringmaster.techniques.models.peft_format import resolved
from ringmaster.techniques.processes.order import KEPT_CHECKPOINTS


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The jobs that are planned together, with an objective and the devices to use.

    Attributes:
        jobs: those of the file, then those of its grid; the paths in them are absolute.
        objective: what plans minimise: "makespan", the end of the last job; "weighted", the sum of weight x end over
            the jobs; "fairness", how much later than alone users are done; "cost", the cost of the devices; or another
            registered objective. Deadlines come first.
        deadlines_s: by job name, the seconds from the batch's start within which the job must end.
        weights: by job name, the weight of the job's end; 1 by default.
        users: by job name, whose job it is, for the objective "fairness" and for limits of users.
        price_per_device_hour: for the objective "cost"; at 1 the cost is in device-hours.
        profiling_share: the largest fraction of the batch's predicted time that profiling may take.
        keep_checkpoints: how many checkpoints of each job are kept.
        planning: the JSON forms of features of the terms of plans, by their keys (`TermsFeature`).
        retraining: the name of the file of models whose retraining run trains the jobs; empty for other batches.
        devices: "auto", {"cpu": n}, {"gpu": n} or {"gpu": "all"}; see `ringmaster.tasks.cluster.detect`.
        folder: the folder of the file, absolute; workers append it to their import path to find a user's factories.
        text: the text of the file, for the records.
    """

    name: str
    jobs: tuple[Job, ...]
    objective: str = "makespan"
    devices: Devices = "auto"
    folder: Path
    text: str
    deadlines_s: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)
    price_per_device_hour: float = 1.0
    profiling_share: float = PROFILING_SHARE
    keep_checkpoints: int = KEPT_CHECKPOINTS
    retraining: str = ""
    planning: Mapping[str, Any] = field(default_factory=dict)

    @property
    def terms(self) -> PlanningTerms:
        """The objective, deadlines, weights, price and further terms that the batch's plans must follow."""
        return PlanningTerms(
            objective=self.objective,
            deadlines_s=self.deadlines_s,
            weights=self.weights,
            users=self.users,
            price_per_device_hour=self.price_per_device_hour,
            features=terms_features(self.planning),
        )

    @classmethod
    def of(
        cls,
        *,
        name: str,
        jobs: Sequence[Job],
        objective: str = "makespan",
        devices: Devices = "auto",
        folder: Path | None = None,
        deadlines_s: Mapping[str, float] | None = None,
        weights: Mapping[str, float] | None = None,
        users: Mapping[str, str] | None = None,
        price_per_device_hour: float = 1.0,
        profiling_share: float = PROFILING_SHARE,
        keep_checkpoints: int = KEPT_CHECKPOINTS,
        **keys: Any,
    ) -> Self:
        """Builds a batch in Python. Relative paths and factories are resolved in `folder` or the working directory.

        keys: further keys of batch files, such as `shared_components` and `trackers`.

        Raises BatchFileError with all faults, at places such as `jobs[2].num_steps`.
        """
        folder = (folder or Path()).resolve()
        raw: dict[str, Any] = {
            "name": name,
            "objective": objective,
            "devices": devices,
            "jobs": [],
            "price_per_device_hour": price_per_device_hour,
            "profiling_share": profiling_share,
            "keep_checkpoints": keep_checkpoints,
            **keys,
        }
        planned: dict[str, Mapping[str, Any]] = {
            "deadline_s": deadlines_s or {},
            "weight": weights or {},
            "user": users or {},
        }
        unknown = [
            Finding((key,), f"names {other!r}, which is not a job of this batch", "use the names of its jobs")
            for key, values in planned.items()
            for other in sorted(set(values) - {job.name for job in jobs})
        ]
        findings = []
        for i, job in enumerate(jobs):
            try:
                values = {key: values[job.name] for key, values in planned.items() if job.name in values}
                raw["jobs"].append(entry_of(job) | values)
            except ValueError as error:
                raw["jobs"].append({"name": job.name})
                findings.append(Finding(("jobs", i), str(error), "use numbers, text, lists and mappings only"))
        if findings:
            raise BatchFileError(_faults([*unknown, *findings], lines=document.YamlDocument(), file=""))
        lines = document.YamlDocument(findings=unknown)
        batch = cls._checked(raw, folder=folder, text=json.dumps(raw, indent=2), lines=lines, file="")
        data: dict[str, dict[str, Any]] = {job.name: job.data.originals() for job in jobs}
        copied = (replace(job, data=replace(job.data, **data.get(job.name, {}))) for job in batch.jobs)
        return replace(batch, jobs=tuple(copied))

    @classmethod
    def _checked(
        cls, raw: Mapping[str, Any], *, folder: Path, text: str, lines: document.YamlDocument, file: str
    ) -> Self:
        entry, planned, findings = _check(raw, folder=folder)
        of_features = [Fault("", None, each.message, each.remedy) for each in feature_findings()]
        if faults := [*of_features, *_faults([*lines.findings, *findings], lines=lines, file=file)]:
            raise BatchFileError(faults)
        assert entry is not None, "values without a fault are a batch"
        parts = {job.name: _parts(job) for job in planned}
        jobs: Sequence[Job] = with_declared_parents(with_kinds(list(chain.from_iterable(parts.values()))))
        made_for: dict[str, str] = {}
        planning: dict[str, Any] = {}
        for hook in file_hooks():
            jobs = hook.completed(jobs, entry)
            made_for |= hook.made_for(entry)
            planning |= hook.planning_features(entry, folder=folder)
        users = {part.name: job.user for job in planned if job.user is not None for part in parts[job.name]}
        made_for |= {search.name: job.name for job in jobs for search in job.searches()}
        return cls(
            name=entry.name,
            jobs=with_searches(jobs),
            objective=entry.objective,
            devices=entry.devices,
            folder=folder,
            text=text,
            deadlines_s={job.name: job.deadline_s for job in planned if job.deadline_s is not None},
            weights={job.name: job.weight for job in planned if "weight" in job.model_fields_set},
            users=users | {made: users[name] for made, name in made_for.items() if name in users},
            price_per_device_hour=entry.price_per_device_hour,
            profiling_share=entry.profiling_share,
            keep_checkpoints=entry.keep_checkpoints,
            planning=planning,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the batch as plain values, which `from_json` reads.

        Keys that release 0.1 did not have appear only with values other than the default. A batch that 0.1 began then
        has the same digest, and can be resumed.
        """
        later = {"users": {}, "profiling_share": PROFILING_SHARE, "keep_checkpoints": KEPT_CHECKPOINTS}
        later |= {"retraining": "", "planning": {}}
        plain = {**vars(self), "folder": str(self.folder)}
        return {key: to_json(value) for key, value in plain.items() if key not in later or value != later[key]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Returns the batch whose `to_json` is `data`, without checking its references again.

        Raises BatchFileError if a name could not be one of a folder.
        """
        jobs = tuple(from_json(Job, job) for job in data["jobs"])
        names = {"name": data["name"], **{f"jobs[{i}].name": job.name for i, job in enumerate(jobs)}}
        if wrong := {place: name for place, name in names.items() if not is_name(name)}:
            faults = (Fault(at, None, f"is not a name, {got(name)}", NAME_REMEDY) for at, name in wrong.items())
            raise BatchFileError(faults)
        return cls(**{**data, "jobs": jobs, "folder": Path(data["folder"])})


def load_batch(path: Path, *, data: Path | None = None) -> Batch:
    """Loads a batch from a YAML or JSON file. Raises BatchFileError with all faults.

    data: the rows of the one job that the whole file describes, such as a Ludwig configuration.
    """
    text = yaml_sections.read_text(path, what="a batch file, such as batch.yaml")
    if data is not None:
        return _batch_of_one(text, path, data=data)
    return parse_batch(text, folder=path.parent, name=path.name)


def _batch_of_one(text: str, path: Path, *, data: Path) -> Batch:
    """The batch of the one job that a whole file describes."""
    key = next(hook.file_key for hook in file_hooks() if hook.file_key)
    read, place = document.read(text), ("jobs", 0, key)
    name = path.stem if is_name(path.stem) else key
    raw = {"name": name, "jobs": [{"name": name, key: read.data, "data": {"path": str(data.absolute())}}]}
    lines = document.YamlDocument(
        lines={(*place, *inside): line for inside, line in read.lines.items()},
        findings=[replace(each, place=(*place, *each.place)) for each in read.findings],
    )
    return Batch._checked(raw, folder=path.parent.resolve(), text=json.dumps(raw), lines=lines, file=path.name)


def parse_batch(text: str, *, folder: Path, name: str) -> Batch:
    """Parses the text of a batch file. Raises BatchFileError with all faults.

    folder: the folder in which relative paths and factories are resolved. name: the file's name in messages.
    """
    read = document.read(text, kind=document.FileKind.BATCH)
    if read.data is None:
        raise BatchFileError(_faults(read.findings, lines=read, file=name))
    stem = Path(name).stem
    raw = {"name": stem if is_name(stem) else "batch", **read.data}
    return Batch._checked(raw, folder=folder.resolve(), text=text, lines=read, file=name)


def _check(raw: Mapping[str, Any], *, folder: Path) -> tuple[BatchEntry | None, list[JobEntry], list[Finding]]:
    """Validates a batch's plain values. Returns the batch (None if it does not match the schema), jobs and faults."""
    from ringmaster.tasks.datasets.checking import NamedData  # imported here because naming imports this package

    context = {"folder": folder}
    jobs: list[JobEntry] = []
    entry = None
    datasets = NamedData(raw.get("datasets"), folder=folder)
    findings = datasets.findings
    values = {key: value for key, value in raw.items() if key != "datasets"}
    if isinstance(raw.get("jobs"), list):
        raw = {**raw, "jobs": [_expanded(job, folder, findings, partial(_at, i)) for i, job in enumerate(raw["jobs"])]}
        files = [datasets.with_files(job, origin=partial(_at, i)) for i, job in enumerate(raw["jobs"])]
        values["jobs"] = [grid.in_rows(job) if isinstance(job, Mapping) else job for job in files]
    try:
        entry = BatchEntry.model_validate(values, context=context)
        jobs += entry.jobs
    except ValidationError as error:
        findings += datasets.named(yaml_sections.findings(error))
    if (fault := grid.too_many(as_list(raw.get("jobs")), as_list(raw.get("grid")))) is not None:
        return None, [], [*findings, fault]
    placed: list[PlacedJob] = [(partial(_at, i), job) for i, job in enumerate(as_list(raw.get("jobs")))]
    for combination in _combinations(as_list(raw.get("grid")), findings=findings):
        whole = _expanded(combination.raw, folder, findings, combination.origin)
        placed.append((combination.origin, whole))
        job = datasets.with_files(whole, origin=combination.origin)
        try:
            jobs.append(JobEntry.model_validate(job, context=context))
        except ValidationError as error:
            job_findings = yaml_sections.findings(error, at=("jobs", 0))
            findings += datasets.named(replace(f, place=combination.origin(f.place[2:])) for f in job_findings)
    for origin, job in placed:
        findings += [replace(finding, place=origin(finding.place)) for finding in rules.job_findings(job)]
    findings += rules.batch_findings(placed)
    findings += chain.from_iterable(hook.batch_findings(raw, placed) for hook in file_hooks())
    findings += chain.from_iterable(hook.file_findings(values, folder=folder) for hook in file_hooks())
    findings += rules.not_finite({key: value for key, value in values.items() if key not in ("jobs", "grid")}, place=())
    if not raw.get("jobs") and not raw.get("grid"):
        findings.append(Finding(("jobs",), "has no job", "give at least one job, under `jobs:` or by `grid:`"))
    if entry is not None and not findings:
        others = [name for hook in file_hooks() for name in hook.made_for(entry)]
        findings += _made_findings(jobs, [place for place, _ in placed], others=others)
    return entry, jobs, findings


def _made_findings(
    entries: Sequence[JobEntry], places: Sequence[Callable[[Location], Location]], *, others: Iterable[str]
) -> Iterator[Finding]:
    """Yields a fault for each sound entry that makes further jobs whose names are taken, or are none.

    They are jobs by which it is trained, short runs that are compared before, and variants to be profiled.

    others: names that are taken in addition to those of the entries.
    """
    taken: dict[str, JobEntry | None] = {**dict.fromkeys(others), **{entry.name: entry for entry in entries}}
    for entry, place in zip(entries, places, strict=True):
        parts = _parts(entry)
        jobs = [job for part in parts for job in (part, *part.searches(), *part.with_variants())]
        made = {job.name: job for job in jobs if job.name != entry.name}
        # The jobs of a batch made in Python may have the short runs among them.
        clashes = [n for n in made if n in taken and ((other := taken[n]) is None or _job(other) != made[n])]
        if clashes:
            message = f"makes a job {min(clashes)!r}, and another has that name"
            yield Finding(place(("name",)), message, "rename one of the two")
        if long := max(made, key=len, default=""):
            remedy = f"shorten the name: {NAME_REMEDY}"
            yield from findings_where((not is_name(long), place(("name",)), f"makes a job {long!r}", remedy))
        taken |= dict.fromkeys(made)
        if len(taken) > grid.MAX_JOBS:
            message = f"and the jobs before make a batch of {len(taken):,} jobs"
            yield Finding(place(()), message, f"keep to {grid.MAX_JOBS:,}, or divide it into several")
            return


def job_faults(values: Mapping[str, Any]) -> list[Fault]:
    """Returns the faults of the plain values of one job, at places within the job."""
    _, _, findings = _check({"name": "batch", "jobs": [values]}, folder=Path())
    inside = [replace(each, place=each.place[2:]) for each in findings]
    return _faults(inside, lines=document.YamlDocument(), file="")


def _combinations(entries: list[Any], *, findings: list[Finding]) -> Iterator[grid.Combination]:
    """Yields the jobs of the grid entries; adds the faults that prevent an expansion to `findings`."""
    for i, value in enumerate(entries):
        try:
            entry = GridEntry.model_validate(value)
        except ValidationError:
            continue  # already reported by the validation of the whole batch
        combinations, wrong = grid.combinations(entry.model_dump(), at=("grid", i))
        findings += wrong
        yield from combinations


def _at(position: int, place: Location) -> Location:
    return ("jobs", position, *place)


def _expanded(entry: Any, folder: Path, findings: list[Finding], origin: Callable[[Location], Location]) -> Any:
    """Returns the entry of a job with what features' keys stand for; adds faults to `findings`."""
    for hook in file_hooks():
        entry, faults = hook.expanded(entry, folder=folder)
        findings += [replace(fault, place=origin(fault.place)) for fault in faults]
    return entry


def _parts(entry: JobEntry) -> list[Job]:
    """Returns the jobs by which the job of an entry is trained, in order; the last one has its name."""
    jobs = [_job(entry)]
    for hook in file_hooks():
        jobs = [each for job in jobs for each in hook.divided(job, entry)]
    return jobs


def _job(entry: JobEntry) -> Job:
    job = job_of(_loss_fields(entry.model_dump(exclude_unset=True, exclude={*PLANNER_KEYS})))
    job = replace(job, adapter=job.adapter and resolved(job.adapter))
    function = loss_function(job.loss, job.loss_options)
    if "metrics" in entry.evaluation.model_fields_set or function is None or not function.default_metrics:
        return job
    return replace(job, evaluation=replace(job.evaluation, metrics=function.default_metrics))


def _loss_fields(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns a job's values with its loss as the fields `loss` and `loss_options` of `Job`."""
    if not isinstance(entry.get("loss"), Mapping):
        return entry
    name, options = split_loss(entry["loss"])
    return {**entry, "loss": name, "loss_options": options}


def entry_of(job: Job) -> dict[str, Any]:
    """Returns a job as batch files have it: its loss with the options, and its data without what only runs note."""
    entry: dict[str, Any] = to_json(job)
    for hook in file_hooks():
        entry = hook.entry_fields(entry)
    if options := entry.pop("loss_options", None):
        entry["loss"] = {"name": entry["loss"], **options}
    return entry | {"data": {key: value for key, value in entry["data"].items() if key not in job.data.originals()}}


def _faults(findings: Iterable[Finding], *, lines: document.YamlDocument, file: str) -> list[Fault]:
    """Returns one fault per place (the first found there), in the order of the file or, without a file, of the jobs."""
    first: dict[Location, Finding] = {}
    for finding in findings:
        first.setdefault(finding.place, finding)
    placed = [(finding.line or lines.line(place), place, finding) for place, finding in first.items()]
    placed.sort(key=lambda item: (item[0] or 0, *(part for part in item[1][1:2] if isinstance(part, int))))
    return [Fault(place_text(place), line, f.message, f.remedy, file) for line, place, f in placed]


def with_searches(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Returns the jobs, each after those that try learning rates for it, unless these are among them."""
    names = {job.name for job in jobs}
    return tuple(each for job in jobs for each in (*(s for s in job.searches() if s.name not in names), job))


def with_kinds(jobs: Sequence[Job]) -> list[Job]:
    """Returns the jobs with what their files and their model leave no doubt about: the kind of data, the
    tokenizer or the image processor, and what the data determines of the loss.

    Files are read once for each distinct pair of data and model. What cannot be read is reported by the preflight.
    """
    known: dict[str, str | None] = {}
    completed = []
    for job in jobs:
        key = digest([job.data, job.model.architecture, job.model.from_pretrained, job.model.config])
        if key not in known:
            known[key] = _kind(job.data, job.model)
        data = replace(job.data, kind=known[key] or job.data.kind)
        data = replace(data, tokenizer=data.tokenizer or _tokenizer(data, job.model))
        job = replace(job, data=inference.with_processor_of(data, job.model))
        completed.append(inference.with_options_of_data(job))
    return completed


def _tokenizer(spec: DataSpec, model: ModelSpec) -> str | None:
    """The tokenizer of a pretrained model, where text is encoded for it: a new one would give tokens other numbers."""
    if model.from_pretrained is None or not inference.encodes_text(spec):
        return None
    folder = Path(model.from_pretrained)
    return model.from_pretrained if not folder.is_dir() or has_tokenizer(folder) else None


def _kind(spec: DataSpec, model: ModelSpec) -> str | None:
    with suppress(ValueError):  # the preflight reads the files again, and reports it
        return inference.infer_kind(spec, model)
    return None
