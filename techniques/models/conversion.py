"""Lossless conversion of models between Ringmaster's checkpoints, Hugging Face folders and those of other trainers.

The source is a checkpoint's folder, a job's folder or URL of checkpoints (the newest complete one), a folder that
`from_pretrained` loads, or one of `foreign_checkpoints`. Tensors are converted a few at a time.

    DESTINATION/config.json, tokenizer files              in all
    DESTINATION/model[-0000N-of-0000M].safetensors        Hugging Face's
    DESTINATION/step-NNNNNNNN/                            Ringmaster's, which `warm_start` names
    DESTINATION/.metadata, *.distcp                       torchtitan's
    DESTINATION/iter_NNNNNNN/.metadata, *.distcp, ...     Megatron-Core's torch_dist, which it divides when it loads it
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ringmaster.techniques.checkpoints.chain import read_chain
from ringmaster.techniques.checkpoints.checkpoint import Checkpoint, CheckpointStore, publish
from ringmaster.techniques.checkpoints.state import Reader
from ringmaster.techniques.checkpoints.storage import LocalPlace
from ringmaster.techniques.checkpoints.tensor_files import DTYPES, LazyTensor, blocks_of
from ringmaster.techniques.models.foreign_checkpoints import CHECKPOINT, STEP, LazyModel, open_foreign
from ringmaster.techniques.models.foreign_writing import WRITERS
from ringmaster.techniques.models.megatron_layout import LlamaShape, NamedTensors
from ringmaster.techniques.models.model_folders import find_checkpoint

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
        raise ValueError(f"unknown format {to!r}. To fix: use {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if destination.exists():
        raise ValueError(f"{destination} is there already. To fix: name a new folder")
    model = open_model(source)
    with publish(destination) as aside:
        num_states = 0
        if to == HUGGING_FACE:
            if model.kind in (HUGGING_FACE, CHECKPOINT):
                LlamaShape.of(model.config)
            _write_hugging_face(LocalPlace(aside), model.tensors)
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


def _write_hugging_face(place: LocalPlace, tensors: NamedTensors) -> None:
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
