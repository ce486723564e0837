"""A causal language model in two parts: the decoder runs for all adapters at once, the head for one after another.

Only one adapter's logits are in memory at a time: each adapter's backward runs from its loss to its hidden states
before the next adapter's head runs. The head's products have as many rows as in a separate run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

NUM_PROBED_TOKENS = 8


class Head:
    """The head of a model: runs the model's own forward with given hidden states in place of its decoder's."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.decoder: nn.Module = model.base_model  # type: ignore[assignment]

    def hidden_states(self, **inputs: Any) -> Tensor:
        """The decoder's hidden states, [rows, tokens, hidden]."""
        found: Tensor = self.decoder(use_cache=False, **inputs).last_hidden_state
        return found

    def __call__(self, hidden: Tensor, tokens: Tensor) -> Any:
        """The model's output for the hidden states [rows, tokens, hidden] of `tokens`."""
        self.decoder.forward = lambda *_, **__: BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)
        try:
            return self._model(input_ids=tokens, use_cache=False)
        finally:
            del self.decoder.forward  # the class's own forward applies again


def head_of(model: nn.Module) -> Head | None:
    """The head of a model whose forward is its decoder and then its head, as tried on a few tokens; else None."""
    if getattr(model, "base_model", model) is model:
        return None
    head, device = Head(model), next(model.parameters()).device
    tokens = torch.zeros((1, NUM_PROBED_TOKENS), dtype=torch.int64, device=device)
    inputs = {"input_ids": tokens, "position_ids": torch.arange(NUM_PROBED_TOKENS, device=device).unsqueeze(0)}
    with torch.no_grad():
        whole = model(use_cache=False, **inputs).logits
        try:
            hidden = head.hidden_states(**inputs)
            divided, others = head(hidden, tokens).logits, head(hidden + 1, tokens).logits
        except (AttributeError, TypeError):  # the forward uses more of the decoder than its hidden states
            return None
    is_handed_them = not torch.equal(divided, others)  # the forward uses them, not a part of the decoder directly
    return head if is_handed_them and torch.equal(whole, divided) else None
