"""Kernels of a step that change its last digits: compiled layers, attention, optimizers. For jobs with `numerics` only.

Before they are used, a step of theirs is compared with a plain one, on the devices and with the model and data of the
job. A config names them under the key `technique.KERNELS`: "compile:default", "attention:eager", "optimizer:foreach".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.compat.transformers import attention_of
from ringmaster.features.kernels.job import Numerics
from ringmaster.techniques.job import Job
from ringmaster.techniques.loss import loss_function
from ringmaster.techniques.model_facts import FLASH_PACKAGE, IMPLEMENTATIONS
from ringmaster.techniques.processes.gang_events import KernelsRefused
from ringmaster.techniques.processes.order import TRIAL
from ringmaster.techniques.technique import ATTENTION, KERNELS, Config, Technique
from ringmaster.techniques.training.callbacks import JobContext, TrainerCallback, TrainerContext
from ringmaster.techniques.training.recomputation import compile_layers, why_not_compiled

COMPILE, OPTIMIZER = "compile", "optimizer"
COMPILE_MODES = {"cpu": ("default",), "gpu": ("default", "max-autotune-no-cudagraphs")}
OF_OPTIMIZERS: Mapping[str, Mapping[str, Mapping[str, bool]]] = {
    "adamw": {"foreach": {"foreach": True}},
    "sgd": {"fused": {"fused": True}},
}
"""The kernels of each optimizer besides its plain ones (`optimizers.KERNELS`), and their arguments."""
NUM_COMPARED = 2
"""Steps that are compared: a kernel may keep what belongs to the first batch, such as a mask."""
SMALL = 0.001
"""Gradients below this share of the largest one are compared with that share: theirs may be rounding alone."""

StepSample = tuple[float, Sequence[Tensor]]
"""The loss of a step and what it computes for each parameter: gradients, or updates."""


class KernelsCallback(TrainerCallback):
    """Has the steps of a job computed by the kernels of its config, if they agree with plain ones."""

    def __init__(self, context: JobContext) -> None:
        super().__init__(context)
        self._name: str = context.order.config[KERNELS]
        self._refusal = ""

    @classmethod
    def is_for(cls, context: JobContext) -> bool:
        """Returns whether the config names kernels."""
        return context.technique is not None and context.order.config.get(KERNELS) is not None

    @classmethod
    def further_configs(cls, job: Job, technique: Technique, *, device_kind: str) -> Iterator[tuple[Config, str]]:
        """Yields the kernels that the job may use."""
        if technique.takes_kernels:
            for name, reason in kernel_choices(job, device_kind=device_kind).items():
                yield {KERNELS: name}, reason

    def before_training(self, trainer: TrainerContext) -> None:
        """Compares the kernels with plain ones. Raises ValueError in a trial where they differ."""
        numerics = trainer.job.feature(Numerics)
        assert numerics is not None, "only such jobs have kernels to choose from"
        arguments = optimizer_kernels(self._name, trainer.job)
        plain = other = partial(_sampled_step, trainer)
        if arguments is not None:
            plain, other = (
                partial(sampled_updates, trainer.updated_parameters, build, lr=trainer.job.optimizer.lr)
                for build in (trainer.build_optimizer, partial(trainer.build_optimizer, kernels=arguments))
            )
        self._refusal = why_kernels_differ(
            self._name,
            plain=plain,
            use=partial(use_kernels, trainer.unwrapped, self._name, device_type=trainer.ranks.device.type),
            other=other,
            tolerance=numerics.tolerance,
            agree=trainer.ranks.max,
        )
        if self._refusal and trainer.order.purpose == TRIAL:
            raise ValueError(self._refusal)
        if arguments is not None and not self._refusal:
            trainer.optimizer = trainer.build_optimizer(kernels=arguments)

    def events(self) -> Iterator[KernelsRefused]:
        """Yields why the kernels are left out, if they are."""
        if self._refusal:
            yield KernelsRefused(message=self._refusal)


TRAINER_CALLBACKS = (KernelsCallback,)
WITHOUT_VALUES: Mapping[str, Callable[..., Any]] = {"why_kernels_differ": lambda name, *, use, **_: use() and ""}
"""What takes the place of functions of this module in estimates on tensors that have no values."""


def kernel_choices(job: Job, *, device_kind: str) -> dict[str, str]:
    """Returns the kernels that a job with `numerics` may use, each with the reason why it cannot; "" where it may.

    device_kind: "cpu" or "gpu".
    """
    if job.feature(Numerics) is None or not job.trains or job.is_black_box:
        return {}
    loss = loss_function(job.loss, job.loss_options)
    if loss is not None and loss.num_written_tokens:
        return {COMPILE: f"the loss {loss.name} trains on what the model writes, which no two kernels write alike"}
    choices: dict[str, str] = {}
    if not job.compile:
        reason = why_not_compiled("cuda" if device_kind == "gpu" else "cpu")
        choices |= {f"{COMPILE}:{mode}": reason for mode in COMPILE_MODES[device_kind]}
    if job.model.factory is None and job.data.packing is False:
        others = {"eager": "", "sdpa": ""}
        if device_kind == "gpu":
            is_fp32 = job.precision == "fp32"
            lacking = "" if find_spec(FLASH_PACKAGE) else "the package flash-attn is not installed"
            others |= {"flash": "it computes in bf16 only" if is_fp32 else lacking, "flex": ""}
        plain = "sdpa" if job.model.attention == "auto" else job.model.attention
        choices |= {f"{ATTENTION}:{name}": reason for name, reason in others.items() if name != plain}
    choices |= {f"{OPTIMIZER}:{name}": "" for name in OF_OPTIMIZERS.get(job.optimizer.name, ())}
    return choices


def optimizer_kernels(name: str, job: Job) -> Mapping[str, bool] | None:
    """Returns the arguments of the job's optimizer for the kernels `name`; None for its plain ones."""
    kind, _, which = name.partition(":")
    return OF_OPTIMIZERS[job.optimizer.name][which] if kind == OPTIMIZER else None


def use_kernels(model: nn.Module, name: str, *, device_type: str) -> Callable[[], None]:
    """Has a model computed by the kernels `name`; returns what undoes it. Raises ValueError on an unknown one.

    The kernels of optimizers are their arguments: see `optimizer_kernels`.
    """
    kind, _, which = name.partition(":")
    if kind == COMPILE:
        return compile_layers(model, device_type=device_type, mode=which)
    if kind == ATTENTION:
        config, wanted = getattr(model, "config", None), IMPLEMENTATIONS.get(which, which)
        if config is None or not hasattr(model, "set_attn_implementation"):
            raise ValueError("the model's attention cannot be chosen")
        before = attention_of(config)
        choose: Any = model.set_attn_implementation
        choose(wanted)
        if attention_of(config) != wanted:
            raise ValueError(f"{type(model).__name__} cannot compute its attention so")
        return partial(choose, before)
    if kind != OPTIMIZER:
        raise ValueError(f"kernels {name!r} are unknown")
    return lambda: None


def why_kernels_differ(
    name: str,
    *,
    plain: Callable[[int], StepSample],
    use: Callable[[], Callable[[], None]],
    other: Callable[[int], StepSample],
    tolerance: float,
    agree: Callable[[float], float] = float,
) -> str:
    """Uses other kernels, unless their steps differ from plain ones; returns the reason, "" where they are in use.

    plain, other: compute a step, before and after `use`, which returns what undoes it.
    agree: returns the largest of all ranks' values.
    """
    expected = [plain(step) for step in range(NUM_COMPARED)]
    reason, difference, undo = "", math.inf, None
    try:
        undo = use()
        results = [other(step) for step in range(NUM_COMPARED)]
        difference = max(map(relative_difference, expected, results))
    except Exception as error:  # noqa: BLE001 - a compiler or a kernel may raise anything; the plain step continues
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    difference = agree(difference)
    if difference <= tolerance:
        return ""
    if undo is not None:
        undo()
    reason = (
        reason or f"its step differs from the plain one by {difference:.1e}, and numerics.tolerance is {tolerance:g}"
    )
    return f"kernels {name} are left out: {reason}"


def relative_difference(plain: StepSample, other: StepSample) -> float:
    """Returns the largest relative difference: of the loss, and of each tensor in the L2 norm.

    With a and b the tensors and A the largest norm of any a, that is |a - b| / max(|a|, .001 A); infinite where one has
    a tensor that the other lacks, or what is not finite.
    """
    (loss, tensors), (other_loss, others) = plain, other
    if len(tensors) != len(others) or any(a.shape != b.shape for a, b in zip(tensors, others, strict=True)):
        return math.inf
    norms = [float(torch.linalg.vector_norm(a.double())) for a in tensors]
    least = SMALL * max(norms, default=0.0)
    differences = [abs(loss - other_loss) / max(abs(loss), 1e-30)]
    for a, b, norm in zip(tensors, others, norms, strict=True):
        distance = float(torch.linalg.vector_norm(a.double() - b.double()))
        differences.append(distance / max(norm, least) if distance else 0.0)
    return max((value if math.isfinite(value) else math.inf) for value in differences)


@torch.no_grad()
def sampled_updates(
    parameters: Sequence[nn.Parameter], build: Callable[[], torch.optim.Optimizer], seed: int, *, lr: float
) -> StepSample:
    """Returns what two steps of a new optimizer make of drawn gradients and values; the parameters stay as they are.

    The values are as large as the learning rate, so that the steps are not lost in their rounding.
    """
    draw, before = torch.Generator().manual_seed(seed), [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.copy_(lr * torch.randn(parameter.shape, generator=draw))
    optimizer = build()
    for _ in range(2):  # the second one reads the state of the first
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter)
        optimizer.step()
    updated = [parameter.detach().clone() for parameter in parameters]
    for parameter, value in zip(parameters, before, strict=True):
        parameter.copy_(value)
        parameter.grad = None
    return 0.0, updated


def _sampled_step(trainer: TrainerContext, step: int) -> StepSample:
    """Returns the loss and the gradients of a step, after which the job is as before."""
    buffers = [buffer.clone() for buffer in trainer.model.buffers()]
    trainer.next_step, before = step, trainer.next_step
    own_sums = trainer.compute_gradients(trainer.own_part)
    trainer.next_step = before
    loss_sum, count, *_ = trainer.ranks.sum([*own_sums])
    gradients = [parameter.grad.clone() for parameter in trainer.parameters if parameter.grad is not None]
    for parameter in trainer.parameters:
        parameter.grad = None
    with torch.no_grad():
        for buffer, value in zip(trainer.model.buffers(), buffers, strict=True):
            buffer.copy_(value)
    trainer.beat()
    return loss_sum / max(count, 1.0), gradients
