"""Production models, loaded from a YAML file with all faults reported at once, and from tags in the registry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch import Fault, document
from ringmaster.tasks.batch.faults import Finding, place_text
from ringmaster.tasks.batch.wording import findings as told
from ringmaster.tasks.cluster import Devices
from ringmaster.tasks.files import is_file, text_of
from ringmaster.tasks.promotion.policy_file import Policy, load_policy
from ringmaster.tasks.retraining.dates import Hours
from ringmaster.tasks.retraining.drift import DriftRule
from ringmaster.tasks.retraining.due import DueRules
from ringmaster.tasks.retraining.production_file import ModelEntry, ProductionEntry, findings
from ringmaster.tasks.retraining.production_jobs import jobs_of, misplaced
from ringmaster.techniques import Job


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The data observed in production.

    inputs: a job on recent data, for drift.
    predictions: a log, for drift.
    suite: a file of assertions.
    asserted: the log that the assertions are checked on.
    """

    inputs: Job | None = None
    predictions: Path | None = None
    suite: Path | None = None
    asserted: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ProductionModel:
    """A model that is retrained on new data.

    registered_name: the permanent name in the model registry.
    job: how the model is trained, with its data and without a base.
    compare_on: the same job on the data for comparing champion and challenger, if that is not the job's own. All of its
        rows are compared on, unless it has a held-out part of its own (`compares_on_all`).
    variants: the job under the other values of its sweep.
    rules, watched: what makes the model due.
    window_days: the number of days of dated files to read.
    priority: models of higher priority are trained first if not all fit in the run.
    """

    registered_name: str
    job: Job
    compare_on: Job | None = None
    warm_start: bool = True
    min_gain: float = 0.0
    variants: tuple[Job, ...] = ()
    rules: DueRules = field(default_factory=DueRules)
    watched: Watched = field(default_factory=Watched)
    window_days: int | None = None
    priority: int = 0

    @property
    def name(self) -> str:
        """The model's name in its file."""
        return self.job.name

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
        return [job for job in (self.job, self.compare_on, self.watched.inputs) if job is not None]


@dataclass(frozen=True, kw_only=True)
class Production:
    """The models of a file.

    folder: the folder of the file, absolute; relative paths and factories are resolved there.
    policy: the promotion policy; None stands for the plain rule that promotes what is better by `min_gain`.
    hours, budget, price_per_device_hour: of a retraining run; the budget is in the unit of the price.
    webhook: the address that reports are posted to.
    with_registry: whether tagged models of the registry belong to it.
    datasets: the value in the file, for the tagged models.
    broken: the faults in the tags, by model name.
    """

    name: str
    models: tuple[ProductionModel, ...]
    devices: Devices
    folder: Path
    policy: Policy | None = None
    hours: Hours = field(default_factory=Hours)
    budget: float | None = None
    price_per_device_hour: float = 1.0
    webhook: str | None = None
    with_registry: bool = False
    datasets: Any = None
    broken: Mapping[str, str] = field(default_factory=dict)

    @property
    def jobs(self) -> list[Job]:
        """All jobs that need data."""
        return [job for model in self.models for job in model.jobs]


def load_production(path: Path) -> Production:
    """Loads the production models of a YAML file. Raises BatchFileError with all faults and their lines."""
    try:
        text = text_of(path)
    except (OSError, UnicodeDecodeError) as error:
        fault = Fault("", None, f"cannot be read: {error}", "name a file of models, such as retraining.yaml", str(path))
        raise BatchFileError([fault]) from error
    read = document.read(text)
    found = list(read.findings)
    made = None
    if read.data is not None:
        made, wrong = _production(read.data, folder=path.parent)
        found += wrong
    if found:
        places: dict[str, Finding] = {}
        for finding in found:
            places.setdefault(place_text(finding.place), finding)
        faults = [
            Fault(place, f.line or read.line(f.place), f.message, f.remedy, path.name) for place, f in places.items()
        ]
        raise BatchFileError(sorted(faults, key=lambda fault: fault.line or 0))
    assert made is not None, "a file without a fault has models"
    return made


def with_tagged(production: Production, tags: Mapping[str, str]) -> Production:
    """Returns `production` with the models that the registry's tags describe. tags: texts by registered name.

    A text is YAML in the form of an entry of `models` without its name. The name is the part of the registered name
    after `NAME.`; models with another prefix do not belong to this file. The file takes precedence for a model that it
    names. A fault in a tag is recorded in `broken`, so that it affects no other model.
    """
    models, broken = list(production.models), dict[str, str]()
    known = {model.registered_name for model in models}
    for registered_name, text in sorted(tags.items()):
        prefix, _, name = registered_name.partition(".")
        if prefix != production.name or not name or registered_name in known:
            continue
        read = document.read(text)
        found = list(read.findings)
        if read.data is not None:
            raw = {"name": production.name, "devices": production.devices, "models": [{**read.data, "name": name}]}
            raw |= {} if production.datasets is None else {"datasets": production.datasets}
            made, wrong = _production(raw, folder=production.folder)
            found += wrong
            models += made.models if made is not None and not found else ()
        if found:
            said = [f"{place_text(f.place[2:]) or 'it'} {f.message}. To fix: {f.remedy}" for f in found]
            broken[name] = "its tag ringmaster.retraining is wrong: " + "; ".join(said)
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

    return replace(
        model,
        job=read_with(model.job),
        variants=tuple(read_with(job) for job in model.variants),
        compare_on=None if model.compare_on is None else read_with(model.compare_on),
        watched=replace(
            model.watched, inputs=None if model.watched.inputs is None else read_with(model.watched.inputs)
        ),
    )


def _production(raw: Mapping[str, Any], *, folder: Path) -> tuple[Production | None, list[Finding]]:
    """Returns a file's plain values as production models (None if there are faults), and all faults."""
    found = list(misplaced(raw))
    entry = None
    try:
        entry = ProductionEntry.model_validate(raw, context={"folder": folder.resolve()})
        suites = [m.due.assertions.suite for m in entry.models if m.due.assertions is not None]
        found += findings(entry, there={suite: is_file(folder, suite) for suite in suites})
    except ValidationError as error:
        found += told(error, root=ProductionEntry)
    batch, variants, wrong = jobs_of(raw, folder=folder)
    found += wrong
    policy, wrong = _policy(raw.get("policy"), folder=folder)
    found += wrong
    if entry is None or found:
        return None, found
    jobs = {} if batch is None else {job.name: job for job in batch.jobs}
    night = entry.night
    return Production(
        name=entry.name,
        models=tuple(_model(entry.name, m, jobs, variants.get(m.name, ()), folder=folder) for m in entry.models),
        devices=entry.devices if batch is None else batch.devices,
        folder=folder.resolve(),
        policy=policy,
        hours=Hours(starts=night.starts, deadline=night.deadline, timezone=night.timezone),
        budget=night.budget,
        price_per_device_hour=night.price_per_device_hour,
        webhook=night.webhook,
        with_registry=entry.registry,
        datasets=entry.datasets,
    ), []


def _model(
    prefix: str, entry: ModelEntry, jobs: Mapping[str, Job], variants: Iterable[str], *, folder: Path
) -> ProductionModel:
    due, drift, asserted = entry.due, entry.due.drift, entry.due.assertions
    own = jobs[entry.name]
    return ProductionModel(
        registered_name=f"{prefix}.{entry.name}",
        job=own,
        compare_on=_other_data(jobs.get(f"{entry.name}.compare_on"), own),
        warm_start=entry.warm_start,
        min_gain=entry.min_gain,
        variants=tuple(jobs[name] for name in variants if replace(jobs[name], name=own.name) != own),
        rules=DueRules(
            new_data=due.new_data,
            min_new_samples=due.min_new_samples,
            max_age_days=due.max_age_days,
            drift=None if drift is None else DriftRule(psi=drift.psi, ks=drift.ks, min_rows=drift.min_rows),
            asserts=asserted is not None,
        ),
        watched=Watched(
            inputs=jobs.get(f"{entry.name}.inputs"),
            predictions=None if drift is None or drift.predictions is None else folder / drift.predictions,
            suite=None if asserted is None else folder / asserted.suite,
            asserted=None if asserted is None else folder / asserted.predictions,
        ),
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


def _policy(name: Any, *, folder: Path) -> tuple[Policy | None, list[Finding]]:
    """Returns the policy that a file names, and its faults."""
    if not isinstance(name, str):
        return None, []
    if not is_file(folder, name):
        return None, [Finding(("policy",), f"there is no file {name!r}", "name a policy file, relative to this one")]
    try:
        return load_policy(folder / name), []
    except BatchFileError as error:
        return None, [
            Finding(("policy",), f"{f.file}:{f.line or 1}: {f.place} {f.message}", f.remedy) for f in error.faults
        ]
