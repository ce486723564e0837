"""Job and its values: everything that determines the trained weights, and nothing about parallelism."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

from ringmaster.codec import SINCE_LATER, feature_items, set_fields, stored_features
from ringmaster.findings import Raw, as_mapping
from ringmaster.techniques.job_features import (
    MAX_AT_ONCE,
    Choices,
    Description,
    Distinct,
    Effect,
    FeatureT,
    FirstCheckpoint,
    Format,
    JobFeature,
    Limits,
    Positive,
    Whole,
    feature_in,
    feature_kind,
    feature_of,
)
from ringmaster.techniques.job_specs import Adapter, DataSpec, EvaluationSpec, ModelSpec, OptimizerSpec, ScheduleSpec

FP8 = "fp8"
PRECISIONS = ("fp32", "bf16", "bf16-params", FP8)
"""Of files. fp8 is stored as bf16, with the feature `ringmaster.features.fp8`."""
COMMUNICATIONS = ("fp32", "bf16")
MAX_DEVICES, MAX_EPOCHS = 2**16, 10**6
"""The most devices of a gang, and passes over the data."""
DISTILLED, PRUNED, QUANTIZED, MERGED = "distilled", "pruned", "quantized", "merged"
QUANTIZATION_AWARE = "quantization-aware"
STRUCTURED = "structured"
"""The method of pruning that leaves layers and channels out."""
REWRITING = (QUANTIZED, MERGED)
"""The kinds that involve no training."""
INT8_METHODS = ("dynamic-int8", "weight-only-int8")
INT4_METHODS = ("dynamic-int8-int4", "weight-only-int4")
ADAPTATIONS: Mapping[str, tuple[str, ...]] = {
    DISTILLED: (),
    PRUNED: ("magnitude", "2:4", STRUCTURED),
    QUANTIZED: INT8_METHODS + INT4_METHODS,
    QUANTIZATION_AWARE: INT4_METHODS,
    MERGED: ("average", "task-arithmetic"),
}
"""The kinds of adaptation besides plain training, and the methods of each."""
COMPOSED, EXTRACTED = "composed", "extracted"
"""The kinds of adaptation of jobs that train a common component: of all of them as one job, and of each one of them."""
REWRITE = "rewrite"  # the technique of jobs without steps
SUM = "sum"
UPDATE_RULES = (SUM,)
"""How the gradient of a common component is made of the jobs' gradients."""
OF_SAMPLES = frozenset(
    f"data.{name}"
    for name in (
        *("source", "path", "dataset", "name", "version", "window", "format", "seq_len", "vocab_size", "tokenizer"),
        *("split", "held_out_split", "held_out", "held_out_path", "time_column", "options"),
    )
)
"""The fields of a job that define where samples come from. What they lead to is seen in `PreparedData`."""
_SAME_STEP = frozenset(
    {
        *("name", "base", "seed", "num_steps", "num_epochs", "schedule", "optimizer.lr"),
        *("evaluation.every_steps", "evaluation.at_steps"),
    }
)
_SAME_TIME = OF_SAMPLES | _SAME_STEP | {"techniques", "num_devices"}
_SAME_MODEL = _SAME_TIME | {
    *("optimizer", "clip_grad_norm", "global_batch_size", "communication", "compile", "exact", "exact_chunk"),
    *("adapter", "freeze", "evaluation.max_batches", "evaluation.max_rows"),
}
SAME: Mapping[Effect, frozenset[str]] = {Effect.STEP: _SAME_STEP, Effect.TIME: _SAME_TIME, Effect.MODEL: _SAME_MODEL}
"""The fields of a job, but those of its features, that have no such effect; every other field is counted, also one that
is added later."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Jobs that train a common component as one job: see `models.composite_model` for the rule.

    Attributes:
        component: its name.
        update: one of `UPDATE_RULES`.
        jobs, paths, weights: of each job its name, the path of the component in its model, and the factor of its loss.
        index: the place in `jobs` of the job that a model is extracted for; None for the composite of all.
    """

    component: str
    jobs: tuple[str, ...]
    paths: tuple[str, ...]
    weights: tuple[float, ...]
    update: str = SUM
    index: int | None = None


@dataclass(frozen=True, kw_only=True)
class AdaptationSpec(JobFeature):
    """How a model is derived from others, if not by plain training alone.

    Other models are named as a base is: a job of the batch, "models:/NAME@ALIAS", or a folder.

    Attributes:
        kind: "distilled": trained against a frozen teacher's logits (Hinton et al., arXiv:1503.02531). "pruned": the
            base without its smallest weights, which stay zero in any steps that follow; by the method "structured"
            without layers or channels within them, so that it has the shape of the job's config. "quantized": the base
            with its linear layers in 8 or 4 bits. "quantization-aware": trained with the rounding of a model that will
            be quantized. "merged": several models in one. "composed": several jobs with a common component, trained as
            one. "extracted": the model of one of these. Models that are quantized, merged,
            extracted or pruned by "structured" do not train.
        method: one of `ADAPTATIONS[kind]`.
        teacher: the teacher of a distilled model.
        teacher_model: the teacher's architecture, where neither a job of the batch nor a folder determines it.
        temperature, weight: with T and w, the loss is (1 - w) times the job's loss plus w T^2 times the KL divergence
            of the teacher's softened distribution softmax(logits / T) from the student's.
        sparsity: the share of each pruned matrix that becomes zero; always a half for the method "2:4".
        group_size: the weights of a row that share a scale, in 4 bits.
        parents: the models that are merged.
        weights: the weight of each parent, in the same order; 1 by default, and divided by their sum in an average.
        composition: of composed and extracted models.
    """

    key = "adaptation"
    description = "how it comes from other models, such as {kind: quantized, method: dynamic-int8}"
    group_obstacle = "is adapted in another way too"
    is_divisible = False

    kind: Annotated[str, Choices(tuple(ADAPTATIONS)), Description(f"one of {', '.join(ADAPTATIONS)}")]
    method: Annotated[
        Annotated[str, Choices(tuple(chain.from_iterable(ADAPTATIONS.values())))] | None,
        Description("; ".join(f"{', '.join(names)} where {kind}" for kind, names in ADAPTATIONS.items() if names)),
    ] = None
    teacher: Annotated[
        Annotated[str, Format("parent")] | None, Description("another job's name, models:/NAME@ALIAS or a folder")
    ] = None
    teacher_model: Annotated[
        ModelSpec | None,
        Description("the teacher's model, such as {factory: ...}, where the teacher does not define it"),
    ] = field(default=None, metadata=SINCE_LATER)
    temperature: Annotated[Positive, Description("the divisor of the logits, such as 2.0")] = 2.0
    weight: Annotated[float, Limits(ge=0, le=1), Description("the teacher's share of the loss, such as 0.5")] = 0.5
    sparsity: Annotated[
        float, Limits(gt=0, lt=1), Description("the share of weights that become zero, such as 0.5")
    ] = 0.5
    group_size: Annotated[Whole, Description("the weights of a row that share a scale in 4 bits, such as 32")] = field(
        default=32, metadata=SINCE_LATER
    )
    parents: Annotated[
        tuple[Annotated[str, Format("parent")], ...],
        Distinct(),
        Description("the models to merge, such as [job-a, models:/NAME@ALIAS]"),
    ] = ()
    weights: Annotated[tuple[float, ...], Description("a number for each of the parents, such as [0.7, 0.3]")] = ()
    composition: Composition | None = field(default=None, metadata=SINCE_LATER)

    def why_not(self, technique: Any) -> str | None:
        """Requires layers that may be called for each of several jobs, or whose weights are whole."""
        if self.kind == QUANTIZATION_AWARE and not technique.whole_layers:
            return f"a {self.kind} job rounds the rows of whole weights and inputs, which {technique.name} divides"
        if self.kind != COMPOSED or technique.reuses_layers:
            return None
        needed = "layers that are called for each of several jobs in one step"
        return f"a {self.kind} model needs {needed}, which {technique.name} has not"

    def renamed(self, rename: Callable[[str], str]) -> "AdaptationSpec":
        """Returns the adaptation with `rename` applied to the names of other models."""
        return replace(self, teacher=self.teacher and rename(self.teacher), parents=tuple(map(rename, self.parents)))


Variant = tuple[int, str, int]
"""What may change of a job after its probe: batch size, precision, and the steps between two exchanges."""


@dataclass(frozen=True, kw_only=True)
class TrainingPhase:
    """A stretch of a job's steps with a batch size, a precision and exchanges of its own.

    The list of a job's phases begins with the job as it was written. What a step trains on is a function of the seed,
    the step and this list.

    Attributes:
        first_step: the step (0-based) with which it begins; it lasts to the next phase.
        global_batch_size, precision: of its steps.
        lr_factor: the factor of the learning rate.
        num_steps: the number of the job's steps if this phase is the last one.
        features: those that only its steps have, such as exchanges every few steps, which begin a round.
    """

    first_step: int
    global_batch_size: int
    precision: str
    lr_factor: float
    num_steps: int
    features: tuple[JobFeature, ...] = stored_features(feature_kind)

    @property
    def variant(self) -> Variant:
        """Batch size, precision, and the steps between two exchanges."""
        every = max((feature.exchange_every for feature in self.features), default=1)
        return self.global_batch_size, self.precision, every


def is_rewriting(job: Raw) -> bool:
    """Whether the adaptation in the plain values of a job never involves training."""
    adaptation = as_mapping(job.get("adaptation"))
    return adaptation.get("kind") in REWRITING or adaptation.get("method") == STRUCTURED


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model to train.

    Attributes:
        name: unique in its batch, made of letters, digits, "-", "_" and ".".
        base: the model that this one adapts: another job's name, or "models:/NAME@ALIAS". Training starts from its
            weights.
        adapter: parameters that are trained in place of the model's weights, which stay frozen; None trains all
            weights.
        loss: None for the model's own loss; the name of one (docs/losses.md), such as "mse"; or
            "package.module:function", called as f(model_output, batch), which returns (sum, count), so that the mean
            over a global batch does not depend on how the batch was divided.
        loss_options: the options of a loss that is given by name, such as {"label_smoothing": 0.1}.
        precision: "fp32"; "bf16" (autocast; weights and optimizer stay in fp32); or "bf16-params" (everything is
            computed with weights rounded to bf16, which the optimizer stores and updates in fp32).
        communication: the precision in which gradients are sent between devices, "fp32" or "bf16". They are summed in
            fp32 where the technique can do so; a single device rounds nothing.
        compile: whether the model's repeated layers are compiled (`torch.compile`); needs a C++ compiler on every node.
        clip_grad_norm: the largest global L2 norm of the gradient, or None.
        global_batch_size: samples of one step, over all devices.
        num_steps, num_epochs: exactly one is given; epochs are converted to steps once the data's size is known.
        techniques, num_devices: what the planner may choose from; None for everything.
        exact: whether the weights have the same bits on any number of devices, under techniques that can add in one
            order (`training.exact_sums`).
        exact_chunk: the samples of one forward and backward of an exact job, which decide its bits; the global batch is
            a power of two of them. None until it is chosen in the preflight.
        freeze: glob patterns of the names of parameters that are not trained, in order: as in a .gitignore, "!" takes
            parameters out again, and the last pattern that matches decides. ("*", "!classifier.*") trains a head alone.
        features: the values of optional features (`ringmaster.features`), one of each kind, in the order of their keys.
    """

    name: Annotated[
        str,
        Format("name"),
        Description("a name of up to 100 letters, digits, '-', '_' and '.', such as llama-small"),
    ]
    model: Annotated[ModelSpec, Description("the model, such as {architecture: LlamaForCausalLM, config: {...}}")]
    data: Annotated[DataSpec, Format("data"), Description("the data, such as {source: python-stdlib, seq_len: 128}")]
    base: Annotated[str | None, Format("parent"), Description("another job's name, models:/NAME@ALIAS or a folder")] = (
        None
    )
    adapter: Annotated[
        Adapter | None,
        Format("agreeing"),
        Description("an adapter, such as {kind: lora, rank: 8}, or leave the key out: every weight is trained"),
    ] = None
    loss: Annotated[str | None, Format("loss")] = None
    precision: Annotated[str, Choices(PRECISIONS)] = "fp32"
    communication: Annotated[str, Choices(COMMUNICATIONS)] = "fp32"
    compile: Annotated[bool, Description("true to compile the model's layers, else false")] = False
    optimizer: Annotated[OptimizerSpec, Description("the optimizer, such as {name: adamw, lr: 3e-4}")] = field(
        default_factory=OptimizerSpec
    )
    schedule: Annotated[ScheduleSpec, Description("the schedule, such as {name: cosine, warmup_steps: 10}")] = field(
        default_factory=ScheduleSpec
    )
    clip_grad_norm: Annotated[Positive | None, Description("the largest norm of the gradient, such as 1.0")] = None
    global_batch_size: Annotated[
        int,
        Limits(ge=1, le=MAX_AT_ONCE),
        Description("the samples of one step on whatever devices, such as 16"),
    ] = 16
    num_steps: Annotated[int | None, Format("steps"), Description("the number of optimizer steps, such as 60")] = None
    num_epochs: Annotated[
        float | None, Limits(gt=0, le=MAX_EPOCHS), Description("the passes over the training data, such as 3")
    ] = None
    evaluation: Annotated[EvaluationSpec, Description("the evaluation, such as {every_steps: 30}")] = field(
        default_factory=EvaluationSpec
    )
    seed: Annotated[int, Limits(ge=0, lt=2**63), Description("a seed such as 0")] = 0
    techniques: Annotated[
        tuple[Annotated[str, Format("technique")], ...] | None,
        Distinct(at_least=1),
        Description("a list of techniques to choose from, such as [single, fsdp], or leave the key out"),
    ] = None
    num_devices: Annotated[
        tuple[Annotated[int, Limits(ge=1, le=MAX_DEVICES)], ...] | None,
        Distinct(at_least=1),
        Description("a list of gang sizes to choose from, such as [1, 2], or leave the key out"),
    ] = None
    exact: Annotated[bool, Description("true for the same bits on any number of devices, else false")] = False
    freeze: Annotated[
        tuple[Annotated[str, Format("freeze_pattern")], ...],
        Distinct(),
        Description(
            'glob patterns of parameters that are not trained, such as ["*", "!classifier.*"]: "!" takes out again, '
            "and the last match decides"
        ),
    ] = field(default=(), metadata=SINCE_LATER)
    loss_options: Mapping[str, Any] = field(default_factory=dict, metadata=SINCE_LATER)
    exact_chunk: Annotated[
        Whole | None,
        Description("the samples of one forward and backward of an exact job, such as 4"),
    ] = field(default=None, metadata=SINCE_LATER)
    features: tuple[JobFeature, ...] = stored_features(feature_kind)

    def __post_init__(self) -> None:
        features = sorted((each for each in self.features if not each.is_empty), key=lambda each: each.job_keys())
        object.__setattr__(self, "features", tuple(features))
        assert len({*map(type, features)}) == len(features), f"job {self.name} has two features of one kind"

    def feature(self, kind: type[FeatureT]) -> FeatureT | None:
        """Returns the job's feature of a kind; None where it has none, or one that is not active."""
        return feature_in(self.features, kind)

    def with_features(self, *features: JobFeature) -> "Job":
        """Returns the job with these features, in place of its own of the same kinds."""
        others = self.without(*map(type, features)).features
        return replace(self, features=(*others, *features))

    def with_key(self, key: str, value: Any) -> "Job":
        """Returns the job with a value, in its JSON form, at a key of a feature; None for a job without the feature."""
        if value is not None:
            return self.with_features(feature_of(key, value))
        return replace(self, features=tuple(each for each in self.features if key not in each.job_keys()))

    def without(self, *kinds: type[JobFeature]) -> "Job":
        """Returns the job without its features of these kinds."""
        return replace(self, features=tuple(feature for feature in self.features if type(feature) not in kinds))

    def unaffected(self, effect: Effect) -> frozenset[str]:
        """Returns the keys of its features that have no such effect."""
        return frozenset(key for each in self.features if effect not in each.effects for key in each.job_keys())

    def fields_with(self, effect: Effect, *, but: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Returns the JSON form of the fields that have an effect, but those with their defaults and those in `but`."""
        return set_fields(self, but=SAME[effect] | self.unaffected(effect) | but)

    @property
    def made_by(self) -> str:
        """The technique that makes the job's model instead of training; "" where it trains."""
        return next((feature.made_by for feature in self.features if feature.made_by), "" if self.trains else REWRITE)

    @property
    def is_black_box(self) -> bool:
        """Whether the model is built and trained by something that knows it alone, such as a command."""
        return self.model.command is not None

    @property
    def base_changes(self) -> dict[str, str]:
        """The keys of the features that change the weights below the adapter, and their texts."""
        changes = (each for each in self.features if each.changes_base)
        return {key: text for each in changes for key, text in feature_items(each).items()}

    def on_base(self, changes: Sequence[JobFeature] = ()) -> "Job":
        """Returns the job with other changes of the weights below its adapter; with none, they are as they were."""
        return replace(self, features=(*(each for each in self.features if not each.changes_base), *changes))

    @property
    def runs_elsewhere(self) -> bool:
        """Whether the job has a Python of its own, with modules that this process may not find."""
        return any(feature.runs_elsewhere for feature in self.features)

    def interpreter(self, cache_dir: str) -> str | None:
        """Returns the Python that runs the job, made where it is not there yet; None for that of this process.

        cache_dir: the folder of what can be made again. Raises InterpreterError where there is none.
        """
        pythons = (feature.interpreter(self, cache_dir=Path(cache_dir)) for feature in self.features)
        return next((python for python in pythons if python is not None), None)

    @property
    def adaptation(self) -> AdaptationSpec | None:
        """How the model is derived from other models besides training; None for plain training."""
        return self.feature(AdaptationSpec)

    @property
    def plain(self) -> "Job":
        """The job without an adaptation that reads other models or masks weights; its layers are the same."""
        how = self.adaptation
        return self if how is not None and how.kind == QUANTIZATION_AWARE else self.without(AdaptationSpec)

    @property
    def is_exact(self) -> bool:
        """Whether the job's result has the same bits on any number of devices."""
        return self.exact or any(feature.is_exact for feature in self.features)

    @property
    def synchronous(self) -> "Job":
        """The job with one optimizer for all devices."""
        if self.num_workers is None:
            return self
        return replace(self, features=tuple(each for each in self.features if each.num_workers is None), exact=True)

    @property
    def num_workers(self) -> int | None:
        """The workers that have an optimizer each; None where all devices have one together."""
        return next((number for feature in self.features if (number := feature.num_workers) is not None), None)

    @property
    def parents(self) -> tuple[str, ...]:
        """The names of all that the job reads: its `models`, what its features read, and the store."""
        named = (*self.models, *(name for feature in self.features for name in feature.parents), self.data.store)
        return tuple(dict.fromkeys(name for name in named if name is not None))

    @property
    def started_from(self) -> FirstCheckpoint | None:
        """The checkpoint of another job with which the job begins, also where its own steps were set since."""
        return next((start for feature in self.features if (start := feature.started_from) is not None), None)

    def with_start(self, start: FirstCheckpoint | None, *, own: str = "") -> "Job":
        """Returns the job that begins with a checkpoint of another job, or at its own first step.

        own: the folder or URL of the job's own checkpoints, with which it continues since its steps were set.
        """
        first = None if start is None else {"checkpoints": start.checkpoints, "step": start.step}
        return self.with_key("warm_start", {"checkpoints": own, "step": 0, "first": first} if own else first)

    @property
    def checkpoint_roots(self) -> tuple[str, ...]:
        """The checkpoints that the job reads to begin or to continue: folders, URLs, or the jobs that have them."""
        return tuple(root for feature in self.features for root in feature.checkpoint_roots)

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models that this one is derived from: the base, then its teacher or the merged models."""
        value = self.adaptation
        named = (self.base, *(() if value is None else (value.teacher, *value.parents)))
        return tuple(dict.fromkeys(name for name in named if name is not None))

    @property
    def trains(self) -> bool:
        """Whether the job has steps; a job without steps only rewrites its parents' weights."""
        return self.num_steps != 0

    @property
    def adapter_drops_out(self) -> bool:
        """Whether the adapter draws random numbers in training."""
        return self.adapter is not None and self.adapter.dropout > 0

    def renamed(self, name: str, rename: Callable[[str], str]) -> "Job":
        """Returns the same job under the name `name`, with `rename` applied to the names of its parents."""
        base = self.base and rename(self.base)
        store = self.data.store
        data = self.data if store is None else self.data.reading(store=rename(store))
        features = tuple(feature.renamed(rename) for feature in self.features)
        return replace(self, name=name, base=base, data=data, features=features)

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of step `step` (0-based). It depends on the step alone, so no state is restored."""
        place, length = self.schedule_place(step)
        return self.optimizer.lr * self.schedule.factor(place, num_steps=length) * self.phase(step).lr_factor

    def searches(self) -> list["Job"]:
        """Returns the short runs that are compared before the job is trained."""
        return [search for feature in self.features for search in feature.searches(self)]

    @property
    def variants(self) -> dict[Variant, "Job"]:
        """The ways in which it may be trained after a while, its own first; none of a job that does not change."""
        others = {variant: job for feature in self.features for variant, job in feature.variants(self).items()}
        return {self.phase(0).variant: self} | others if others else {}

    def with_variants(self) -> tuple["Job", ...]:
        """Returns the job and its variants."""
        return tuple(self.variants.values()) or (self,)

    @property
    def varies(self) -> bool:
        """Whether its batch size, precision or exchanges are still to be chosen."""
        return any(feature.varies(self) for feature in self.features)

    @property
    def phases(self) -> tuple[TrainingPhase, ...]:
        """The phases of a job that has changed its batch size, precision or exchanges on the way; none of others."""
        return tuple(phase for feature in self.features for phase in feature.phases)

    def phase(self, step: int) -> TrainingPhase:
        """Returns the phase of a step (0-based)."""
        own = (TrainingPhase(
            first_step=0,
            global_batch_size=self.global_batch_size,
            precision=self.precision,
            lr_factor=1.0,
            num_steps=self.num_steps or 0,
        ),)  # fmt: skip
        return next(phase for phase in reversed(self.phases or own) if phase.first_step <= step)

    @property
    def max_evaluated_rows(self) -> int:
        """The most held-out rows of one evaluation."""
        spec = self.evaluation
        return spec.max_rows if spec.max_batches is None else spec.max_batches * self.global_batch_size

    def is_evaluated(self, step: int) -> bool:
        """Returns whether the job is evaluated after `step` steps, before its last."""
        if not 0 < step < self.total_steps:
            return False
        return self.evaluation.is_due(self.schedule_place(step)[0], before=self.schedule_place(step - 1)[0])

    def samples(self, step: int) -> range:
        """Returns the places of a step's samples in the endless stream of the job's samples."""
        first, phase = 0, self.phase(step)
        for earlier, following in pairwise(self.phases):
            if following.first_step <= step:
                first += (following.first_step - earlier.first_step) * earlier.global_batch_size
        first += (step - phase.first_step) * phase.global_batch_size
        return range(first, first + phase.global_batch_size)

    def schedule_place(self, step: int) -> tuple[float, int]:
        """Returns the position of the schedule at a step, and its length, in steps of the job as it was written.

        With N these steps, and a phase from step f at the place p with n steps to the end: p + (step - f) (N - p) / n.
        So the schedule ends with the last step, whatever the phases.
        """
        if not self.phases:
            return step, self.schedule.num_steps or self.total_steps
        place, length = 0.0, self.phases[0].num_steps
        for i, phase in enumerate(self.phases):
            is_last = i + 1 == len(self.phases) or step < self.phases[i + 1].first_step
            end = step if is_last else self.phases[i + 1].first_step
            place += (end - phase.first_step) * (length - place) / (phase.num_steps - phase.first_step)
            if is_last:
                break
        return place, length

    @property
    def total_steps(self) -> int:
        """The number of steps. A job given in epochs must have been resolved against its data before."""
        assert self.num_steps is not None, f"job {self.name}: epochs were not resolved into steps"
        return self.num_steps
