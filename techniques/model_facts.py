"""Facts about a model that techniques and the planner use. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from ringmaster import features
from ringmaster.codec import SINCE_LATER, stored_flat
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import ModelSpec

# Our names, and those of transformers.
IMPLEMENTATIONS = {"sdpa": "sdpa", "flash": "flash_attention_2", "flex": "flex_attention"}
FLASH_PACKAGE = "flash_attn"


def check_attention(spec: ModelSpec) -> None:
    """Raises ValueError where a model on this machine cannot compute attention as `spec` requires."""
    if spec.attention not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(
            f"model: attention {spec.attention!r} is unknown. To fix: take auto, {', '.join(IMPLEMENTATIONS)}"
        )
    if spec.attention != "auto" and (spec.factory is not None or spec.command is not None):
        raise ValueError("model: attention is chosen for Hugging Face's models. To fix: leave it out")
    if spec.attention != "auto" and "attn_implementation" in spec.config:
        raise ValueError("model: attention and config.attn_implementation set the same. To fix: leave one out")
    if spec.attention == "flash" and find_spec(FLASH_PACKAGE) is None:
        raise ValueError(
            "model: attention: flash needs the package flash-attn, which is not installed. To fix: install it, or take "
            "sdpa, which on a GPU runs PyTorch's own build of FlashAttention"
        )


def why_no_attention(job: Job, *, device_kind: str) -> str | None:
    """Returns why devices of this kind cannot compute attention as the job requires, or None."""
    attention = job.model.attention
    if attention in ("flash", "flex") and device_kind != "gpu":
        reason = "is a GPU's" if attention == "flash" else "has no backward on CPUs"
        return f"attention: {attention} {reason}; sdpa is for every device"
    if attention == "flash" and job.precision == "fp32":
        return "attention: flash computes in bf16 only, and the job's precision is fp32"
    return None


@dataclass(frozen=True, kw_only=True)
class LayerModule:
    """A module inside a layer that has its own parameters, e.g. "self_attn.q_proj", "Linear", (out, in).

    name: its name within the layer.
    kind: its class.
    shape: the shape of its weight; empty if it has none.
    """

    name: str
    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A causal language model that reads samples of `seq_len` tokens.

    architecture: the name of its class.
    num_kv_heads: the number of key-value heads, which groups of query heads may share.
    head_dim: the width of an attention head.
    window: the number of tokens that attention reaches back, None for all.
    is_tied: whether embedding and head share their weight.
    modules: the modules of its layers, without duplicates.
    has_positions: whether samples have `position_ids`, as packed ones have.
    """

    architecture: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    seq_len: int
    window: int | None
    is_tied: bool
    modules: tuple[LayerModule, ...]
    has_positions: bool = field(default=False, metadata=SINCE_LATER)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts that a technique must know about a model.

    num_parameters: the number of parameters, with an adapter's; shared ones count once.
    parameter_bytes: the size of all parameters in fp32.
    largest_layer_bytes: the size of the largest part that is gathered at once: a repeated layer, or all parameters
        outside of the repeated layers.
    num_layers: the number of repeated layers, see `layer_names`.
    has_dropout: whether training draws random numbers.
    decoder: the structure of a causal language model, None for any other model.
    num_trained: the number of trained parameters, None for all.
    has_experts: whether tokens are routed to some of several experts.
    num_experts: the number of experts of a layer, where their tensors can be divided between experts; 0 otherwise.
    expert_bytes: the size of their parameters in fp32.
    has_router_loss: whether the model adds a loss of its routers, which is one of the whole batch.
    undivided: what several adapters in one batch cannot each have of their own, as a message about `modules_to_save`
        or about tensors of the samples; empty if there is nothing.
    computes_loss: whether the loss, when the job names none, is the model's own, of more than logits, or one of rows.
    whole_batch: the reason why the job's batch must not be divided; empty if it may be (`techniques.probing`).
    scalar: the name of a parameter that is a single number, which cannot be sharded; empty if there is none.
    former: stored facts that only earlier releases recorded.
    """

    num_parameters: int
    parameter_bytes: int
    largest_layer_bytes: int
    num_layers: int
    has_dropout: bool
    decoder: Decoder | None = None
    num_trained: int | None = field(default=None, metadata=SINCE_LATER)
    has_experts: bool = field(default=False, metadata=SINCE_LATER)
    num_experts: int = field(default=0, metadata=SINCE_LATER)
    expert_bytes: int = field(default=0, metadata=SINCE_LATER)
    has_router_loss: bool = field(default=False, metadata=SINCE_LATER)
    undivided: str = field(default="", metadata=SINCE_LATER)
    computes_loss: bool = field(default=False, metadata=SINCE_LATER)
    whole_batch: str = field(default="", metadata=SINCE_LATER)
    scalar: str = field(default="", metadata=SINCE_LATER)
    former: Mapping[str, Any] = stored_flat({})

    @property
    def num_updated(self) -> int:
        """The number of parameters that have a gradient and optimizer state."""
        return self.num_parameters if self.num_trained is None else self.num_trained


CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
"""Endings of the names of transformers' causal language models."""


MODEL_LOSSES: Mapping[str, str] = features.dotted_names("MODEL_LOSSES")
"""The losses that features have for models, by the endings of their names. They also read what a model writes."""


def default_loss(model_class: str) -> str | None:
    """Returns the loss of `MODEL_LOSSES` for models of a class; None for others."""
    return next((loss for ending, loss in MODEL_LOSSES.items() if model_class.endswith(ending)), None)


def is_causal_name(name: str) -> bool:
    """Returns whether a model class of transformers predicts the next token, unless its config has an encoder.

    Those of `AutoModelForImageTextToText` do so for the tokens of texts with images.
    """
    return name.endswith(CAUSAL_SUFFIXES) or reads_image_texts(name)


def reads_image_texts(name: str) -> bool:
    """Returns whether a model class of transformers reads texts with images, and writes text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()


POSITIONS_AFTER_PADDING = frozenset(
    {"camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet"}
    | {"roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}
    | {"altclip_text_model", "bridgetower_text_model", "clap_text_model"}
)
"""The `model_type` of models whose first token has the position behind that of padding, their padding token's id."""


def text_config_of(config: Any) -> Any:
    """Returns the part of a Hugging Face config that describes how text is read, which mostly is the config itself."""
    nested = getattr(config, "text_config", None)
    return config if nested is None or isinstance(nested, dict) else nested


def num_positions(config: Any) -> int | None:
    """Returns the most tokens that a Hugging Face model has positions for; None where its config names no limit.

    config: None for that of no model.
    """
    config = text_config_of(config)
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:  # XLNet's config has -1
        return None
    return most - num_positions_before(config)


def num_positions_before(config: Any, *, pad_token_id: int | None = None) -> int:
    """Returns how many of a model's positions lie before that of the first token.

    pad_token_id: the padding token that the config will have; None for the one that it has.
    """
    kind, padding = getattr(config, "model_type", None), getattr(config, "pad_token_id", None)
    if kind not in POSITIONS_AFTER_PADDING or getattr(config, "position_embedding_type", None) == "rotary":
        return 0
    padding = padding if pad_token_id is None else pad_token_id
    return 2 if kind == "mpnet" or padding is None else padding + 1  # MPNet's padding is always 1


# The forward of these models accepts hidden states in place of embeddings, without further processing, and explicit
# positions. Only attention mixes tokens.
ARCHITECTURES = (
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


def why_unknown(decoder: Decoder | None) -> str | None:
    """Returns why a model cannot be cut between layers or along tokens, or None."""
    if decoder is None:
        return "is for causal language models of texts alone with attention layers, such as Llama"
    if decoder.architecture not in ARCHITECTURES:
        return f"does not know how to cut {decoder.architecture}; it knows {', '.join(ARCHITECTURES)}"
    return None


def why_positions_lost(decoder: Decoder | None) -> str | None:
    """Returns why a technique that computes positions itself cannot train on these samples, or None."""
    if decoder is not None and decoder.has_positions:
        return "counts positions from the start of a row, and packed samples have positions of their own"
    return None
