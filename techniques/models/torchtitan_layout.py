"""A Llama's tensors under the names of torchtitan, and under those of Hugging Face.

torchtitan rotates neighboring columns of a head's queries and keys, as Meta's Llama does, and transformers the two
halves: the rows of a head (0, 1, 2, ...) of torchtitan are (0, d/2, 1, d/2 + 1, ...) of transformers. The states of the
optimizer are of the fused product of queries, keys and values, whose rows are grouped as Megatron's.

Releases before 0.3 have no `qkv_linear` in their names and call the head `output`. They are read too.

Source: torchtitan 0.3, models/llama3/state_dict_adapter.py and models/common/attention.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ringmaster.techniques.checkpoints.tensor_files import LazyTensor
from ringmaster.techniques.models.megatron_layout import LlamaShape, NamedTensors, grouped, of_groups

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
