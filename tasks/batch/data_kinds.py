"""The kinds of data of a batch's jobs, where their files leave them open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ringmaster.techniques.interface.job import DataSpec, Job, ModelSpec
from ringmaster.techniques.interface.values import digest
from ringmaster.techniques.runtime.data.inference import encodes_text, infer_kind


def with_kinds(jobs: Sequence[Job]) -> list[Job]:
    """Returns the jobs with what their files and their model leave no doubt about: the kind of data, and the tokenizer.

    Files are read once for each distinct pair of data and model. What cannot be read is reported by the preflight.
    """
    known: dict[str, str | None] = {}
    found = []
    for job in jobs:
        key = digest([job.data, job.model.architecture, job.model.from_pretrained, job.model.config])
        if key not in known:
            known[key] = _kind(job.data, job.model)
        kind = known[key] or job.data.kind
        tokenizer = job.data.tokenizer or _tokenizer(replace(job.data, kind=kind), job.model)
        found.append(replace(job, data=replace(job.data, kind=kind, tokenizer=tokenizer)))
    return found


def _tokenizer(spec: DataSpec, model: ModelSpec) -> str | None:
    """The tokenizer of a pretrained model, where text is encoded for it: a new one would give tokens other numbers."""
    if model.from_pretrained is None or not encodes_text(spec):
        return None
    folder = Path(model.from_pretrained)
    has_tokenizer = not folder.is_dir() or any(folder.glob("tokenizer*")) or any(folder.glob("vocab.*"))
    return model.from_pretrained if has_tokenizer else None


def _kind(spec: DataSpec, model: ModelSpec) -> str | None:
    try:
        return infer_kind(spec, model)
    except ValueError:  # the preflight reads the files again, and reports it
        return None
