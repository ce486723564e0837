"""Metrics of made-up outputs, measured as by several ranks, each with several batches."""

from types import SimpleNamespace

import numpy as np
import torch

from ringmaster.tasks.evaluation.scores import MetricRows, Scores
from ringmaster.techniques.metric import metric_named
from ringmaster.techniques.training.bound_loss import BoundLoss
from ringmaster.techniques.training.metric_totals import MetricTotals, outputs_of, sums_of

LOSS = BoundLoss(compute=lambda output, batch: (torch.zeros(()), 1), inputs=None)


def measured(names, batch, *, num_parts=1, size=3, replicas=1, loss=LOSS, data=None, **output):
    """Returns metrics by name, of rows divided over `num_parts` ranks in batches of at most `size` rows.

    output: tensors with `len(tensor) / len(rows)` entries a row, the fields of the model's output.
    replicas: on how many ranks each part is.
    """
    num_rows = len(next(iter(batch.values())))
    ranks = []
    for mine in np.array_split(np.arange(num_rows), num_parts):
        metrics = MetricTotals(names, loss=loss, data=data)
        for first in range(0, len(mine), size):
            rows = mine[first : first + size].tolist()
            metrics.add(part_of(output, rows, num_rows), {k: v[rows] for k, v in batch.items()}, rows=rows)
        ranks += [metrics] * replicas
    return ranks[0].result(list(zip(*(metrics.parts() for metrics in ranks), strict=True)))


def part_of(output, rows, num_rows):
    found = {k: v.reshape(num_rows, -1, *v.shape[1:])[rows].flatten(0, 1) for k, v in output.items()}
    return SimpleNamespace(**found)


def scores_of(name, batch, *, loss=LOSS, **output) -> Scores:
    """Returns the contributions of rows to a metric, as the scoring of rows finds them."""
    outputs = outputs_of(loss, SimpleNamespace(**output), batch, losses=None)
    sums = {key: each.double().numpy() for key, each in sums_of([metric_named(name)], outputs).items()}
    return Scores(kind="other", num_rows=len(next(iter(batch.values()))), sums=sums)


def rows_of(name, batch, **output) -> MetricRows:
    return scores_of(name, batch, **output).rows(name)
