"""The `Loss` of a job as the runtime uses it: a sum and a count, and the inputs that the model needs for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from ringmaster.techniques.interface.loss import LossFunction
from ringmaster.techniques.interface.metric import IGNORED

Batch = Mapping[str, Tensor]
SumAndCount = tuple[Tensor, Tensor | int]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss, and the inputs that the model needs for it.

    compute: f(model_output, batch) -> (sum, count): the sum over the averaged elements, and their number. None where a
        subclass computes the loss.
    inputs: the names in a batch that are passed to `forward`; None for all.
    shifted: whether the output at a position predicts the label at the next one (language models).
    is_models: whether the model computes the loss, and `compute` only reads it from the output.
    is_of_classes: whether it compares each label with the prediction in the same place, or that of a row.
    """

    compute: Callable[[Any, Batch], SumAndCount] | None
    inputs: frozenset[str] | None
    shifted: bool = False
    is_models: bool = False
    is_of_classes: bool = False

    def __call__(self, output: Any, batch: Batch) -> SumAndCount:
        """Returns (sum, count) of a batch; the sum is a differentiable fp32 scalar."""
        assert self.compute is not None
        return self.compute(output, batch)

    @property
    def function(self) -> LossFunction | None:
        """The loss that the job names, None for any other."""
        return None

    def predictions(self, output: Any, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Returns the logits, and the label that each position predicts: [rows, ..., classes] and [rows, ...]."""
        labels = batch.get("labels")
        # A user's loss of a language model may read labels of rows instead of tokens.
        if self.shifted and ("shift_labels" in batch or (labels is not None and labels.dim() > 1)):
            labels = next_tokens(batch)
        return logits_of(output), labels

    def is_known(self, batch: Batch) -> bool:
        """Whether the loss of these rows can be computed: not where it compares with weights that are not there."""
        return True

    def by_row(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Returns each row's contribution to (sum, count), of a loss with a `function`: see `losses_by_row`."""
        raise NotImplementedError("only a loss with a function is computed by row")

    def rewards(self, output: Any, batch: Batch) -> Tensor | None:
        """Returns the rewards of the chosen and the rejected sequence of each pair, [rows, 2].

        Returns None for losses that have none, and where they are not known.
        """
        return None

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Returns this batch's summand of the numbers of a global batch that `given` takes; mostly there are none."""
        return {}

    def given(self, totals: Mapping[str, float]) -> Loss:
        """Returns the loss of rows of a global batch with these totals."""
        return self

    def sequences(self, samples: Sequence[int]) -> Sequence[int]:
        """Returns the number of each row that the model gets, of samples with these numbers."""
        return samples

    def forward_inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the entries of `batch` for `forward`; labels only where the model itself computes the loss."""
        given = {name: value for name, value in batch.items() if self.inputs is None or name in self.inputs}
        if not given:
            raise ValueError(
                f"the model's forward takes {', '.join(sorted(self.inputs or ()))}, and the samples have "
                f"{', '.join(sorted(batch))}. To fix: name the samples' tensors as forward names its arguments"
            )
        return given


def next_tokens(batch: Batch) -> Tensor:
    """Returns the label that each position predicts, [rows, tokens].

    The labels are shifted, which avoids a copy of the far larger logits. A batch of divided sequences contains its own
    `shift_labels`, as the token after its last one is on another rank.
    """
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return functional.pad(labels_of(batch)[:, 1:], (0, 1), value=IGNORED)


def logits_of(output: Any) -> Tensor | None:
    """Returns the logits of a model's output (tensor, mapping or object), or None where it has none."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def labels_of(batch: Batch) -> Tensor:
    """Returns the labels of a batch. Raises ValueError, with a remedy, where it has none."""
    if "labels" not in batch:
        raise ValueError(
            f"the samples have no labels, only {', '.join(sorted(batch))}. To fix: add them, or name a loss of the "
            f"job (and metrics) that need none"
        )
    return batch["labels"]
