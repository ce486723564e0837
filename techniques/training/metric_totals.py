"""Metrics over many batches: sums that are added over batches and ranks, and values of rows that are gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.metric import GatheredMetric, Metric, ModelMetric, Outputs, metrics_named
from ringmaster.techniques.processes.gang_events import RowValues
from ringmaster.techniques.training.bound_loss import BoundLoss, SampleTensors

if TYPE_CHECKING:
    from ringmaster.techniques.metric import Values


def outputs_of(
    loss: BoundLoss,
    output: Any,
    batch: SampleTensors,
    *,
    losses: tuple[Tensor, Tensor] | None,
    data: PreparedData | None = None,
    written: Sequence[Sequence[int]] | None = None,
) -> Outputs:
    """Returns what metrics read of a model's output for a batch. losses, written: as in `Outputs`."""
    logits, labels = loss.predictions(output, batch)
    return Outputs(
        output=output,
        batch=batch,
        logits=logits,
        labels=labels,
        losses=losses,
        rewards_of=loss.rewards,
        tokenizer_dir=None if data is None else data.tokenizer_dir,
        class_names=() if data is None else data.labels,
        base=loss.base,
        written=loss.written(output, batch) if written is None else written,
    )


def sums_of(metrics: Sequence[Metric], outputs: Outputs) -> dict[str, Tensor]:
    """Returns the sums of metrics, by name; those that the outputs do not suit are left out.

    Raises ValueError where a metric has computed something else.
    """
    all_sums: dict[str, Tensor] = {}
    for metric in metrics:
        if all_sums.keys() >= set(metric.sums):
            continue  # another metric computes the same sums
        if (sums := metric.compute_sums(outputs)) is not None:
            if faults := list(_faults_of_sums(metric, sums, outputs)):
                raise ValueError(f"{metric.name}: {', and '.join(faults)}")
            all_sums.update({name: sums[name] for name in metric.sums})
    return all_sums


def _faults_of_sums(metric: Metric, sums: Any, outputs: Outputs) -> Iterator[str]:
    """Yields why what a metric has computed of a batch is not sums of its rows.

    A sum of the loss is a scalar where the loss of each row is not known.
    """
    if not isinstance(sums, Mapping):
        yield f"compute_sums returned {type(sums).__name__}, and not a tensor for each of {', '.join(metric.sums)}"
        return
    num_rows = len(next(iter(outputs.batch.values())))
    is_of_rows = isinstance(metric, GatheredMetric) or (outputs.losses is not None and outputs.losses[0].ndim > 0)
    for name in metric.sums:
        each = sums.get(name)
        if not isinstance(each, Tensor):
            yield f"its sum {name!r} is {'missing' if each is None else type(each).__name__}, and not a tensor"
        elif each.is_complex() or each.is_quantized or each.layout != torch.strided:
            yield f"its sum {name!r} is a tensor of {each.dtype} ({each.layout}), and not of plain real numbers"
        elif each.ndim > 2 or each.shape[1:] == (0,) or (each.shape[:1] != (num_rows,) and (each.ndim or is_of_rows)):
            yield f"its sum {name!r} has the shape {list(each.shape)}, and not [{num_rows}] or [{num_rows}, k], by rows"


class MetricTotals:
    """Metrics of one model over many batches.

    names: of registered metrics; ValueError on another.
    loss: the job's loss.
    data: the prepared data, for metrics that read its tokenizer or the names of its classes.
    exact: whether sums must not depend on which ranks add them.
    part: the rows of a part of an evaluation, in its order, whose values of the first metric, a mean, `row_values`
        then has; the loss separates rows. Only that metric is computed of them. None for all rows.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        loss: BoundLoss,
        data: PreparedData | None = None,
        exact: bool = False,
        part: Sequence[int] | None = None,
    ) -> None:
        self._exact, self._part = exact, part
        self.row_values: RowValues | None = None
        named = metrics_named(names if part is None else names[:1])
        self.of_models = [metric for metric in named if isinstance(metric, ModelMetric)]
        self._metrics = [metric for metric in named if metric not in self.of_models]
        self._names, self._loss, self._data = [metric.name for metric in named], loss, data
        self._measured = [torch.zeros(0, dtype=torch.float64)] * (2 * len(self.of_models))  # rows, values
        gathered = [metric for metric in self._metrics if isinstance(metric, GatheredMetric)]
        kept = self._metrics[:1] if part is not None else []
        self._gathered = frozenset(name for metric in [*gathered, *kept] for name in metric.sums)
        self._parts: dict[str, list[Tensor]] = {name: [] for metric in self._metrics for name in metric.sums}
        self._rows: list[int] = []

    def measure_model(
        self, model: nn.Module, data: PreparedData, num_rows: int, *, ranks: tuple[int, int] = (0, 1), batch_size: int
    ) -> None:
        """Measures the metrics of models on at most `num_rows` of their rows, of which each rank takes its part.

        ranks: this one's number, and how many divide the rows.
        """
        self._measured = []
        for metric in self.of_models:
            rows = range(min(metric.num_rows(), num_rows))[ranks[0] :: ranks[1]]
            values = metric.measure(model, rows, tokenizer_dir=data.tokenizer_dir, batch_size=batch_size)
            self._measured += [torch.tensor(rows, dtype=torch.float64), torch.as_tensor(values, dtype=torch.float64)]

    def add(
        self,
        output: Any,
        batch: SampleTensors,
        *,
        rows: Sequence[int] | None = None,
        written: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Adds the output for one batch. Raises ValueError where a metric cannot be computed from it.

        written: what the model has written to the rows, where a metric reads it.
        rows: the numbers of the batch's rows in the data. A row that several ranks add is gathered once. None
        means the rows after those of earlier batches.
        """
        losses = None
        if is_known := self._loss.is_known(batch):
            by_row = None if self._part is None else self._loss.by_row(output, batch)
            total, count = by_row or self._loss(output, batch)
            losses = total.detach(), torch.as_tensor(count, dtype=torch.float64, device=total.device)
        outputs = outputs_of(self._loss, output, batch, losses=losses, data=self._data, written=written)
        sums = sums_of(self._metrics, outputs)
        unsuited = [metric for metric in self._metrics if not sums.keys() >= set(metric.sums)]
        if unsuited and is_known:  # what a loss that is not known leaves out is NaN
            raise ValueError(
                f"{', '.join(metric.name for metric in unsuited)} cannot be computed: the model returns "
                f"{_shape_text('logits', outputs.logits)}, "
                f"and the samples have {_shape_text('labels', outputs.labels)}."
                f"{''.join(f' {each.name} needs {each.needs}.' for each in unsuited if each.needs)} "
                "To fix: name other metrics"
            )
        for name, each in sums.items():
            values = each.detach().double()
            before = [part.shape[1:] if name in self._gathered else part.shape for part in self._parts[name][:1]]
            if before not in ([], [values.shape[1:]]):
                raise ValueError(f"the sum {name!r} has rows of {list(values.shape[1:])}, and had {list(before[0])}")
            if name not in self._gathered:
                values = values.sum(0) if values.ndim else values
                values = rounded(values) if self._exact else values
            self._parts[name].append(values.cpu() if name in self._gathered else values)
        num_rows = len(next(iter(batch.values())))
        self._rows += range(len(self._rows), len(self._rows) + num_rows) if rows is None else rows

    def parts(self) -> list[Tensor]:
        """Returns what this rank contributes to `result`: a few vectors, [any length] in fp64 on the CPU.

        They are the numbers of the rows, and for each sum its total, or the values of the rows.
        """
        vectors = [torch.tensor(self._rows, dtype=torch.float64)]
        for name, parts in self._parts.items():
            if not parts:
                vectors.append(torch.zeros(0, dtype=torch.float64))
            else:
                whole = torch.cat(parts) if name in self._gathered else torch.stack(parts).sum(0)
                vectors.append(whole.flatten().cpu())
        return [*vectors, *(part.flatten() for part in self._measured)]

    def result(self, parts: Sequence[Sequence[Tensor]] | None = None) -> dict[str, float]:
        """Returns the metrics, NaN where nothing was counted; without a row, only those that read none.

        parts: for each of `parts()`, those of all ranks (`Ranks.gather`). None means this rank alone.
        """
        rows_of_ranks, *rest = parts or [[own] for own in self.parts()]
        totals = {
            name: _rows(each, rows_of_ranks) if name in self._gathered else _total(each)
            for name, each in zip(self._parts, rest, strict=False)
        }
        if self._part is not None:
            self._keep_rows(totals)
        of_models = rest[len(self._parts) :]
        for metric, rows, values in zip(self.of_models, of_models[::2], of_models[1::2], strict=True):
            totals[metric.sums[0]] = _rows(values, rows)
        measured = [*self._metrics, *self.of_models] if any(map(len, rows_of_ranks)) else self.of_models
        with np.errstate(divide="ignore", invalid="ignore"):
            values_by_name = {
                metric.name: float(metric.value({name: totals[name] for name in metric.sums})) for metric in measured
            }
        return {name: values_by_name[name] for name in self._names if name in values_by_name}

    def _keep_rows(self, totals: dict[str, Values]) -> None:
        """Takes the values of rows from the totals, in the order of the part, and leaves their sums in `totals`."""
        assert self._part is not None
        sums = self._metrics[0].sums
        places = np.argsort(np.argsort(np.asarray(self._part)))  # the values are in the order of the rows' numbers
        values, counts = (np.asarray(totals[name], dtype=np.float64)[places] for name in sums)
        self.row_values = RowValues(values=tuple(values.tolist()), counts=tuple(counts.tolist()))
        totals |= {name: totals[name].sum() for name in sums}


def rounded(values: Tensor) -> Tensor:
    """Returns fp64 values with 24 significant bits, as fp32 has: sums of many have no error, in whatever order.

    Source: Veltkamp's splitting (Dekker, Numerische Mathematik 18, 1971).
    """
    scaled = values * float((1 << 29) + 1)
    result = scaled - (scaled - values)
    return torch.where(result.isfinite(), result, values)


def _total(parts: Sequence[Tensor]) -> Values:
    """Returns the sum over ranks, without those that have counted nothing: a scalar, or [k]."""
    counted = [part for part in parts if len(part)]
    total: Values = torch.stack(counted).sum(0).numpy() if counted else np.zeros(1)
    return total if len(total) > 1 else total[0]


def _rows(parts: Sequence[Tensor], rows_of_ranks: Sequence[Tensor]) -> Values:
    """Returns the values of all rows, [rows] or [rows, k], in their order, each once."""
    _, first = np.unique(torch.cat(list(rows_of_ranks)).numpy(), return_index=True)
    shaped = [part.reshape(len(rows), -1) for part, rows in zip(parts, rows_of_ranks, strict=True) if len(rows)]
    values: Values = torch.cat(shaped).numpy()[first] if shaped else np.zeros((0, 1))
    return values[:, 0] if values.shape[1] == 1 else values


def _shape_text(name: str, tensor: Tensor | None) -> str:
    return f"no {name}" if tensor is None else f"{name} {list(tensor.shape)} of {tensor.dtype}"
