"""Registry of metrics: the built-in ones, and those of installed distributions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ringmaster.techniques.metric import Metric, name_fault
from ringmaster.techniques.registry import find, installed, make

ENTRY_POINT_GROUP = "ringmaster.metrics"

BUILTIN: dict[str, str] = {
    "loss": "ringmaster.techniques.metrics.loss:MeanLoss",
    "perplexity": "ringmaster.techniques.metrics.perplexity:Perplexity",
    "accuracy": "ringmaster.techniques.metrics.accuracy:Accuracy",
    "f1": "ringmaster.techniques.metrics.f1:F1",
    "f1_macro": "ringmaster.techniques.metrics.f1:F1Macro",
    "f1_micro": "ringmaster.techniques.metrics.f1:F1Micro",
    "f1_weighted": "ringmaster.techniques.metrics.f1:F1Weighted",
    "entity_f1": "ringmaster.techniques.metrics.entities:EntityF1",
    "entity_precision": "ringmaster.techniques.metrics.entities:EntityPrecision",
    "entity_recall": "ringmaster.techniques.metrics.entities:EntityRecall",
    "precision": "ringmaster.techniques.metrics.precision_recall:Precision",
    "recall": "ringmaster.techniques.metrics.precision_recall:Recall",
    "matthews": "ringmaster.techniques.metrics.matthews:Matthews",
    "auroc": "ringmaster.techniques.metrics.auroc:Auroc",
    "mse": "ringmaster.techniques.metrics.regression:Mse",
    "mae": "ringmaster.techniques.metrics.regression:Mae",
    "r2": "ringmaster.techniques.metrics.regression:R2",
    "exact_match": "ringmaster.techniques.metrics.exact_match:ExactMatch",
    "rouge_l": "ringmaster.techniques.metrics.rouge_l:RougeL",
    "preference_accuracy": "ringmaster.techniques.metrics.preference_accuracy:PreferenceAccuracy",
    "reward": "ringmaster.techniques.metrics.reward:Reward",
    "recall_at_1": "ringmaster.techniques.metrics.recall_at:RecallAt1",
    "recall_at_5": "ringmaster.techniques.metrics.recall_at:RecallAt5",
}


def metric_names() -> tuple[str, ...]:
    """Returns the names of all metrics, built-in ones first."""
    return tuple(_every())


def metric_named(name: str) -> Metric:
    """Returns a metric. Raises ValueError where no metric, or a faulty one, has the name."""
    # Entry points are searched for other names only: that takes a tenth of a second, in each rank.
    path = BUILTIN[name] if name in BUILTIN else find("metric", name, _every())
    metric: Metric = make(Metric, path)
    if metric.name != name:
        raise ValueError(f"entry point {name!r} has the metric {metric.name!r} ({path}). To fix: give both one name")
    if (fault := name_fault(name)) is not None:
        raise ValueError(f"metric {name!r} ({path}) cannot have this name: {fault}. To fix: give it another name")
    return metric


def installed_metric(name: str) -> str | None:
    """Returns the dotted path of the class of an installed metric; None for built-in ones."""
    return None if name in BUILTIN else find("metric", name, _every())


def metrics_named(names: Iterable[str]) -> tuple[Metric, ...]:
    """Returns metrics that are computed together, each once. Raises ValueError as `metric_named`.

    Also raises ValueError where two of them compute sums of one name in different ways.
    """
    found = tuple(metric_named(name) for name in dict.fromkeys(names))
    owners: dict[str, Metric] = {}
    for metric in found:
        for name in metric.sums:
            owner = owners.setdefault(name, metric)
            if type(owner).compute_sums is not type(metric).compute_sums:
                raise ValueError(
                    f"the metrics {owner.name} and {metric.name} both have a sum {name!r}. To fix: rename one of the "
                    "sums, or measure only one of the metrics"
                )
    return found


def scored_metrics(names: Iterable[str]) -> tuple[Metric, ...]:
    """Returns the metrics that are computed of scored rows: the defaults of every kind of model, and those named."""
    defaults = [name for name in BUILTIN if metric_named(name).default_for]
    return metrics_named([*defaults, *names])


def why_not_divided(names: Iterable[str]) -> str | None:
    """Returns why the tokens of a row must not be divided over devices where these metrics are measured, or None."""
    for metric in metrics_named(names):
        if metric.reads_whole_rows:
            return f"the metric {metric.name} reads whole rows, and here each rank has some tokens of them"
    return None


def why_undefined(values: Mapping[str, float]) -> list[str]:
    """Returns why metrics, by name, have no value (NaN), as far as it is known; each with a remedy."""
    causes = {name: metric_named(name).undefined_where for name, value in values.items() if name in _every()}
    return [
        f"{name} has no value, as {cause}. To fix: evaluate more rows"
        for name, cause in causes.items()
        if cause and math.isnan(values[name])
    ]


def default_metrics(kind: str) -> tuple[str, ...]:
    """Returns the built-in metrics by which a model of a kind is measured where none is named."""
    places = {name: metric_named(name).default_for for name in BUILTIN}
    return tuple(sorted((name for name in BUILTIN if kind in places[name]), key=lambda name: places[name][kind]))


def _every() -> dict[str, str]:
    # Built-in metrics come first, and cannot be shadowed.
    return {**BUILTIN, **installed(ENTRY_POINT_GROUP), **BUILTIN}
