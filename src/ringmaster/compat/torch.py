"""Private and undocumented names of PyTorch, except those of `torch.distributed`: see `torch_distributed`."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = [
    "ATTENTION_OPERATORS",
    "CPU_ATTENTION",
    "FUNCTIONAL_COLLECTIVES",
    "READ_VALUE",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "foreach_add_",
    "foreach_copy_",
    "foreach_div_",
    "foreach_mul",
    "foreach_mul_",
    "foreach_neg_",
    "foreach_sign_",
    "forward_pre_hooks",
    "is_mutable",
    "is_view",
    "is_wrapper",
    "num_storage_references",
    "own_buffers",
    "own_modules",
    "own_parameters",
    "persistent_buffers",
    "set_own_parameters",
    "storage_key",
    "stored_layout",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "unset_fake_temporarily",
]

# -- tensors without values --------------------------------------------------------------------------------------------
# FakeTensor, FakeTensorMode, unset_fake_temporarily: estimates of a rank's memory run its step on tensors that have
# shapes but no values. There is no public name. Without them nothing estimates memory without a device.

# TorchDispatchMode sees every operator: it counts memory and work. Without it there are no such estimates.

# As a plain bool: the TypeIs of `is_traceable_wrapper_subclass` excludes tensors. Operators on wrappers, such as
# DTensors, would be counted twice without it.
is_wrapper: Callable[[object], bool] = is_traceable_wrapper_subclass

# The operator behind `Tensor.item()`, which estimates answer with a constant. Without it estimates stop at models that
# read values.
READ_VALUE = torch.ops.aten._local_scalar_dense.default


def is_mutable(operator: Any) -> bool:
    """Returns whether an operator writes into its arguments, according to its schema.

    No public name has the schema. Without it work in place is not counted.
    """
    return bool(operator._schema.is_mutable)


# tree_flatten, tree_leaves, tree_unflatten: the tensors in nested arguments and results of modules and operators. They
# know the outputs of Hugging Face's models, which transformers registers there. Without them the gradients of nested
# inputs are not grouped by layer, and results in containers are not counted.


# -- storages ----------------------------------------------------------------------------------------------------------


def storage_key(storage: torch.UntypedStorage) -> int:
    """Returns what identifies the memory of tensors while it is alive, also where it is on no device.

    The public `data_ptr` is refused for tensors without values. Without it views of a tensor count as memory of their
    own, and copies of weights are not recognized among the tensors that autograd saves.
    """
    return int(storage._cdata)


def num_storage_references(tensor: Tensor) -> int:
    """Returns how many references there are to a tensor's memory, the one that is made to count them included.

    No public name counts them. Without it buffers are never reused.
    """
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def is_view(tensor: Tensor) -> bool:
    """Returns whether a tensor is a view of another one.

    Pipeline schedules detach in place what they have sent, which is refused for views. Without it every stage copies
    its output.
    """
    return bool(tensor._is_view())


# -- what a module itself has ------------------------------------------------------------------------------------------


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the parameters of a module without those of its submodules, None among them; it may be changed.

    `register_parameter` and `setattr` take parameters alone, and look a name up in the instance first. Without it
    weights in another precision, on another device or of some experts cannot take the place of a parameter while a
    forward runs.
    """
    return module._parameters


def set_own_parameters(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replaces all own parameters of a module by tensors, which need not be parameters.

    Without it a copy of a module with some of its experts cannot be made.
    """
    module._parameters = tensors  # type: ignore[assignment]


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the buffers of a module without those of its submodules; it may be changed.

    `register_buffer` forgets whether a buffer is stored in checkpoints. Without it buffers move to another device only
    together with the weights.
    """
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the direct submodules by name, None among them, which `named_children` leaves out.

    Without it merged adapters leave empty names behind.
    """
    return module._modules


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the own buffers of a module that belong into a checkpoint.

    `state_dict` contains it too, but gathers or copies the weights under some techniques. Without it checkpoints hold
    buffers that models make anew.
    """
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Returns the hooks that run before a module's forward.

    Without it the prefix of an adapter, which is such a hook, cannot be switched off.
    """
    return list(module._forward_pre_hooks.values())


# -- operators ---------------------------------------------------------------------------------------------------------
# Operators on lists of tensors, in one kernel on a GPU. PyTorch's own optimizers use them; the documentation has only
# those of one argument. Without them updates and sums start a kernel for each tensor.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_neg_ = torch._foreach_neg_
foreach_sign_ = torch._foreach_sign_

# The names of the operators of `scaled_dot_product_attention`, which "selective" recomputation stores. Where a name
# changes, attention is computed twice.
CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
ATTENTION_OPERATORS = frozenset(
    {f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")}
    | {CPU_ATTENTION, "_scaled_dot_product_fused_attention_overrideable"}
)

# The namespace of collectives as operators, whose results "selective" recomputation stores. Where it changes, ranks
# communicate again in the backward.
FUNCTIONAL_COLLECTIVES = "_c10d_functional"

# The function that metadata of torch.distributed.checkpoint names for the layout of tensors: a safe unpickler allows it
# by its name. Without it such checkpoints are refused.
stored_layout = torch.serialization._get_layout


def replacement_of_apply(apply: Callable[..., nn.Module]) -> tuple[type[nn.Module], str, Callable[..., nn.Module]]:
    """Returns where `apply` takes the place of `nn.Module._apply`, which `to`, `half` and others call.

    It swaps tensors in a way that tensors without values do not support. Without it no estimate moves a model.
    """
    return nn.Module, "_apply", apply
