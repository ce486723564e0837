"""Lossless conversion of models between Ringmaster's checkpoints, Hugging Face folders and those of other trainers.

With the states of their optimizers, where the format has them. GGUF files become folders of safetensors.

The source is a checkpoint's folder, a job's folder or URL of checkpoints (the newest complete one), a folder that
`from_pretrained` loads, or one of `foreign_checkpoints`. Tensors are converted a few at a time.

    DESTINATION/config.json, tokenizer files              in all
    DESTINATION/model[-0000N-of-0000M].safetensors        Hugging Face's
    DESTINATION/step-NNNNNNNN/                            Ringmaster's, with which a job can begin
    DESTINATION/.metadata, *.distcp                       torchtitan's
    DESTINATION/iter_NNNNNNN/.metadata, *.distcp, ...     Megatron-Core's torch_dist, which it divides when it loads it
"""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ringmaster.compat.transformers import MODEL_CONSTRUCTION
from ringmaster.extras import require_extra
from ringmaster.features.foreign_models.dcp_folders import DcpTensor, write_dcp
from ringmaster.features.foreign_models.foreign_checkpoints import (
    CHECKPOINT,
    DCP,
    MEGATRON,
    STEP,
    LazyModel,
    find_checkpoint,
    open_foreign,
)
from ringmaster.features.foreign_models.llama_layouts import (
    STACKED,
    LlamaShape,
    NamedTensors,
    to_megatron,
    to_torchtitan,
)
from ringmaster.files import check_new
from ringmaster.techniques.checkpoints.chain import read_chain
from ringmaster.techniques.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointStore,
    CheckpointTensor,
    RankPieces,
    TensorPiece,
    publish,
)
from ringmaster.techniques.checkpoints.state import Reader
from ringmaster.techniques.checkpoints.storage import LocalStorage
from ringmaster.techniques.checkpoints.tensor_files import DTYPE_NAMES, DTYPES, LazyTensor, blocks_of
from ringmaster.techniques.training.trainer import BY_HASH

EXTRA = (*(f"self_attention.{each}" for each in ("linear_qkv", "linear_proj", "core_attention")), "mlp.linear_fc1")
EXTRA += ("mlp.linear_fc2",)
NEMO = ".nemo"
ADAM = "exp_avg"
"""The state that only Adam and its relatives have, which count a parameter's steps."""


def write_checkpoint(folder: Path, model: LazyModel) -> int:
    """Writes a checkpoint from which a job can continue."""
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


HUGGING_FACE = "hf"
FORMATS = (HUGGING_FACE, *WRITERS)
SHARD_BYTES = 5 * 10**9
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
NOT_LLAMA = (
    "To fix: give a checkpoint folder, a folder with config.json and safetensors, or a checkpoint of Megatron-Core, "
    "torchtitan (DCP) or DeepSpeed"
)


def convert(source: str, destination: Path, *, to: str) -> dict[str, Any]:
    """Writes the model in `source` to a new folder in another format; returns a summary for display.

    Only a few tensors are in memory at a time.

    to: one of `FORMATS`. All but hf keep the states of the optimizer.
    Raises ValueError with a remedy if the source holds no convertible model, or if the destination exists.
    """
    if to not in FORMATS:
        known = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise ValueError(f"unknown format {to!r}. To fix: use {known}; ringmaster convert --help names all")
    check_new(destination)
    model = open_model(source)
    with publish(destination) as aside:
        num_states = 0
        if to == HUGGING_FACE:
            if model.kind in (HUGGING_FACE, CHECKPOINT):
                LlamaShape.of(model.config)
            _write_hugging_face(LocalStorage(aside), model.tensors)
        else:
            num_states = WRITERS[to](aside, model)
        (aside / "config.json").write_text(json.dumps(_config(model), indent=2) + "\n")
        for file in model.tokenizer:
            shutil.copyfile(file, aside / file.name)
    return {
        "from": model.kind,
        "to": to,
        "destination": str(destination),
        "num_tensors": len(model.tensors),
        "num_states": num_states,
        "num_bytes": sum(tensor.num_bytes for tensor in model.tensors.values()),
        "tokenizer_files": sorted(file.name for file in model.tokenizer),
    }


@contextmanager
def converted_checkpoint(folder: Path) -> Iterator[Path]:
    """Yields a folder of safetensors with the model of a checkpoint, of which no file may be a link to elsewhere.

    Raises ValueError as `convert` does.
    """
    links = [str(path) for path in folder.rglob("*") if not path.resolve().is_relative_to(folder.resolve())]
    if links:
        raise ValueError(f"{', '.join(links[:3])} lead out of {folder}. To fix: copy the files there")
    with tempfile.TemporaryDirectory() as aside:
        convert(str(folder), Path(aside, "model"), to=HUGGING_FACE)
        yield Path(aside, "model")


def open_model(source: str) -> LazyModel:
    """The model in a folder (or URL of checkpoints), of any known format. Raises ValueError if there is none."""
    if "://" in source:
        return _from_checkpoint(CheckpointStore(source).newest(), source)
    folder = Path(source)
    if folder.suffix == NEMO:
        raise ValueError(
            f"{source} is an archive of NeMo 1: its model_config.yaml and model_weights are not read, and it has no "
            "Hugging Face config. To fix: make a Hugging Face folder of it by NeMo's scripts/checkpoint_converters"
        )
    if (folder / "manifest.json").is_file():
        return _from_checkpoint(CheckpointStore(folder.parent).whole(folder.name), source)
    if any(folder.glob("step-????????")):
        return _from_checkpoint(CheckpointStore(folder).newest(), source)
    if (checkpoint := find_checkpoint(folder)) is not None:
        return replace(open_foreign(checkpoint), tokenizer=_tokenizer(folder))
    if (files := sorted(folder.glob("*.safetensors"))) and (folder / "config.json").is_file():
        return LazyModel(
            kind=HUGGING_FACE, config=_read_config(folder), tensors=_lazy(files), tokenizer=_tokenizer(folder)
        )
    raise ValueError(f"{source} holds no model that is known. {NOT_LLAMA}")


def _from_checkpoint(checkpoint: Checkpoint | None, source: str) -> LazyModel:
    if checkpoint is None:
        raise ValueError(f"{source} holds no checkpoint that is whole. {NOT_LLAMA}")
    meta, reader = checkpoint.manifest.meta, Reader(checkpoint)
    if not meta.get("config"):
        raise ValueError(f"{source} is of a model that has no Hugging Face config. To fix: convert Llamas")
    tensors: NamedTensors = {}
    states: dict[str, NamedTensors] = {}
    for name, stored in checkpoint.manifest.tensors.items():
        part, _, rest = name.partition("/")
        parameter, _, state = rest.rpartition("/") if part == "optimizer" else (rest, "", "")
        lazy = LazyTensor(dtype=DTYPES[stored.dtype], shape=stored.shape, load=partial(reader.whole, name))
        if part == "model":
            tensors[rest] = lazy
        elif part == "optimizer" and state != STEP:
            states.setdefault(state, {})[parameter] = lazy
    chain = read_chain(Path(checkpoint.location).parent if "://" not in source else source)
    optimizer = dict(chain.job).get("optimizer", {}) if chain is not None else {}
    tokenizer = _tokenizer(Path(meta["tokenizer_dir"])) if meta.get("tokenizer_dir") else ()
    return LazyModel(
        kind=CHECKPOINT,
        config=meta["config"],
        tensors=tensors,
        tokenizer=tokenizer,
        states=states,
        step=checkpoint.manifest.step,
        hyperparameters={"lr": optimizer["lr"], **optimizer["options"]} if optimizer.get("name") == "adamw" else {},
    )


def _lazy(files: Iterable[Path]) -> NamedTensors:
    """The tensors of safetensors files. A file stays open as long as one of its tensors is referenced."""
    result: NamedTensors = {}
    for file in files:
        try:
            opened: Any = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read: {error}. To fix: fetch or save the file again") from error
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            stored = opened.get_slice(name)
            if (dtype := DTYPES.get(stored.get_dtype())) is None:
                raise ValueError(f"{file}: {name} is of {stored.get_dtype()}. To fix: convert models of usual dtypes")
            load: Callable[[], torch.Tensor] = partial(opened.get_tensor, name)
            result[name] = LazyTensor(dtype=dtype, shape=tuple(stored.get_shape()), load=load)
    return result


def _write_hugging_face(place: LocalStorage, tensors: NamedTensors) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory

    parts = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    for file, names in parts.filename_to_tensors.items():
        place.write(file, blocks_of({name: tensors[name] for name in names}, metadata={"format": "pt"}))
    if parts.is_sharded:
        index = {"metadata": parts.metadata, "weight_map": parts.tensor_to_filename}
        place.write("model.safetensors.index.json", [json.dumps(index, indent=2).encode()])


def _config(model: LazyModel) -> dict[str, Any]:
    """The config to write: with the tensors' common dtype, and with `use_cache` for generation."""
    dtypes = {tensor.dtype for tensor in model.tensors.values()}
    known = {"dtype": str(dtypes.pop()).removeprefix("torch.")} if len(dtypes) == 1 else {}
    return {**model.config, **known, "use_cache": True}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{folder / 'config.json'} is not valid JSON: {error}. To fix: save the model again"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} is not a JSON object. To fix: save the model again")
    return config


def _tokenizer(folder: Path) -> tuple[Path, ...]:
    return tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())


@contextmanager
def converted_gguf(file: Path) -> Iterator[Path]:
    """Yields a folder with the model of a GGUF file: its config, its tokenizer, and its weights in fp32.

    Quantized weights become the numbers that they stand for. Raises ValueError where the extra `gguf` is not installed,
    or transformers does not know the file's architecture.
    """
    require_extra("gguf", feature=f"the GGUF file {file}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        try:
            with MODEL_CONSTRUCTION:
                model = AutoModelForCausalLM.from_pretrained(
                    str(file.parent), gguf_file=file.name, local_files_only=True, dtype=torch.float32
                )
            # Its weights are plain numbers now, which transformers refuses to save while they count as quantized.
            model.hf_quantizer = None
            vars(model.config).pop("quantization_config", None)
            model.save_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
            tokenizer.save_pretrained(folder)
        except Exception as error:
            why = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(
                f"{file} cannot be read as a GGUF file: {why}. To fix: download it again, or name a model's folder"
            ) from error
        yield Path(folder)
