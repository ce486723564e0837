"""A Llama's tensors as Megatron-LM and Megatron-Core lay them out, and as Hugging Face does.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ringmaster.techniques.checkpoints.tensor_files import LazyTensor

NamedTensors = dict[str, LazyTensor]

EMBEDDINGS, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
STACKED, FINAL_NORM = "decoder.layers.", "decoder.final_layernorm.weight"
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


def to_megatron(tensors: Mapping[str, LazyTensor], shape: LlamaShape) -> NamedTensors:
    """The tensors, or states of an optimizer, under Megatron's names, undivided.

    Raises ValueError if the model lacks tensors or has others (biases).
    """
    left = dict(tensors)

    def take(name: str) -> LazyTensor:
        try:
            return left.pop(name)
        except KeyError:
            raise ValueError(f"the model lacks {name}. To fix: give a whole Llama") from None

    result = {EMBEDDINGS: take("model.embed_tokens.weight"), FINAL_NORM: take("model.norm.weight")}
    output = left.pop("lm_head.weight", None) if shape.is_tied else take("lm_head.weight")
    if output is not None and not shape.is_tied:
        result[OUTPUT] = output
    for i in range(shape.num_layers):
        theirs, ours = f"{STACKED}{i}.", f"model.layers.{i}."
        q, k, v = (take(f"{ours}self_attn.{name}_proj.weight") for name in "qkv")
        gate, up = (take(f"{ours}mlp.{name}_proj.weight") for name in ("gate", "up"))
        result[theirs + FIRST_NORM[0]] = take(f"{ours}input_layernorm.weight")
        result[theirs + QKV] = grouped(q, k, v, shape)
        result[theirs + PROJ] = take(f"{ours}self_attn.o_proj.weight")
        result[theirs + SECOND_NORM[0]] = take(f"{ours}post_attention_layernorm.weight")
        result[theirs + FC1] = _concatenated([gate, up], dim=0)
        result[theirs + FC2] = take(f"{ours}mlp.down_proj.weight")
    _refuse_left_overs(left)
    return result


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
            result[f"{ours}self_attn.{name}_proj.weight"] = of_groups(qkv, which, shape)
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


def _refuse_left_overs(left: Mapping[str, LazyTensor]) -> None:
    if left:
        some = ", ".join(sorted(left)[:3])
        raise ValueError(f"the model has {some}, which a plain Llama has not. To fix: convert Llamas without biases")


def grouped(q: LazyTensor, k: LazyTensor, v: LazyTensor, shape: LlamaShape) -> LazyTensor:
    """The fused rows of queries, keys and values: of each group its queries, its key and its value."""

    def load() -> Tensor:
        parts = [
            part.load().reshape(shape.num_groups, rows, -1)
            for part, rows in zip((q, k, v), shape.group_rows, strict=True)
        ]
        return torch.cat(parts, dim=1).reshape(-1, q.shape[1])

    return replace(q, shape=(shape.num_groups * sum(shape.group_rows), q.shape[1]), load=load)


def of_groups(qkv: LazyTensor, which: int, shape: LlamaShape) -> LazyTensor:
    """The queries (0), keys (1) or values (2) of fused rows."""
    rows = shape.group_rows

    def load() -> Tensor:
        grouped = qkv.load().reshape(shape.num_groups, sum(rows), -1)
        return grouped.narrow(1, sum(rows[:which]), rows[which]).reshape(-1, qkv.shape[1])

    return replace(qkv, shape=(shape.num_groups * rows[which], qkv.shape[1]), load=load)


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
