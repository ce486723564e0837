"""Checkpoints of DeepSpeed: of ZeRO's stages 1 to 3, and universal ones.

Of stages 1 and 2, the parameters of a group, one behind the other, are one vector that the ranks divide; of stage 3,
each parameter is divided, and a rank's shares lie one behind the other. The states of the optimizer lie as the weights
in fp32 do. What the optimizer does not update (frozen weights, buffers) is in the files of the model's states.

The files are pickles with four classes of DeepSpeed beside the weights. They are read as weights alone, with stand-ins
for these; a file that names anything else is refused before it runs.

Source: DeepSpeed 0.19, utils/zero_to_fp32.py and checkpoint/ds_to_universal.py.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringmaster.techniques.checkpoints.dcp_folders import MOST_LISTED, SAVE_AGAIN, weights_in_stream
from ringmaster.techniques.checkpoints.tensor_files import LazyTensor

NamedTensors = dict[str, LazyTensor]
ZeroContent = tuple[NamedTensors, dict[str, NamedTensors], int | None]
"""The weights, the optimizer's states by state and parameter, and the number of steps."""

OPTIMIZER = re.compile(r"(?:\w+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


Key = TypeVar("Key", int, str)


class StandIn:
    """What a class of DeepSpeed becomes: its attributes are kept, and never read."""

    def __init__(self, *_: Any) -> None: ...


CLASSES: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (StandIn, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (StandIn, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (StandIn, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def read_zero(folder: Path) -> ZeroContent:
    """Returns the content of a checkpoint that ZeRO has divided over its ranks.

    Raises ValueError, with all faults, where files are missing, damaged, or hold more than weights.
    """
    models, optimizers = _load_all(folder, MODEL), _load_all(folder, OPTIMIZER)
    first = next(iter(optimizers.values()))["optimizer_state_dict"]
    stage, count = first["zero_stage"], first["partition_count"]
    num_ranks = max(count) if isinstance(count, list) else count
    missing = sorted(set(range(num_ranks)) - optimizers.keys())
    missing_models = sorted(set(range(num_ranks if stage == 3 else 1)) - models.keys())
    if missing or missing_models:
        lost = [f"the optim_states of rank {rank}" for rank in missing]
        lost += [f"the model_states of rank {rank}" for rank in missing_models]
        raise ValueError(f"{folder} lacks {', '.join(lost)}. {SAVE_AGAIN}")
    ranks = [optimizers[rank]["optimizer_state_dict"] for rank in range(num_ranks)]
    model, groups = models[0], models[0]["param_shapes"]
    if stage == 3:
        vectors = {"fp32": [rank["fp32_flat_groups"] for rank in ranks]}
        inner = [rank["optimizer_state_dict"]["state"] for rank in ranks]
        divide: Callable[[list[list[Tensor]]], NamedTensors] = partial(_of_shares, groups=groups)
    else:
        vectors = {"fp32": [rank["single_partition_of_fp32_groups"] for rank in ranks]}
        bases = [rank["base_optimizer_state"] for rank in ranks]
        inner = [dict(enumerate(base)) if isinstance(base, list) else base["state"] for base in bases]
        divide = partial(_of_vectors, groups=groups, paddings=first.get("param_alignment_paddings"))
    states = inner[0][0] if inner[0] else {}
    for state in (key for key, each in states.items() if isinstance(each, Tensor) and each.dim()):
        vectors[state] = [[rank[group][state] for group in sorted(rank)] for rank in inner]
    try:
        divided = {state: divide(by_rank) for state, by_rank in vectors.items()}
    except (IndexError, ValueError) as error:
        raise ValueError(f"{folder}: its shards do not hold what its parameters need: {error}. {SAVE_AGAIN}") from error
    weights = divided.pop("fp32")
    weights |= _not_updated(models, but=weights)
    return weights, divided, model.get("global_steps")


def read_universal(folder: Path, wanted: Mapping[str, LazyTensor]) -> ZeroContent:
    """Returns the content of a universal checkpoint. Raises ValueError, with all faults, as `read_zero`.

    wanted: the tensors of the model, whose shapes those made from stage 3 lack.
    """
    files = sorted((folder / "zero").glob("*/*.pt"))
    stored = _collect({str(file): file for file in files})
    named: dict[str, NamedTensors] = {"fp32": {}}
    steps, faults = [], []
    for file in files:
        value: Any = stored[str(file)]
        value = value.get("param") if isinstance(value, Mapping) else value
        if file.stem == "step":
            steps.append(int(value))
        elif isinstance(value, Tensor):
            shape = wanted[file.parent.name].shape if file.parent.name in wanted else value.shape
            flat = value.dim() == 1 and value.numel() == math.prod(shape)
            named.setdefault(file.stem, {})[file.parent.name] = _lazy(value.reshape(shape) if flat else value)
        else:
            faults.append(f"{file} holds no tensor")
    if faults:
        raise ValueError(f"{'; '.join(faults[:MOST_LISTED])}. {SAVE_AGAIN}")
    weights = named.pop("fp32")
    weights |= _not_updated(_load_all(folder, MODEL), but=weights)
    return weights, named, max(steps, default=None)


def _not_updated(models: Mapping[int, Mapping[str, Any]], *, but: NamedTensors) -> NamedTensors:
    """Returns the frozen weights and the buffers, of which stage 3 has divided the former."""
    result: NamedTensors = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        shares = [[models[rank]["frozen_param_fragments"][name].flatten()] for rank in sorted(models)]
        result |= _of_shares(shares, groups=[{name: shape}])
    for name, value in models[0]["module"].items():
        if name not in but and name not in result and isinstance(value, Tensor) and value.numel():
            result[name] = _lazy(value)
    return result


def _load_all(folder: Path, pattern: re.Pattern[str]) -> dict[int, dict[str, Any]]:
    """Returns what the files of a name hold, by rank."""
    matches = {file: match for file in sorted(folder.iterdir()) if (match := pattern.fullmatch(file.name))}
    if not matches:
        raise ValueError(f"{folder} has no file {pattern.pattern}. {SAVE_AGAIN}")
    if any(int(match[2]) for match in matches.values()):
        raise ValueError(
            f"{folder} is divided by tensor parallelism. To fix: convert it with deepspeed.checkpoint.ds_to_universal"
        )
    return _collect({int(match[1] or 0): file for file, match in matches.items()})


def _collect(files: Mapping[Key, Path]) -> dict[Key, Any]:
    """Returns what each file holds. Raises ValueError with the faults of all."""
    result: dict[Key, Any] = {}
    faults = []
    with torch.serialization.safe_globals(CLASSES):
        for key, file in files.items():
            try:
                result[key] = weights_in_stream(str(file), named=str(file))
            except ValueError as error:
                faults.append(str(error))
    if faults:
        raise ValueError("; ".join(faults[:MOST_LISTED]))
    return result


def _of_vectors(
    by_rank: list[list[Tensor]], *, groups: Sequence[Mapping[str, Any]], paddings: Sequence[Sequence[int]] | None
) -> NamedTensors:
    result: NamedTensors = {}
    for group, shapes in enumerate(groups):
        parts, at = [rank[group] for rank in by_rank], 0
        for i, (name, shape) in enumerate(shapes.items()):
            result[name] = _joined([(parts, at, at + math.prod(shape))], shape)
            at += math.prod(shape) + (paddings[group][i] if paddings else 0)
    return result


def _of_shares(by_rank: list[list[Tensor]], *, groups: Sequence[Mapping[str, Any]]) -> NamedTensors:
    result: NamedTensors = {}
    at = 0
    for name, shape in [each for shapes in groups for each in shapes.items()]:
        share = math.ceil(math.prod(shape) / len(by_rank))
        result[name] = _joined([(parts, at, at + share) for parts in by_rank], shape)
        at += share
    return result


def _joined(spans: Iterable[tuple[list[Tensor], int, int]], shape: Sequence[int]) -> LazyTensor:
    """The values from a first up to a last one of some vectors each, put together. Raises ValueError at their end."""
    slices: list[Tensor] = []
    for parts, first, last in spans:
        for part in parts:
            slices.append(part.detach()[max(first, 0) : max(last, 0)])
            first, last = first - part.numel(), last - part.numel()
        if last > 0:
            raise ValueError(f"{last} values of a tensor of the shape {list(shape)} are missing")
    count = math.prod(shape)
    return LazyTensor(
        dtype=slices[0].dtype, shape=tuple(shape), load=lambda: torch.cat(slices)[:count].reshape(tuple(shape))
    )


def _lazy(tensor: Tensor) -> LazyTensor:
    return LazyTensor(dtype=tensor.dtype, shape=tuple(tensor.shape), load=tensor.detach().contiguous)
