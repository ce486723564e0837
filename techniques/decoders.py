"""Which models the techniques know how to cut between layers or along tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringmaster.techniques.engine.models.decoder import Decoder

# Their forward takes hidden states where embeddings enter, doing nothing else to them, and positions explicitly; only
# attention looks from one token to another.
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
    """Why a model cannot be cut so, or None."""
    if decoder is None:
        return "is for causal language models with attention layers, such as Llama"
    if decoder.architecture not in ARCHITECTURES:
        return f"does not know how to cut {decoder.architecture}; it knows {', '.join(ARCHITECTURES)}"
    return None
