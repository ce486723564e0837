"""The kinds of data of a batch's jobs, where their files leave them open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ringmaster.codec import digest
from ringmaster.techniques.data.inference import (
    encodes_text,
    has_negatives,
    has_tokenizer,
    infer_kind,
    with_processor_of,
)
from ringmaster.techniques.job import DataSpec, Job, ModelSpec
from ringmaster.techniques.losses.contrastive import Contrastive


def with_kinds(jobs: Sequence[Job]) -> list[Job]:
    """Returns the jobs with what their files and their model leave no doubt about: the kind of data, the
    tokenizer or the image processor, and whether a contrastive loss has hard negatives.

    Files are read once for each distinct pair of data and model. What cannot be read is reported by the preflight.
    """
    known: dict[str, str | None] = {}
    found = []
    for job in jobs:
        key = digest([job.data, job.model.architecture, job.model.from_pretrained, job.model.config])
        if key not in known:
            known[key] = _kind(job.data, job.model)
        data = replace(job.data, kind=known[key] or job.data.kind)
        data = replace(data, tokenizer=data.tokenizer or _tokenizer(data, job.model))
        job = replace(job, data=with_processor_of(data, job.model.from_pretrained))
        found.append(_with_hard_negatives(job))
    return found


def _with_hard_negatives(job: Job) -> Job:
    """The job, whose loss learns from hard negatives where its data has some, unless it says whether to."""
    if job.loss != Contrastive.name or "hard_negatives" in job.loss_options:
        return job
    try:
        has_some = has_negatives(job.data)
    except ValueError:  # as below
        return job
    return replace(job, loss_options={**job.loss_options, "hard_negatives": True}) if has_some else job


def _tokenizer(spec: DataSpec, model: ModelSpec) -> str | None:
    """The tokenizer of a pretrained model, where text is encoded for it: a new one would give tokens other numbers."""
    if model.from_pretrained is None or not encodes_text(spec):
        return None
    folder = Path(model.from_pretrained)
    return model.from_pretrained if not folder.is_dir() or has_tokenizer(folder) else None


def _kind(spec: DataSpec, model: ModelSpec) -> str | None:
    try:
        return infer_kind(spec, model)
    except ValueError:  # the preflight reads the files again, and reports it
        return None
