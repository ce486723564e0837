"""Divides a decoder like Llama along heads and features: a parallel style for each module, by its name.

Sources: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; Korthikanti et al., sequence parallelism
(arXiv:2205.05198), section 4.2.2.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ringmaster.compat.torch_distributed import ColwiseStyle, ModuleStyle, RowwiseStyle
from ringmaster.techniques.models.adapter_modules import ScaledLayer
from ringmaster.techniques.models.layers import layer_names

HEAD_NORMS = ("q_norm", "k_norm")


def cut(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool) -> None:
    """Lays `model` out over `mesh` in place; parameters keep their names, frozen ones stay frozen, tied ones tied.

    Between modules activations are plain tensors: of all tokens, or of this rank's tokens with `sequence_parallel`.
    With `loss_parallel` logits are a DTensor, divided over the vocabulary.
    """
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    is_tied = head.weight is embedding.weight
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    plan = _plan(model, mesh, embedding, head, between, loss_parallel=loss_parallel)
    # Every rank has built the same weights and takes its part of them: nothing is sent.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if is_tied:
        head.weight = embedding.weight  # both are divided along the vocabulary
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])


def _plan(
    model: nn.Module,
    mesh: DeviceMesh,
    embedding: nn.Module,
    head: nn.Module,
    between: Placement,
    *,
    loss_parallel: bool,
) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    config: Any = model.config
    num_kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if module is embedding:
            # Positions and mask are made from the whole sequence, which is divided before the first layer.
            plan[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        elif module is head:
            plan[name] = _AdaptedColwise(
                input_layouts=between,
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            )
        elif last in ("k_proj", "v_proj") and num_kv_heads < mesh.size():
            plan[name] = _SharedHeads(num_kv_heads)
            attention: Any = model.get_submodule(name.rpartition(".")[0])
            attention.num_key_value_groups = config.num_attention_heads // mesh.size()
        elif last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            plan[name] = _AdaptedColwise()
        elif last in ("o_proj", "down_proj"):
            plan[name] = _AdaptedRowwise(output_layouts=between)
        elif last == "self_attn":
            plan[name] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": between},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
        elif last == "mlp":
            plan[name] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
        elif last in HEAD_NORMS:
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)  # [rows, tokens, heads, head_dim]
        elif type(module).__name__.endswith("Norm"):
            plan[name] = _norm(between)
    if between == Shard(1):
        plan[layer_names(model)[0]] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=between, use_local_output=True
        )
    return plan


class _AdaptedColwise(ColwiseStyle):
    """Divides a linear layer by its outputs, and its adapter too: a LoRA's B, or factors of outputs."""

    def divide(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        """Distributes the parameters of the layer, or of a part of its adapter."""
        divided = {"weight", "bias"} if name != "lora_A" else set()
        if isinstance(module, ScaledLayer) and not module.scales_input:
            divided.add("ia3_l")
        _place(module, mesh, dict.fromkeys(divided, Shard(0)))


class _AdaptedRowwise(RowwiseStyle):
    """Divides a linear layer by its inputs, and its adapter too: a LoRA's A, or factors of inputs."""

    def divide(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        """Distributes the parameters of the layer, or of a part of its adapter."""
        divided = {"weight"} if name != "lora_B" else set()
        if isinstance(module, ScaledLayer) and module.scales_input:
            divided.add("ia3_l")
        _place(module, mesh, dict.fromkeys(divided, Shard(1)))


def _place(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Distributes a module's own parameters; those without a placement are replicated."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = placements.get(name, Replicate())
        part = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part))


def _norm(between: Placement) -> ParallelStyle:
    style = SequenceParallel(use_local_output=True)
    style.sequence_sharding = (between,)  # type: ignore[assignment]
    return style


class _SharedHeads(ModuleStyle):
    """Keys or values with fewer heads than ranks: each rank computes all heads and uses the one that its queries share.

    A rank's gradient of the weights is a summand: the part that comes from its own queries.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads

    def parallelize(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Replicates the layer, of whose outputs each rank takes its head."""
        ranks_a_head = mesh.size() // self._num_heads
        own = mesh.get_local_rank() // ranks_a_head

        def replicate(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
            _place(module, mesh, {})

        def pick(module: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> Tensor:
            whole = outputs.to_local(grad_placements=[Partial()])
            return torch.chunk(whole, self._num_heads, dim=-1)[own].contiguous()

        return distribute_module(module, mesh, replicate, output_fn=pick)  # type: ignore[arg-type]
