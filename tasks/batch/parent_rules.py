"""Validation of the parents of jobs: whether models fit each other, and what they imply."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

from ringmaster.codec import to_json
from ringmaster.findings import Finding, Location, Raw, as_list, as_mapping, findings_where
from ringmaster.tasks.batch.references import closest, is_folder
from ringmaster.techniques.job import (
    MERGED,
    QUANTIZED,
    REWRITING,
    STRUCTURED,
    Job,
)
from ringmaster.techniques.job_features import JobFeature, feature_kinds, product_of
from ringmaster.techniques.job_specs import CONTINUE, MERGE, Adapter
from ringmaster.techniques.models.architectures import with_config_of
from ringmaster.techniques.models.model_folders import model_of_folder, quantization_of, tensor_shapes
from ringmaster.techniques.models.peft_format import resolved

Edge = tuple[str, str]
"""(a job's name, the name of one of its parents)."""
MAX_CIRCLES = 100
"""The most cycles that are reported at once."""
MAX_NAMED = 500
"""The most jobs among which a remedy searches for a similar name."""

TOKENIZER = ("source", "path", "dataset", "factory", "kwargs", "vocab_size", "text_column", "split")
"""The data keys that determine the vocabulary a model learns if no tokenizer is named."""


@dataclass(frozen=True)
class Parent:
    """What a job reads, as it names it. place: in the job. kind: of the feature that names it; None for models."""

    place: Location
    name: str
    kind: type[JobFeature] | None = None


def parents_of(job: Raw) -> list[Parent]:
    """Returns the parents of a job."""
    adaptation = as_mapping(job.get("adaptation"))
    named: list[tuple[Location, object, type[JobFeature] | None]] = [
        (("base",), job.get("base"), None),
        (("adaptation", "teacher"), adaptation.get("teacher"), None),
    ]
    named += [(*pair, kind) for kind in dict.fromkeys(feature_kinds().values()) for pair in kind.parents_in(job)]
    named += [(("adaptation", "parents", i), each, None) for i, each in enumerate(as_list(adaptation.get("parents")))]
    return [Parent(place, name, kind) for place, name, kind in named if isinstance(name, str)]


def parent_findings(
    place: Location, job: Raw, named: Parent, *, jobs: Mapping[str, Raw], circles: Mapping[Edge, list[str]]
) -> Iterator[Finding]:
    """Yields the faults of one parent of a job.

    place: the parent's place in the batch.
    circles: the cycles among the jobs, from `circles_of`.
    """
    parent, key, kind = named.name, named.place, named.kind
    if is_folder(parent) or (kind is not None and parent not in jobs and kind.is_elsewhere(parent)):
        return
    if parent.startswith("models:/"):
        yield from findings_where(
            (
                re.fullmatch(r"models:/[^/@]+", parent),
                place,
                f"{parent} has no alias and no version",
                f"write {parent}/1 or {parent}@champion",
            ),
            (
                not re.fullmatch(r"models:/[^/@]+(@[^/@]+|/\d+)?", parent),
                place,
                f"{parent!r} names no registered model",
                "write models:/NAME@ALIAS or models:/NAME/VERSION",
            ),
        )
    elif parent not in jobs:
        names = jobs if len(jobs) <= MAX_NAMED else ()
        remedy = closest(parent, names, what="The jobs of this batch are") if names else "name a job of this batch"
        yield Finding(place, f"no job is named {parent!r}", f"{remedy}; a registered model is models:/NAME@ALIAS")
    elif circle := circles.get((job["name"], parent)):
        what = "bases" if all(jobs[a].get("base") == b for a, b in pairwise(circle)) else "parents"
        message = f"{what} go round in a circle: {' -> '.join(circle)}"
        yield Finding(place, message, "let one of them start from fresh weights")
    elif (job["name"], parent) not in circles:  # a cycle is reported once, at its first job
        other = jobs[parent]
        product, wanted = product_of(other), "" if kind is None else kind.product
        if product != wanted:
            remedy = f"name a job that makes {wanted or 'a model'}"
            yield Finding(place, f"{parent} makes {product or 'a model'}", remedy)
        for finding in () if kind is None else kind.parent_findings(job, parent, other):
            yield replace(finding, place=place)
        if product or wanted or (kind is not None and not kind.parents_share_model):
            return
        if key == ("adaptation", "teacher"):
            yield from _another_vocabulary(place, job, parent, other)
            return
        if as_mapping(other.get("adaptation")).get("kind") == QUANTIZED:
            yield Finding(
                place,
                f"{parent} is quantized, and a quantized model is neither trained nor rewritten further",
                f"take what {parent} was quantized from, and quantize the result",
            )
        yield from _another_model(place, job, parent, other, exactly=key != ("base",))


def with_declared_parents(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Returns the jobs of a batch with the values that others imply: zero steps, teachers' models, bases' adapters,
    the passages of stores.
    """
    models, named = {job.name: job.model for job in jobs}, {job.name: job for job in jobs}
    completed = []
    for job in jobs:
        if job.adapter is not None:
            job = replace(job, adapter=_with_base_adapter(job, named))
        how = job.adaptation
        if how is not None and (how.kind in REWRITING or how.method == STRUCTURED):
            job = replace(job, num_steps=0, num_epochs=None)
        if how is not None and how.teacher in models:
            job = job.with_features(replace(how, teacher_model=models[how.teacher]))
        if (maker := named.get(job.data.store or "")) is not None:
            job = replace(job, data=job.data.reading(passages=to_json(maker.data)))
        completed.append(job)
    return tuple(completed)


def _with_base_adapter(job: Job, jobs: Mapping[str, Job]) -> Adapter | None:
    """Returns a job's adapter, with the settings of the adapter of its base where it continues that."""
    base = None if job.base is None else jobs.get(job.base)
    adapter = job.adapter
    if base is None or base.adapter is None or adapter is None or adapter.from_pretrained is not None:
        return adapter
    theirs = _with_base_adapter(base, jobs)
    if adapter.base_adapter == MERGE or theirs is None:
        return adapter
    dropout = adapter.dropout or theirs.dropout
    return replace(resolved(theirs.exported), from_pretrained=None, base_adapter=CONTINUE, dropout=dropout)


def _another_model(place: Location, job: Raw, parent: str, other: Raw, *, exactly: bool) -> Iterator[Finding]:
    """Yields why the weights of `other` do not fit `job`. exactly: whether differing configs are faults too."""
    own, theirs = as_mapping(job.get("model")), as_mapping(other.get("model"))
    a, b = own.get("architecture"), theirs.get("architecture")
    are_built_alike = (own.get("factory") is None) == (theirs.get("factory") is None)
    are_comparable = are_built_alike and not own.get("from_pretrained") and not theirs.get("from_pretrained")
    keys = ("factory", "config", "kwargs") if exactly and are_comparable else ()
    differing = [key for key in keys if (own.get(key) or None) != (theirs.get(key) or None)]
    yield from findings_where(
        (
            a and b and a != b,
            place,
            f"{parent} is a {b}, whose weights do not fit a {a}",
            f"use the same architecture, or another base than {parent}",
        ),
        *(
            (
                True,
                place,
                f"{parent} has another model.{key}, so that its shapes do not match",
                "merge models of one architecture and size",
            )
            for key in differing[:1]
        ),
    )


def _another_vocabulary(place: Location, job: Raw, parent: str, other: Raw) -> Iterator[Finding]:
    """Yields why the teacher `other` and `job` have different vocabularies, so that their logits do not match."""
    own, theirs = as_mapping(job.get("data")), as_mapping(other.get("data"))
    if not (own.get("seq_len") or theirs.get("seq_len")):
        return
    keys = ("tokenizer",) if own.get("tokenizer") or theirs.get("tokenizer") else TOKENIZER
    differing = [key for key in keys if own.get(key) != theirs.get(key)]
    size, size_there = (as_mapping(as_mapping(j.get("model")).get("config")).get("vocab_size") for j in (job, other))
    yield from findings_where(
        (
            differing,
            place,
            f"{parent} learnt another vocabulary: its data.{''.join(differing[:1])} is another",
            "give both jobs the same data, or the same data.tokenizer",
        ),
        (
            None not in (size, size_there) and size != size_there,
            place,
            f"{parent} has a vocabulary of {size_there} tokens, and this job one of {size}",
            "give both models the same vocab_size",
        ),
    )


def circles_of(jobs: Mapping[str, Raw]) -> dict[Edge, list[str]]:
    """Returns cycles among the jobs: for each (job, parent) of a cycle, the path from the job back to itself.

    Only the first job of a cycle gets the path; the others get an empty list, so that a cycle is reported once. Cycles
    that share an edge with a reported one, and those beyond `MAX_CIRCLES`, are found once these are mended.
    """
    parents = {name: [each.name for each in parents_of(job) if each.name in jobs] for name, job in jobs.items()}
    order = {name: i for i, name in enumerate(jobs)}
    circles: dict[Edge, list[str]] = {}
    for _ in range(MAX_CIRCLES):
        try:
            TopologicalSorter(parents).prepare()
        except CycleError as error:
            circle = list(reversed(error.args[1][1:]))  # each job before its parent
        else:
            break
        first = circle.index(min(circle, key=order.__getitem__))
        circle = [*circle[first:], *circle[:first], circle[first]]
        for i, (job, parent) in enumerate(pairwise(circle)):
            circles[job, parent] = [] if i else circle
            parents[job] = [other for other in parents[job] if other != parent]
    return circles


TOKENIZER_FILE = "tokenizer.json"


def unfit_parents(jobs: Sequence[Job], folders: Mapping[str, Path]) -> list[str]:
    """Returns a message for every folder that a job cannot adapt as it requests.

    folders: the folders of bases by the job that adapts them, and of other models by the name that jobs give them.
    """
    messages: list[str] = []
    for job in jobs:
        try:
            messages += [f"job {job.name}: {fault}" for fault in _faults(job, folders)]
        except ValueError as error:  # the files of a model are damaged
            messages.append(f"job {job.name}: {error}")
    return messages


def with_teachers(jobs: Sequence[Job], folders: Mapping[str, Path]) -> tuple[Job, ...]:
    """Returns the jobs; a job whose teacher is in a folder gets the model that the folder describes."""

    def completed(job: Job) -> Job:
        how = job.adaptation
        folder = None if how is None or how.teacher is None else _folder(job, how.teacher, folders)
        if how is None or how.teacher_model is not None or folder is None:
            return job
        return job.with_features(replace(how, teacher_model=model_of_folder(folder)))

    return tuple(map(completed, jobs))


def with_base_configs(jobs: Sequence[Job], folders: Mapping[str, Path]) -> tuple[Job, ...]:
    """Returns the jobs; one whose model leaves its sizes open gets the config of the model in a folder that it adapts.

    It may adapt that model through other jobs of the batch, unless one of these changes its shape.
    """
    by_name = {job.name: job for job in jobs}

    def completed(job: Job) -> Job:
        each = job
        while (is_same := each.adaptation is None or each.adaptation.method != STRUCTURED) and each.base in by_name:
            each = by_name[each.base]
        if not is_same or each.name not in folders:
            return job
        return replace(job, model=with_config_of(job.model, folders[each.name]))

    return tuple(map(completed, jobs))


def _folder(job: Job, parent: str, folders: Mapping[str, Path]) -> Path | None:
    return folders.get(job.name if parent == job.base else parent)


def _faults(job: Job, folders: Mapping[str, Path]) -> Iterator[str]:
    how = job.adaptation
    known = {p: parent_folder for p in job.parents if (parent_folder := _folder(job, p, folders)) is not None}
    for parent, folder in known.items():
        if quantization_of(folder) is not None and (how is None or parent != how.teacher):
            yield (
                f"{parent} is quantized, and a quantized model is neither trained nor rewritten further. "
                "To fix: take what it was quantized from"
            )
    if how is None or how.kind != MERGED or len(known) < 2:
        return
    (first, first_folder), *others = known.items()
    own_shapes, own_tokens = tensor_shapes(first_folder), _text(first_folder / TOKENIZER_FILE)
    for parent, folder in others:
        theirs = tensor_shapes(folder)
        names = sorted(own_shapes.keys() | theirs.keys())
        name = next((name for name in names if _shape(own_shapes, name) != _shape(theirs, name)), None)
        if name is not None:
            yield (
                f"{parent} and {first} do not match: {name} is {_shape(theirs, name)} and {_shape(own_shapes, name)}. "
                "To fix: merge models of one architecture and size"
            )
        elif _text(folder / TOKENIZER_FILE) != own_tokens:
            yield f"{parent} and {first} have different tokenizers. To fix: merge models that learnt the same tokens"


def _shape(shapes: Mapping[str, tuple[str, tuple[int, ...]]], name: str) -> str:
    return str(list(shapes[name][1])) if name in shapes else "missing"


def _text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None


def with_orphans(jobs: Sequence[Job], faults: Mapping[str, str]) -> dict[str, str]:
    """Returns the faults of jobs by name, with those of all jobs that adapt a job which cannot be trained."""
    all_faults = dict(faults)
    while True:
        left = [job for job in jobs if job.name not in all_faults]
        orphans = [(job, gone) for job in left if (gone := [parent for parent in job.parents if parent in all_faults])]
        if not orphans:
            return all_faults
        for job, gone in orphans:
            all_faults[job.name] = f"its {'base' if gone[0] == job.base else 'parent'} {gone[0]} has failed"
