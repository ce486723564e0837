"""The tokens that a model finds most likely at the labelled positions of a row, given the true tokens before them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ringmaster.techniques.metric import IGNORED, Outputs

if TYPE_CHECKING:
    from torch import Tensor

NEEDS = "a label and a logit for each token: a language model and samples with labels"


def most_likely(outputs: Outputs) -> Tensor | None:
    """Returns the most likely token at each position, [rows, tokens]; None unless each position has a label."""
    logits, labels = outputs.logits, outputs.labels
    if logits is None or labels is None or labels.ndim != 2 or logits.shape[:-1] != labels.shape:
        return None
    return None if logits.shape[-1] == 1 or labels.is_floating_point() else logits.argmax(-1)


def answers(predicted: Tensor, labels: Tensor) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the predicted and the true tokens at the labelled positions of each row."""
    for row, of in zip(predicted.cpu(), labels.cpu(), strict=True):
        counted = of != IGNORED
        yield row[counted].tolist(), of[counted].tolist()
