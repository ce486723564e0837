"""The kinds of data of a batch's jobs, where their files leave them open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringmaster.techniques.interface.job import DataSpec, Job, ModelSpec
from ringmaster.techniques.interface.values import digest
from ringmaster.techniques.runtime.data.inference import infer_kind


def with_kinds(jobs: Sequence[Job]) -> list[Job]:
    """Returns the jobs with the kind of data that the columns of their files and their model leave no doubt about.

    Files are read once for each distinct pair of data and model. What cannot be read is reported by the preflight.
    """
    known: dict[str, str | None] = {}
    found = []
    for job in jobs:
        key = digest([job.data, job.model.architecture, job.model.from_pretrained, job.model.config])
        if key not in known:
            known[key] = _kind(job.data, job.model)
        kind = known[key]
        found.append(job if kind is None else replace(job, data=replace(job.data, kind=kind)))
    return found


def _kind(spec: DataSpec, model: ModelSpec) -> str | None:
    try:
        return infer_kind(spec, model)
    except ValueError:  # the preflight reads the files again, and reports it
        return None
