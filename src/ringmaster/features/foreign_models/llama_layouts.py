"""A Llama's tensors as Megatron-Core and torchtitan lay them out and name them, and as Hugging Face does.

Megatron's layout of a Llama, where g is the number of key-value groups of n/g query heads each:

    linear_qkv   rows [q of group 0 (n/g heads), k of group 0, v of group 0, q of group 1, ...]
    linear_fc1   gate's rows, then up's
    word_embeddings, output_layer              may be padded at the end

The norms before attention and MLP are named as part of the product that follows (Transformer Engine's names). RoPE's
order of a head's columns is the same.

torchtitan rotates neighboring columns of a head's queries and keys, as Meta's Llama does, and transformers the two
halves: the rows of a head (0, 1, 2, ...) of torchtitan are (0, d/2, 1, d/2 + 1, ...) of transformers. The states of the
optimizer are of the fused product of queries, keys and values, whose rows are grouped as Megatron's. Releases before
0.3 have no `qkv_linear` in their names and call the head `output`. They are read too.

Sources: Megatron-LM's core/models/gpt; torchtitan 0.3, models/llama3/state_dict_adapter.py and
models/common/attention.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
        result[theirs + FC1] = _stacked_rows(gate, up)
        result[theirs + FC2] = take(f"{ours}mlp.down_proj.weight")
    if left:
        some = ", ".join(sorted(left)[:3])
        raise ValueError(f"the model has {some}, which a plain Llama has not. To fix: convert Llamas without biases")
    return result


def from_megatron(tensors: Mapping[str, LazyTensor], shape: LlamaShape) -> NamedTensors:
    """The tensors, or states of an optimizer, under Hugging Face's names, of those that `to_megatron` names."""
    result = {"model.embed_tokens.weight": _rows(tensors[EMBEDDINGS], 0, shape.vocab_size)}
    for i in range(shape.num_layers):
        theirs, ours = f"{STACKED}{i}.", f"model.layers.{i}."
        result[f"{ours}input_layernorm.weight"] = tensors[theirs + FIRST_NORM[0]]
        result[f"{ours}post_attention_layernorm.weight"] = tensors[theirs + SECOND_NORM[0]]
        for which, name in enumerate("qkv"):
            result[f"{ours}self_attn.{name}_proj.weight"] = of_groups(tensors[theirs + QKV], which, shape)
        result[f"{ours}self_attn.o_proj.weight"] = tensors[theirs + PROJ]
        fused = tensors[theirs + FC1]
        for name, start in (("gate", 0), ("up", fused.shape[0] // 2)):
            result[f"{ours}mlp.{name}_proj.weight"] = _rows(fused, start, start + fused.shape[0] // 2)
        result[f"{ours}mlp.down_proj.weight"] = tensors[theirs + FC2]
    result["model.norm.weight"] = tensors[FINAL_NORM]
    if not shape.is_tied:
        result["lm_head.weight"] = _rows(tensors[OUTPUT], 0, shape.vocab_size)
    return result


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


def _stacked_rows(first: LazyTensor, second: LazyTensor) -> LazyTensor:
    shape = (first.shape[0] + second.shape[0], *first.shape[1:])
    return replace(first, shape=shape, load=lambda: torch.cat([first.load(), second.load()]))


def _rows(tensor: LazyTensor, start: int, end: int) -> LazyTensor:
    return replace(tensor, shape=(end - start, *tensor.shape[1:]), load=lambda: tensor.load()[start:end].contiguous())


OUTER = {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight"}
OUTER |= {"lm_head.weight": "lm_head.weight"}
INNER = {
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUR_INNER = {theirs: ours for ours, theirs in INNER.items()}
LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)\.weight")
FUSED = "attention.qkv_linear.wqkv"
MARK = "tok_embeddings.weight"
"""A name that only models of torchtitan have."""


def to_torchtitan(tensors: Mapping[str, LazyTensor], shape: LlamaShape, *, is_fused: bool = False) -> NamedTensors:
    """Returns a Llama's tensors, or states of its optimizer, under torchtitan's names.

    is_fused: fuse queries, keys and values, as the optimizer has them.
    """
    result: NamedTensors = {}
    for name, tensor in tensors.items():
        match = LAYER.fullmatch(name)
        target = f"layers.{match[1]}.{INNER[match[2]]}.weight" if match else OUTER[name]
        result[target] = _rotated(tensor, target, shape, to_halves=False)
    if shape.is_tied and not is_fused:
        result["lm_head.weight"] = result[MARK]
    for i in range(shape.num_layers) if is_fused else ():
        q, k, v = (result.pop(f"layers.{i}.attention.qkv_linear.w{each}.weight") for each in "qkv")
        result[f"layers.{i}.{FUSED}.weight"] = grouped(q, k, v, shape)
    return result


def from_torchtitan(tensors: Mapping[str, LazyTensor], shape: LlamaShape) -> NamedTensors:
    """Returns a Llama's tensors, or states of its optimizer, under Hugging Face's names; unknown names as they are."""
    result: NamedTensors = {}
    for name, tensor in tensors.items():
        name = re.sub(r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1.", name.replace("output.", "lm_head.", 1))
        if FUSED in name:
            for which, letter in enumerate("qkv"):
                stock = name.replace("wqkv", f"w{letter}")
                result[_our_name(stock)] = _rotated(of_groups(tensor, which, shape), stock, shape, to_halves=True)
        elif not (shape.is_tied and name == "lm_head.weight"):
            result[_our_name(name)] = _rotated(tensor, name, shape, to_halves=True)
    return result


def _our_name(name: str) -> str:
    match = LAYER.fullmatch(name)
    if match:
        return f"model.layers.{match[1]}.{OUR_INNER.get(match[2], match[2])}.weight"
    return next((ours for ours, theirs in OUTER.items() if theirs == name), name)


def _rotated(tensor: LazyTensor, name: str, shape: LlamaShape, *, to_halves: bool) -> LazyTensor:
    """Reorders the rows of queries and keys; `name` is torchtitan's."""
    num_heads = {"wq": shape.num_heads, "wk": shape.num_groups}.get(name.split(".")[-2])
    if num_heads is None:
        return tensor
    halves = (-1, 2) if to_halves else (2, -1)

    def load() -> Tensor:
        return tensor.load().reshape(num_heads, *halves, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    return replace(tensor, load=load)
