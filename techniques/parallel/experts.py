"""Experts that are divided over ranks: each rank computes some of them, for the tokens of all ranks.

Sources: Shazeer et al., Outrageously Large Neural Networks (arXiv:1701.06538); Lepikhin et al., GShard
(arXiv:2006.16668). No token is dropped: ranks exchange how many tokens go to each expert before the tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
"""Arguments of the forward of experts in Hugging Face's models, whose tensors hold one expert after another."""


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules whose own parameters are those of several experts, along their first dimension."""
    return [module for module in model.modules() if _is_of_experts(module)]


def _is_of_experts(module: nn.Module) -> bool:
    number, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    return (
        isinstance(number, int)
        and 0 < len(own) == len(list(module.parameters()))
        and all(parameter.dim() > 1 and parameter.shape[0] == number for parameter in own)
        and list(inspect.signature(type(module).forward).parameters)[1:] == ARGUMENTS
    )


def divide_experts(module: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Leaves this rank an equal part of the experts, and has tokens travel to them; returns the divided parameters.

    mesh: of one dimension. Its size divides the number of experts.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    module.forward = partial(_routed, module, type(module).forward, mesh)
    return list(module.parameters(recurse=False))


def _routed(
    module: nn.Module, compute: Callable[..., Tensor], mesh: DeviceMesh, hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Returns what the experts that were chosen for each token make of it.

    hidden: [tokens, width]. index, weights: [tokens, k], the chosen experts and their shares.
    """
    group, num_ranks, (_, top_k) = mesh.get_group(), mesh.size(), index.shape
    num_own = cast(int, module.num_experts) // num_ranks
    chosen = index.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    leaving = torch.bincount(chosen, minlength=num_own * num_ranks).view(num_ranks, num_own)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    sent, received = leaving.sum(1).tolist(), arriving.sum(1).tolist()
    tokens = all_to_all_single_autograd(hidden[order // top_k], received, sent, group)
    own = torch.arange(num_own, device=index.device).repeat(num_ranks).repeat_interleave(arriving.flatten())
    if len(tokens):
        part = _with_tensors(module, num_own, dtype=tokens.dtype, scale=1 / num_ranks)
        tokens = compute(part, tokens, own[:, None], torch.ones_like(own[:, None], dtype=weights.dtype))
    returned = all_to_all_single_autograd(tokens, sent, received, group)[torch.argsort(order)]
    return (returned.view(*index.shape, -1) * weights[..., None]).sum(1).to(hidden.dtype)


def _with_tensors(module: nn.Module, number: int, *, dtype: torch.dtype, scale: float) -> nn.Module:
    """Returns a copy of the module with this rank's experts as plain tensors, whose gradients are scaled.

    Gradients of the other weights are averaged over ranks, and those of experts are sums over the tokens of all ranks.
    """
    part = copy.copy(module)
    part.num_experts = number  # type: ignore[assignment]
    for name in module._parameters:
        part.__dict__.pop(name, None)  # where computation is in bf16, a rounded tensor hides the parameter
    part._parameters = {
        name: _Scaled.apply(cast(DTensor, parameter).to_local(), scale, dtype)  # type: ignore[no-untyped-call]
        for name, parameter in module.named_parameters(recurse=False)
    }
    return part


class _Scaled(torch.autograd.Function):
    """A tensor in the precision of computation, whose gradient is scaled on its way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        ctx.scale, ctx.dtype = scale, tensor.dtype
        return tensor if torch.is_autocast_enabled(tensor.device.type) else tensor.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].to(ctx.dtype) * ctx.scale, None, None


def fill_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Gives a gradient of zeros to the trained parameters of experts that no token has reached."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
