"""What a model's outputs say of rows, and one model asked by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ringmaster.techniques.adapters.attaching import attach
from ringmaster.techniques.adapters.peft_format import base_of, is_adapter
from ringmaster.techniques.engine.half import compute_in_half
from ringmaster.techniques.engine.losses import (
    Loss,
    hits_by_row,
    logits_of,
    loss_of,
    losses_by_row,
    next_token_loss,
)
from ringmaster.techniques.engine.models import build_model
from ringmaster.techniques.engine.scoring.order import model_spec
from ringmaster.techniques.engine.scoring.rows import Rows
from ringmaster.techniques.job import Adapter, ModelSpec

CAUSAL, CLASSIFIER, OTHER = "causal", "classifier", "other"

Array = np.ndarray[Any, Any]
Count = Callable[[int], None]
"""Told how many rows more have been scored."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RowScores:
    """What one model says of some rows. kind: "causal", "classifier" or "other". arrays: a row each, by name:

    loss_sums, loss_counts, hits, labelled; num_tokens of rows of tokens; log_probabilities of whole rows (causal);
    predictions and probabilities [rows, labels] (classifiers); column.NAME of whole numbers; slice.NAME; input.NAME.
    """

    kind: str
    arrays: Mapping[str, Array]


class Collected:
    """Values of rows that come in any order."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, Any]] = {}

    def add(self, numbers: Sequence[int], values: Mapping[str, Sequence[Any]]) -> None:
        """Values of the rows with these numbers, by name."""
        for key, of in values.items():
            self._rows.setdefault(key, {}).update(zip(numbers, of, strict=True))

    def scores(self, *, shifted: bool) -> RowScores:
        """All of them, in the rows' order."""
        num_rows = max((len(values) for values in self._rows.values()), default=0)
        arrays = {key: _stacked([of[i] for i in range(num_rows)]) for key, of in self._rows.items()}
        return RowScores(kind=CAUSAL if shifted else CLASSIFIER if "predictions" in arrays else OTHER, arrays=arrays)


def built(model_dir: Path, rows: Rows) -> tuple[nn.Module, ModelSpec]:
    """The model in a folder, of an adapter its base, on the CPU; and what it is. Raises ValueError."""
    spec = model_spec(model_dir)
    if spec.factory is None:
        spec = replace(spec, attention=rows.job.model.attention)
    weights = base_of(model_dir) if is_adapter(model_dir) else model_dir
    model = build_model(spec, data=rows.prepared, seed=rows.job.seed, weights_from=weights and weights.absolute())
    return model, spec


@torch.no_grad()
def ask_alone(model_dir: Path, rows: Rows, *, device: torch.device, count: Count) -> RowScores:
    """The scores of one model, asked by itself."""
    model, spec = built(model_dir, rows)
    if is_adapter(model_dir):
        attach(model, Adapter(from_pretrained=str(model_dir)), seed=rows.job.seed)
    model = model.eval().to(device)
    loss = loss_of(rows.job.loss, model, spec)
    if rows.job.precision == "bf16-params":
        compute_in_half(model)
    collected, config = Collected(), getattr(model, "config", None)
    for numbers, batch in rows.chunks(model_dir, config=config, shifted=loss.shifted, device=device):
        has_labels = rows.cases is None or "labels" in batch
        found = said(loss, _forward(model, loss, batch, rows), batch, has_labels=has_labels)
        if has_labels and "loss_sums" not in found:
            found |= _losses_one_by_one(model, loss, batch, rows)
        collected.add(numbers, {**found, **rows.known(batch)})
        count(len(numbers))
    return collected.scores(shifted=loss.shifted)


def said(loss: Loss, output: Any, batch: Mapping[str, Tensor], *, has_labels: bool) -> dict[str, list[Any]]:
    """What an output says of the rows of a batch, a value (or vector) each, by name; losses where there are labels."""
    found: dict[str, Any] = {}
    if has_labels and (losses := losses_by_row(loss, output, batch)) is not None:
        found["loss_sums"], found["loss_counts"] = losses
    if (hits := hits_by_row(loss, output, batch)) is not None:
        found["hits"], found["labelled"] = hits
    logits = logits_of(output)
    if loss.shifted:
        # Of a loss that is the likelihood of the next tokens this is known already.
        is_known = "loss_sums" in found and loss.compute is next_token_loss
        found["log_probabilities"] = -found["loss_sums"] if is_known else _log_probabilities(output, batch)
    elif logits is not None and logits.ndim == 2 and logits.shape[-1] > 1:
        found["probabilities"] = logits.float().softmax(-1)
        found["predictions"] = logits.argmax(-1)
    return {key: list(tensor.double().cpu().numpy()) for key, tensor in found.items()}


def _forward(model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], rows: Rows) -> Any:
    kind = next(iter(batch.values())).device.type
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=rows.job.precision == "bf16"):
        return model(**loss.forward_inputs(batch))


def _losses_one_by_one(model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], rows: Rows) -> dict[str, list[Any]]:
    """A loss that knows only whole batches, of batches of one row."""
    pairs = []
    for i in range(len(next(iter(batch.values())))):
        row = {key: tensor[i : i + 1] for key, tensor in batch.items()}
        pairs.append([float(value) for value in loss(_forward(model, loss, row, rows), row)])
    return {key: [np.float64(pair[i]) for pair in pairs] for i, key in enumerate(("loss_sums", "loss_counts"))}


def _log_probabilities(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Of each row of tokens, all but its first one, given those before: [rows], natural logarithms."""
    told = losses_by_row(Loss(compute=next_token_loss, inputs=None, shifted=True), output, batch)
    assert told is not None
    return -told[0]


def _stacked(values: list[Any]) -> Array:
    """Rows as one array; rows of different lengths (of tokens) filled up with -1 behind."""
    if isinstance(values[0], np.ndarray) and len({value.shape for value in values}) > 1:
        width = max(len(value) for value in values)
        return np.stack([np.pad(value, (0, width - len(value)), constant_values=-1) for value in values])
    return np.asarray(values)
