"""Job and its parts: everything that determines the trained weights, and nothing about parallelism."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import Annotated, Any

from ringmaster.codec import SINCE_LATER, set_fields, stored_flat, stored_parts
from ringmaster.findings import Raw, as_mapping
from ringmaster.techniques.job_parts import (
    Choices,
    Description,
    Distinct,
    Effect,
    FirstCheckpoint,
    Format,
    JobPart,
    Limits,
    PartT,
    Positive,
    part_in,
    part_kind,
)

PRECISIONS = ("fp32", "bf16", "bf16-params")
COMMUNICATIONS = ("fp32", "bf16")
PADDINGS = ("longest", "max_length")
SAMPLINGS = ("random", "length-grouped")


@dataclass(frozen=True)
class OptionValues:
    """The values that an option may have. words: which they are. fits: whether a value is one of them."""

    words: str
    fits: Callable[[Any], bool]


def _is_number(value: Any, *, least: float = -math.inf, below: float = math.inf) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < below


def _are(value: Any, *checks: Callable[[Any], bool]) -> bool:
    """Returns whether a value is a list with an item for each check, which it passes."""
    is_list = isinstance(value, (list, tuple)) and len(value) == len(checks)
    return is_list and all(check(item) for check, item in zip(checks, value, strict=True))


_is_share, _is_positive = partial(_is_number, least=0.0, below=1.0), partial(_is_number, least=0.0)
_NUMBER, _FLAG = (
    OptionValues("a number", _is_number),
    OptionValues("true or false", lambda value: value in (True, False)),
)
_POSITIVE = OptionValues("a number of at least 0", _is_positive)
_BETAS = OptionValues(
    "two numbers of at least 0 and below 1, such as [0.9, 0.99]", lambda value: _are(value, _is_share, _is_share)
)
OPTIMIZER_OPTIONS: Mapping[str, Mapping[str, OptionValues]] = {
    "adafactor": {
        "beta2_decay": OptionValues("a number of at most 0", lambda value: _is_number(value) and value <= 0),
        "d": OptionValues("a number of at least 1", lambda value: _is_number(value, least=1.0)),
        "eps": OptionValues(
            "two numbers of at least 0, the first of which may be null",
            lambda value: _are(value, lambda item: item is None or _is_positive(item), _is_positive),
        ),
        "weight_decay": _POSITIVE,
    },
    "adamw": {"amsgrad": _FLAG, "betas": _BETAS, "eps": _POSITIVE, "weight_decay": _POSITIVE},
    "lion": {"betas": _BETAS, "weight_decay": _POSITIVE},
    "muon": {
        "adamw_betas": _BETAS,
        "adamw_eps": _POSITIVE,
        "adamw_lr": _POSITIVE,
        "adamw_weight_decay": _POSITIVE,
        "adjust_lr_fn": OptionValues(
            "original or match_rms_adamw", lambda value: value in (None, "original", "match_rms_adamw")
        ),
        "eps": _POSITIVE,
        "momentum": _POSITIVE,
        "nesterov": _FLAG,
        "ns_coefficients": OptionValues("three numbers", lambda value: _are(value, *[_is_number] * 3)),
        "ns_steps": OptionValues(
            "a whole number from 1 to 99", lambda value: type(value) is int and _is_number(value, least=1, below=100)
        ),
        "weight_decay": _POSITIVE,
    },
    "sgd": {"dampening": _NUMBER, "momentum": _POSITIVE, "nesterov": _FLAG, "weight_decay": _POSITIVE},
}
"""The options of each optimizer."""
OPTIMIZERS = tuple(OPTIMIZER_OPTIONS)
OF_WHOLE_TENSORS = frozenset({"adafactor", "muon"})
"""The optimizers that need whole tensors; the others update each element by itself."""
SCHEDULES = ("constant", "linear", "cosine", "wsd")
DECAY_RATIO = 0.1
"""The default of `decay_ratio`."""
ATTENTIONS = ("auto", "sdpa", "flash", "flex")
ADAPTERS = ("lora", "prefix", "ia3", "prompt")
VIRTUAL_TOKENS = ("prefix", "prompt")
"""The kinds of adapters that put learned tokens before each row."""
INITIALIZATIONS = ("default", "pissa", "pissa_niter_16", "olora")
NF4 = "nf4"
"""The 4-bit format of a frozen base."""
CONTINUE, MERGE = "continue", "merge"
BASE_ADAPTERS = (CONTINUE, MERGE)
"""What a job with an adapter does with the adapter that its base is."""
DISTILLED, PRUNED, QUANTIZED, MERGED = "distilled", "pruned", "quantized", "merged"
STRUCTURED = "structured"
"""The method of pruning that leaves layers and channels out."""
REWRITING = (QUANTIZED, MERGED)
"""The kinds that involve no training."""
ADAPTATIONS: Mapping[str, tuple[str, ...]] = {
    DISTILLED: (),
    PRUNED: ("magnitude", "2:4", STRUCTURED),
    QUANTIZED: ("dynamic-int8", "weight-only-int8"),
    MERGED: ("average", "task-arithmetic"),
}
"""The kinds of adaptation besides plain training, and the methods of each."""
COMPOSED, EXTRACTED = "composed", "extracted"
"""The kinds of adaptation of jobs that train a common component: of all of them as one job, and of each one of them."""
SUM = "sum"
UPDATE_RULES = (SUM,)
"""How the gradient of a common component is made of the jobs' gradients."""
RETRIEVER = "retriever"
"""The option of kinds of data whose samples read a knowledge store."""
LEARNING_RATE_RULES = ("damped-gain", "square-root")
FRESH_HEAD = frozenset({"num_labels", "id2label", "architectures"})
"""Keys of a pretrained model's `config` that may give it a head which its file lacks."""
OF_SAMPLES = frozenset(
    f"data.{name}"
    for name in (
        *("source", "path", "dataset", "name", "version", "window", "format", "seq_len", "vocab_size", "tokenizer"),
        *("split", "held_out_split", "held_out", "held_out_path", "time_column", "options"),
    )
)
"""The fields of a job that say where samples come from. What they lead to is seen in `PreparedData`."""
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
"""The fields of a job, but those of its parts, that have no such effect; every other field is counted, also one that is
added later."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Where a model comes from: `architecture`, `from_pretrained` or both, a `factory`, or a `command`.

    Attributes:
        architecture: a Hugging Face class built from `config` with fresh weights, e.g. "LlamaForCausalLM". With
            `from_pretrained`, the class into which those weights are loaded; what they lack, such as a head, is fresh.
        from_pretrained: a local folder or a hub name; only safetensors weights are read. `config` overrides its fields.
        kwargs: the arguments of the factory, or of the command.
        factory: "package.module:function", called with `kwargs`, which returns a torch module.
        attention: the implementation in a Hugging Face model, which changes the last digits: "auto" (transformers'
            default, "sdpa" where the model has it), "sdpa" (PyTorch's, whose kernels on a GPU are FlashAttention's or
            memory-efficient), "flash" (the package flash-attn: a GPU, bf16) or "flex" (PyTorch's FlexAttention: a GPU).
        command: the arguments of a command that builds and trains the model on its own (docs/commands.md). The command
            gets `kwargs` in its order.
        configs: the configs that the command accepts; one of them is selected by measurement.
        adopt: for a command that runs an unedited script: the folder in which it runs. None for a command that reports
            on its own.
    """

    architecture: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    from_pretrained: str | None = None
    factory: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "auto"
    command: tuple[str, ...] | None = None
    configs: tuple[Mapping[str, Any], ...] = ()
    adopt: str | None = field(default=None, metadata=SINCE_LATER)

    @property
    def is_drawn(self) -> bool:
        """Whether initial weights depend on a seed where the job has no base: all weights, or those of a fresh head."""
        return self.from_pretrained is None or self.has_fresh_head

    @property
    def has_fresh_head(self) -> bool:
        """Whether the weights of a pretrained model may lack the head."""
        return self.from_pretrained is not None and (
            self.architecture is not None or not FRESH_HEAD.isdisjoint(self.config)
        )


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Where samples come from: one of `source`, `path`, `dataset` and `factory`, and how they are made: `kind`.

    Attributes:
        source: a data set that every machine has: "python-stdlib" (text) or "digits" (8x8 images, 10 classes); or
            "command", for a model's command that reads its own data.
        path: a glob of text, JSONL or Parquet files.
        dataset: a Hugging Face `datasets` name or folder.
        kwargs: the arguments of the factory, of `load_dataset`, or of the `kind`.
        factory: "package.module:function", called with `kwargs`, which returns (training, held_out): two objects with
            `__len__` and `__getitem__(index) -> dict of tensors`.
        seq_len: tokens of a text sample.
        vocab_size: size of the byte-level BPE vocabulary that is trained on the text where no `tokenizer` is given.
        tokenizer: a folder or hub name.
        split, held_out_split: splits of a `datasets` data set.
        held_out: the share reserved for evaluation where there is no split.
        name, version: of a data set in a catalogue (docs/datasets.md). `path` and `held_out_path` then name its files.
        held_out_path: globs or fsspec URLs of the files reserved for evaluation.
        format: the format of files whose names do not show it.
        window: the rows of `path` to use: {"last_days": n}, {"last_rows": n} or {"since": time, "until": time}.
        time_column: the column with a row's time.
        kind: the name of the data source (`data_source.DataSource`) that makes the samples; None for the one that fits:
            text for language models from a `path`, and a `dataset` as it is.
        padding: "longest" pads the samples of a step to the longest of them, "max_length" to `seq_len`.
        sampling: the order of samples: "random", or "length-grouped", where the samples of a step have similar lengths.
        packing: whether several samples lie in one row of `seq_len` tokens, for language models. Attention does not
            cross them. A job's global batch size then counts rows. Held-out samples are not packed.
        original_path, original_held_out_path: of files that retraining or `lineage undo` has copied, the paths that the
            user gave. They name the data in records.
        options: the settings of the kind alone, such as {"label_column": "stars"}: those of its `DataOptions`. In batch
            files they lie beside the other fields.
    """

    source: str | None = None
    path: str | None = None
    dataset: str | None = None
    factory: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seq_len: int | None = None
    vocab_size: int = 2048
    tokenizer: str | None = None
    split: str = "train"
    held_out_split: str | None = None
    held_out: float = 0.1
    name: str | None = field(default=None, metadata=SINCE_LATER)
    version: str | None = field(default=None, metadata=SINCE_LATER)
    held_out_path: str | None = field(default=None, metadata=SINCE_LATER)
    format: str | None = field(default=None, metadata=SINCE_LATER)
    window: Mapping[str, Any] | None = field(default=None, metadata=SINCE_LATER)
    time_column: str | None = field(default=None, metadata=SINCE_LATER)
    kind: str | None = field(default=None, metadata=SINCE_LATER)
    padding: str = field(default="longest", metadata=SINCE_LATER)
    sampling: str = field(default="random", metadata=SINCE_LATER)
    packing: bool = field(default=False, metadata=SINCE_LATER)
    original_path: str | None = field(default=None, metadata=SINCE_LATER)
    original_held_out_path: str | None = field(default=None, metadata=SINCE_LATER)
    options: Mapping[str, Any] = stored_flat({"text_column": "text"})

    @property
    def store(self) -> str | None:
        """The knowledge store that samples read, as the option `retriever` names it; None where they read none."""
        retriever = self.options.get(RETRIEVER) or self.kwargs.get(RETRIEVER)
        store = retriever.get("store") if isinstance(retriever, Mapping) else None
        return store if isinstance(store, str) else None

    def reading(self, **changes: Any) -> "DataSpec":
        """Returns the data, which reads a store, with other settings of its retriever."""
        retriever = self.options.get(RETRIEVER) or self.kwargs[RETRIEVER]
        return replace(self, options={**self.options, RETRIEVER: {**retriever, **changes}})


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Parameters that are trained in place of the model's own weights, which stay frozen.

    Attributes:
        kind: "lora" (products of two thin matrices added to the targets: Hu et al., arXiv:2106.09685), "prefix" (keys
            and values before each layer's own: Li and Liang, arXiv:2101.00190), "ia3" (factors of the targets'
            outputs, or of their inputs: Liu et al., arXiv:2205.05638) or "prompt" (embeddings before those of the
            tokens: Lester et al., arXiv:2104.08691).
        rank, alpha: a LoRA adds alpha / rank * B A to a weight, where A is [rank, in] and B is [out, rank].
        rank_stabilised: use alpha / sqrt(rank) instead (Kalajdzievski, arXiv:2312.03732).
        targets: suffixes of the names of the linear modules to adapt, such as q_proj; () for all of them inside the
            repeated layers, or for "ia3" those that peft chooses for the architecture.
        feedforward: the targets of an "ia3" whose inputs are scaled; () for those that peft chooses for the
            architecture.
        dora: whether the rows of a LoRA's weights keep trained lengths (Liu et al., arXiv:2402.09353).
        dropout: the share of a LoRA's inputs that are dropped in training.
        initialization: "default"; "pissa" (the largest singular vectors: Meng et al., arXiv:2404.02948), or the quicker
            "pissa_niter_16"; or "olora" (an orthonormal basis: Buyukakyuz, arXiv:2406.01775). The latter subtract the
            first product from the base's weights. The exported LoRA has twice the rank, and is on the base as it was.
        num_virtual_tokens: length of a "prefix", in every layer, or of a "prompt".
        modules_to_save: suffixes of the names of modules that are trained directly, such as a fresh head.
        from_pretrained: a folder written by peft or by Ringmaster. Its adapter is trained further, and determines all
            of the fields above.
        base_adapter: what becomes of the adapter that the base is: "continue" trains it further, which determines all
            of the fields above; "merge" adds it to the weights that the new adapter is on. None continues the adapter
            of a job of the batch, and merges that of a registered model or a folder.
    """

    kind: str = "lora"
    rank: int = 8
    alpha: float = 16.0
    rank_stabilised: bool = False
    targets: tuple[str, ...] = ()
    feedforward: tuple[str, ...] = ()
    num_virtual_tokens: int = 20
    modules_to_save: tuple[str, ...] = ()
    from_pretrained: str | None = None
    base_adapter: str | None = field(default=None, metadata=SINCE_LATER)
    dora: bool = field(default=False, metadata=SINCE_LATER)
    dropout: float = field(default=0.0, metadata=SINCE_LATER)
    initialization: str = field(default="default", metadata=SINCE_LATER)

    @property
    def subtracts(self) -> bool:
        """Whether its first product is subtracted from the base's weights."""
        return self.kind == "lora" and self.initialization != "default" and self.from_pretrained is None

    @property
    def continues_base(self) -> bool:
        """Whether the adapter of the base is trained further."""
        return self.base_adapter == CONTINUE

    @property
    def scaling(self) -> float:
        """The factor of a LoRA's product: alpha / r, or rank-stabilised alpha / sqrt(r)."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    @property
    def exported(self) -> "Adapter":
        """The adapter that is exported: one of twice the rank, where its first product was subtracted from the base."""
        if not self.subtracts:
            return self
        alpha = self.alpha * (math.sqrt(2) if self.rank_stabilised else 2)
        return replace(self, rank=2 * self.rank, alpha=alpha, initialization="default")

    @property
    def begins_as_base(self) -> bool:
        """Whether the model without the adapter is what its training begins with.

        It is not where modules are trained directly, or where an earlier adapter is trained further.
        """
        return not (self.modules_to_save or self.from_pretrained or self.continues_base or self.subtracts)


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Settings of the parameters whose names match the glob pattern `match`, such as "*.bias" or "classifier.*".

    lr, weight_decay: in place of the optimizer's; None leaves them.
    """

    match: str
    lr: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The optimizer `name` with learning rate `lr`; `options` are its other arguments.

    Attributes:
        name: "adamw" and "sgd" of PyTorch; "adafactor" of PyTorch (Shazeer and Stern, arXiv:1804.04235); "lion" (Chen
            et al., arXiv:2302.06675); or "muon" (Jordan, kellerjordan.github.io/posts/muon) of PyTorch for the matrices
            of the repeated layers, with AdamW for all other parameters.
        options: those of `OPTIMIZER_OPTIONS`, for example weight_decay, betas, eps and momentum. Of "muon", those of
            AdamW begin with adamw_; the learning rate of AdamW is `lr` unless adamw_lr is given.
        layer_decay: d, for the learning rate lr * d^(L + 1 - depth) of each of L layers, as BEiT fine-tunes (Bao et
            al., arXiv:2106.08254): what is before the layers (embeddings) has depth 0, the layers have depths 1 to L,
            and what is after them (the last norm, the head) has depth L + 1.
        groups: settings of parameters by name; a later group overrides an earlier one, and `layer_decay`.
        decay_norms_and_biases: False for no weight decay of parameters with fewer than two dimensions.
    """

    name: str = "adamw"
    lr: float = 1e-3
    options: Mapping[str, Any] = field(default_factory=dict)
    layer_decay: float | None = field(default=None, metadata=SINCE_LATER)
    groups: tuple[ParameterGroup, ...] = field(default=(), metadata=SINCE_LATER)
    decay_norms_and_biases: bool = field(default=True, metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """Learning rate over steps: a linear warm-up, then constant or decaying.

    Attributes:
        name: "constant"; "linear" or "cosine", which decay from the warm-up to the last step; or "wsd" (warm-up,
            stable, decay: Hu et al., MiniCPM, arXiv:2404.06395), which is constant and then decays linearly.
        warmup_steps, warmup_ratio: the steps of the warm-up, or their share of all steps, rounded up; not both.
        min_lr_ratio: the share of the learning rate at which a decay ends.
        decay_ratio: the share of the steps in which "wsd" decays, rounded up; None for `DECAY_RATIO`.
        num_steps: the steps of the schedule, of which the job may be a part; None for those of the job.
    """

    name: str = "constant"
    warmup_steps: int = 0
    warmup_ratio: float | None = field(default=None, metadata=SINCE_LATER)
    min_lr_ratio: float = field(default=0.0, metadata=SINCE_LATER)
    decay_ratio: float | None = field(default=None, metadata=SINCE_LATER)
    num_steps: int | None = field(default=None, metadata=SINCE_LATER)

    def num_warmup_steps(self, num_steps: int) -> int:
        """Returns the steps of the warm-up of a job of `num_steps` steps."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * num_steps)

    def num_decay_steps(self, num_steps: int) -> int:
        """Returns the steps in which "wsd" decays, of a job of `num_steps` steps."""
        return math.ceil((DECAY_RATIO if self.decay_ratio is None else self.decay_ratio) * num_steps)

    def factor(self, step: float, *, num_steps: int) -> float:
        """Returns the factor of the base learning rate at step `step` of `num_steps`.

        With k the step (0-based), N the number of steps, W those of the warm-up, D those of the decay of "wsd", and r
        the `min_lr_ratio`:

            k < W       (k + 1) / W                                 linear warm-up
            constant    1
            linear      r + (1 - r) (1 - p)                         p = (k - W) / (N - W)
            cosine      r + (1 - r) (1 + cos(pi p)) / 2             the same p
            wsd         1 before step N - D, then r + (1 - r) (1 - p)    p = (k - (N - D)) / D

        After the warm-up these are `get_linear_schedule_with_warmup`, `get_cosine_with_min_lr_schedule_with_warmup`
        and `get_wsd_schedule` (decay_type="linear") of transformers. In the warm-up they are one step ahead of
        transformers, whose first step has the learning rate 0 and changes nothing.

        Source of "wsd": Hu et al., MiniCPM (arXiv:2404.06395).
        """
        num_warmup = self.num_warmup_steps(num_steps)
        if step < num_warmup:
            return (step + 1) / num_warmup
        first = num_steps - self.num_decay_steps(num_steps) if self.name == "wsd" else num_warmup
        if self.name == "constant" or step < first:
            return 1.0
        progress = min((step - first) / max(num_steps - first, 1), 1.0)
        factor = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.name == "cosine" else 1.0 - progress
        return factor * (1.0 - self.min_lr_ratio) + self.min_lr_ratio


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """Evaluation on held-out data: at the end, every `every_steps` steps where that is set, and after `at_steps`.

    Attributes:
        metrics: names of `ringmaster.techniques.metric`; models are compared by the first one.
        max_batches: the limit of jobs that were stored before `max_rows`, in global batches; None where `max_rows` is.
        max_rows: the most rows of one evaluation, the first ones held out. No setting of training changes it, so that
            jobs with different batch sizes are compared on the same rows.
        max_new_tokens: the most tokens that a model writes to a row, for metrics of what it writes.
    """

    every_steps: int | None = None
    at_steps: tuple[int, ...] = ()
    metrics: tuple[str, ...] = ("loss",)
    max_batches: int | None = None
    max_new_tokens: int = 64
    max_rows: int = field(default=1024, metadata=SINCE_LATER)

    def is_due(self, place: float, *, before: float) -> bool:
        """Returns whether an evaluation is due after the step from `before` to `place`, apart from that at the end.

        Both are places in the job's schedule: the numbers of steps, unless the batch size has changed.
        """
        every = self.every_steps
        is_regular = every is not None and place // every > before // every
        return is_regular or any(before < step <= place for step in self.at_steps)


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
class AdaptationSpec(JobPart):
    """How a model is derived from others, if not by plain training alone.

    Other models are named as a base is: a job of the batch, "models:/NAME@ALIAS", or a folder.

    Attributes:
        kind: "distilled": trained against a frozen teacher's logits (Hinton et al., arXiv:1503.02531). "pruned": the
            base without its smallest weights, which stay zero in any steps that follow; by the method "structured"
            without layers or channels within them, so that it has the shape of the job's config. "quantized": the base
            with its linear layers in 8 bits. "merged": several models in one. "composed": several jobs with a common
            component, trained as one. "extracted": the model of one of these. Models that are quantized, merged,
            extracted or pruned by "structured" do not train.
        method: one of `ADAPTATIONS[kind]`.
        teacher: the teacher of a distilled model.
        teacher_model: the teacher's architecture, where neither a job of the batch nor a folder determines it.
        temperature, weight: with T and w, the loss is (1 - w) times the job's loss plus w T^2 times the KL divergence
            of the teacher's softened distribution softmax(logits / T) from the student's.
        sparsity: the share of each pruned matrix that becomes zero; always a half for the method "2:4".
        parents: the models that are merged.
        weights: the weight of each parent, in the same order; 1 by default, and divided by their sum in an average.
        composition: of composed and extracted models.
    """

    key = "adaptation"
    description = "how it comes from other models, such as {kind: quantized, method: dynamic-int8}"
    group_obstacle = "is adapted in another way too"

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
    parents: Annotated[
        tuple[Annotated[str, Format("parent")], ...],
        Distinct(),
        Description("the models to merge, such as [job-a, models:/NAME@ALIAS]"),
    ] = ()
    weights: Annotated[tuple[float, ...], Description("a number for each of the parents, such as [0.7, 0.3]")] = ()
    composition: Composition | None = field(default=None, metadata=SINCE_LATER)

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
        parts: those that only its steps have, such as exchanges every few steps, which begin a round.
    """

    first_step: int
    global_batch_size: int
    precision: str
    lr_factor: float
    num_steps: int
    parts: tuple[JobPart, ...] = stored_parts(part_kind)

    @property
    def variant(self) -> Variant:
        """Batch size, precision, and the steps between two exchanges."""
        every = max((part.exchange_every for part in self.parts), default=1)
        return self.global_batch_size, self.precision, every


def exchanging(every: int, *, workers: int | None, **settings: Any) -> tuple[JobPart, ...]:
    """Returns the part of a job in which workers exchange weights every few steps; none for an exchange a step."""
    if every == 1:
        return ()
    kind = part_kind("local_updates")
    assert kind is not None, "a built-in feature has the key"
    return (kind(**{"workers": workers or 1, "sync_every": every, **settings}),)


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
        loss: None for the model's own loss; the name of one (docs/losses.md), such as "dpo"; or
            "package.module:function", called as f(model_output, batch), which returns (sum, count), so that the mean
            over a global batch does not depend on how the batch was divided.
        loss_options: the options of a loss that is given by name, such as {"beta": 0.1}.
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
        parts: those of optional features (`ringmaster.features`), one of each kind, in the order of their keys.
    """

    name: str
    model: ModelSpec
    data: DataSpec
    base: str | None = None
    adapter: Adapter | None = None
    loss: str | None = None
    precision: str = "fp32"
    communication: str = "fp32"
    compile: bool = False
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    clip_grad_norm: float | None = None
    global_batch_size: int = 16
    num_steps: int | None = None
    num_epochs: float | None = None
    evaluation: EvaluationSpec = EvaluationSpec()
    seed: int = 0
    techniques: tuple[str, ...] | None = None
    num_devices: tuple[int, ...] | None = None
    exact: bool = False
    freeze: tuple[str, ...] = field(default=(), metadata=SINCE_LATER)
    loss_options: Mapping[str, Any] = field(default_factory=dict, metadata=SINCE_LATER)
    exact_chunk: int | None = field(default=None, metadata=SINCE_LATER)
    parts: tuple[JobPart, ...] = stored_parts(part_kind)

    def __post_init__(self) -> None:
        parts = sorted((part for part in self.parts if not part.is_empty), key=lambda part: part.job_keys())
        object.__setattr__(self, "parts", tuple(parts))
        assert len({type(part) for part in parts}) == len(parts), f"job {self.name} has two parts of one kind"

    def part(self, kind: type[PartT]) -> PartT | None:
        """Returns the job's part of a kind; None where it has none, or one that is not active."""
        return part_in(self.parts, kind)

    def with_parts(self, *parts: JobPart) -> "Job":
        """Returns the job with these parts, in place of its own of the same kinds."""
        others = self.without(*map(type, parts)).parts
        return replace(self, parts=(*others, *parts))

    def without(self, *kinds: type[JobPart]) -> "Job":
        """Returns the job without its parts of these kinds."""
        return replace(self, parts=tuple(part for part in self.parts if type(part) not in kinds))

    def unaffected(self, effect: Effect) -> frozenset[str]:
        """Returns the keys of its parts that have no such effect."""
        return frozenset(key for part in self.parts if effect not in part.effects for key in part.job_keys())

    def fields_with(self, effect: Effect, *, but: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Returns the JSON form of the fields that have an effect, but those with their defaults and those in `but`."""
        return set_fields(self, but=SAME[effect] | self.unaffected(effect) | but)

    @property
    def made_by(self) -> str:
        """The technique that makes what the job asks for, in place of training; "" where it trains."""
        return next((part.made_by for part in self.parts if part.made_by), "")

    @property
    def base_format(self) -> str | None:
        """The format in which the frozen weights below the adapter are held; None for the weights as they are."""
        return next((name for part in self.parts if (name := part.base_format) is not None), None)

    def with_base_format(self, base_format: str | None) -> "Job":
        """Returns the job with the frozen weights below its adapter in a format; None for the weights as they are."""
        others = replace(self, parts=tuple(part for part in self.parts if part.base_format is None))
        if base_format is None:
            return others
        kind = part_kind("quantize_base")
        assert kind is not None, "a built-in feature has the key"
        values: Mapping[str, Any] = {"quantize_base": base_format}
        return others.with_parts(kind(**values))

    @property
    def adaptation(self) -> AdaptationSpec | None:
        """How the model is derived from other models besides training; None for plain training."""
        return self.part(AdaptationSpec)

    @property
    def is_exact(self) -> bool:
        """Whether the job's result has the same bits on any number of devices."""
        return self.exact or any(part.is_exact for part in self.parts)

    @property
    def synchronous(self) -> "Job":
        """The job with one optimizer for all devices."""
        if self.num_workers is None:
            return self
        return replace(self, parts=tuple(part for part in self.parts if part.num_workers is None), exact=True)

    @property
    def num_workers(self) -> int | None:
        """The workers that have an optimizer each; None where all devices have one together."""
        return next((number for part in self.parts if (number := part.num_workers) is not None), None)

    @property
    def components(self) -> Mapping[str, str]:
        """The prefixes of parameters by the names of components of the model."""
        return {name: prefix for part in self.parts for name, prefix in part.named_components.items()}

    @property
    def parents(self) -> tuple[str, ...]:
        """The names of all that the job reads: its `models`, what its parts read, and the store."""
        named = (*self.models, *(name for part in self.parts for name in part.parents), self.data.store)
        return tuple(dict.fromkeys(name for name in named if name is not None))

    @property
    def started_from(self) -> FirstCheckpoint | None:
        """The checkpoint of another job with which the job begins, also where its own steps were set since."""
        return next((start for part in self.parts if (start := part.started_from) is not None), None)

    @property
    def checkpoint_roots(self) -> tuple[str, ...]:
        """The folders or URLs of checkpoints, or the jobs that have them, which the job reads to begin or to go on."""
        return tuple(root for part in self.parts for root in part.checkpoint_roots)

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
        parts = tuple(part.renamed(rename) for part in self.parts)
        return replace(self, name=name, base=base, data=data, parts=parts)

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of step `step` (0-based). It depends on the step alone, so no state is restored."""
        place, length = self.schedule_place(step)
        return self.optimizer.lr * self.schedule.factor(place, num_steps=length) * self.phase(step).lr_factor

    def searches(self) -> list["Job"]:
        """Returns the short runs that are compared before the job is trained."""
        return [search for part in self.parts for search in part.searches(self)]

    def variants(self) -> dict[Variant, "Job"]:
        """Returns its variants other than its own, as jobs to be profiled."""
        return {variant: job for part in self.parts for variant, job in part.variants(self).items()}

    @property
    def varies(self) -> bool:
        """Whether its batch size, precision or exchanges are still to be chosen."""
        return any(part.varies(self) for part in self.parts)

    @property
    def phases(self) -> tuple[TrainingPhase, ...]:
        """The phases of a job that has changed its batch size, precision or exchanges on the way; none of others."""
        return tuple(phase for part in self.parts for phase in part.phases)

    def with_phases(self, phases: Sequence[TrainingPhase]) -> "Job":
        """Returns the job, as it was written, with phases."""
        kind, values = part_kind("phases"), {"phases": tuple(phases)}
        assert kind is not None, "a built-in feature has the key"
        return replace(self, num_steps=phases[-1].num_steps).with_parts(kind(**values))

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
        """Returns where the schedule stands at a step, and its length, in steps of the job as it was written.

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
