"""Checkpoints of other frameworks, opened as models of Hugging Face with the states of their optimizers.

    DCP            .metadata, *.distcp                        torchtitan's names, Hugging Face's, or Megatron-Core's
    torch_dist     .metadata, *.distcp, metadata.json         Megatron-Core's DCP; NeMo 2 has it in `weights/`
    DeepSpeed      *_model_states.pt, *_optim_states.pt       ZeRO of stage 1 to 3 (`deepspeed_checkpoints`)
    universal      zero/PARAMETER/{fp32,exp_avg,...}.pt       DeepSpeed's after `ds_to_universal`

None of them says which model it is of: a Hugging Face config.json lies beside it. What it holds is compared with what
a model of that config has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringmaster.techniques.checkpoints.dcp_folders import SAVE_AGAIN, DcpFolder, DcpTensor, weights_in_stream
from ringmaster.techniques.checkpoints.tensor_files import DTYPE_NAMES, LazyTensor
from ringmaster.techniques.models.deepspeed_checkpoints import read_universal, read_zero
from ringmaster.techniques.models.llama_layouts import (
    EMBEDDINGS,
    FIRST_NORM,
    MARK,
    OUTPUT,
    SECOND_NORM,
    STACKED,
    LlamaShape,
    NamedTensors,
    from_megatron,
    from_torchtitan,
    to_megatron,
)
from ringmaster.techniques.models.model_folders import CONFIG, FoundCheckpoint, few, misfits, read_json

CHECKPOINT, DCP, MEGATRON, DEEPSPEED, UNIVERSAL = "checkpoint", "dcp", "megatron", "deepspeed", "universal"
STATE = re.compile(r"(?:chained_\d+\.)?(?:optimizer|optim)\.(?:state\.)?(.+)")
NO_WEIGHTS = re.compile(
    r"(chained_\d+\.)?(optimizer|optim|lr_scheduler|train_state|dataloader|opt_param_scheduler)\.|rng"
)
STEP, COMMON = "step", "common.pt"


@dataclass(frozen=True, kw_only=True)
class LazyModel:
    """A model whose tensors are not loaded yet.

    kind: the format of its source.
    config: its Hugging Face config.
    tensors: its tensors under Hugging Face's names.
    tokenizer: its tokenizer's files.
    states: of its optimizer, by the name of the state (`exp_avg`) and then the parameter's.
    step: the number of steps that it was trained for, if the source says so.
    hyperparameters: of its optimizer, as far as the source says.
    """

    kind: str
    config: Mapping[str, Any]
    tensors: NamedTensors
    tokenizer: tuple[Path, ...] = ()
    states: Mapping[str, NamedTensors] = field(default_factory=dict)
    step: int | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)


def open_foreign(checkpoint: FoundCheckpoint) -> LazyModel:
    """Returns the model in a foreign checkpoint.

    Raises ValueError, with all faults of a kind, where it is damaged, or is none of the model that its config says.
    """
    folder = checkpoint.folder
    places = [each / CONFIG for each in (folder, folder.parent) if (each / CONFIG).is_file()]
    config = read_json(places[0]) if places else {}
    if not config.get("model_type") or not config.get("architectures"):
        raise ValueError(
            f"{folder} is a checkpoint of {checkpoint.kind}, and no {CONFIG} beside it says of which model. To fix: "
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
        raise ValueError(f"{folder} is no checkpoint of {checkpoint.kind}: {error!r:.200}. {SAVE_AGAIN}") from error
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    _refuse_misfits(tensors, wanted, of=str(folder), config=places[0])
    for state, named in states.items():
        parameters = {name: wanted[name] for name in named if name in wanted}
        _refuse_misfits(named, parameters, of=f"{folder}: the optimizer's {state}", config=places[0])
    number = re.search(r"(\d+)(_universal)?$", folder.name)
    step = step if step is not None or number is None else int(number[1])
    return LazyModel(kind=checkpoint.kind, config=config, tensors=tensors, states=states, step=step)


def expected_tensors(config: Mapping[str, Any]) -> NamedTensors:
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


def _refuse_misfits(tensors: NamedTensors, wanted: NamedTensors, *, of: str, config: Path) -> None:
    shapes = ({name: each.shape for name, each in side.items()} for side in (tensors, wanted))
    faults = [f"{name} is of {each.dtype}" for name, each in tensors.items() if each.dtype not in DTYPE_NAMES]
    if faults := faults + misfits(*shapes):
        raise ValueError(f"{of} does not fit {config}: {few(faults)}. To fix: put the config.json of this model there")


def _read_dcp(
    folder: Path, config: Mapping[str, Any], wanted: NamedTensors
) -> tuple[NamedTensors, dict[str, NamedTensors], int | None]:
    content = DcpFolder(folder)
    weights = {name: each for name, each in content.tensors.items() if not NO_WEIGHTS.match(name)}
    readers: dict[str, Read] = {
        MARK: lambda named, *_: from_torchtitan(named, LlamaShape.of(config)),
        EMBEDDINGS: _megatron,
        next(iter(wanted)): lambda named, *_: named,
    }
    for mark, read in readers.items():
        prefixes = [name.removesuffix(mark) for name in weights if name == mark or name.endswith(f".{mark}")]
        if prefixes:
            prefix = min(prefixes, key=len)
            own: NamedTensors = {
                name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)
            }
            by_state = _states(content, prefix, states_first=read is _megatron)
            steps = [int(each.load()) for each in by_state.pop(STEP, {}).values()]
            stored = content.value("train_state.step")
            if (common := folder / COMMON).is_file() and stored is None:
                values = weights_in_stream(str(common), named=str(common))
                stored = values.get("global_step") if isinstance(values, Mapping) else None
            step = max(steps) if steps else stored if isinstance(stored, int) else None
            states = {state: read(named, config, wanted, content) for state, named in by_state.items()}
            return read(own, config, wanted, content), states, step
    raise ValueError(
        f"{folder} has the tensors {', '.join(sorted(weights)[:3])}, which are named neither as by torchtitan nor by "
        "Megatron-Core nor as the config's model. To fix: save the model's state_dict, or put its own config.json there"
    )


def _states(content: DcpFolder, prefix: str, *, states_first: bool) -> dict[str, NamedTensors]:
    """Returns the optimizer's tensors by their state, which Megatron names before the parameter, and DCP after it."""
    result: dict[str, NamedTensors] = {}
    for name, tensor in content.tensors.items():
        if match := STATE.fullmatch(name):
            first, _, last = match[1].partition(".") if states_first else match[1].rpartition(".")
            state, parameter = (first, last) if states_first else (last, first)
            result.setdefault(state, {})[parameter.removeprefix(prefix)] = tensor
    return result


Read = Callable[[NamedTensors, Mapping[str, Any], NamedTensors, DcpFolder], NamedTensors]


def _megatron(named: NamedTensors, config: Mapping[str, Any], wanted: NamedTensors, content: DcpFolder) -> NamedTensors:
    shape = LlamaShape.of(config)
    result: NamedTensors = {}
    for name, tensor in named.items():
        name = name.replace(FIRST_NORM[1], FIRST_NORM[0]).replace(SECOND_NORM[1], SECOND_NORM[0])
        rest = name.removeprefix(STACKED)
        if rest == name or rest.split(".")[0].isdigit() or not isinstance(tensor, DcpTensor):
            result[name] = tensor
            continue
        for i in range(tensor.shape[0] if tensor.shape else 0):
            load = partial(tensor.load_row, i)
            result[f"{STACKED}{i}.{rest}"] = LazyTensor(dtype=tensor.dtype, shape=tensor.shape[1:], load=load)
    theirs = to_megatron(wanted, shape)
    for name in (EMBEDDINGS, OUTPUT):  # padded to what the ranks of the writer divide
        if name in theirs and name in result:
            rows = max(shape.vocab_size, result[name].shape[0])
            theirs[name] = replace(theirs[name], shape=(rows, *theirs[name].shape[1:]))
    _refuse_misfits(result, theirs, of=str(content.folder), config=Path(CONFIG))
    return from_megatron(result, shape)
