"""Jobs that share a component: their faults, and the jobs that train them together.

The jobs become one job, the composite, which is named after the component: a unit of work for profiles, plans and
checkpoints. Each of them then has no steps of its own, and extracts its model from the composite's.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ringmaster.codec import to_json
from ringmaster.features.composition.job import Components, components_of
from ringmaster.findings import Finding, Location, Raw, as_mapping, findings_where
from ringmaster.tasks.batch.file_hooks import BatchFileHook, PlacedJob
from ringmaster.tasks.batch.references import closest, split_loss
from ringmaster.tasks.batch.sections import Section
from ringmaster.techniques.job import COMPOSED, EXTRACTED, AdaptationSpec, Composition, Job
from ringmaster.techniques.job_features import file_keys, is_black_box, other_features
from ringmaster.techniques.job_specs import RETRIEVER, DataSpec, ModelSpec, OptimizerSpec, ScheduleSpec
from ringmaster.techniques.loss import loss_function

FACTORY = "ringmaster.techniques.models.composite_model:composite_model"
EQUAL = (
    *("num_steps", "optimizer", "schedule", "clip_grad_norm", "precision", "communication", "compile"),
    *("techniques", "num_devices"),
)
"""The keys in which jobs that share a component agree, as they take their steps together."""
REFUSED = ("adapter", "base", "freeze", "exact", "num_epochs")
"""The keys that jobs that share a component cannot have, beside those of all other features."""
DEFAULTS = {
    "optimizer": to_json(OptimizerSpec()),
    "schedule": to_json(ScheduleSpec()),
    "precision": Job.precision,
    "communication": Job.communication,
    "compile": Job.compile,
}


class SharedComponentsInFiles(BatchFileHook):
    """The key `shared_components` of a batch."""

    def batch_findings(self, batch: Raw, jobs: Sequence[PlacedJob]) -> Iterator[Finding]:
        """Yields the faults of the components; their modules are compared in the preflight."""
        yield from _component_findings(batch.get("shared_components"), jobs)

    def made_for(self, batch: Section) -> Mapping[str, str]:
        """Returns the composites, each with the first of its jobs."""
        return {name: next(iter(section.jobs)) for name, section in _components(batch).items()}

    def completed(self, jobs: Sequence[Job], batch: Section) -> Sequence[Job]:
        """Returns the jobs, with a composite before the first of those that share a component."""
        named, made = {job.name: job for job in jobs}, dict[str, list[Job]]()
        for component, section in _components(batch).items():
            weights = [section.weights.get(name, 1.0) for name in section.jobs]
            parts = [named[name] for name in section.jobs]
            composite, *extracted = composed(component, parts, [*section.jobs.values()], weights=weights)
            first = min(parts, key=jobs.index)
            made |= {job.name: [composite, job] if job.name == first.name else [job] for job in extracted}
        return tuple(each for job in jobs for each in made.get(job.name, [job]))


BATCH_FILE_HOOKS = (SharedComponentsInFiles(),)


def _components(batch: Section) -> Mapping[str, Any]:
    components: Mapping[str, Any] = batch.shared_components  # type: ignore[attr-defined]
    return components


def _component_findings(components: Any, jobs: Sequence[PlacedJob]) -> Iterator[Finding]:
    named = {job["name"]: job for _, raw in jobs if isinstance((job := as_mapping(raw)).get("name"), str)}
    owners: dict[str, str] = {}
    for component, raw in as_mapping(components).items():
        section, at = as_mapping(raw), ("shared_components", component)
        paths, weights = as_mapping(section.get("jobs")), as_mapping(section.get("weights"))
        yield from findings_where(
            (component in named, at, f"{component!r} is the name of a job", "give the component another name"),
            (len(paths) < 2, (*at, "jobs"), "are fewer than two", "name each job that trains the component, and where"),
            *((job not in paths, (*at, "weights", job), "is not a job that shares it", "remove it") for job in weights),
        )
        first: Raw | None = None
        for name in paths:
            place = (*at, "jobs", name)
            if name not in named:
                yield Finding(place, f"no job is named {name!r}", closest(name, named, what="The jobs are"))
                continue
            if name in owners:
                yield Finding(place, f"shares {owners[name]} already", "share one component, which may be a larger one")
            owners[name] = component
            yield from _faults(named[name], place)
            first = first or named[name]
            yield from _differences(named[name], first, place)


def _faults(job: Raw, at: Location) -> Iterator[Finding]:
    of_files = [kind.job_keys()[0] for kind in file_keys("ENTRY_KEYS")]
    for key in dict.fromkeys((*REFUSED, *other_features(Components), *of_files)):
        if job.get(key):
            yield Finding(at, f"has {key}, which is not trained with a shared component", f"remove {key} from the job")
    optimizer, loss = as_mapping(job.get("optimizer")), job.get("loss")
    yield from findings_where(
        *(
            (optimizer.get(key), at, f"has optimizer.{key}, which names layers of one model", f"remove optimizer.{key}")
            for key in ("groups", "layer_decay")
        ),
        (as_mapping(job.get("data")).get(RETRIEVER), at, "has data that is read with passages", "give other data"),
        (is_black_box(job), at, "has a model that its trainer knows alone", "give a model that is built here"),
        (job.get("num_steps") is None and not job.get("num_epochs"), at, "has no num_steps", "give it num_steps"),
    )
    name, options = split_loss(loss) if isinstance(loss, Mapping) else (loss, {})
    try:
        function = loss_function(name, options) if isinstance(name, str) else None
    except ValueError:  # which the rules of the job report
        return
    if function is not None and (function.compares or function.num_written_tokens or not function.drops_out):
        what = "needs completions, another model's outputs or a model without dropout"
        yield Finding(at, f"has the loss {name}, which {what}", "give another loss, or train the job on its own")


def _differences(job: Raw, first: Raw, at: Location) -> Iterator[Finding]:
    for key in EQUAL:
        own, theirs = (_value(each, key) for each in (job, first))
        if own != theirs:
            yield Finding(at, f"has {key} {own}, and {first['name']} has {theirs}", f"give both the same {key}")


def _value(job: Raw, key: str) -> Any:
    value, default = job.get(key), DEFAULTS.get(key)
    return {**default, **value} if isinstance(value, Mapping) and isinstance(default, Mapping) else value or default


def composed(component: str, jobs: Sequence[Job], paths: Sequence[str], *, weights: Sequence[float]) -> list[Job]:
    """Returns the composite of jobs, and the jobs that extract their models from it, in order.

    paths: of the component in each job's model. weights: the factor of each job's loss.
    """
    first = jobs[0]
    how = Composition(
        component=component,
        jobs=tuple(job.name for job in jobs),
        paths=tuple(paths),
        weights=tuple(weights),
    )
    composite = replace(
        first,
        name=component,
        model=ModelSpec(factory=FACTORY, kwargs={"paths": [*paths], "weights": [*weights]}),
        data=DataSpec(
            kind="composite",
            kwargs={"jobs": [to_json(job) for job in jobs]},
            padding="longest" if all(job.data.padding == "longest" for job in jobs) else "max_length",
        ),
        loss=None,
        loss_options={},
        global_batch_size=math.gcd(*(job.global_batch_size for job in jobs)),
        evaluation=replace(first.evaluation, metrics=("loss",)),
    ).with_features(
        AdaptationSpec(kind=COMPOSED, composition=how), Components(components={component: f"part0.{paths[0]}"})
    )
    return [
        composite,
        *(
            replace(
                job,
                base=component,
                num_steps=0,
                techniques=None,
                num_devices=None,
            ).with_features(
                AdaptationSpec(kind=EXTRACTED, composition=replace(how, index=index)),
                Components(components={**components_of(job), component: path}),
            )
            for index, (job, path) in enumerate(zip(jobs, paths, strict=True))
        ),
    ]
