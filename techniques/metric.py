"""The `Metric` interface: a number that measures how good a model is on held-out data.

A metric is computed in two steps. Sums over rows are computed from a model's outputs, batch by batch. They are added up
over batches and ranks, and the value of the metric is computed from the totals. An evaluation may therefore be divided
over devices, and a bootstrap may draw the rows again without the model.

A metric that is not a function of sums, such as a ranking of all rows, is a `GatheredMetric`: its values of rows are
gathered instead of added.
"""

from __future__ import annotations

import math
import posixpath
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ringmaster import features
from ringmaster.registry import Registry, resolve
from ringmaster.text import join_limited

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    Values = npt.NDArray[np.float64]


IGNORED = -100  # as a label
MAX_IN_NAME = 245  # characters: MLflow takes 250 in a key, and a metric of held-out rows has the key "eval/NAME"
MAX_METRICS = 1000  # of one evaluation
SCORES = frozenset({"num_tokens", "log_probabilities", "predictions", "probabilities"})
"""The names of a row's scores that are not sums of a metric."""


def name_fault(name: object) -> str | None:
    """Returns why MLflow would not record a metric of that name, or None where it would."""
    if not isinstance(name, str) or not name:
        return "it is not text"
    if len(name) > MAX_IN_NAME:
        return f"it has {len(name)} characters, of which {MAX_IN_NAME} are recorded"
    if not re.fullmatch(r"[/\w.\- :]+", name):
        return "only letters, digits, '_', '-', '.', ':', '/' and spaces are recorded"
    if posixpath.normpath(name) != name or name.startswith(("..", "/")) or name == ".":
        return f"it is not a plain path: {posixpath.normpath(name)!r} would be another name"
    return None


def checked_values(values: object, *, may_be_undefined: bool = True) -> dict[str, float]:
    """Returns the values of metrics by name, as floats. Raises ValueError with every name or value that is none.

    may_be_undefined: whether a value may be NaN or infinite, as the metric of nothing is.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"metrics {values!r:.100} are not an object. To fix: give each metric's value by its name")
    if len(values) > MAX_METRICS:
        raise ValueError(f"{len(values)} metrics are given at once. To fix: give at most {MAX_METRICS}")
    result, faults = dict[str, float](), list[str]()
    for name, value in values.items():
        if (fault := name_fault(name)) is not None:
            faults.append(f"metric {name!r:.100} cannot have this name: {fault}. To fix: give it another name")
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            faults.append(f"metric {name!r} is {value!r:.100}. To fix: give a number")
        elif abs(value) > sys.float_info.max and (isinstance(value, int) or not may_be_undefined):
            faults.append(f"metric {name!r} is infinite or too large for 64 bits. To fix: give a finite number")
        elif math.isnan(value) and not may_be_undefined:
            faults.append(f"metric {name!r} is NaN. To fix: give a finite number, or leave it out")
        else:
            result[name] = float(value)
    if faults:
        raise ValueError(join_limited(faults, between="; ", most=5))
    return result


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
    rewards_of: for a loss over pairs of answers, the function that computes `rewards` from (output, batch).
    tokenizer_dir: the folder of the tokenizer that made the rows' tokens, if any.
    class_names: the names of the classes, in the order of their numbers; () where they have none.
    base: the folder or name on the hub of the pretrained model, if any.
    written: the tokens that the model writes to the prompt of each row; None unless a metric has `generates`.
    """

    output: Any
    batch: Mapping[str, Tensor]
    logits: Tensor | None
    labels: Tensor | None
    losses: tuple[Tensor, Tensor] | None
    rewards_of: Callable[[Any, Mapping[str, Tensor]], Tensor | None] | None = None
    tokenizer_dir: Path | None = None
    class_names: tuple[str, ...] = ()
    base: str | None = None
    written: Sequence[Sequence[int]] | None = None

    @property
    def rewards(self) -> Tensor | None:
        """The rewards of a row's sequences, the right one first, [rows, sequences]; None without such a loss."""
        return None if self.rewards_of is None else self.rewards_of(self.output, self.batch)


class Metric(ABC):
    """A metric, a class without arguments in one file.

    Attributes:
        name: the name in batch files, tables and charts. An entry point has the same name.
        higher_is_better: the direction in which models are compared.
        sums: the names of its sums. Metrics that inherit one `compute_sums` share their sums.
        needs: what it needs of the outputs, for users: "a label and a logit for each class". Part of error messages.
        share_of: for a metric that is the share of counted elements, such as of labels, the sum with their number. Its
            values are between 0 and 1, and a share of exactly 0 or 1 has Wilson's confidence interval.
        reads_whole_rows: whether it cannot be computed from a part of a row's tokens. A technique that divides
            sequences over devices then does not train a job that names the metric.
        generates: whether it reads what the model writes to the rows' prompts. Only techniques that keep the whole
            model on each device then train a job that names the metric.
        undefined_where: what rows have no value of the metric, which then is NaN, for users; "" where nothing is
            known.
        default_for: the kinds of models ("causal", "classifier", "other") that `ringmaster evaluate` and policies
            measure by a built-in metric where none is named, each with the place of the metric in their order. A job
            then measures its loss alone.
    """

    name: ClassVar[str]
    higher_is_better: ClassVar[bool]
    sums: ClassVar[tuple[str, ...]]
    needs: ClassVar[str] = ""
    share_of: ClassVar[str | None] = None
    reads_whole_rows: ClassVar[bool] = False
    generates: ClassVar[bool] = False
    undefined_where: ClassVar[str] = ""
    default_for: ClassVar[Mapping[str, int]] = {}

    @property
    def is_mean(self) -> bool:
        """Whether the metric is a mean: the total of its first sum by that of its second one."""
        return len(self.sums) == 2 and type(self).value is Metric.value and not isinstance(self, GatheredMetric)

    @abstractmethod
    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns each row's contribution to each of `sums`, whatever other rows the batch has.

        A contribution is a number, [rows], or a vector, such as a number for each class, [rows, k] with k > 1 equal for
        all rows. Returns None where the outputs or the labels do not suit the metric. A job that requests it then
        fails; the scoring of rows leaves the metric out.
        """

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns the metric of total sums: scalars, or arrays of one shape with totals of several sets of rows.

        By default the first of two sums by the second: a mean, or a share. The total of vectors has one dimension more,
        the last one, [..., k]. Totals that are all multiplied by one number have the same value, as several ranks may
        count the same rows. It may divide by zero: the metric of nothing is NaN.
        """
        first, second = (sums[name] for name in self.sums)
        return first / second

    def value_of_rows(self, rows: Mapping[str, Values], counts: Values) -> Values:
        """Returns the metric of samples of rows, [...].

        rows: the contributions of all rows to `sums`, [rows] or [rows, k].
        counts: how often each sample has each row, [..., rows].
        """
        return self.value({name: counts @ values for name, values in rows.items()})


class GatheredMetric(Metric):
    """A metric that is a function of all rows at once, such as of the order of their scores.

    Its "sums" are values of rows, in fp64, that are gathered from batches and ranks instead of added. `relate` is
    called once with those of all rows, in their order, each once by however many ranks it was computed. `value_of_rows`
    is called with the result, of samples or of a part of the rows.
    """

    reads_whole_rows = True

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns the metric of all rows, each once. sums: the values of the rows, [rows] or [rows, k]."""
        import numpy as np

        related = self.relate(sums)
        return self.value_of_rows(related, np.ones(len(next(iter(related.values())))))

    def relate(self, rows: Mapping[str, Values]) -> Mapping[str, Values]:
        """Returns values of rows, [rows] or [rows, k], that depend on all rows, such as ranks; by default `rows`."""
        return rows

    @abstractmethod
    def value_of_rows(self, rows: Mapping[str, Values], counts: Values) -> Values:
        """Returns the metric of samples of rows, as in `Metric`. rows: some of the values that `relate` returned."""


class ModelMetric(GatheredMetric):
    """A metric of a model on rows of its own, such as the documents of a benchmark, instead of the job's data.

    The rows are divided over devices and gathered as those of a `GatheredMetric`. The scoring of rows leaves it out.
    """

    generates = True

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns None: the outputs for the job's data do not matter."""
        return None

    @abstractmethod
    def num_rows(self) -> int:
        """Returns the number of rows. Raises ValueError, with a remedy, where they cannot be read."""

    @abstractmethod
    def measure(self, model: Any, rows: Sequence[int], *, tokenizer_dir: Path | None, batch_size: int) -> Values:
        """Returns the value of each of some rows, [rows] or [rows, k].

        model: a model of transformers in evaluation mode, on its device. tokenizer_dir: the tokenizer of the data.
        batch_size: the most rows of a forward pass.
        """


BUILTIN_METRICS: dict[str, str] = {
    "loss": "ringmaster.techniques.metrics.loss_values:MeanLoss",
    "perplexity": "ringmaster.techniques.metrics.loss_values:Perplexity",
    "accuracy": "ringmaster.techniques.metrics.classification:Accuracy",
    "mse": "ringmaster.techniques.metrics.loss_values:Mse",
    "mae": "ringmaster.techniques.metrics.loss_values:Mae",
    "r2": "ringmaster.techniques.metrics.loss_values:R2",
    **features.dotted_names("METRICS"),
}
METRICS = Registry(kind="metric", entry_point_group="ringmaster.metrics", builtin=BUILTIN_METRICS)
METRIC_FAMILIES = Registry(
    kind="family of metrics",
    entry_point_group="ringmaster.metric_families",
    builtin={
        "latency": "ringmaster.techniques.metrics.latency:latency_metric",
        **features.dotted_names("METRIC_FAMILIES"),
    },
)
"""Functions, by name, from the rest of the name FAMILY/REST of a metric to its class."""


def metric_names() -> tuple[str, ...]:
    """Returns the names of all metrics, built-in ones first."""
    return tuple(METRICS.paths())


def metric_named(name: str) -> Metric:
    """Returns a metric. Raises ValueError where no metric, or a faulty one, has the name."""
    family, slash, rest = name.partition("/")
    if slash and family in METRIC_FAMILIES.paths():
        member: type[Metric] = resolve(METRIC_FAMILIES.path(family))(rest)
        return member()
    metric: Metric = METRICS.load(name, Metric)()
    if (fault := name_fault(name)) is not None:
        raise ValueError(
            f"metric {name!r} ({METRICS.path(name)}) cannot have this name: {fault}. To fix: give it another name"
        )
    return metric


def installed_metric(name: str) -> str | None:
    """Returns the dotted path of the class of an installed metric; None for built-in ones."""
    family, slash, _ = name.partition("/")
    registry = METRIC_FAMILIES if slash and family in METRIC_FAMILIES.paths() else METRICS
    return registry.installed_path(family if registry is METRIC_FAMILIES else name)


def metrics_named(names: Iterable[str]) -> tuple[Metric, ...]:
    """Returns metrics that are computed together, each once. Raises ValueError as `metric_named`.

    Also raises ValueError where two of them compute sums of one name in different ways.
    """
    result = tuple(metric_named(name) for name in dict.fromkeys(names))
    owners: dict[str, Metric] = {}
    for metric in result:
        if taken := SCORES.intersection(metric.sums):
            raise ValueError(f"metric {metric.name} may not name a sum {', '.join(taken)}. To fix: rename the sum")
        for name in metric.sums:
            owner = owners.setdefault(name, metric)
            if type(owner).compute_sums is not type(metric).compute_sums:
                raise ValueError(
                    f"the metrics {owner.name} and {metric.name} both have a sum {name!r}. To fix: rename one of the "
                    "sums, or measure only one of the metrics"
                )
    return result


def scored_metrics(names: Iterable[str]) -> tuple[Metric, ...]:
    """Returns the metrics that are computed of scored rows: the defaults of every kind of model, and those named."""
    defaults = [name for name in BUILTIN_METRICS if metric_named(name).default_for]
    return metrics_named([*defaults, *names])


def why_generating(names: Iterable[str]) -> str | None:
    """Returns which metric needs the whole model, to write or to answer questions of its own; None where none does."""
    return next((f"the metric {metric.name}" for metric in metrics_named(names) if metric.generates), None)


def answer_of(labels: Sequence[int]) -> list[int]:
    """Returns the first run of labels of a row."""
    first = next((place for place, label in enumerate(labels) if label != IGNORED), len(labels))
    return list(takewhile(lambda label: label != IGNORED, labels[first:]))


def why_not_divided(names: Iterable[str]) -> str | None:
    """Returns why the tokens of a row must not be divided over devices where these metrics are measured, or None."""
    for metric in metrics_named(names):
        if metric.reads_whole_rows:
            return f"the metric {metric.name} reads whole rows, and here each rank has some tokens of them"
    return None


def metrics_text(values: Mapping[str, Any], *, num_rows: int | None = None) -> str:
    """Returns metrics in a line, such as "loss 0.61, accuracy 0.71 of 256 rows".

    num_rows: the number of held-out rows that they were computed of; None where it is unknown. Metrics of a family,
    may have rows of their own.
    """
    of_rows = [name for name in values if "/" not in name]
    texts = {name: f"{name} {value:.4g}" for name, value in values.items()}
    if of_rows and num_rows:
        texts[of_rows[-1]] += f" of {num_rows:,} row" + ("" if num_rows == 1 else "s")
    return ", ".join(texts[name] for name in [*of_rows, *(name for name in values if "/" in name)])


def why_undefined(values: Mapping[str, float]) -> list[str]:
    """Returns why metrics, by name, have no value (NaN), as far as it is known; each with a remedy."""
    causes = {name: metric_named(name).undefined_where for name, value in values.items() if name in METRICS.paths()}
    return [
        f"{name} has no value, as {cause}. To fix: evaluate more rows"
        for name, cause in causes.items()
        if cause and math.isnan(values[name])
    ]


def default_metrics(kind: str) -> tuple[str, ...]:
    """Returns the built-in metrics by which a model of a kind is measured where none is named."""
    places = {name: metric_named(name).default_for for name in BUILTIN_METRICS}
    return tuple(
        sorted((name for name in BUILTIN_METRICS if kind in places[name]), key=lambda name: places[name][kind])
    )


def gain(challenger: float, champion: float, *, metric: str) -> float:
    """Returns by how much the challenger is better, in the metric's unit; negative if it is worse.

    Returns NaN if either value is not finite. Raises ValueError on an unknown metric.
    """
    is_high_good = metric_named(metric).higher_is_better
    if not (math.isfinite(challenger) and math.isfinite(champion)):
        return math.nan
    return challenger - champion if is_high_good else champion - challenger


def ranked(values: Mapping[str, float], *, metric: str) -> list[str]:
    """Returns the names of `values`, the best first; those without a finite value come last, ties keep their order."""
    finite = [name for name in values if math.isfinite(values[name])]
    finite.sort(key=lambda name: gain(values[name], 0.0, metric=metric), reverse=True)
    return [*finite, *(name for name in values if not math.isfinite(values[name]))]
