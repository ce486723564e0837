"""Metrics over many batches, as sums that are added over batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringmaster.techniques.interface.metric import Metric, Outputs
from ringmaster.techniques.metrics.registry import metrics_named
from ringmaster.techniques.runtime.training.losses import Batch, Loss


def outputs_of(loss: Loss, output: Any, batch: Batch, *, losses: tuple[Tensor, Tensor] | None) -> Outputs:
    """Returns what metrics read of a model's output for a batch. losses: as in `Outputs`."""
    logits, labels = loss.predictions(output, batch)
    return Outputs(output=output, batch=batch, logits=logits, labels=labels, losses=losses)


def sums_of(metrics: Sequence[Metric], outputs: Outputs) -> dict[str, Tensor]:
    """Returns the sums of metrics, by name; those that the outputs do not suit are left out."""
    computed = ((metric, metric.compute_sums(outputs)) for metric in metrics)
    return {name: sums[name] for metric, sums in computed if sums is not None for name in metric.sums}


class Metrics:
    """Metrics of one model over many batches.

    names: of registered metrics; ValueError on another.
    loss: the job's loss.
    """

    def __init__(self, names: Sequence[str], *, loss: Loss) -> None:
        self._metrics, self._loss = metrics_named(names), loss
        self._parts: dict[str, list[Tensor]] = {name: [] for metric in self._metrics for name in metric.sums}

    def add(self, output: Any, batch: Batch) -> None:
        """Adds the output for one batch. Raises ValueError where a metric cannot be computed from it."""
        losses = None
        if is_known := self._loss.is_known(batch):
            total, count = self._loss(output, batch)
            losses = total.detach(), torch.as_tensor(count, dtype=torch.float64, device=total.device)
        outputs = outputs_of(self._loss, output, batch, losses=losses)
        found = sums_of(self._metrics, outputs)
        unsuited = [metric.name for metric in self._metrics if not found.keys() >= set(metric.sums)]
        if unsuited and is_known:  # what a loss that is not known leaves out is NaN
            raise ValueError(
                f"{', '.join(unsuited)} cannot be computed: the model returns {_said('logits', outputs.logits)}, and "
                f"the samples have {_said('labels', outputs.labels)}. To fix: name other metrics"
            )
        for name, each in found.items():
            self._parts[name].append(each.detach().double().sum())

    def sums(self) -> list[float]:
        """Returns the total of each sum; add these over ranks, element by element."""
        return [float(torch.stack(parts).sum()) if parts else 0.0 for parts in self._parts.values()]

    def result(self, sums: Sequence[float]) -> dict[str, float]:
        """Returns the metrics that result from `sums`; NaN where nothing was counted."""
        totals: Mapping[str, Any] = dict(zip(self._parts, np.asarray(sums), strict=True))
        with np.errstate(divide="ignore", invalid="ignore"):
            return {metric.name: float(metric.value(totals)) for metric in self._metrics}


def _said(name: str, tensor: Tensor | None) -> str:
    return f"no {name}" if tensor is None else f"{name} {list(tensor.shape)} of {tensor.dtype}"
