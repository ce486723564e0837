"""Architectures of causal language models that techniques can cut between layers or along tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringmaster.techniques.model_facts import Decoder

CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Endings of the names of transformers' causal language models."""

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
        return "is for causal language models with attention layers, such as Llama"
    if decoder.architecture not in ARCHITECTURES:
        return f"does not know how to cut {decoder.architecture}; it knows {', '.join(ARCHITECTURES)}"
    return None


def why_positions_lost(decoder: Decoder | None) -> str | None:
    """Returns why a technique that computes positions itself cannot train on these samples, or None."""
    if decoder is not None and decoder.has_positions:
        return "counts positions from the start of a row, and packed samples have positions of their own"
    return None
