"""The `Metric` interface: a number that says how good a model is on held-out data.

A metric is computed in two steps. Sums over rows are computed from a model's outputs, batch by batch. They are added up
over batches and ranks, and the value of the metric is computed from the totals. An evaluation may therefore be divided
over devices, and a bootstrap may draw the rows again without the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    Values = npt.NDArray[np.float64]

IGNORED = -100  # as a label


@dataclass(frozen=True, eq=False, kw_only=True)
class Outputs:
    """What a metric reads of one batch.

    output: the return value of the model's `forward`.
    batch: the rows, tensors [rows, ...] by name.
    logits: [rows, ..., labels], or None if the model returns none.
    labels: the label that each position predicts, [rows, ...]: for language models, the next token. None if the rows
        have none. A position whose label is `IGNORED` does not count.
    losses: (sums, counts) of the job's loss, None for rows without labels. The sums and the numbers of averaged
        elements are given for each row, [rows]. The trainer, which needs no rows, gives scalars for the whole batch.
    """

    output: Any
    batch: Mapping[str, Tensor]
    logits: Tensor | None
    labels: Tensor | None
    losses: tuple[Tensor, Tensor] | None


class Metric(ABC):
    """A metric, a class without arguments in one file.

    name: the name in batch files, tables and charts. An entry point has the same name.
    higher_is_better: the direction in which models are compared.
    sums: the names of its sums. Metrics that inherit one `compute_sums` share their sums.
    share_of: for a metric that is the share of counted elements, such as of labels, the sum with their number. Its
        values are between 0 and 1, and a share of exactly 0 or 1 has Wilson's confidence interval.
    default_for: the kinds of models ("causal", "classifier", "other") that a built-in metric measures where no metric
        is named, each with the place of the metric in their order.
    """

    name: ClassVar[str]
    higher_is_better: ClassVar[bool]
    sums: ClassVar[tuple[str, ...]]
    share_of: ClassVar[str | None] = None
    default_for: ClassVar[Mapping[str, int]] = {}

    @abstractmethod
    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns each row's contribution to each of `sums`, [rows], whatever other rows the batch has.

        Returns None where the outputs or the labels do not suit the metric. A job that asks for it then fails; the
        scoring of rows leaves the metric out.
        """

    @abstractmethod
    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns the metric of total sums: scalars, or arrays of one shape with totals of several sets of rows.

        It may divide by zero: the metric of nothing is NaN.
        """
