"""Models and the states of their optimizers as checkpoints of Ringmaster, of torchtitan and of Megatron-Core."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore, CheckpointTensor, RankPieces, TensorPiece
from ringmaster.techniques.checkpoints.dcp_folders import DcpTensor, write_dcp
from ringmaster.techniques.checkpoints.tensor_files import DTYPE_NAMES, LazyTensor, blocks_of
from ringmaster.techniques.models.foreign_checkpoints import CHECKPOINT, DCP, MEGATRON, STEP, LazyModel
from ringmaster.techniques.models.megatron_layout import STACKED, LlamaShape, NamedTensors, to_megatron
from ringmaster.techniques.models.torchtitan_layout import to_torchtitan
from ringmaster.techniques.training.trainer import BY_HASH

EXTRA = (*(f"self_attention.{each}" for each in ("linear_qkv", "linear_proj", "core_attention")), "mlp.linear_fc1")
EXTRA += ("mlp.linear_fc2",)
ADAM = "exp_avg"
"""The state that only Adam and its relatives have, which count a parameter's steps."""


def write_checkpoint(folder: Path, model: LazyModel) -> int:
    """Writes a checkpoint that a job goes on from by `warm_start`."""
    tensors = {f"model/{name}": tensor for name, tensor in model.tensors.items()}
    for state, named in model.states.items():
        tensors |= {f"optimizer/{name}/{state}": tensor for name, tensor in named.items()}
    tensors |= {f"optimizer/{name}/{STEP}": _count(model) for name in model.states.get(ADAM, ())}

    def pieces(file: str) -> RankPieces:
        whole = {
            name: CheckpointTensor(
                dtype=DTYPE_NAMES[each.dtype],
                shape=each.shape,
                pieces=(TensorPiece(file=file, key=name, offset=(0,) * len(each.shape), shape=each.shape),),
            )
            for name, each in tensors.items()
        }
        return RankPieces(tensors=whole, blocks=blocks_of(tensors))

    tokenizer = str(model.tokenizer[0].parent.absolute()) if model.tokenizer else None
    meta = {"job": model.kind, "weights_digest": "", "config": dict(model.config), "tokenizer_dir": tokenizer}
    CheckpointStore(folder).save(model.step or 0, pieces, {**meta, "draws": BY_HASH})
    return sum(map(len, model.states.values()))


def write_torchtitan(folder: Path, model: LazyModel) -> int:
    """Writes a checkpoint of DCP: of a Llama under torchtitan's names, of another model under Hugging Face's.

    With the states of AdamW, its hyperparameters are written for each parameter, as torchtitan has them.
    """
    is_llama, tensors = model.config.get("model_type") == "llama", dict(model.tensors)
    values: dict[str, Any] = {"train_state.step": model.step or 0, "train_state.ntokens_seen": 0}
    if is_llama:
        tensors = to_torchtitan(tensors, LlamaShape.of(model.config))
    for state, named in _adam(model).items():
        theirs = to_torchtitan(named, LlamaShape.of(model.config), is_fused=True) if is_llama else named
        tensors |= {f"optimizer.state.{name}.{state}": tensor for name, tensor in theirs.items()}
        for name in theirs if state == ADAM else ():
            tensors[f"optimizer.state.{name}.{STEP}"] = _count(model)
            values |= {f"optimizer.param_groups.{name}.{key}": value for key, value in _settings(model).items()}
    write_dcp(folder, tensors, values)
    return sum(map(len, _adam(model).values()))


def write_megatron(folder: Path, model: LazyModel) -> int:
    """Writes a checkpoint of Megatron-Core, whose layers are one tensor for each of their weights."""
    shape = LlamaShape.of(model.config)
    tensors = _stacked(to_megatron(model.tensors, shape), shape)
    for state, named in _adam(model).items():
        theirs = _stacked(to_megatron(named, shape), shape)
        tensors |= {f"optimizer.state.{state}.{name}": tensor for name, tensor in theirs.items()}
    iteration = folder / f"iter_{model.step or 0:07d}"
    values = {  # which its linear layers have in common with those of Transformer Engine
        f"{STACKED}{name}._extra_state/shard_{i}_{shape.num_layers}": [None]
        for i in range(shape.num_layers)
        for name in EXTRA
    }
    write_dcp(iteration, tensors, values, by_row=frozenset(name for name in tensors if STACKED in name))
    common: dict[str, Any] = {"iteration": model.step or 0, "checkpoint_version": 3.0}
    if _adam(model):
        settings = {**_settings(model), "is_expert_parallel": False, "is_decoupled_lr": False, "lr_mult": 1.0}
        groups = [{**settings, "wd_mult": each, STEP: model.step} for each in (1.0, 0.0)]
        common["optimizer"] = {"state": {"common_step": _count(model).load()}, "param_groups": groups}
    torch.save(common, iteration / "common.pt")
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backends |= {"common_backend": "torch", "common_backend_version": 1}
    (iteration / "metadata.json").write_text(json.dumps(backends))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(model.step or 0))
    return sum(map(len, _adam(model).values()))


WRITERS: Mapping[str, Callable[[Path, LazyModel], int]] = {
    CHECKPOINT: write_checkpoint,
    DCP: write_torchtitan,
    MEGATRON: write_megatron,
}
"""By their formats, of which each returns the number of the optimizer's tensors that it has written."""


def _count(model: LazyModel) -> LazyTensor:
    return LazyTensor(dtype=torch.float32, shape=(), load=lambda: torch.tensor(float(model.step or 0)))


def _adam(model: LazyModel) -> Mapping[str, NamedTensors]:
    """Returns the states of AdamW, which are of no use without its hyperparameters; {} where the source lacks them."""
    return model.states if model.hyperparameters and ADAM in model.states else {}


def _settings(model: LazyModel) -> dict[str, Any]:
    """Returns the hyperparameters of AdamW as its parameter groups have them."""
    group = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **model.hyperparameters).param_groups[0]
    return {key: value for key, value in group.items() if key != "params"} | {"initial_lr": group["lr"]}


def _stacked(tensors: NamedTensors, shape: LlamaShape) -> NamedTensors:
    """Returns the tensors with those of all layers as one."""
    layers: dict[str, NamedTensors] = {}
    result: NamedTensors = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(rf"{STACKED}(\d+)\.(.+)", name):
            layers.setdefault(f"{STACKED}{match[2]}", {})[match[1]] = tensor
        else:
            result[name] = tensor
    for name, of_layer in layers.items():
        first = of_layer["0"]
        size = (shape.num_layers, *first.shape)
        result[name] = DcpTensor(dtype=first.dtype, shape=size, load=of_layer["0"].load, load_row=_row_of(of_layer))
    return result


def _row_of(of_layer: NamedTensors) -> Callable[[int], Tensor]:
    return lambda row: of_layer[str(row)].load()
