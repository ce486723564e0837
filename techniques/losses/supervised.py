"""Losses of labels: cross entropy with smoothed labels and weighted classes, and the mean squared error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ringmaster.techniques import loss
from ringmaster.techniques.metric import IGNORED

if TYPE_CHECKING:
    from torch import Tensor


def token_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the log-probability of each labelled token, and 0 where the label is -100: [rows, ..., tokens], fp32."""
    from torch.nn import functional

    flat = logits.reshape(-1, logits.shape[-1]).float()
    each = functional.cross_entropy(flat, labels.flatten().long(), ignore_index=IGNORED, reduction="none")
    return -each.reshape(labels.shape)


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the natural log-probability of the labelled tokens of each sequence, in fp32, [rows, ...].

    logits: [rows, ..., tokens, vocabulary]. labels: the token that each position predicts, [rows, ..., tokens].
    """
    return token_log_probabilities(logits, labels).sum(-1)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(loss.LossFunction):
    """The mean cross entropy of `torch.nn.functional.cross_entropy`, over the labels that are not -100.

    With weights w, smoothing e, C classes and p = softmax(logits), a label y gives the summand

        -(1 - e) w[y] log p[y] - e / C sum over c of w[c] log p[c]

    and counts as w[y] (Szegedy et al., Rethinking the Inception Architecture, arXiv:1512.00567, section 7).
    """

    name: ClassVar[str] = "cross-entropy"
    kinds: ClassVar[tuple[str, ...]] = (loss.CAUSAL, loss.CLASSIFIER, loss.SEQUENCE_TO_SEQUENCE)
    per_token: ClassVar[bool] = True

    label_smoothing: float = loss.option(0.0, loss.Values(least=0, below=1))
    class_weights: tuple[float, ...] = loss.option((), loss.Values(least=0, is_list=True))

    def row_sums(self, inputs: loss.LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the sum of each row's labels, and their weight."""
        return self.by_row(*self._checked(inputs))

    def by_row(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of each row's labels, and their weight. logits: [rows, ..., classes]; labels: [rows, ...]."""
        import torch
        from torch.nn import functional

        num_rows, num_classes = len(labels), logits.shape[-1]
        weight = torch.tensor(self.class_weights, device=logits.device) if self.class_weights else None
        # In fp32, as a bf16 softmax over a large vocabulary, which autocast would use, loses precision in its sum.
        each = functional.cross_entropy(
            logits.reshape(-1, num_classes).float(),
            labels.flatten().long(),
            weight=weight,
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )
        counted = labels != IGNORED
        counts = counted if weight is None else weight[labels.long().clamp(min=0)] * counted
        return each.reshape(num_rows, -1).sum(1), counts.reshape(num_rows, -1).sum(1)

    def _checked(self, inputs: loss.LossInputs) -> tuple[Tensor, Tensor]:
        logits, labels = inputs.logits, inputs.labels
        if logits is None or labels is None:
            missing = "the model returns no logits" if logits is None else "the samples have no labels"
            raise ValueError(f"loss cross-entropy: {missing}. To fix: train a classifier or a language model on labels")
        if logits.shape[-1] == 1 or labels.is_floating_point() or logits.shape[:-1] != labels.shape:
            raise ValueError(
                f"loss cross-entropy: there is not one class for each label: logits are {list(logits.shape)}, labels "
                f"{list(labels.shape)} of {labels.dtype}. To fix: number the classes from 0, or leave the loss out"
            )
        if self.class_weights and len(self.class_weights) != logits.shape[-1]:
            raise ValueError(
                f"loss cross-entropy: class_weights has {len(self.class_weights)} numbers for {logits.shape[-1]} "
                "classes. To fix: give one for each class"
            )
        return logits, labels


@dataclass(frozen=True, kw_only=True)
class MeanSquaredError(loss.LossFunction):
    """The mean of (prediction - label)^2 over all elements; predictions are the model's logits, or a tensor."""

    name: ClassVar[str] = "mse"

    def row_sums(self, inputs: loss.LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the sum of squares of each row, and its number of elements."""
        import torch

        predicted, labels = inputs.logits, inputs.batch.get("labels")
        if predicted is None or labels is None:
            missing = "the model returns no logits" if predicted is None else "the samples have no labels"
            raise ValueError(f"loss mse: {missing}. To fix: train a model with logits on samples with labels")
        num_rows = len(labels)
        if predicted.numel() != labels.numel() or len(predicted) != num_rows:
            raise ValueError(
                f"loss mse: predictions are {list(predicted.shape)} and labels {list(labels.shape)}. To fix: give as "
                "many labels as predictions, or set model.config.num_labels"
            )
        squared = (predicted.float().reshape(num_rows, -1) - labels.float().reshape(num_rows, -1)).square()
        return squared.sum(1), torch.full_like(squared[:, 0], squared.shape[1])


@dataclass(frozen=True, kw_only=True)
class WeightedOutputs(loss.LossFunction):
    """The weighted sum of the losses of several outputs of one model, each a mean over rows.

    The model returns `outputs`, logits [rows, classes] of each; the labels of the first are `labels`, those of output k
    are `labels_k`, k = 1, 2, .... Of classes the loss is the cross entropy, of numbers the squared error. weights: the
    factor of each output's loss.
    """

    name: ClassVar[str] = "weighted-outputs"

    weights: tuple[float, ...] = loss.option((), loss.Values(least=0, is_list=True, required=True))

    def row_sums(self, inputs: loss.LossInputs) -> tuple[Tensor, Tensor]:
        """Returns the weighted sum of the losses of each row, and 1 for each."""
        import torch
        from torch.nn import functional

        outputs: Sequence[Tensor] = inputs.output.get("outputs", ()) if isinstance(inputs.output, Mapping) else ()
        names = ["labels", *(f"labels_{number}" for number in range(1, len(self.weights)))]
        if len(outputs) != len(names) or not inputs.batch.keys() >= {*names}:
            raise ValueError(
                f"loss weighted-outputs: there are {len(self.weights)} weights, the model returns {len(outputs)} "
                f"outputs, and the samples have {', '.join(inputs.batch)}. To fix: give as many of each"
            )
        total = torch.zeros(len(inputs.batch["labels"]), device=outputs[0].device)
        for weight, name, logits in zip(self.weights, names, outputs, strict=True):
            labels = inputs.batch[name]
            if labels.is_floating_point():
                each = (logits.float().flatten() - labels.float()).square()
            else:
                each = functional.cross_entropy(logits.float(), labels, reduction="none")
            total = total + weight * each
        return total, torch.ones_like(total)
