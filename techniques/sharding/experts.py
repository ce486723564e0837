"""Experts that are divided over ranks: each rank computes some of them, for the tokens of all ranks.

Sources: Shazeer et al., Outrageously Large Neural Networks (arXiv:1701.06538); Lepikhin et al., GShard
(arXiv:2006.16668). No token is dropped: ranks exchange how many tokens go to each expert before the tokens.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from ringmaster.compat.torch import own_parameters, set_own_parameters
from ringmaster.compat.torch_distributed import all_to_all_single_autograd
from ringmaster.techniques.metric import IGNORED
from ringmaster.techniques.training.bound_loss import next_tokens

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
    leaving = torch.zeros(num_own * num_ranks, dtype=chosen.dtype, device=chosen.device)
    leaving = leaving.scatter_add_(0, chosen, torch.ones_like(chosen)).view(num_ranks, num_own)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    sent, received = sizes_of(leaving.sum(1), total=len(chosen)), sizes_of(arriving.sum(1), total=len(chosen))
    tokens = all_to_all_single_autograd(hidden[order // top_k], received, sent, group)
    own = torch.arange(num_own, device=index.device).repeat(num_ranks)
    own = own.repeat_interleave(arriving.flatten(), output_size=sum(received))
    if len(tokens):
        part = _with_tensors(module, num_own, dtype=tokens.dtype, scale=1 / num_ranks)
        tokens = compute(part, tokens, own[:, None], torch.ones_like(own[:, None], dtype=weights.dtype))
    returned = all_to_all_single_autograd(tokens, sent, received, group)[torch.argsort(order)]
    return (returned.view(*index.shape, -1) * weights[..., None]).sum(1).to(hidden.dtype)


def sizes_of(counts: Tensor, *, total: int) -> list[int]:
    """Returns the tokens that go to, or come from, each rank. total: those that this rank sends."""
    sizes: list[int] = counts.tolist()
    return sizes


def _with_tensors(module: nn.Module, number: int, *, dtype: torch.dtype, scale: float) -> nn.Module:
    """Returns a copy of the module with this rank's experts as plain tensors, whose gradients are scaled.

    Gradients of the other weights are averaged over ranks, and those of experts are sums over the tokens of all ranks.
    """
    part = copy.copy(module)
    part.num_experts = number  # type: ignore[assignment]
    for name in own_parameters(module):
        part.__dict__.pop(name, None)  # where computation is in bf16, a rounded tensor hides the parameter
    tensors = {
        name: _Scaled.apply(cast(DTensor, parameter).to_local(), scale, dtype)  # type: ignore[no-untyped-call]
        for name, parameter in module.named_parameters(recurse=False)
    }
    set_own_parameters(part, tensors)
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


def has_router_loss(model: nn.Module) -> bool:
    """Whether a causal language model adds the load-balancing loss of its routers to its own loss."""
    config: Any = getattr(model, "config", None)
    is_known = hasattr(inspect.getmodule(type(model)), "load_balancing_loss_func")
    return is_known and bool(getattr(config, "output_router_logits", False)) and hasattr(model, "router_aux_loss_coef")


def loss_of_whole_batch(model: Any, output: Any, batch: Mapping[str, Tensor], mesh: DeviceMesh) -> Tensor:
    """Returns this rank's part of the loss of the whole batch, such that the mean over ranks is that loss.

    That is the cross entropy of the next tokens and, with the share f of all choices and the mean probability p of each
    of E experts, over all layers and the tokens of all ranks, the coefficient times E times the sum of f p (Fedus et
    al., Switch Transformers, arXiv:2101.03961, equations 4 to 6). Only f and the numbers of tokens are exchanged.
    """
    labels, mask = next_tokens(batch), batch.get("attention_mask")
    probabilities = torch.stack([logits.float().softmax(-1) for logits in output.router_logits])  # layer, token, expert
    with torch.no_grad():
        chosen = probabilities.topk(model.num_experts_per_tok).indices
        choices = functional.one_hot(chosen, probabilities.shape[-1]).sum(-2).float()
        weights = torch.ones_like(choices[..., :1]) if mask is None else mask.reshape(-1, 1).expand_as(choices[..., :1])
        counts = [(choices * weights).sum((0, 1)), weights.sum().float()[None], (labels != IGNORED).sum().float()[None]]
        totals = torch.cat(counts)
        dist.all_reduce(totals, group=mesh.get_group())
    shares, num_weighted, num_labels = totals[:-2] / totals[-2], totals[-2], totals[-1]
    balance = len(shares) * (shares * (probabilities * weights).sum((0, 1)) / num_weighted).sum()
    logits = output.logits.flatten(0, -2).float()
    entropy = functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum") / num_labels
    loss: Tensor = mesh.size() * (entropy + model.router_aux_loss_coef * balance)
    return loss
