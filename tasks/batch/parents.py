"""Checks of the model folders that jobs adapt: whether they fit each other, and which models they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ringmaster.techniques.job import MERGED, Job
from ringmaster.techniques.models.model_folders import model_of_folder, quantization_of, tensor_shapes

TOKENIZER = "tokenizer.json"


def unfit_parents(jobs: Sequence[Job], folders: Mapping[str, Path]) -> list[str]:
    """Returns a message for every folder that a job cannot adapt as it requests.

    folders: the folders of bases by the job that adapts them, and of other models by the name that jobs give them.
    """
    found: list[str] = []
    for job in jobs:
        try:
            found += [f"job {job.name}: {fault}" for fault in _faults(job, folders)]
        except ValueError as error:  # the files of a model are damaged
            found.append(f"job {job.name}: {error}")
    return found


def with_teachers(jobs: Sequence[Job], folders: Mapping[str, Path]) -> tuple[Job, ...]:
    """Returns the jobs; a job whose teacher is in a folder gets the model that the folder describes."""
    said = []
    for job in jobs:
        how = job.adaptation
        folder = None if how is None or how.teacher is None else _folder(job, how.teacher, folders)
        if how is not None and how.teacher_model is None and folder is not None:
            job = replace(job, adaptation=replace(how, teacher_model=model_of_folder(folder)))
        said.append(job)
    return tuple(said)


def _folder(job: Job, parent: str, folders: Mapping[str, Path]) -> Path | None:
    return folders.get(job.name if parent == job.base else parent)


def _faults(job: Job, folders: Mapping[str, Path]) -> Iterator[str]:
    how = job.adaptation
    known = [(p, found) for p in job.parents if (found := _folder(job, p, folders)) is not None]
    for parent, folder in known:
        if quantization_of(folder) is not None and (how is None or parent != how.teacher):
            yield (
                f"{parent} is quantized, and a quantized model is neither trained nor rewritten further. "
                "To fix: take what it was quantized from"
            )
    if how is None or how.kind != MERGED or len(known) < 2:
        return
    (first, first_folder), *others = known
    for parent, folder in others:
        mine, theirs = tensor_shapes(first_folder), tensor_shapes(folder)
        differing = sorted(name for name in mine.keys() | theirs.keys() if _shape(mine, name) != _shape(theirs, name))
        if differing:
            name = differing[0]
            yield (
                f"{parent} and {first} do not match: {name} is {_shape(theirs, name)} and {_shape(mine, name)}. "
                "To fix: merge models of one architecture and size"
            )
        elif _text(folder / TOKENIZER) != _text(first_folder / TOKENIZER):
            yield f"{parent} and {first} have different tokenizers. To fix: merge models that learnt the same tokens"


def _shape(shapes: Mapping[str, tuple[str, tuple[int, ...]]], name: str) -> str:
    return str(list(shapes[name][1])) if name in shapes else "missing"


def _text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None


def with_orphans(jobs: Sequence[Job], faults: Mapping[str, str]) -> dict[str, str]:
    """Returns the faults of jobs by name, with those of all jobs that adapt a job which cannot be trained."""
    found = dict(faults)
    while True:
        left = [job for job in jobs if job.name not in found]
        orphans = [(job, gone) for job in left if (gone := [parent for parent in job.parents if parent in found])]
        if not orphans:
            return found
        for job, gone in orphans:
            found[job.name] = f"its {'base' if gone[0] == job.base else 'parent'} {gone[0]} has failed"
