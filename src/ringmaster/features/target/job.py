"""`target` of a job, where it ends early, and `may_vary`, what may be chosen on the way to it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any

from ringmaster.codec import SINCE_LATER
from ringmaster.findings import Finding, Raw, are_counts, as_list, as_mapping, findings_where
from ringmaster.techniques.job import Job, TrainingPhase, Variant, is_rewriting
from ringmaster.techniques.job_features import (
    MAX_AT_ONCE,
    Choices,
    Description,
    Distinct,
    Effect,
    Format,
    JobFeature,
    Limits,
    Positive,
    Whole,
    feature_of,
    is_black_box,
)
from ringmaster.techniques.job_specs import LEARNING_RATE_RULES, EvaluationSpec, OptimizerSpec
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.processes.gang_events import JobResult

MEASURED_OPTIMIZERS = ("adamw", "sgd")
"""The optimizers with which the noise scale of the gradient can be measured."""
SEARCH_SHARE, MIN_SEARCH_STEPS = 0.05, 20
"""The share of a job's steps for which learning rates are compared: bad ones show after 4 %."""
VARIABLE_PRECISIONS = ("fp32", "bf16")
"""The precisions between which a job may change: its state is the same in both."""
LOCAL = "local"
"""The technique of jobs whose devices exchange every few steps."""
_Choices = Distinct(at_most=100)  # every combination of values is a variant of the job


@dataclass(frozen=True, kw_only=True)
class Target(JobFeature):
    """A value of a metric on held-out data at which the job ends.

    Attributes:
        metric: of the job's evaluation.
        at_most, at_least: the bound, one of the two.
    """

    key = "target"
    description = "where the job ends early, such as {metric: eval/loss, at_most: 2.0}"
    effects = Effect.WEIGHTS
    is_divisible = False
    group_obstacle = "ends at a target, or may change its batch size on the way"

    metric: Annotated[str, Format("metric"), Description("a metric of the evaluation, such as eval/loss")]
    at_most: Annotated[float | None, Description("the value to fall to, such as 2.0")] = None
    at_least: Annotated[float | None, Description("the value to rise to, such as 0.9")] = None

    def is_reached(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether an evaluation has reached the target."""
        value = metrics.get(self.metric, math.nan)
        return value <= self.at_most if self.at_most is not None else value >= (self.at_least or 0.0)

    def __str__(self) -> str:
        bound = f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"
        return f"{self.metric} {bound}"

    def final_message(self, result: JobResult) -> str:
        """Checks whether the job has reached the target."""
        return f"{'reached' if result.ended_early else 'did not reach'} {self}, after step {result.step}"

    @classmethod
    def findings(cls, job: Raw) -> Iterator[Finding]:
        """Yields why a job cannot end at its target."""
        target, evaluation, place = job.get("target"), as_mapping(job.get("evaluation")), ("target",)
        if not isinstance(target, Mapping):
            return
        bounds = [key for key in ("at_most", "at_least") if target.get(key) is not None]
        metric, metrics = target.get("metric"), evaluation.get("metrics", EvaluationSpec.metrics)
        is_known = isinstance(metric, str) and isinstance(metrics, (list, tuple))
        yield from findings_where(
            (len(bounds) != 1, place, "does not say one bound", "give one of at_most and at_least"),
            (
                is_known and str(metric).removeprefix("eval/") not in metrics,
                (*place, "metric"),
                f"{metric} is not evaluated",
                "name it in evaluation.metrics too",
            ),
            (
                not evaluation.get("every_steps") and not evaluation.get("at_steps"),
                place,
                "is looked for in evaluations on the way, and there are none",
                "give evaluation.every_steps, such as 50",
            ),
            (is_black_box(job), place, "is for jobs that Ringmaster trains, not for commands", "leave it out"),
            (is_rewriting(job), place, "cannot be combined with an adaptation that trains nothing", "leave it out"),
        )


@dataclass(frozen=True, kw_only=True)
class Variables(JobFeature):
    """What may be chosen of a job on the way to its target: [how](time-to-target.md).

    Its own value is the first of each list.

    Attributes:
        global_batch_size, precision: the values; empty where nothing may be chosen.
        learning_rate_rule: how the learning rate follows the batch size (`target.noise_scale`).
        sync_every: the steps between two exchanges, of local updates where it is more than one.
        workers: of local updates. None until the preflight has chosen it.
        lr: learning rates to compare in short runs before the job is trained.
    """

    key = "may_vary"
    description = "what may be chosen for `objective: time-to-target`, such as {global_batch_size: [16, 64]}"
    effects = Effect(0)
    objective = "time-to-target"
    is_divisible = False

    global_batch_size: Annotated[
        tuple[Annotated[int, Limits(ge=2, le=MAX_AT_ONCE)], ...],
        _Choices,
        Description("batch sizes, the job's own among them, such as [16, 32, 64]"),
    ] = ()
    precision: Annotated[
        tuple[Annotated[str, Choices(VARIABLE_PRECISIONS)], ...],
        _Choices,
        Description(f"out of {', '.join(VARIABLE_PRECISIONS)}, the job's own among them"),
    ] = ()
    learning_rate_rule: Annotated[
        str, Choices(LEARNING_RATE_RULES), Description(f"one of {', '.join(LEARNING_RATE_RULES)}")
    ] = "damped-gain"
    sync_every: Annotated[
        tuple[Whole, ...], _Choices, Description("steps between two exchanges, 1 among them, such as [1, 8, 32]")
    ] = field(default=(), metadata=SINCE_LATER)
    workers: Annotated[
        Whole | None,
        Description("the number of workers of local updates; by default the devices of the largest gang"),
    ] = field(default=None, metadata=SINCE_LATER)
    lr: Annotated[
        tuple[Positive, ...],
        Distinct(),
        Description("learning rates to try first, the job's own among them, such as [5e-4, 1e-3, 2e-3]"),
    ] = field(default=(), metadata=SINCE_LATER)

    @property
    def is_empty(self) -> bool:
        """Whether nothing may be chosen."""
        return self == Variables()

    def settled(self, *, num_workers: int | None) -> "Variables":
        """Returns what may be chosen, with the workers that the preflight has chosen."""
        return replace(self, workers=self.workers or num_workers) if self.sync_every else self

    def varies(self, job: Job) -> bool:
        """Returns whether the batch size, precision or local updates of a job are still to be chosen."""
        return job.feature(Target) is not None and not job.phases and len(self.choices(job)) > 1

    def why_unfit(self, job: Job, facts: ModelFacts) -> str:
        """Requires that the batch may be divided where something is still to be chosen."""
        why = facts.whole_batch
        return f"may_vary: its batch must stay whole: {why}" if why and self.varies(job) else ""

    def searches(self, job: Job) -> list[Job]:
        """Returns the jobs that try learning rates: the same job, evaluated after `search_steps`.

        They are trained no further than that. They measure the noise of gradients as the job would, which continues
        from the best one's checkpoint.
        """
        jobs = []
        for lr in dict.fromkeys(self.lr):
            at_steps = tuple(sorted({*job.evaluation.at_steps, search_steps(job)}))
            search = replace(
                job.without(Target),
                name=f"{job.name}.lr-{lr!r}",
                optimizer=replace(job.optimizer, lr=lr),
                evaluation=replace(job.evaluation, at_steps=at_steps),
            )
            jobs.append(search.with_features(replace(self, lr=())))
        return jobs

    def variants(self, job: Job) -> dict[Variant, Job]:
        """Returns the variants of a job other than its own, as jobs to be profiled: in the steps after the probe."""
        jobs = {}
        for variant in self.choices(job)[1:] if self.varies(job) else ():
            size, precision, every = variant
            name = f"{job.name}.{size}.{precision}" + (f".{every}" if every > 1 else "")
            other = replace(job.without(Variables), name=name, global_batch_size=size, precision=precision)
            jobs[variant] = other.with_features(*exchanging(every, workers=self.workers))
        return jobs

    def choices(self, job: Job) -> list[Variant]:
        """Returns the variants in which a job may be trained after its probe, its own first.

        Local updates take two workers and more, which share the batch equally.
        """
        own, workers = job.phase(0).variant, self.workers or 1
        variants = product(self.global_batch_size or own[:1], self.precision or own[1:2], self.sync_every or own[2:])
        possible = [each for each in variants if each[2] == 1 or (workers > 1 and each[0] % workers == 0)]
        return list(dict.fromkeys((own, *possible)))

    @classmethod
    def findings(cls, job: Raw) -> Iterator[Finding]:
        """Yields why what a job lists under `may_vary` cannot be chosen."""
        variables, data, optimizer = job.get("may_vary"), as_mapping(job.get("data")), as_mapping(job.get("optimizer"))
        if not isinstance(variables, Mapping):
            return
        place, num_steps, techniques = ("may_vary",), job.get("num_steps"), job.get("techniques")
        exchanges, workers = as_list(variables.get("sync_every")), variables.get("workers")
        size, name = job.get("global_batch_size", Job.global_batch_size), optimizer.get("name", OptimizerSpec.name)
        may_vary_size = len(as_list(variables.get("global_batch_size"))) > 1
        own = {
            "global_batch_size": size,
            "precision": job.get("precision", Job.precision),
            "lr": optimizer.get("lr", OptimizerSpec.lr),
        }
        yield from findings_where(
            (
                job.get("target") is None,
                place,
                "is chosen on the way to a target, and there is none",
                "give a target, or leave it out",
            ),
            (
                job.get("exact"),
                ("exact",),
                "fixes all bits, and what may_vary lists changes them",
                "leave one of the two out",
            ),
            (
                job.get("local_updates") is not None,
                ("local_updates",),
                "has an exchange every few steps, in which no batch size may vary",
                "leave it out, or may_vary",
            ),
            (
                job.get("warm_start") is not None,
                ("warm_start",),
                "passes over the first steps, by which may_vary is decided",
                "leave one of the two out",
            ),
            (
                data.get("kind") == "prompt",
                ("data", "kind"),
                "is prompt, and a job that trains on what it generates may not vary",
                "leave may_vary out",
            ),
            *(
                (
                    as_list(variables.get(key)) and value not in variables[key],
                    (*place, key),
                    f"lacks the job's own {value}",
                    f"add {value}, or set {key} to one of the list",
                )
                for key, value in own.items()
            ),
            (
                exchanges and 1 not in exchanges,
                (*place, "sync_every"),
                "lacks 1, an exchange at each step, with which every job begins",
                "add 1",
            ),
            (
                exchanges and job.get("numerics") is not None,
                (*place, "sync_every"),
                "does not go with numerics, as local updates have the same bits everywhere",
                "leave one of the two out",
            ),
            (
                exchanges and isinstance(techniques, list) and LOCAL not in techniques,
                (*place, "sync_every"),
                f"takes the technique {LOCAL}, which techniques leaves out",
                f"add {LOCAL} to techniques, or leave it out",
            ),
            (
                workers is not None and not exchanges,
                (*place, "workers"),
                "are those of local updates, which nothing permits",
                "give sync_every, or leave it out",
            ),
            (
                are_counts(size, workers) and size % workers > 0,
                (*place, "workers"),
                f"is {workers}, and global_batch_size {size} cannot be divided by it",
                "give a number that divides it",
            ),
            (
                variables.get("lr") and not (isinstance(num_steps, int) and num_steps > MIN_SEARCH_STEPS),
                (*place, "lr"),
                f"is compared after {MIN_SEARCH_STEPS} steps at the least, of num_steps",
                "give num_steps, more than that, or leave it out",
            ),
            (
                may_vary_size and name not in MEASURED_OPTIMIZERS,
                (*place, "global_batch_size"),
                f"needs the noise scale, which is measured with {' and '.join(MEASURED_OPTIMIZERS)}, not {name}",
                "take one of these optimizers, or leave it out",
            ),
            (
                may_vary_size and data.get("sampling") == "length-grouped",
                (*place, "global_batch_size"),
                "does not go with length-grouped sampling, whose groups depend on the batch size",
                "set data.sampling: random, or leave it out",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Phases(JobFeature):
    """What a job has changed on its way to a target. A run makes it; files have no such key."""

    effects = Effect(0)
    group_obstacle = Target.group_obstacle

    phases: tuple[TrainingPhase, ...] = ()

    def with_steps(self, num_steps: int) -> "Phases":
        """Returns the phases, of which the last one is as long as is left."""
        return Phases(phases=(*self.phases[:-1], replace(self.phases[-1], num_steps=num_steps)))


def exchanging(every: int, *, workers: int | None, **settings: Any) -> tuple[JobFeature, ...]:
    """Returns the feature of a job in which workers exchange weights every few steps; none for an exchange a step."""
    values = {"workers": workers or 1, "sync_every": every, **settings}
    return () if every == 1 else (feature_of("local_updates", values),)


def search_steps(job: Job) -> int:
    """Returns the steps of the short runs that compare learning rates for a job."""
    return max(math.ceil(SEARCH_SHARE * job.total_steps), MIN_SEARCH_STEPS)


def variables_of(job: Job) -> Variables:
    """Returns what may be chosen of a job."""
    return job.feature(Variables) or Variables()


JOB_FEATURES = (Target, Variables, Phases)
