"""Computing with bf16 weights while training fp32 ones, whoever holds them and however they are divided.

With w the fp32 weights that the optimizer updates, every module computes with round(w) in bf16, activations included,
and its gradient arrives at w in fp32, where micro-batches and ranks add up. The rounded copies live from a module's
forward to its backward; names, checkpoints and optimizers see w alone.

Source: Micikevicius et al., Mixed Precision Training (arXiv:1710.03740), section 3.1, with bf16 for fp16, which needs
no scaling of the loss.
"""

# No postponed annotations here: DDP reads those of its hooks.
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

HALF = torch.bfloat16
# Containers, which have no forward; and statistics of batches, which kernels keep in fp32 beside inputs in bf16.
LEFT_ALONE = (nn.ParameterList, nn.ParameterDict, _BatchNorm)


def compute_in_half(model: nn.Module) -> None:
    """Makes every module of `model` that has parameters of its own compute in bf16; call it when all else is laid out.

    A rounded weight stands in its module's instance while `forward` runs, where Python looks before the module's
    parameters are asked for, so that nothing is wrapped or renamed. Inputs in fp32 are rounded too.
    """
    for module in model.modules():
        if not any(True for _ in module.parameters(recurse=False)) or isinstance(module, LEFT_ALONE):
            continue
        holders = [module]
        if isinstance(module, nn.MultiheadAttention):  # reads the weights of a module that it never calls
            holders.append(module.out_proj)
        module.register_forward_pre_hook(_Round(holders), with_kwargs=True)
        module.register_forward_hook(_Restore(holders), always_call=True)


@torch.no_grad()
def round_weights(model: nn.Module, *, but: Collection[str] = ()) -> None:
    """Keeps frozen weights in bf16, of the modules that `compute_in_half` makes compute so: no fp32 is updated.

    but: names of modules whose weights, which others may share, stay as they are.
    """
    kept = {id(parameter) for name in but for parameter in model.get_submodule(name).parameters(recurse=False)}
    for module in model.modules():
        if not isinstance(module, LEFT_ALONE):
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point() and id(parameter) not in kept:
                    parameter.data = parameter.data.to(HALF)


def average_in_half(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """A communication hook of DDP: averages a bucket of fp32 gradients, each rounded to bf16 on its way.

    PyTorch's own hook of that kind is for NCCL alone.
    """
    gradients = bucket.buffer()
    rounded = (gradients / group.size()).to(HALF)
    arriving: torch.futures.Future[list[Tensor]] = dist.all_reduce(rounded, group=group, async_op=True).get_future()
    return arriving.then(lambda future: gradients.copy_(future.value()[0]))


class _Round:
    """Before a module's forward: its weights and inputs in bf16."""

    def __init__(self, holders: list[nn.Module]) -> None:
        self._holders = holders

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for holder in self._holders:
            for name, parameter in holder._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    holder.__dict__[name] = parameter.to(HALF)
        return tuple(map(_rounded, args)), {key: _rounded(value) for key, value in kwargs.items()}


class _Restore:
    """Behind it, whether it raised or not."""

    def __init__(self, holders: list[nn.Module]) -> None:
        self._holders = holders

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for holder in self._holders:
            for name in holder._parameters:
                holder.__dict__.pop(name, None)


def _rounded(value: Any) -> Any:
    return value.to(HALF) if isinstance(value, Tensor) and value.dtype == torch.float32 else value
