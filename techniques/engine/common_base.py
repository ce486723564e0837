"""One base in memory for several adapters that are asked, not trained: what each says of its rows, as it would alone.

Questions are put to the base many at a time, as `fused.stem` computes them: those of different adapters, of different
rows, and, of a causal language model, of different lengths. On a CPU in fp32 each answer is, bit by bit, the one that
the adapter gives alone. For that a question whose products have fewer than eight rows is asked by itself (a product of
so few takes another kernel), and models whose products depend on which rows go together are refused (`NotTogether`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from ringmaster.techniques.adapters.attaching import first_state, pretrained_state, sites
from ringmaster.techniques.adapters.leaves import own_leaves
from ringmaster.techniques.adapters.peft_format import is_adapter, read_adapter
from ringmaster.techniques.engine.fused.batches import Part
from ringmaster.techniques.engine.fused.insets import Insets, insets_of
from ringmaster.techniques.engine.fused.stem import Stem
from ringmaster.techniques.engine.losses import Loss, classification_loss, next_token_loss
from ringmaster.techniques.engine.models.facts import has_experts
from ringmaster.techniques.engine.scoring.rows import MAX_LOGITS, MAX_ROWS, max_tokens

LEAST_ROWS = 8  # of a product: one of fewer takes another kernel alone than among others


class NotTogether(ValueError):
    """These models, or these rows, cannot be asked over one base: ask one model after another."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Question:
    """What the model of this name is to be given: arguments of `forward`. about: the caller's, handed back."""

    model: str
    inputs: dict[str, Tensor]
    about: Any = None

    @property
    def num_rows(self) -> int:
        """Samples."""
        return len(next(iter(self.inputs.values())))

    @property
    def num_tokens(self) -> int:
        """Of all samples; 0 where they are no tokens."""
        tokens = self.inputs.get("input_ids")
        return 0 if tokens is None else tokens.numel()


class CommonBase:
    """A base and the adapters on it. model: without any; it is changed in place. loss: what is made of its outputs.

    Raises NotTogether where the model cannot serve several adapters at once.
    """

    def __init__(self, model: nn.Module, *, loss: Loss) -> None:
        if loss.compute not in (next_token_loss, classification_loss):
            raise NotTogether(f"the loss of {type(model).__name__} needs more than logits")
        config: Any = getattr(model, "config", None)
        if has_experts(model):
            raise NotTogether(f"{type(model).__name__} routes rows to experts, whose products depend on all rows")
        self._device = next(model.parameters()).device
        self._num_logits = (getattr(config, "vocab_size", None) or 1) if loss.shifted else 0
        self._stem = Stem(model.eval())
        self._causal, self._packs = loss.shifted, self._stem.packs
        self._insets: dict[str, Insets] = {}

    def add(self, name: str, folder: Path) -> None:
        """Lets the adapter in `folder` be asked; a folder without an adapter is the base itself.

        Raises ValueError where the adapter does not fit the base.
        """
        if not is_adapter(folder):
            self._insets[name] = Insets()
            return
        adapter, model = read_adapter(folder), self._stem.model
        at = sites(model, adapter)
        state = pretrained_state(folder, first_state(model, adapter, at, seed=0))
        own = own_leaves(model, adapter)
        self._stem.open(at, own)
        placed = {key: value.to(self._device) for key, value in state.items()}
        self._insets[name] = insets_of(adapter, at, own, placed)

    @torch.no_grad()
    def answers(self, questions: Iterable[Question]) -> Iterator[tuple[Question, CausalLMOutput]]:
        """The logits of each question, in their order; read only as far ahead as one forward pass takes.

        Raises NotTogether where a question is of padded rows, which a packed batch has no place for.
        """
        waiting: list[Question] = []
        for question in questions:
            if waiting and not self._fits(waiting, question):
                yield from self._asked(waiting)
                waiting = []
            waiting.append(question)
        if waiting:
            yield from self._asked(waiting)

    def _asked(self, questions: list[Question]) -> Iterator[tuple[Question, CausalLMOutput]]:
        parts = [Part(insets=self._insets[question.model], inputs=self._inputs(question)) for question in questions]
        yield from zip(questions, self._stem.forward(parts), strict=True)

    def _fits(self, waiting: list[Question], question: Question) -> bool:
        """Whether one more question goes into the same forward pass, and leaves all answers as they are alone."""
        together = [*waiting, question]
        if min(self._product_rows(waiting[-1]), self._product_rows(question)) < LEAST_ROWS:
            return False
        if not self._packs and _is_padded(waiting[-1]) != _is_padded(question):
            return False
        num_tokens = sum(each.num_tokens for each in together)
        if num_tokens:
            return num_tokens <= max_tokens(self._device) and num_tokens * self._num_logits <= MAX_LOGITS
        return sum(each.num_rows for each in together) <= MAX_ROWS

    def _product_rows(self, question: Question) -> int:
        """Of the smallest product: of a classifier's head, which has a row a sample."""
        return question.num_tokens if self._causal else question.num_rows

    def _inputs(self, question: Question) -> dict[str, Tensor]:
        if not self._packs:
            return question.inputs
        if not question.inputs.keys() <= {"input_ids", "attention_mask"} or _is_padded(question):
            raise NotTogether("rows that are padded, or more than tokens, cannot be packed")
        return {"input_ids": question.inputs["input_ids"]}


def _is_padded(question: Question) -> bool:
    mask = question.inputs.get("attention_mask")
    return mask is not None and not bool(mask.all())
