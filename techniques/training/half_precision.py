"""Computation with bf16 weights while fp32 weights are trained, in any layout.

With w the fp32 weights that the optimizer updates, every module computes with round(w) in bf16, activations included.
Its gradient reaches w in fp32, where micro-batches and ranks are summed. The rounded copies exist from a module's
forward to its backward; names, checkpoints and optimizers see only w.

Source: Micikevicius et al., Mixed Precision Training (arXiv:1710.03740), section 3.1, with bf16 for fp16, which needs
no scaling of the loss.
"""

# No postponed annotations here, as DDP checks the annotations of its hooks.
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

HALF = torch.bfloat16
# Containers, which have no forward; and batch normalisation, whose kernels take fp32 statistics with bf16 inputs.
LEFT_ALONE = (nn.ParameterList, nn.ParameterDict, _BatchNorm)


def compute_in_half(model: nn.Module) -> None:
    """Makes every module with parameters of its own compute in bf16; call it after the model is laid out.

    While `forward` runs, rounded weights are set in the module instance's `__dict__`, which Python reads before the
    module's parameters. So nothing is wrapped or renamed. Inputs in fp32 are rounded too.
    """
    for module in model.modules():
        if not any(True for _ in module.parameters(recurse=False)) or isinstance(module, LEFT_ALONE):
            continue
        holders = [module]
        if isinstance(module, nn.MultiheadAttention):  # it reads the weights of a sub-module without calling it
            holders.append(module.out_proj)
        module.register_forward_pre_hook(partial(_round, holders), with_kwargs=True)
        module.register_forward_hook(partial(_restore, holders), always_call=True)


@torch.no_grad()
def round_weights(model: nn.Module, *, but: Collection[str] = ()) -> None:
    """Stores frozen weights in bf16, in the modules that `compute_in_half` makes compute in bf16.

    No optimizer needs their fp32 values. `but` lists names of modules whose weights stay as they are, as other modules
    may share them.
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
    """Communication hook of DDP that averages a bucket of fp32 gradients, each rounded to bf16 for the exchange.

    PyTorch's own hook of that kind supports NCCL only.
    """
    gradients = bucket.buffer()
    rounded = (gradients / group.size()).to(HALF)
    arriving: torch.futures.Future[list[Tensor]] = dist.all_reduce(rounded, group=group, async_op=True).get_future()
    return arriving.then(lambda future: gradients.copy_(future.value()[0]))


def _round(holders: list[nn.Module], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook that rounds the weights of `holders` and the inputs to bf16."""
    for holder in holders:
        for name, parameter in holder._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                holder.__dict__[name] = parameter.to(HALF)
    return tuple(map(_rounded, args)), {key: _rounded(value) for key, value in kwargs.items()}


def _restore(holders: list[nn.Module], module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook that removes the rounded weights, even where the forward raised."""
    for holder in holders:
        for name in holder._parameters:
            holder.__dict__.pop(name, None)


def _rounded(value: Any) -> Any:
    return value.to(HALF) if isinstance(value, Tensor) and value.dtype == torch.float32 else value
