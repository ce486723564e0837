"""Inference of several adapters over one base in memory, with the outputs that each adapter would give alone.

One forward pass serves many questions (`fused.base.shared_base`): of different adapters, of different rows, and for a
causal language model of different lengths. On a CPU in fp32 each output equals the adapter's separate output bit by
bit. For this reason a question whose products have fewer than eight rows runs alone, because such products use another
kernel. Models whose products depend on the other rows of the batch are refused (`NoCommonBase`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from ringmaster.errors import NoCommonBase
from ringmaster.techniques.models.adapters.attaching import first_state, pretrained_state, sites
from ringmaster.techniques.models.adapters.leaves import own_leaves
from ringmaster.techniques.models.adapters.peft_format import is_adapter, read_adapter
from ringmaster.techniques.models.facts import has_experts
from ringmaster.techniques.scoring.rows import MAX_LOGITS, MAX_ROWS, max_tokens
from ringmaster.techniques.training.fused.base.adapter_modules import AdapterModules, adapter_modules_of
from ringmaster.techniques.training.fused.base.shared_base import Stem
from ringmaster.techniques.training.fused.batches import Part
from ringmaster.techniques.training.losses import Loss, classification_loss, next_token_loss

LEAST_ROWS = 8  # a product of fewer rows runs on another kernel alone than in a batch


@dataclass(frozen=True, eq=False, kw_only=True)
class Question:
    """The input of one model.

    model: the model's name.
    inputs: the arguments of `forward`.
    about: any value of the caller, returned with the output.
    """

    model: str
    inputs: dict[str, Tensor]
    about: Any = None

    @property
    def num_rows(self) -> int:
        """The number of samples."""
        return len(next(iter(self.inputs.values())))

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all samples; 0 if the inputs are not tokens."""
        tokens = self.inputs.get("input_ids")
        return 0 if tokens is None else tokens.numel()


class CommonBase:
    """A base and the adapters on it.

    model: the base without an adapter; it is changed in place.
    loss: the loss that will be computed from the outputs.
    Raises NoCommonBase if the model cannot serve several adapters at once.
    """

    def __init__(self, model: nn.Module, *, loss: Loss) -> None:
        if loss.compute not in (next_token_loss, classification_loss):
            raise NoCommonBase(f"the loss of {type(model).__name__} needs more than logits")
        config: Any = getattr(model, "config", None)
        if has_experts(model):
            raise NoCommonBase(f"{type(model).__name__} routes rows to experts, whose products depend on all rows")
        self._device = next(model.parameters()).device
        self._num_logits = (getattr(config, "vocab_size", None) or 1) if loss.shifted else 0
        self._stem = Stem(model.eval())
        self._causal, self._packs = loss.shifted, self._stem.packs
        self._adapter_modules: dict[str, AdapterModules] = {}

    def add(self, name: str, folder: Path) -> None:
        """Adds the adapter in `folder` under a name. A folder without an adapter stands for the base itself.

        Raises ValueError if the adapter does not fit the base.
        """
        if not is_adapter(folder):
            self._adapter_modules[name] = AdapterModules()
            return
        adapter, model = read_adapter(folder), self._stem.model
        at = sites(model, adapter)
        state = pretrained_state(folder, first_state(model, adapter, at, seed=0))
        own = own_leaves(model, adapter)
        self._stem.open(at, own)
        placed = {key: value.to(self._device) for key, value in state.items()}
        self._adapter_modules[name] = adapter_modules_of(adapter, at, own, placed)

    @torch.no_grad()
    def answers(self, questions: Iterable[Question]) -> Iterator[tuple[Question, CausalLMOutput]]:
        """Yields each question with its logits, in order; reads ahead by no more than one forward pass.

        Raises NoCommonBase if the base packs samples and a question has padded rows.
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
        parts = [
            Part(adapter_modules=self._adapter_modules[question.model], inputs=self._inputs(question))
            for question in questions
        ]
        yield from zip(questions, self._stem.forward(parts), strict=True)

    def _fits(self, waiting: list[Question], question: Question) -> bool:
        """Whether one more question fits into the same forward pass without changing any output."""
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
        """The number of rows of the smallest product: a classifier's head has one row per sample."""
        return question.num_tokens if self._causal else question.num_rows

    def _inputs(self, question: Question) -> dict[str, Tensor]:
        if not self._packs:
            return question.inputs
        if not question.inputs.keys() <= {"input_ids", "attention_mask"} or _is_padded(question):
            raise NoCommonBase("rows that are padded, or more than tokens, cannot be packed")
        return {"input_ids": question.inputs["input_ids"]}


def _is_padded(question: Question) -> bool:
    mask = question.inputs.get("attention_mask")
    return mask is not None and not bool(mask.all())
