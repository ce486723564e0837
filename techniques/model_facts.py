"""Facts about a model that techniques and the planner use. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from ringmaster.codec import SINCE_LATER


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
    undivided: what several adapters in one batch cannot each have of their own, as a message about `modules_to_save`
        or about tensors of the samples; empty if there is nothing.
    computes_loss: whether the model itself computes the loss, from more than logits, when the job names no loss.
    whole_batch: the reason why the job's batch must not be divided; empty if it may be (`runtime.probing`).
    scalar: the name of a parameter that is a single number, which cannot be sharded; empty if there is none.
    """

    num_parameters: int
    parameter_bytes: int
    largest_layer_bytes: int
    num_layers: int
    has_dropout: bool
    decoder: Decoder | None = None
    num_trained: int | None = field(default=None, metadata=SINCE_LATER)
    has_experts: bool = field(default=False, metadata=SINCE_LATER)
    undivided: str = field(default="", metadata=SINCE_LATER)
    computes_loss: bool = field(default=False, metadata=SINCE_LATER)
    whole_batch: str = field(default="", metadata=SINCE_LATER)
    scalar: str = field(default="", metadata=SINCE_LATER)

    @property
    def num_updated(self) -> int:
        """The number of parameters that have a gradient and optimizer state."""
        return self.num_parameters if self.num_trained is None else self.num_trained
