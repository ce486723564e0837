"""Lossless conversion of models between Ringmaster's checkpoints, Hugging Face folders and Megatron-LM checkpoints.

The source is a checkpoint's folder, a job's folder or URL of checkpoints (the newest complete one), a folder that
`from_pretrained` loads, or a Megatron-LM checkpoint (`mp_rank_XX[_YYY]`). A Megatron-LM checkpoint holds safetensors or
`.pt` files. A `.pt` file is opened as weights only, and one whose pickle would run other code is refused. All output is
safetensors; tensors are converted a few at a time.

    DESTINATION/config.json, tokenizer files              in both
    DESTINATION/model[-0000N-of-0000M].safetensors        Hugging Face's
    DESTINATION/latest_checkpointed_iteration.txt         Megatron-LM's; holds "release": no optimizer, no step
    DESTINATION/release/mp_rank_XX[_YYY]/model.safetensors

Megatron-LM's layout of a Llama, where g is the number of key-value groups of n/g query heads each, and t the number of
tensor-parallel ranks:

    linear_qkv   rows [q of group 0 (n/g heads), k of group 0, v of group 0, q of group 1, ...]; ranks take whole groups
    linear_fc1   on each rank its share of gate's rows, then its share of up's
    linear_proj, linear_fc2                    divided by columns
    word_embeddings, output_layer              divided by rows, padded to a multiple of 128 t rows with the last row

Pipeline stages hold equal numbers of layers, numbered from 0 on each stage. With several stages, the last one holds a
tied output layer as a copy of the embeddings. The norms before attention and MLP are named as part of the product that
follows (Transformer Engine's names); the plain names are read too. RoPE's order of a head's columns is the same.

Source: Megatron-LM's core/models/gpt, tools/checkpoint; Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ringmaster.techniques.checkpoints.checkpoint import Checkpoint, CheckpointStore, publish
from ringmaster.techniques.checkpoints.state import Reader
from ringmaster.techniques.checkpoints.storage import LocalPlace
from ringmaster.techniques.checkpoints.tensor_files import DTYPES, LazyTensor, blocks_of

NamedTensors = dict[str, LazyTensor]

VOCABULARY_MULTIPLE = 128
EMBEDDINGS, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
QKV, PROJ = "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"
FC1, FC2 = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"
# The norms' names under Transformer Engine, and without it.
FIRST_NORM = ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
SECOND_NORM = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
IGNORED = ("_extra_state", "rotary_pos_emb.inv_freq")  # state of low-precision kernels; derived from the config


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The fields of a Llama's config that determine its tensors."""

    num_layers: int
    num_heads: int
    num_groups: int
    head_dim: int
    vocab_size: int
    is_tied: bool

    @staticmethod
    def of(config: Mapping[str, Any]) -> LlamaShape:
        """The shape from a Hugging Face config. Raises ValueError if it is not a Llama's."""
        if (result := config.get("model_type")) != "llama":
            raise ValueError(f"the model is a {result}, and only Llamas are converted. To fix: give a Llama")
        sizes = {key: _size(config, key) for key in ("num_attention_heads", "num_hidden_layers", "vocab_size")}
        num_heads = sizes["num_attention_heads"]
        return LlamaShape(
            num_layers=sizes["num_hidden_layers"],
            num_heads=num_heads,
            num_groups=_size(config, "num_key_value_heads", num_heads),
            head_dim=_size(config, "head_dim") if config.get("head_dim") else _size(config, "hidden_size") // num_heads,
            vocab_size=sizes["vocab_size"],
            is_tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def group_rows(self) -> tuple[int, int, int]:
        """The numbers of rows of q, k and v in one group."""
        return self.num_heads // self.num_groups * self.head_dim, self.head_dim, self.head_dim


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size in a config. Raises ValueError if it is missing or not a positive integer."""
    value = config.get(key) or default
    if type(value) is not int or value < 1:
        raise ValueError(f"the model's config has no {key} that is a whole number above 0. To fix: mend config.json")
    return value


def to_megatron(tensors: Mapping[str, LazyTensor], shape: LlamaShape, *, tp: int, pp: int) -> list[list[NamedTensors]]:
    """The tensors of each rank under Megatron-LM's names, by tensor-parallel rank and pipeline stage.

    Raises ValueError if the sizes do not divide the model, or if it lacks tensors or has others (biases).
    """
    _check_division(tensors, shape, tp=tp, pp=pp)
    left = dict(tensors)

    def take(name: str) -> LazyTensor:
        try:
            return left.pop(name)
        except KeyError:
            raise ValueError(f"the model lacks {name}. To fix: give a whole Llama") from None

    embeddings, norm = take("model.embed_tokens.weight"), take("model.norm.weight")
    tied_copy = left.pop("lm_head.weight", embeddings)
    output = embeddings if shape.is_tied else tied_copy
    ranks: list[list[NamedTensors]] = [[{} for _ in range(pp)] for _ in range(tp)]

    def put(stage: int, name: str, parts: Sequence[LazyTensor]) -> None:
        for rank, part in zip(ranks, parts, strict=True):
            rank[stage][name] = part

    put(0, EMBEDDINGS, _divide(_padded(embeddings, shape, tp=tp), tp, dim=0))
    for i in range(shape.num_layers):
        stage, local = divmod(i, shape.num_layers // pp)
        theirs, ours = f"decoder.layers.{local}.", f"model.layers.{i}."
        q, k, v = (take(f"{ours}self_attn.{name}_proj.weight") for name in "qkv")
        gate, up = (take(f"{ours}mlp.{name}_proj.weight") for name in ("gate", "up"))
        put(stage, theirs + FIRST_NORM[0], [take(f"{ours}input_layernorm.weight")] * tp)
        put(stage, theirs + QKV, _divide(_grouped(q, k, v, shape), tp, dim=0))
        put(stage, theirs + PROJ, _divide(take(f"{ours}self_attn.o_proj.weight"), tp, dim=1))
        put(stage, theirs + SECOND_NORM[0], [take(f"{ours}post_attention_layernorm.weight")] * tp)
        halves = zip(_divide(gate, tp, dim=0), _divide(up, tp, dim=0), strict=True)
        put(stage, theirs + FC1, [_concatenated(pair, dim=0) for pair in halves])
        put(stage, theirs + FC2, _divide(take(f"{ours}mlp.down_proj.weight"), tp, dim=1))
    put(pp - 1, FINAL_NORM, [norm] * tp)
    if not shape.is_tied or pp > 1:
        put(pp - 1, OUTPUT, _divide(_padded(output, shape, tp=tp), tp, dim=0))
    _refuse_left_overs(left)
    return ranks


def from_megatron(ranks: Sequence[Sequence[Mapping[str, LazyTensor]]], shape: LlamaShape) -> NamedTensors:
    """The full tensors under Hugging Face's names, from those of each tensor-parallel rank and pipeline stage.

    Raises ValueError if a rank lacks a tensor or has an unknown one.
    """
    pp = len(ranks[0])
    left = [[{k: v for k, v in stage.items() if not k.endswith(IGNORED)} for stage in rank] for rank in ranks]

    def take(stage: int, *names: str) -> list[LazyTensor]:
        for name in names:
            if name in left[0][stage]:
                try:
                    return [rank[stage].pop(name) for rank in left]
                except KeyError:
                    raise ValueError(f"a tensor-parallel rank of stage {stage} lacks {name}") from None
        raise ValueError(f"stage {stage} of {pp} lacks {names[0]}. To fix: give all ranks' folders of one checkpoint")

    result: NamedTensors = {}
    embeddings = _concatenated(take(0, EMBEDDINGS), dim=0)
    result["model.embed_tokens.weight"] = _rows(embeddings, 0, shape.vocab_size)
    for i in range(shape.num_layers):
        stage, local = divmod(i, shape.num_layers // pp)
        theirs, ours = f"decoder.layers.{local}.", f"model.layers.{i}."
        result[f"{ours}input_layernorm.weight"] = take(stage, *(theirs + name for name in FIRST_NORM))[0]
        result[f"{ours}post_attention_layernorm.weight"] = take(stage, *(theirs + name for name in SECOND_NORM))[0]
        qkv = _concatenated(take(stage, theirs + QKV), dim=0)
        for which, name in enumerate("qkv"):
            result[f"{ours}self_attn.{name}_proj.weight"] = _of_groups(qkv, which, shape)
        result[f"{ours}self_attn.o_proj.weight"] = _concatenated(take(stage, theirs + PROJ), dim=1)
        pairs = [_divide(part, 2, dim=0) for part in take(stage, theirs + FC1)]
        for which, name in enumerate(("gate", "up")):
            result[f"{ours}mlp.{name}_proj.weight"] = _concatenated([pair[which] for pair in pairs], dim=0)
        result[f"{ours}mlp.down_proj.weight"] = _concatenated(take(stage, theirs + FC2), dim=1)
    result["model.norm.weight"] = take(pp - 1, FINAL_NORM)[0]
    if not shape.is_tied:
        result["lm_head.weight"] = _rows(_concatenated(take(pp - 1, OUTPUT), dim=0), 0, shape.vocab_size)
    else:
        for rank in left:
            rank[pp - 1].pop(OUTPUT, None)  # a copy
    for stages in left:
        for unknown in stages:
            _refuse_left_overs(unknown)
    return result


def _check_division(tensors: Mapping[str, LazyTensor], shape: LlamaShape, *, tp: int, pp: int) -> None:
    wrong = []
    if shape.num_layers % pp:
        wrong.append(f"{shape.num_layers} layers cannot be divided into {pp} equal stages")
    if shape.num_groups % tp:
        wrong.append(f"{shape.num_groups} key-value heads cannot be divided over {tp} ranks")
    gate = tensors.get("model.layers.0.mlp.gate_proj.weight")
    if gate is not None and gate.shape[0] % tp:
        wrong.append(f"an MLP's width of {gate.shape[0]} cannot be divided over {tp} ranks")
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}. To fix: take sizes that divide them")


def _refuse_left_overs(left: Mapping[str, LazyTensor]) -> None:
    if left:
        some = ", ".join(sorted(left)[:3])
        raise ValueError(f"the model has {some}, which a plain Llama has not. To fix: convert Llamas without biases")


def _grouped(q: LazyTensor, k: LazyTensor, v: LazyTensor, shape: LlamaShape) -> LazyTensor:
    def load() -> Tensor:
        parts = [
            part.load().reshape(shape.num_groups, rows, -1)
            for part, rows in zip((q, k, v), shape.group_rows, strict=True)
        ]
        return torch.cat(parts, dim=1).reshape(-1, q.shape[1])

    return replace(q, shape=(shape.num_groups * sum(shape.group_rows), q.shape[1]), load=load)


def _of_groups(qkv: LazyTensor, which: int, shape: LlamaShape) -> LazyTensor:
    rows = shape.group_rows

    def load() -> Tensor:
        grouped = qkv.load().reshape(shape.num_groups, sum(rows), -1)
        return grouped.narrow(1, sum(rows[:which]), rows[which]).reshape(-1, qkv.shape[1])

    return replace(qkv, shape=(shape.num_groups * rows[which], qkv.shape[1]), load=load)


def _padded(tensor: LazyTensor, shape: LlamaShape, *, tp: int) -> LazyTensor:
    num_rows = math.ceil(shape.vocab_size / (VOCABULARY_MULTIPLE * tp)) * VOCABULARY_MULTIPLE * tp

    def load() -> Tensor:
        rows = tensor.load()
        return torch.cat([rows, rows[-1:].expand(num_rows - len(rows), -1)])

    return replace(tensor, shape=(num_rows, tensor.shape[1]), load=load)


def _divide(tensor: LazyTensor, num: int, *, dim: int) -> list[LazyTensor]:
    if num == 1:
        return [tensor]
    assert tensor.shape[dim] % num == 0, "sizes were checked"
    shape = tuple(size // num if i == dim else size for i, size in enumerate(tensor.shape))

    def part(index: int) -> Callable[[], Tensor]:
        return lambda: tensor.load().chunk(num, dim=dim)[index].contiguous()

    return [replace(tensor, shape=shape, load=part(index)) for index in range(num)]


def _concatenated(parts: Sequence[LazyTensor], *, dim: int) -> LazyTensor:
    first = parts[0]
    total = sum(part.shape[dim] for part in parts)
    shape = tuple(total if i == dim else size for i, size in enumerate(first.shape))
    return replace(first, shape=shape, load=lambda: torch.cat([part.load() for part in parts], dim=dim))


def _rows(tensor: LazyTensor, start: int, end: int) -> LazyTensor:
    if tensor.shape[0] < end:
        raise ValueError(f"the embeddings have {tensor.shape[0]} rows, and the config's vocabulary {end}")
    return replace(tensor, shape=(end - start, *tensor.shape[1:]), load=lambda: tensor.load()[start:end].contiguous())


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
