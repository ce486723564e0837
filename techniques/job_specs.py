"""The values of a job: where its model and samples come from, and how it is trained and evaluated."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from ringmaster.codec import SINCE_LATER, stored_flat
from ringmaster.techniques.job_features import (
    MAX_AT_ONCE,
    Choices,
    Description,
    Distinct,
    Format,
    Limits,
    ModuleName,
    Positive,
    Whole,
)

PADDINGS = ("longest", "max_length")
SAMPLINGS = ("random", "length-grouped")
ATTENTIONS = ("auto", "sdpa", "flash", "flex")
RETRIEVER = "retriever"
"""The option of kinds of data whose samples read a knowledge store."""
FRESH_HEAD = frozenset({"num_labels", "id2label", "architectures"})
"""Keys of a pretrained model's `config` that may give it a head which its file lacks."""


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

    architecture: Annotated[
        str | None,
        Format("architecture"),
        Description(
            "a Hugging Face class, such as LlamaForCausalLM; with from_pretrained, the class that gets the weights, "
            "with a fresh head where they have none"
        ),
    ] = None
    config: Annotated[
        Mapping[str, Any],
        Description(
            "the fields of its Hugging Face config, such as {hidden_size: 256}; without a width, those of `base`"
        ),
    ] = field(default_factory=dict)
    from_pretrained: Annotated[
        str | None,
        Format("pretrained"),
        Description("a folder with config.json and safetensors weights, or the name of a model on the hub"),
    ] = None
    factory: Annotated[
        str | None,
        Format("factory"),
        Description('"package.module:function", which returns a torch module, such as my_models:build'),
    ] = None
    kwargs: Annotated[Mapping[str, Any], Description("the arguments of the factory, such as {width: 64}")] = field(
        default_factory=dict
    )
    attention: Annotated[str, Choices(ATTENTIONS)] = "auto"
    command: Annotated[
        tuple[str, ...] | None,
        Format("command"),
        Description('a trainer of your own that speaks our protocol, such as "python train.py"'),
    ] = None
    configs: Annotated[
        tuple[Mapping[str, Any], ...],
        Distinct(),
        Description("configs for the command, such as [{micro_batch: 8}]"),
    ] = ()
    adopt: Annotated[
        str | None, Format("adopt"), Description("true for an unedited script of Trainer, TRL or Accelerate")
    ] = field(default=None, metadata=SINCE_LATER)

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
            files they are stored among the other fields.
    """

    # Before the paths, whose checks read it.
    format: Annotated[str | None, Format("rows")] = field(default=None, metadata=SINCE_LATER)
    source: Annotated[
        str | None,
        Format("source"),
        Description("a data set that every machine has: python-stdlib (text) or digits (images)"),
    ] = None
    path: Annotated[
        str | None,
        Format("files"),
        Description('text, JSONL, CSV or Parquet files, relative to the batch file, such as "data/*.jsonl"'),
    ] = None
    dataset: Annotated[
        str | None, Format("folder"), Description("a Hugging Face datasets name or folder, such as wikitext")
    ] = None
    factory: Annotated[
        str | None,
        Format("factory"),
        Description('"package.module:function", which returns (training, held_out), such as my_data:load'),
    ] = None
    kwargs: Annotated[
        Mapping[str, Any],
        Description("the arguments of the factory, of load_dataset, or of the kind, such as {name: en}"),
    ] = field(default_factory=dict)
    seq_len: Annotated[
        int | None, Limits(ge=2, le=MAX_AT_ONCE), Description("the number of tokens of a text sample, such as 128")
    ] = None
    vocab_size: Annotated[
        int,
        Limits(ge=257, le=MAX_AT_ONCE),
        Description("the size of the byte-level vocabulary, such as 2048"),
    ] = 2048
    tokenizer: Annotated[
        str | None, Format("folder"), Description("a folder or hub name with a tokenizer, such as gpt2")
    ] = None
    split: Annotated[str, Description("the split of the data set to train on, such as train")] = "train"
    held_out_split: Annotated[str | None, Description("the split to evaluate on, such as test")] = None
    held_out: Annotated[float, Limits(ge=0, lt=1), Description("the share held out for evaluation, such as 0.1")] = 0.1
    name: Annotated[str | None, Description("the name of a data set under `datasets:`, such as reviews")] = field(
        default=None, metadata=SINCE_LATER
    )
    version: Annotated[
        str | None, Format("version"), Description("a version of the data set, such as 3, or latest")
    ] = field(default=None, metadata=SINCE_LATER)
    held_out_path: Annotated[
        str | None, Format("files"), Description('files to evaluate on, such as "data/test/*.jsonl"')
    ] = field(default=None, metadata=SINCE_LATER)
    window: Annotated[
        Mapping[str, Any] | None, Format("window"), Description("the rows to read, such as {last_days: 30}")
    ] = field(default=None, metadata=SINCE_LATER)
    time_column: Annotated[str | None, Description("the column with a row's time, such as at")] = field(
        default=None, metadata=SINCE_LATER
    )
    kind: Annotated[
        str | None,
        Format("data_kind"),
        Description("what makes samples of the rows, such as text, or leave the key out"),
    ] = field(default=None, metadata=SINCE_LATER)
    padding: Annotated[str, Choices(PADDINGS)] = field(default="longest", metadata=SINCE_LATER)
    sampling: Annotated[str, Choices(SAMPLINGS)] = field(default="random", metadata=SINCE_LATER)
    packing: Annotated[
        bool,
        Description("whether several samples share a row of seq_len tokens, which global_batch_size then counts"),
    ] = field(default=False, metadata=SINCE_LATER)
    original_path: str | None = field(default=None, metadata=SINCE_LATER)
    original_held_out_path: str | None = field(default=None, metadata=SINCE_LATER)
    options: Mapping[str, Any] = stored_flat({"text_column": "text"})

    def originals(self) -> dict[str, str | None]:
        """Returns the fields that a run sets and no file has: the paths of files that it has copied."""
        return {"original_path": self.original_path, "original_held_out_path": self.original_held_out_path}

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
ADAPTERS = ("lora", "prefix", "ia3", "prompt")
VIRTUAL_TOKENS = ("prefix", "prompt")
"""The kinds of adapters that put learned tokens before each row."""
INITIALIZATIONS = ("default", "pissa", "pissa_niter_16", "olora")
CONTINUE, MERGE = "continue", "merge"
BASE_ADAPTERS = (CONTINUE, MERGE)
"""What a job with an adapter does with the adapter that its base is."""
LEARNING_RATE_RULES = ("damped-gain", "square-root")


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

    kind: Annotated[str, Choices(ADAPTERS)] = "lora"
    rank: Annotated[Whole, Description("the rank of a lora, such as 8")] = 8
    alpha: Annotated[Positive, Description("the scale of a lora before the division by its rank, such as 16")] = 16.0
    rank_stabilised: Annotated[bool, Description("true to scale by the root of the rank, else false")] = False
    targets: Annotated[
        tuple[ModuleName, ...],
        Distinct(),
        Description("a list of names of linear modules, such as [q_proj, v_proj], or leave the key out"),
    ] = ()
    feedforward: Annotated[
        tuple[ModuleName, ...],
        Distinct(),
        Description("those of the targets whose inputs an ia3 scales, such as [down_proj]"),
    ] = ()
    num_virtual_tokens: Annotated[Whole, Description("the length of a prefix or a prompt, such as 20")] = 20
    modules_to_save: Annotated[
        tuple[ModuleName, ...],
        Distinct(),
        Description("a list of names of modules that are trained as they are, such as [classifier]"),
    ] = ()
    from_pretrained: Annotated[
        str | None, Format("adapter"), Description("a folder with an adapter that peft or a job has saved")
    ] = None
    base_adapter: Annotated[
        str | None,
        Choices(BASE_ADAPTERS),
        Description("continue, to train the adapter of the base further, or merge, to build on it"),
    ] = field(default=None, metadata=SINCE_LATER)
    dora: Annotated[bool, Description("true for a DoRA, else false")] = field(default=False, metadata=SINCE_LATER)
    dropout: Annotated[
        float, Limits(ge=0, lt=1), Description("the share of a lora's inputs to drop in training, such as 0.05")
    ] = field(default=0.0, metadata=SINCE_LATER)
    initialization: Annotated[
        str, Choices(INITIALIZATIONS), Description(f"of a lora, one of {', '.join(INITIALIZATIONS)}")
    ] = field(default="default", metadata=SINCE_LATER)

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
    """Settings of the parameters whose names match a pattern; a later group overrides an earlier one.

    lr, weight_decay: in place of the optimizer's; None leaves them.
    """

    match: Annotated[
        str,
        Format("pattern"),
        Description('a glob pattern of parameter names, such as "*.bias" or "classifier.*"'),
    ]
    lr: Annotated[Positive | None, Description("the learning rate of these parameters, such as 1e-3")] = None
    weight_decay: Annotated[
        float | None, Limits(ge=0), Description("the weight decay of these parameters, such as 0.0")
    ] = None


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The optimizer that updates the weights: its name, its learning rate `lr`, and its other arguments.

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

    name: Annotated[str, Choices(OPTIMIZERS)] = "adamw"
    lr: Annotated[Positive, Description("a learning rate such as 3e-4")] = 1e-3
    options: Annotated[
        Mapping[str, Any], Description("further arguments of the optimizer, such as {weight_decay: 0.1}")
    ] = field(default_factory=dict)
    layer_decay: Annotated[
        float | None,
        Limits(gt=0, le=1),
        Description("the factor of the learning rate from each layer to the one below it, such as 0.9"),
    ] = field(default=None, metadata=SINCE_LATER)
    groups: Annotated[
        tuple[ParameterGroup, ...],
        Description('a list of settings by parameter name, such as [{match: "*.bias", weight_decay: 0.0}]'),
    ] = field(default=(), metadata=SINCE_LATER)
    decay_norms_and_biases: Annotated[
        bool, Description("false for no weight decay of parameters with fewer than two dimensions, else true")
    ] = field(default=True, metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """The learning rate over the steps: a linear warm-up, then constant or decaying.

    Attributes:
        name: "constant"; "linear" or "cosine", which decay from the warm-up to the last step; or "wsd" (warm-up,
            stable, decay: Hu et al., MiniCPM, arXiv:2404.06395), which is constant and then decays linearly.
        warmup_steps, warmup_ratio: the steps of the warm-up, or their share of all steps, rounded up; not both.
        min_lr_ratio: the share of the learning rate at which a decay ends.
        decay_ratio: the share of the steps in which "wsd" decays, rounded up; None for `DECAY_RATIO`.
        num_steps: the steps of the schedule, of which the job may be a part; None for those of the job.
    """

    name: Annotated[str, Choices(SCHEDULES)] = "constant"
    warmup_steps: Annotated[int, Limits(ge=0), Description("the steps of the linear warm-up, such as 10")] = 0
    warmup_ratio: Annotated[
        float | None,
        Limits(ge=0, lt=1),
        Description("the warm-up's share of the steps in place of warmup_steps, such as 0.1"),
    ] = field(default=None, metadata=SINCE_LATER)
    min_lr_ratio: Annotated[
        float,
        Limits(ge=0, le=1),
        Description("the share of the learning rate at which the decay ends, such as 0.1"),
    ] = field(default=0.0, metadata=SINCE_LATER)
    decay_ratio: Annotated[
        float | None,
        Limits(gt=0, le=1),
        Description(f"the share of the steps in which wsd decays, such as {DECAY_RATIO}"),
    ] = field(default=None, metadata=SINCE_LATER)
    num_steps: Annotated[
        Whole | None,
        Description("the steps of the schedule where the job is a part of them, or leave it out"),
    ] = field(default=None, metadata=SINCE_LATER)

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
class EvaluationSlice:
    """The slice of the held-out rows in a random order that an evaluation on the way computes.

    step: so many steps are done, and it is not the last one.
    begin, end: of the part in the random order of all rows, as shares of them, 0 <= begin < end <= 1.
    seed: of that order, which is the same in all jobs that are compared.
    """

    step: int
    begin: float = 0.0
    end: float = 1.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """Evaluation on held-out data: at the end, every `every_steps` steps where that is set, and after `at_steps`.

    Attributes:
        metrics: names of `ringmaster.techniques.metric`; models are compared by the first one.
        max_batches: the limit of jobs that were stored before `max_rows`, in global batches; None where `max_rows` is.
        max_rows: the most rows of one evaluation, the first ones held out. No setting of training changes it, so that
            jobs with different batch sizes are compared on the same rows.
        max_new_tokens: the most tokens that a model writes to a row, for metrics of what it writes.
        parts: the parts of the rows that evaluations on the way compute; of two of a step, the last one counts.
    """

    every_steps: Annotated[Whole | None, Description("the steps between two evaluations, such as 30")] = None
    at_steps: Annotated[
        tuple[Whole, ...],
        Distinct(),
        Description("further steps after which to evaluate, such as [10, 100]"),
    ] = ()
    metrics: Annotated[
        tuple[Annotated[str, Format("evaluation_metric")], ...],
        Distinct(at_least=1),
        Description("a list of metrics, such as [loss, accuracy]"),
    ] = ("loss",)
    max_batches: Annotated[
        Whole | None,
        Description("max_rows in batches of the file's own global_batch_size, whatever a sweep tries, such as 16"),
    ] = None
    max_new_tokens: Annotated[
        Whole, Description("the most tokens that a model writes for a metric generated_*, such as 64")
    ] = 64
    max_rows: Annotated[Whole, Description("the most held-out rows of one evaluation, such as 1024")] = field(
        default=1024, metadata=SINCE_LATER
    )
    parts: tuple[EvaluationSlice, ...] = field(default=(), metadata=SINCE_LATER)

    def is_due(self, place: float, *, before: float) -> bool:
        """Returns whether an evaluation is due after the step from `before` to `place`, apart from that at the end.

        Both are places in the job's schedule: the numbers of steps, unless the batch size has changed.
        """
        every = self.every_steps
        is_regular = every is not None and place // every > before // every
        return is_regular or any(before < step <= place for step in self.at_steps)
