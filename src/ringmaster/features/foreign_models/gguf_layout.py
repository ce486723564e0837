"""The names, the layout and the metadata that GGUF has for the tensors of a decoder.

The format describes a model by an architecture and by numbers. How the architecture computes is fixed in llama.cpp:
what a config says otherwise cannot be written, and is refused. Two layouts differ from transformers':

- A Llama of llama.cpp rotates neighbouring columns of a head's queries and keys, one of transformers the two halves:
  the rows (0, d/2, 1, d/2 + 1, ...) of a head become (0, 1, 2, 3, ...).
- A norm of Gemma multiplies by one plus its weight: the sum is stored.

Sources: docs/gguf.md of ggml; `gguf.MODEL_TENSORS` and `gguf.TensorNameMap`; llama.cpp's conversion of these
architectures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gguf
import torch
from torch import Tensor

from ringmaster.errors import InputError, input_errors, raise_faults
from ringmaster.text import enumerated

QUERIES, KEYS, VALUES, ATTENTION_OUTPUT = (f"self_attn.{each}_proj" for each in "qkvo")
GATE, UP, DOWN = (f"mlp.{each}_proj" for each in ("gate", "up", "down"))
EMBEDDINGS, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
PLAIN_YARN = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"}
    | {"beta_fast", "beta_slow"}
)
"""The parameters of YaRN that GGUF has; llama.cpp derives the scale of the attention from the factor."""
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class GgufArchitecture:
    """What llama.cpp computes for an architecture.

    name: in GGUF.
    model_class: of transformers.
    activation: of the feed-forward layers.
    norms: those of a layer, apart from the two that all have.
    biases: the modules of a layer that may have a bias.
    is_interleaved: whether queries and keys rotate neighbouring columns.
    norm_offset: what is added to the weights of norms.
    window_period: one layer in so many attends to all tokens, the others to a window; None: all attend to all.
    num_layers_by_width: the number of layers at which attention is scaled by the width of the model over the number of
        heads, in place of the size of a head.
    """

    name: str
    model_class: str
    activation: str
    norms: tuple[str, ...] = ()
    biases: frozenset[str] = frozenset()
    is_interleaved: bool = False
    norm_offset: float = 0.0
    window_period: int | None = None
    num_layers_by_width: int | None = None


HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
GEMMA_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
QKV = frozenset({QUERIES, KEYS, VALUES})
ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        name="llama",
        model_class="LlamaForCausalLM",
        activation="silu",
        biases=QKV | {ATTENTION_OUTPUT, GATE, UP, DOWN},
        is_interleaved=True,
    ),
    "qwen2": GgufArchitecture(name="qwen2", model_class="Qwen2ForCausalLM", activation="silu", biases=QKV),
    "qwen3": GgufArchitecture(name="qwen3", model_class="Qwen3ForCausalLM", activation="silu", norms=HEAD_NORMS),
    "gemma2": GgufArchitecture(
        name="gemma2",
        model_class="Gemma2ForCausalLM",
        activation="gelu_pytorch_tanh",
        norms=GEMMA_NORMS,
        norm_offset=1.0,
        window_period=2,
        num_layers_by_width=46,
    ),
    "gemma3_text": GgufArchitecture(
        name="gemma3",
        model_class="Gemma3ForCausalLM",
        activation="gelu_pytorch_tanh",
        norms=(*HEAD_NORMS, *GEMMA_NORMS),
        norm_offset=1.0,
        window_period=6,
        num_layers_by_width=62,
    ),
}
"""By the `model_type` of transformers."""


def config_of(fields: Mapping[str, Any]) -> Any:
    """Returns the config of transformers that fields of a config.json describe, with its defaults.

    Raises InputError where GGUF has no architecture for it here, or the fields are invalid.
    """
    from transformers import AutoConfig

    model_type = str(fields.get("model_type"))
    (model_class, *_) = fields.get("architectures") or [None]
    known = ARCHITECTURES.get(model_type)
    if known is None or model_class not in (None, known.model_class):
        classes = ", ".join(each.model_class for each in ARCHITECTURES.values())
        raise InputError([f"a {model_class or model_type} is not converted to GGUF. To fix: give one of {classes}"])
    with input_errors(ValueError, TypeError, KeyError, about="the model's config is invalid: "):
        return AutoConfig.for_model(**{**fields, "model_type": model_type})


@dataclass(frozen=True, kw_only=True)
class GgufLayout:
    """The layout of one model. config: of transformers."""

    architecture: GgufArchitecture
    config: Any

    @staticmethod
    def of(config: Any) -> GgufLayout:
        """Returns the layout of a model. Raises InputError with everything that llama.cpp computes otherwise."""
        layout = GgufLayout(architecture=ARCHITECTURES[config.model_type], config=config)
        remedy = "To fix: use an engine that reads its folder, such as vLLM or transformers"
        raise_faults([f"the model cannot be written as GGUF: {fault}. {remedy}" for fault in _faults(layout)])
        return layout

    @property
    def head_dim(self) -> int:
        """The size of an attention head."""
        config = self.config
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    @cached_property
    def tensor_names(self) -> gguf.TensorNameMap:
        """The names in GGUF of transformers' modules."""
        (arch,) = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture.name)
        return gguf.get_tensor_name_map(arch, self.config.num_hidden_layers)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the tensors that the model must have, under transformers' names."""
        config, head_dim = self.config, self.head_dim
        hidden, wide, num_heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        of_layer: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,)),
            **{norm: (head_dim if norm in HEAD_NORMS else hidden,) for norm in self.architecture.norms},
            QUERIES: (num_heads * head_dim, hidden),
            **dict.fromkeys((KEYS, VALUES), (num_kv_heads * head_dim, hidden)),
            ATTENTION_OUTPUT: (hidden, num_heads * head_dim),
            **dict.fromkeys((GATE, UP), (wide, hidden)),
            DOWN: (hidden, wide),
        }
        result = {EMBEDDINGS: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
        if not config.tie_word_embeddings:
            result[HEAD] = (config.vocab_size, hidden)
        for i in range(config.num_hidden_layers):
            result |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
        return {f"{name}.weight": shape for name, shape in result.items()}

    def is_bias(self, name: str) -> bool:
        """Whether a tensor is a bias that the architecture may have."""
        module, _, kind = name.rpartition(".")
        return (
            kind == "bias"
            and f"{module}.weight" in self.shapes
            and module.split(".", 3)[-1] in self.architecture.biases
        )

    def tensor_faults(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        """Yields what is missing, superfluous or of another shape among a model's tensors, by their names."""
        tied = f"{HEAD}.weight"
        unknown = sorted(name for name in shapes if not (name in self.shapes or self.is_bias(name) or name == tied))
        if adapted := [name for name in unknown if ".lora_" in name]:
            yield f"{adapted[0]} is of an adapter. To fix: merge it first, by ringmaster export --merge"
        elif unknown:
            yield f"GGUF has no name for {enumerated(unknown)}. To fix: give a whole {self.architecture.model_class}"
        if absent := [name for name in self.shapes if name not in shapes]:
            yield f"the weights lack {enumerated(absent)}. To fix: save the model again"
        for name, shape in self.shapes.items():
            if shapes.get(name, shape) != shape:
                text = f"{name} has the shape {list(shapes[name])}, and the config {list(shape)}"
                yield f"{text}: all layers have one size in GGUF. To fix: give a model whose layers are alike"
                return

    def name(self, tensor: str) -> str:
        """Returns the name of a tensor in GGUF."""
        result = self.tensor_names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert result is not None, tensor
        return result

    def stored(self, name: str, values: Tensor) -> Tensor:
        """Returns the values of a tensor as GGUF stores them. name: under transformers' names."""
        if self.architecture.norm_offset and name.endswith("norm.weight"):
            return values.float() + self.architecture.norm_offset
        if self.architecture.is_interleaved and name.rpartition(".")[0].endswith((QUERIES, KEYS)):
            return self.interleaved(values)
        return values

    def interleaved(self, rows: Tensor) -> Tensor:
        """Returns the rows of queries or keys, of which the two halves of each head alternate."""
        halves = rows.reshape(-1, 2, self.head_dim // 2, *rows.shape[1:])
        return halves.transpose(1, 2).reshape(rows.shape)

    def rope_of(self, layer_type: str) -> Mapping[str, Any]:
        """Returns the parameters of the rotary embeddings of a type of layers."""
        parameters: Mapping[str, Any] = self.config.rope_parameters or {}
        of_type = parameters.get(layer_type, parameters)
        return of_type or {}

    def extra_tensors(self) -> Mapping[str, Tensor]:
        """Returns tensors that transformers computes from its config: the divisors of frequencies of Llama 3."""
        if self.rope_of(FULL).get("rope_type") != "llama3":
            return {}
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](self.config, torch.device("cpu"))
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        plain = 1.0 / self.rope_of(FULL)["rope_theta"] ** steps
        return {f"{gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS]}.weight": plain / scaled.float()}

    def describe(self, writer: gguf.GGUFWriter) -> None:
        """Adds the metadata of the architecture to a file."""
        config = self.config
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(self.head_dim)
        self._describe_rope(writer)
        if self.architecture.window_period is not None:
            writer.add_sliding_window(config.sliding_window)
        if (cap := getattr(config, "attn_logit_softcapping", None)) is not None:
            writer.add_attn_logit_softcapping(cap)
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            writer.add_final_logit_softcapping(cap)

    def _describe_rope(self, writer: gguf.GGUFWriter) -> None:
        rope = self.rope_of(FULL)
        writer.add_rope_freq_base(rope["rope_theta"])
        if SLIDING in (self.config.rope_parameters or {}):
            writer.add_rope_freq_base_swa(self.rope_of(SLIDING)["rope_theta"])
        kind = rope.get("rope_type", "default")
        if kind in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
            writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
            writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)


def _faults(layout: GgufLayout) -> Iterator[str]:
    """Yields what llama.cpp computes otherwise than a config says."""
    architecture, config = layout.architecture, layout.config
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if activation != architecture.activation:
        yield f"its activation is {activation}, and {architecture.name} has {architecture.activation}"
    yield from _rope_faults(layout)
    yield from _window_faults(layout)
    if architecture.norm_offset:
        yield from _gemma_faults(layout)


def _rope_faults(layout: GgufLayout) -> Iterator[str]:
    ropes = {layers: layout.rope_of(layers) for layers in (FULL, SLIDING)}
    if any(rope.get("partial_rotary_factor", 1.0) != 1.0 for rope in ropes.values()):
        yield f"only a part of each head is rotated, and the whole of one of {layout.architecture.name}"
    kind, is_llama = ropes[FULL].get("rope_type", "default"), layout.architecture.name == "llama"
    if kind not in ROPE_TYPES or (kind == "llama3" and not is_llama):
        yield f"its positions are scaled by {kind}, which {layout.architecture.name} has not"
    elif kind == "yarn" and (others := {key for key, value in ropes[FULL].items() if value} - PLAIN_YARN):
        yield f"its positions are scaled by YaRN with {', '.join(sorted(others))}, which GGUF does not have"
    if SLIDING in (layout.config.rope_parameters or {}) and ropes[SLIDING].get("rope_type", "default") != "default":
        yield f"the positions in its windows are scaled by {ropes[SLIDING]['rope_type']}, which GGUF does not have"


def _window_faults(layout: GgufLayout) -> Iterator[str]:
    period, config = layout.architecture.window_period, layout.config
    types = getattr(config, "layer_types", None) or []
    expected = [FULL if period is None or (i + 1) % period == 0 else SLIDING for i in range(config.num_hidden_layers)]
    if types and list(types) != expected:
        has = "no windows" if period is None else f"a window in all layers but each {period}th"
        yield f"its layers attend in another order: {layout.architecture.name} has {has}"


def _gemma_faults(layout: GgufLayout) -> Iterator[str]:
    architecture, config = layout.architecture, layout.config
    by_width = config.num_hidden_layers == architecture.num_layers_by_width
    scalar = config.hidden_size // config.num_attention_heads if by_width else layout.head_dim
    if config.query_pre_attn_scalar != scalar:
        text = f"query_pre_attn_scalar is {config.query_pre_attn_scalar}, and {scalar} in llama.cpp"
        yield f"{text} for {config.num_hidden_layers} layers of this size"
    caps = [getattr(config, f"{place}_logit_softcapping", None) for place in ("attn", "final")]
    if architecture.name == "gemma2" and None in caps:
        yield "its logits have no soft caps, and those of gemma2 always do"
    if architecture.name == "gemma2" and not config.tie_word_embeddings:
        yield "its output layer is not its embeddings, as that of gemma2 is"
    if architecture.name == "gemma3" and caps[0] is not None:
        yield "its attention has a soft cap, and that of gemma3 has none"
    if getattr(config, "use_bidirectional_attention", None):
        yield "its attention is bidirectional"
