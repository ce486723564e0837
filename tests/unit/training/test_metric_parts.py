"""Metrics of a part of the held-out rows, with the values of each row."""

import torch
from torch.nn import functional

from ringmaster.techniques.training.bound_loss import BoundLoss, classification_loss
from ringmaster.techniques.training.metric_totals import MetricTotals

LOSS = BoundLoss(compute=classification_loss, inputs=None, is_of_classes=True)
LOGITS = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(10) % 3
BY_ROW = functional.cross_entropy(LOGITS, LABELS, reduction="none").double()


def totals_of(chunks, *, part):
    totals = MetricTotals(["loss", "accuracy"], loss=LOSS, part=part)
    for rows in chunks:
        totals.add(LOGITS[rows], {"labels": LABELS[rows]}, rows=rows)
    return totals


def test_a_part_has_the_values_of_its_rows_in_its_order_on_any_division():
    part = [7, 2, 9, 5]
    alone = totals_of([[7, 2], [9, 5]], part=part)
    metrics = alone.result()
    assert alone.row_values.values == tuple(BY_ROW[part].tolist())
    assert alone.row_values.counts == (1.0,) * 4
    assert torch.tensor(metrics["loss"], dtype=torch.float64).isclose(BY_ROW[part].mean())
    assert metrics.keys() == {"loss"}, "others are not compared, and left out"
    ranks = [totals_of([rows], part=part) for rows in ([7, 2], [9, 5])]
    assert ranks[0].result([list(each) for each in zip(*(rank.parts() for rank in ranks), strict=True)]) == metrics
    assert ranks[0].row_values == alone.row_values


def test_all_rows_have_no_values_by_row():
    whole = totals_of([list(range(10))], part=None)
    assert whole.result()["loss"] and whole.row_values is None
