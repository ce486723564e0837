"""Lossless conversion of models between Ringmaster's checkpoints, Hugging Face folders and Megatron-LM checkpoints.

The source is a checkpoint's folder, a job's folder or URL of checkpoints (the newest complete one), a folder that
`from_pretrained` loads, or a Megatron-LM checkpoint (`mp_rank_XX[_YYY]`). A Megatron-LM checkpoint holds safetensors or
`.pt` files. A `.pt` file is opened as weights only, and one whose pickle would run other code is refused. All output is
safetensors; tensors are converted a few at a time.

    DESTINATION/config.json, tokenizer files              in both
    DESTINATION/model[-0000N-of-0000M].safetensors        Hugging Face's
    DESTINATION/latest_checkpointed_iteration.txt         Megatron-LM's; holds "release": no optimizer, no step
    DESTINATION/release/mp_rank_XX[_YYY]/model.safetensors
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ringmaster.techniques.checkpoints.checkpoint import Checkpoint, CheckpointStore, publish
from ringmaster.techniques.checkpoints.state import Reader
from ringmaster.techniques.checkpoints.storage import LocalPlace
from ringmaster.techniques.checkpoints.tensor_files import DTYPES, LazyTensor, blocks_of
from ringmaster.techniques.models.megatron import LlamaShape, NamedTensors, from_megatron, to_megatron

HUGGING_FACE, MEGATRON = "hf", "megatron"
FORMATS = (HUGGING_FACE, MEGATRON)
SHARD_BYTES = 5 * 10**9
LATEST_ITERATION, RELEASE = "latest_checkpointed_iteration.txt", "release"
RANK_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
NOT_LLAMA = "To fix: give a checkpoint folder, a folder with config.json and safetensors, or one of Megatron-LM"


@dataclass(frozen=True, kw_only=True)
class LazyModel:
    """A model whose tensors are not loaded yet.

    kind: the format of its source.
    config: its Hugging Face config.
    tensors: its tensors under Hugging Face's names.
    tokenizer: its tokenizer's files.
    """

    kind: str
    config: Mapping[str, Any]
    tensors: NamedTensors
    tokenizer: tuple[Path, ...] = ()


def convert(source: str, destination: Path, *, to: str, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    """Writes the model in `source` to a new folder in another format; returns a summary for display.

    Only a few tensors are in memory at a time.

    to: the format, "hf" or "megatron".
    tp, pp: the numbers of tensor-parallel ranks and pipeline stages of Megatron-LM's layout.
    Raises ValueError with a remedy if the source holds no convertible model, or if the destination exists.
    """
    if to not in FORMATS:
        raise ValueError(f"unknown format {to!r}. To fix: use {' or '.join(FORMATS)}")
    if tp < 1 or pp < 1 or (to == HUGGING_FACE and tp * pp > 1):
        raise ValueError("To fix: give tp and pp of at least 1, and only with megatron")
    if destination.exists():
        raise ValueError(f"{destination} is there already. To fix: name a new folder")
    model = open_model(source)
    shape = LlamaShape.of(model.config)
    with publish(destination) as aside:
        if to == HUGGING_FACE:
            _write_hugging_face(LocalPlace(aside), model.tensors)
        else:
            _write_megatron(LocalPlace(aside), to_megatron(model.tensors, shape, tp=tp, pp=pp))
        (aside / "config.json").write_text(json.dumps(_config(model), indent=2) + "\n")
        for file in model.tokenizer:
            shutil.copyfile(file, aside / file.name)
    return {
        "from": model.kind,
        "to": to,
        "destination": str(destination),
        "num_tensors": len(model.tensors),
        "num_bytes": sum(tensor.num_bytes for tensor in model.tensors.values()),
        "tokenizer_files": sorted(file.name for file in model.tokenizer),
    }


def open_model(source: str) -> LazyModel:
    """The model in a folder (or URL of checkpoints), of any known format. Raises ValueError if there is none."""
    if "://" in source:
        return _from_checkpoint(CheckpointStore(source).newest(), source)
    folder = Path(source)
    if (folder / "manifest.json").is_file():
        return _from_checkpoint(CheckpointStore(folder.parent).whole(folder.name), source)
    if any(folder.glob("step-????????")):
        return _from_checkpoint(CheckpointStore(folder).newest(), source)
    if (folder / LATEST_ITERATION).is_file() or any(folder.glob("mp_rank_*")):
        return _from_megatron(folder)
    if (folder / "config.json").is_file():
        files = sorted(folder.glob("*.safetensors"))
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
    tensors = {
        name.removeprefix("model/"): LazyTensor(
            dtype=DTYPES[stored.dtype], shape=stored.shape, load=partial(reader.whole, name)
        )
        for name, stored in checkpoint.manifest.tensors.items()
        if name.startswith("model/")
    }
    tokenizer = _tokenizer(Path(meta["tokenizer_dir"])) if meta.get("tokenizer_dir") else ()
    return LazyModel(kind="checkpoint", config=meta["config"], tensors=tensors, tokenizer=tokenizer)


def _from_megatron(folder: Path) -> LazyModel:
    ranks_in = folder
    if (folder / LATEST_ITERATION).is_file():
        latest = (folder / LATEST_ITERATION).read_text().strip()
        ranks_in = folder / (latest if latest == RELEASE else f"iter_{int(latest):07d}")
    result: dict[tuple[int, int], NamedTensors] = {}
    args: Mapping[str, Any] = {}
    for path in sorted(ranks_in.glob("mp_rank_*")):
        if match := RANK_FOLDER.fullmatch(path.name):
            named, args = _read_rank(path)
            result[int(match[1]), int(match[2] or 0)] = named
    num = tuple(1 + max(at[i] for at in result) for i in range(2)) if result else (0, 0)
    if not result or len(result) != num[0] * num[1]:
        raise ValueError(f"{ranks_in} lacks folders of ranks (mp_rank_XX_YYY). To fix: gather all of them there")
    has_config = (folder / "config.json").is_file()
    if not has_config and not args:
        raise ValueError(f"{folder} says nothing of the model. To fix: put its Hugging Face config.json there")
    config = _read_config(folder) if has_config else _config_of(args)
    ranks = [[result[rank, stage] for stage in range(num[1])] for rank in range(num[0])]
    tensors = from_megatron(ranks, LlamaShape.of(config))
    return LazyModel(kind=MEGATRON, config=config, tensors=tensors, tokenizer=_tokenizer(folder))


def _read_rank(folder: Path) -> tuple[NamedTensors, Mapping[str, Any]]:
    if files := sorted(folder.glob("*.safetensors")):
        return _lazy(files), {}
    files = [folder / name for name in ("model_optim_rng.pt", "model_rng.pt") if (folder / name).is_file()]
    if not files:
        raise ValueError(f"{folder} has neither safetensors nor model_optim_rng.pt. To fix: give the model's files")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            stored = torch.load(files[0], map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"{files[0]} holds more than weights, and pickles are not run: {str(error).splitlines()[0]} "
            "To fix: in Megatron-LM's environment write its 'model' with safetensors.torch.save_file beside it"
        ) from error
    if "model" not in stored:
        raise ValueError(f"{files[0]} holds no 'model': virtual stages are not read. To fix: save it without them")
    named = {
        name: LazyTensor(dtype=value.dtype, shape=tuple(value.shape), load=value.contiguous)
        for name, value in stored["model"].items()
        if isinstance(value, torch.Tensor)
    }
    return named, vars(stored.get("args", argparse.Namespace()))


def _config_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """The Hugging Face config that corresponds to the training arguments in a Megatron-LM checkpoint."""
    heads = args["num_attention_heads"]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": args["hidden_size"],
        "intermediate_size": args["ffn_hidden_size"],
        "num_hidden_layers": args["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": args["num_query_groups"] if args.get("group_query_attention") else heads,
        "head_dim": args.get("kv_channels") or args["hidden_size"] // heads,
        "rms_norm_eps": args.get("norm_epsilon", 1e-5),
        "rope_theta": float(args.get("rotary_base", 10_000)),
        "max_position_embeddings": args["max_position_embeddings"],
        "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        "vocab_size": args.get("vocab_size") or args["padded_vocab_size"],
    }


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


def _write_megatron(place: LocalPlace, ranks: list[list[NamedTensors]]) -> None:
    for rank, stages in enumerate(ranks):
        for stage, tensors in enumerate(stages):
            folder = f"mp_rank_{rank:02d}" if len(stages) == 1 else f"mp_rank_{rank:02d}_{stage:03d}"
            place.write(f"{RELEASE}/{folder}/model.safetensors", blocks_of(tensors, metadata={"format": "pt"}))
    place.write(LATEST_ITERATION, [RELEASE.encode()])


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
