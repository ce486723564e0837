"""Checkpoints of other frameworks, opened as models of Hugging Face with the states of their optimizers.

    DCP            .metadata, *.distcp                        torchtitan's names, Hugging Face's, or Megatron-Core's
    torch_dist     .metadata, *.distcp, metadata.json         Megatron-Core's DCP; NeMo 2 has it in `weights/`
    DeepSpeed      *_model_states.pt, *_optim_states.pt       ZeRO of stage 1 to 3
    universal      zero/PARAMETER/{fp32,exp_avg,...}.pt       DeepSpeed's after `ds_to_universal`

None of them names its model: a Hugging Face config.json next to it does. What it holds is compared with what
a model of that config has.

DeepSpeed: of stages 1 and 2, the parameters of a group, one behind the other, are one vector that the ranks divide; of
stage 3, each parameter is divided, and a rank's shares lie one behind the other. The states of the optimizer lie as the
weights in fp32 do. What the optimizer does not update (frozen weights, buffers) is in the files of the model's states.
The files are pickles with four classes of DeepSpeed besides the weights. They are read as weights alone, with stand-ins
for these; a file that names anything else is refused before it runs.

Source: DeepSpeed 0.19, utils/zero_to_fp32.py and checkpoint/ds_to_universal.py.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringmaster.features.foreign_models import dcp_folders, llama_layouts
from ringmaster.techniques.checkpoints.tensor_files import DTYPE_NAMES, LazyTensor
from ringmaster.techniques.models.model_folders import CONFIG, few, misfits, read_json

CHECKPOINT, DCP, MEGATRON, DEEPSPEED, UNIVERSAL = "checkpoint", "dcp", "megatron", "deepspeed", "universal"
STATE = re.compile(r"(?:chained_\d+\.)?(?:optimizer|optim)\.(?:state\.)?(.+)")
NO_WEIGHTS = re.compile(
    r"(chained_\d+\.)?(optimizer|optim|lr_scheduler|train_state|dataloader|opt_param_scheduler)\.|rng"
)
STEP, COMMON = "step", "common.pt"
MAX_TAG = 200  # characters of the name of a checkpoint's folder

ZeroContent = tuple[llama_layouts.NamedTensors, dict[str, llama_layouts.NamedTensors], int | None]
"""The weights, the optimizer's states by state and parameter, and the number of steps."""

OPTIMIZER = re.compile(r"(?:\w+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")

Key = TypeVar("Key", int, str)


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint of another framework. folder: of its files, which may lie below the folder that was named."""

    kind: str
    folder: Path


def find_checkpoint(folder: Path) -> FoundCheckpoint | None:
    """Returns the newest checkpoint of DCP, Megatron-Core, NeMo or DeepSpeed in a folder, found by names of files."""
    pointers = [folder / name for name in ("latest", "latest_universal", "latest_checkpointed_iteration.txt")]
    tags = [file.read_text(errors="replace").strip()[:MAX_TAG] for file in pointers if file.is_file()]
    tags = [
        f"iter_{int(tag):07d}" if tag.isdecimal() else tag for tag in tags if tag not in ("", "..") and "/" not in tag
    ]
    steps = [path for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    newest = [path.name for path in sorted(steps, key=lambda path: -int(path.name[5:]))]
    for place in (folder / name for name in (".", *tags, *newest, "weights")):
        if (place / ".metadata").is_file():
            return FoundCheckpoint(kind="megatron" if (place / "metadata.json").is_file() else "dcp", folder=place)
        if (place / "zero").is_dir():
            return FoundCheckpoint(kind="universal", folder=place)
        if any(place.glob("*_optim_states.pt")) or any(place.glob("*_model_states.pt")):
            return FoundCheckpoint(kind="deepspeed", folder=place)
    return None


@dataclass(frozen=True, kw_only=True)
class LazyModel:
    """A model whose tensors are not loaded yet.

    kind: the format of its source.
    config: its Hugging Face config.
    tensors: its tensors under Hugging Face's names.
    tokenizer: its tokenizer's files.
    states: of its optimizer, by the name of the state (`exp_avg`) and then the parameter's.
    step: the number of steps that it was trained for, if known.
    hyperparameters: of its optimizer, as far as known.
    """

    kind: str
    config: Mapping[str, Any]
    tensors: llama_layouts.NamedTensors
    tokenizer: tuple[Path, ...] = ()
    states: Mapping[str, llama_layouts.NamedTensors] = field(default_factory=dict)
    step: int | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)


def open_foreign(checkpoint: FoundCheckpoint) -> LazyModel:
    """Returns the model in a foreign checkpoint.

    Raises ValueError, with all faults of a kind, where it is damaged, or not of the model that its config names.
    """
    folder = checkpoint.folder
    places = [each / CONFIG for each in (folder, folder.parent) if (each / CONFIG).is_file()]
    config = read_json(places[0]) if places else {}
    if not config.get("model_type") or not config.get("architectures"):
        raise ValueError(
            f"{folder} is a checkpoint of {checkpoint.kind}, and no {CONFIG} next to it names its model. To fix: "
            f"put the model's Hugging Face {CONFIG}, with its architectures, into {folder}"
        )
    wanted = expected_tensors(config)
    try:
        if checkpoint.kind == DEEPSPEED:
            tensors, states, step = read_zero(folder)
        elif checkpoint.kind == UNIVERSAL:
            tensors, states, step = read_universal(folder, wanted)
        else:
            tensors, states, step = _read_dcp(folder, config, wanted)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{folder} is not a checkpoint of {checkpoint.kind}: {error!r:.200}. {dcp_folders.SAVE_AGAIN}"
        ) from error
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    _refuse_misfits(tensors, wanted, of=str(folder), config=places[0])
    for state, named in states.items():
        parameters = {name: wanted[name] for name in named if name in wanted}
        _refuse_misfits(named, parameters, of=f"{folder}: the optimizer's {state}", config=places[0])
    number = re.search(r"(\d+)(_universal)?$", folder.name)
    step = step if step is not None or number is None else int(number[1])
    return LazyModel(kind=checkpoint.kind, config=config, tensors=tensors, states=states, step=step)


def expected_tensors(config: Mapping[str, Any]) -> llama_layouts.NamedTensors:
    """Returns the tensors of a model of a Hugging Face config, without values; tied ones once.

    Raises ValueError where the config is none.
    """
    from transformers import AutoConfig

    from ringmaster.techniques.checkpoints.state import named_state
    from ringmaster.techniques.models.architectures import instantiate

    fields = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        named = named_state(instantiate(AutoConfig.for_model(config["model_type"], **fields)))
    return {name.removeprefix("model/"): _without_values(tensor) for name, tensor in named.items()}


def _without_values(tensor: Tensor) -> LazyTensor:
    return LazyTensor(dtype=tensor.dtype, shape=tuple(tensor.shape), load=lambda: tensor)


def _refuse_misfits(
    tensors: llama_layouts.NamedTensors, wanted: llama_layouts.NamedTensors, *, of: str, config: Path
) -> None:
    shapes = ({name: each.shape for name, each in side.items()} for side in (tensors, wanted))
    faults = [f"{name} is of {each.dtype}" for name, each in tensors.items() if each.dtype not in DTYPE_NAMES]
    if faults := faults + misfits(*shapes):
        raise ValueError(f"{of} does not fit {config}: {few(faults)}. To fix: put the config.json of this model there")


def _read_dcp(
    folder: Path, config: Mapping[str, Any], wanted: llama_layouts.NamedTensors
) -> tuple[llama_layouts.NamedTensors, dict[str, llama_layouts.NamedTensors], int | None]:
    content = dcp_folders.DcpFolder(folder)
    weights = {name: each for name, each in content.tensors.items() if not NO_WEIGHTS.match(name)}
    readers: dict[str, Read] = {
        llama_layouts.MARK: lambda named, *_: llama_layouts.from_torchtitan(named, llama_layouts.LlamaShape.of(config)),
        llama_layouts.EMBEDDINGS: _megatron,
        next(iter(wanted)): lambda named, *_: named,
    }
    for mark, read in readers.items():
        prefixes = [name.removesuffix(mark) for name in weights if name == mark or name.endswith(f".{mark}")]
        if prefixes:
            prefix = min(prefixes, key=len)
            own: llama_layouts.NamedTensors = {
                name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)
            }
            by_state = _states(content, prefix, states_first=read is _megatron)
            steps = [int(each.load()) for each in by_state.pop(STEP, {}).values()]
            stored = content.value("train_state.step")
            if (common := folder / COMMON).is_file() and stored is None:
                values = dcp_folders.weights_in_stream(str(common), named=str(common))
                stored = values.get("global_step") if isinstance(values, Mapping) else None
            step = max(steps) if steps else stored if isinstance(stored, int) else None
            states = {state: read(named, config, wanted, content) for state, named in by_state.items()}
            return read(own, config, wanted, content), states, step
    raise ValueError(
        f"{folder} has the tensors {', '.join(sorted(weights)[:3])}, which are named neither as by torchtitan nor by "
        "Megatron-Core nor as the config's model. To fix: save the model's state_dict, or put its own config.json there"
    )


def _states(
    content: dcp_folders.DcpFolder, prefix: str, *, states_first: bool
) -> dict[str, llama_layouts.NamedTensors]:
    """Returns the optimizer's tensors by their state, which Megatron names before the parameter, and DCP after it."""
    result: dict[str, llama_layouts.NamedTensors] = {}
    for name, tensor in content.tensors.items():
        if match := STATE.fullmatch(name):
            first, _, last = match[1].partition(".") if states_first else match[1].rpartition(".")
            state, parameter = (first, last) if states_first else (last, first)
            result.setdefault(state, {})[parameter.removeprefix(prefix)] = tensor
    return result


Read = Callable[
    [llama_layouts.NamedTensors, Mapping[str, Any], llama_layouts.NamedTensors, dcp_folders.DcpFolder],
    llama_layouts.NamedTensors,
]


def _megatron(
    named: llama_layouts.NamedTensors,
    config: Mapping[str, Any],
    wanted: llama_layouts.NamedTensors,
    content: dcp_folders.DcpFolder,
) -> llama_layouts.NamedTensors:
    shape = llama_layouts.LlamaShape.of(config)
    result: llama_layouts.NamedTensors = {}
    for name, tensor in named.items():
        name = name.replace(llama_layouts.FIRST_NORM[1], llama_layouts.FIRST_NORM[0]).replace(
            llama_layouts.SECOND_NORM[1], llama_layouts.SECOND_NORM[0]
        )
        rest = name.removeprefix(llama_layouts.STACKED)
        if rest == name or rest.split(".")[0].isdigit() or not isinstance(tensor, dcp_folders.DcpTensor):
            result[name] = tensor
            continue
        for i in range(tensor.shape[0] if tensor.shape else 0):
            load = partial(tensor.load_row, i)
            result[f"{llama_layouts.STACKED}{i}.{rest}"] = LazyTensor(
                dtype=tensor.dtype, shape=tensor.shape[1:], load=load
            )
    theirs = llama_layouts.to_megatron(wanted, shape)
    for name in (llama_layouts.EMBEDDINGS, llama_layouts.OUTPUT):  # padded to what the ranks of the writer divide
        if name in theirs and name in result:
            rows = max(shape.vocab_size, result[name].shape[0])
            theirs[name] = replace(theirs[name], shape=(rows, *theirs[name].shape[1:]))
    _refuse_misfits(result, theirs, of=str(content.folder), config=Path(CONFIG))
    return llama_layouts.from_megatron(result, shape)


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
        raise ValueError(f"{folder} lacks {', '.join(lost)}. {dcp_folders.SAVE_AGAIN}")
    ranks = [optimizers[rank]["optimizer_state_dict"] for rank in range(num_ranks)]
    model, groups = models[0], models[0]["param_shapes"]
    if stage == 3:
        vectors = {"fp32": [rank["fp32_flat_groups"] for rank in ranks]}
        inner = [rank["optimizer_state_dict"]["state"] for rank in ranks]
        divide: Callable[[list[list[Tensor]]], llama_layouts.NamedTensors] = partial(_of_shares, groups=groups)
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
        raise ValueError(
            f"{folder}: its shards do not hold what its parameters need: {error}. {dcp_folders.SAVE_AGAIN}"
        ) from error
    weights = divided.pop("fp32")
    weights |= _not_updated(models, but=weights)
    return weights, divided, model.get("global_steps")


def read_universal(folder: Path, wanted: Mapping[str, LazyTensor]) -> ZeroContent:
    """Returns the content of a universal checkpoint. Raises ValueError, with all faults, as `read_zero`.

    wanted: the tensors of the model, whose shapes those made from stage 3 lack.
    """
    files = sorted((folder / "zero").glob("*/*.pt"))
    stored = _collect({str(file): file for file in files})
    named: dict[str, llama_layouts.NamedTensors] = {"fp32": {}}
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
        raise ValueError(f"{'; '.join(faults[: dcp_folders.MAX_LISTED])}. {dcp_folders.SAVE_AGAIN}")
    weights = named.pop("fp32")
    weights |= _not_updated(_load_all(folder, MODEL), but=weights)
    return weights, named, max(steps, default=None)


def _not_updated(
    models: Mapping[int, Mapping[str, Any]], *, but: llama_layouts.NamedTensors
) -> llama_layouts.NamedTensors:
    """Returns the frozen weights and the buffers, of which stage 3 has divided the former."""
    result: llama_layouts.NamedTensors = {}
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
        raise ValueError(f"{folder} has no file {pattern.pattern}. {dcp_folders.SAVE_AGAIN}")
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
                result[key] = dcp_folders.weights_in_stream(str(file), named=str(file))
            except ValueError as error:
                faults.append(str(error))
    if faults:
        raise ValueError("; ".join(faults[: dcp_folders.MAX_LISTED]))
    return result


def _of_vectors(
    by_rank: list[list[Tensor]], *, groups: Sequence[Mapping[str, Any]], paddings: Sequence[Sequence[int]] | None
) -> llama_layouts.NamedTensors:
    result: llama_layouts.NamedTensors = {}
    for group, shapes in enumerate(groups):
        parts, at = [rank[group] for rank in by_rank], 0
        for i, (name, shape) in enumerate(shapes.items()):
            result[name] = _joined([(parts, at, at + math.prod(shape))], shape)
            at += math.prod(shape) + (paddings[group][i] if paddings else 0)
    return result


def _of_shares(by_rank: list[list[Tensor]], *, groups: Sequence[Mapping[str, Any]]) -> llama_layouts.NamedTensors:
    result: llama_layouts.NamedTensors = {}
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
