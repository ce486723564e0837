"""A loss that a job names (`ringmaster.techniques.losses`), as the runtime uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from ringmaster.techniques.interface.loss import (
    ADVANTAGES,
    CAUSAL,
    CLASSIFIER,
    REWARDS,
    LossFunction,
    LossInputs,
)
from ringmaster.techniques.interface.metric import IGNORED
from ringmaster.techniques.losses.registry import loss_named
from ringmaster.techniques.training.loss import Batch, Loss, SumAndCount, logits_of, next_tokens

REFERENCE = "reference_log_probabilities"
"""The entry of a batch with what its loss compares, under the job's initial weights; [rows, 2] for pairs."""
ADDED = (REFERENCE, ADVANTAGES, REWARDS)
"""The entries of batches that are not the model's inputs."""


@dataclass(frozen=True, kw_only=True)
class FunctionLoss(Loss):
    """A loss function, for the kind of model that the job trains.

    known: totals of the global batch that the rows belong to; None where the rows are the global batch.
    """

    named: LossFunction
    kind: str
    known: Mapping[str, float] | None = None

    @property
    def function(self) -> LossFunction:
        """The loss function."""
        return self.named

    def __call__(self, output: Any, batch: Batch) -> SumAndCount:
        """Returns (sum, count) of a batch, which is a part of the global batch or, without `known`, all of it."""
        inputs = self._inputs(output, batch, totals=self.totals(batch) if self.known is None else self.known)
        sums, counts = self.named.each(inputs)
        return sums.sum(), counts.sum()

    def by_row(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Returns the loss of each row as if it were alone, ([rows], [rows]); None where a row has no loss alone."""
        if self.named.mixes_rows:
            return None
        labels = self._labels(batch)
        totals = {} if labels is None else self.named.totals(labels)
        return self.named.each(self._inputs(output, batch, totals=totals))

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the entries of `batch` for `forward`; of pairs and groups all sequences of each in turn."""
        given = super().forward_inputs({name: value for name, value in batch.items() if name not in ADDED})
        sequences = self.named.num_sequences
        if sequences is None:
            return given
        for name, value in given.items():
            if value.dim() < 2 or value.shape[1] != sequences:
                raise ValueError(
                    f"loss {self.named.name}: {name} of a sample is {list(value.shape[1:])}, and not of {sequences} "
                    f"sequences. To fix: give samples whose tensors are [{sequences}, tokens] (docs/losses.md)"
                )
        return {name: value.flatten(0, 1) for name, value in given.items()}

    def predictions(self, output: Any, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Returns logits and labels; of pairs [rows, 2, tokens, vocabulary] and [rows, 2, tokens]; of groups alike."""
        sequences = self.named.num_sequences
        if sequences is None:
            return super().predictions(output, batch)
        logits = logits_of(output)
        return None if logits is None else logits.reshape(-1, sequences, *logits.shape[1:]), self._labels(batch)

    def is_known(self, batch: Batch) -> bool:
        """Whether the batch has the log-probabilities that the loss compares with, if it compares."""
        return not self.named.compares or REFERENCE in batch

    def rewards(self, output: Any, batch: Batch) -> Tensor | None:
        """Returns the rewards of each pair, [rows, 2]; None without rewards, or where they are not known."""
        if not self.is_known(batch):
            return None
        return self.named.rewards_of(self._inputs(output, batch, totals={}))

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Returns this batch's summands."""
        if not self.named.total_names:
            return {}
        labels = self._labels(batch)
        if labels is None:
            raise ValueError(f"loss {self.named.name}: the samples have no labels. To fix: add them")
        return {name: float(each.sum()) for name, each in self.named.totals(labels).items()}

    def given(self, totals: Mapping[str, float]) -> Loss:
        """Returns the loss of rows of a global batch with these totals."""
        return replace(self, known=totals) if self.named.total_names else self

    def sequences(self, samples: Sequence[int]) -> Sequence[int]:
        """Returns a number for each sequence of each sample."""
        number = self.named.num_sequences
        return samples if number is None else [number * sample + i for sample in samples for i in range(number)]

    def _labels(self, batch: Batch) -> Tensor | None:
        labels = batch.get("labels")
        if labels is None or self.kind != CAUSAL:
            return labels
        if self.named.num_sequences is None:
            return next_tokens(batch)
        return functional.pad(labels[..., 1:], (0, 1), value=IGNORED)

    def _inputs(self, output: Any, batch: Batch, *, totals: Mapping[str, float | Tensor]) -> LossInputs:
        logits, labels = self.predictions(output, batch)
        reference = batch.get(REFERENCE)
        return LossInputs(output=output, batch=batch, logits=logits, labels=labels, totals=totals, reference=reference)


def named_loss(
    name: str, options: Mapping[str, Any], *, kind: str, model: str, inputs: frozenset[str] | None
) -> FunctionLoss:
    """Returns the loss `name` for a model of a kind. Raises ValueError where it is not for such a model.

    model: the name of its class. inputs: as in `Loss`.
    """
    function = loss_named(name, options)
    if kind not in function.kinds:
        raise ValueError(
            f"loss {name} is for {' and '.join(function.kinds)} models, and {model} is none. To fix: give another loss "
            "or model"
        )
    shifted = kind == CAUSAL and function.num_sequences is None
    return FunctionLoss(
        compute=None,
        inputs=inputs,
        shifted=shifted,
        is_of_classes=function.per_token and kind == CLASSIFIER,
        named=function,
        kind=kind,
    )


def with_made_up_reference(loss: Loss, batch: Batch) -> dict[str, Tensor]:
    """Returns a batch with zeros for what a reference gives, for a step that only tries or times the loss."""
    if loss.is_known(batch):
        return dict(batch)
    tensor = next(iter(batch.values()))
    is_of_tokens = loss.function is not None and loss.function.generation is not None
    shape = batch["labels"].shape if is_of_tokens else (len(tensor), 2)
    return {**batch, REFERENCE: torch.zeros(shape, device=tensor.device)}


def disable_dropout(model: nn.Module, loss: Loss) -> None:
    """Switches the dropout of `model` off where the loss wants none: that of modules, and rates that modules store."""
    if loss.function is None or loss.function.drops_out:
        return
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and any(part in name for part in ("dropout", "drop_prob", "layerdrop")):
                setattr(module, name, 0.0)
