"""What is trained: a `Job` says everything that decides the weights, and nothing about how it is parallelised."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PRECISIONS = ("fp32", "bf16", "bf16-params")
COMMUNICATIONS = ("fp32", "bf16")
OPTIMIZERS = ("adamw", "sgd")
SCHEDULES = ("constant", "linear", "cosine")
METRICS = ("loss", "perplexity", "accuracy")
ATTENTIONS = ("auto", "sdpa", "flash", "flex")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Where a model comes from: exactly one of `architecture`, `from_pretrained`, `factory` and `command`.

    architecture: a Hugging Face class built from `config` with fresh weights, e.g. "LlamaForCausalLM".
    from_pretrained: a local folder or a hub name; only safetensors weights are read. `config` overrides its fields.
    factory: "package.module:function", called with `kwargs`, returning a torch module.
    attention: how a Hugging Face model computes it, which changes the last digits: "auto" (transformers' choice, "sdpa"
        where the model has it), "sdpa" (PyTorch's, whose kernels on a GPU are FlashAttention's or memory-efficient),
        "flash" (the package flash-attn: a GPU, bf16) or "flex" (PyTorch's FlexAttention: a GPU).
    command: the words of a command that builds and trains the model by itself (docs/commands.md); `configs` are what
        it may be told as its config, one of which is chosen by measuring; it finds `kwargs` in its order.
    """

    architecture: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    from_pretrained: str | None = None
    factory: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "auto"
    command: tuple[str, ...] | None = None
    configs: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Where samples come from: exactly one of `source`, `path`, `dataset` and `factory`; always map-style.

    source: a data set that every machine has: "python-stdlib" (text) or "digits" (8x8 images, 10 classes); or
        "command", for a model's command that reads its own.
    path: a glob of text, JSONL or Parquet files. dataset: a Hugging Face `datasets` name or folder.
    factory: "package.module:function", called with `kwargs`, returning (training, held_out): two objects with
        `__len__` and `__getitem__(index) -> dict of tensors`.
    seq_len: tokens of a text sample. vocab_size: of the byte-level BPE that is trained on the text where no
        `tokenizer` (a folder or hub name) is given. text_column: the field or column that holds the text.
    split, held_out_split: of a `datasets` data set. held_out: the share kept for evaluation where there is no split.
    """

    source: str | None = None
    path: str | None = None
    dataset: str | None = None
    factory: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seq_len: int | None = None
    vocab_size: int = 2048
    tokenizer: str | None = None
    text_column: str = "text"
    split: str = "train"
    held_out_split: str | None = None
    held_out: float = 0.1


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """`name` with learning rate `lr`; `options` are its other arguments (weight_decay, betas, eps, momentum)."""

    name: str = "adamw"
    lr: float = 1e-3
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """Learning rate over steps: a linear warm-up of `warmup_steps`, then constant, or down to zero at the last step."""

    name: str = "constant"
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """What is measured on held-out data: at the end, and every `every_steps` steps where that is set.

    max_batches bounds one evaluation, in global batches. The first metric is the one that models are compared by.
    """

    every_steps: int | None = None
    metrics: tuple[str, ...] = ("loss",)
    max_batches: int = 16


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model to train.

    name: unique in its batch, made of letters, digits, "-", "_" and ".".
    base: the model that this one adapts: another job's name, or "models:/NAME@ALIAS"; its weights are the first ones.
    loss: None for the model's own, or "package.module:function", called as f(model_output, batch), returning
        (sum, count), so that the mean over a global batch does not depend on how the batch was divided.
    precision: "fp32"; "bf16" (autocast; weights and optimizer stay in fp32); or "bf16-params" (everything is computed
        with weights rounded to bf16, which the optimizer keeps and updates in fp32).
    communication: what gradients are rounded to on their way between devices, "fp32" or "bf16"; they add up in fp32
        where the technique can, and one device alone rounds nothing.
    compile: whether the model's repeated layers are compiled (`torch.compile`); needs a C++ compiler on every node.
    clip_grad_norm: the largest global L2 norm of the gradient, or None.
    global_batch_size: samples that make one step, on whatever devices.
    num_steps, num_epochs: exactly one is given; an epoch becomes steps once the data's size is known.
    techniques, num_devices: what the planner may choose from; None for everything.
    exact: pins the layout, for models that draw random numbers (dropout) whose weights must repeat bit by bit.
    """

    name: str
    model: ModelSpec
    data: DataSpec
    base: str | None = None
    adapter: Mapping[str, Any] | None = None
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

    @property
    def total_steps(self) -> int:
        """The number of steps; a job given in epochs must have been resolved against its data before."""
        assert self.num_steps is not None, f"job {self.name}: epochs were not resolved into steps"
        return self.num_steps
