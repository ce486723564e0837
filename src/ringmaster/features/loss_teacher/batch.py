"""`teacher` of losses in batch files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic_core import PydanticCustomError

from ringmaster.features.loss_teacher.job import LossTeacher
from ringmaster.findings import Finding, Raw, as_mapping, findings_where
from ringmaster.tasks.batch import references
from ringmaster.tasks.batch.file_hooks import BatchFileHook
from ringmaster.tasks.batch.sections import Section
from ringmaster.techniques.job import Job
from ringmaster.techniques.loss import JOB, ModelName, is_named, job_named, loss_class, loss_names


class LossTeacherInFiles(BatchFileHook):
    """A loss's teacher becomes a feature of the job, which its trainer reads."""

    def expanded(self, entry: Any, *, folder: Path) -> tuple[Any, Sequence[Finding]]:
        """Returns the entry of a job with the folder of a pretrained teacher as an absolute path."""
        loss = as_mapping(as_mapping(entry).get("loss"))
        teacher = loss.get("teacher")
        if not _needs_teacher(loss.get("name")) or not ModelName().allow(teacher) or job_named(teacher) is not None:
            return entry, ()
        try:
            named = references.pretrained(teacher, SimpleNamespace(context={"folder": folder}))  # type: ignore[arg-type]
        except PydanticCustomError as fault:
            context = fault.context or {}
            return entry, [Finding(("loss", "teacher"), str(context["problem"]), str(context["remedy"]))]
        return {**entry, "loss": {**loss, "teacher": named}}, ()

    def job_findings(self, job: Raw) -> Iterator[Finding]:
        """Yields a loss without its teacher, and what does not go with one."""
        loss = job.get("loss")
        options = as_mapping(loss)
        if not _needs_teacher(options.get("name") if isinstance(loss, Mapping) else loss):
            return
        is_of_factory = as_mapping(job.get("data")).get("factory") is not None  # as where other values are changed
        yield from findings_where(
            (
                options.get("teacher") is None and not is_of_factory,
                ("loss", "teacher"),
                "is missing",
                f"give {ModelName()}",
            ),
            (
                job.get("adaptation") is not None,
                ("adaptation",),
                "does not go with a loss that has a teacher",
                "leave it out, or give another loss",
            ),
        )

    def job_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of a job with the teacher as a feature in place of an option."""
        options = as_mapping(fields.get("loss_options"))
        teacher = options.get("teacher")
        if not _needs_teacher(fields.get("loss")) or teacher is None:
            return fields
        name = job_named(teacher)
        feature = {"model": {"from_pretrained": teacher}} if name is None else {"job": name}
        left = {key: value for key, value in options.items() if key != "teacher"}
        return {**fields, "loss_options": left, LossTeacher.key: feature}

    def entry_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of a job's entry with the teacher as an option of the loss."""
        feature = as_mapping(fields.get(LossTeacher.key))
        if not feature:
            return fields
        others = {key: value for key, value in fields.items() if key != LossTeacher.key}
        name = feature.get("job")
        teacher = as_mapping(feature.get("model")).get("from_pretrained") if name is None else f"{JOB}{name}"
        return {**others, "loss_options": {**as_mapping(fields.get("loss_options")), "teacher": teacher}}

    def completed(self, jobs: Sequence[Job], batch: Section) -> Sequence[Job]:
        """Returns the jobs with the models of the jobs that are their teachers."""
        models = {job.name: job.model for job in jobs}
        return [_with_model(job, models) for job in jobs]


def _needs_teacher(name: object) -> bool:
    if not isinstance(name, str) or not is_named(name) or name not in loss_names():
        return False
    kind = loss_class(name)
    return kind is not None and kind.needs_teacher


def _with_model(job: Job, models: Mapping[str, Any]) -> Job:
    feature = job.feature(LossTeacher)
    if feature is None or feature.job is None or feature.job not in models:
        return job
    return job.with_features(replace(feature, model=models[feature.job]))


BATCH_FILE_HOOKS = (LossTeacherInFiles(),)
