"""The registry of metrics, and the faults of metrics in it."""

import numpy as np
import pytest
import torch

from ringmaster.techniques import Metric
from ringmaster.techniques.job_specs import EvaluationSpec
from ringmaster.techniques.metric import (
    Outputs,
    default_metrics,
    metric_named,
    metric_names,
    metrics_named,
    scored_metrics,
    why_not_divided,
)
from ringmaster.techniques.metrics.classification import Accuracy


class Errors(Accuracy):
    name = "errors"
    higher_is_better = False

    def value(self, sums):
        return 1 - super().value(sums)


class Weighted(Accuracy):
    """Names the sums of accuracy, and computes others."""

    name = "weighted"

    def compute_sums(self, outputs):
        return {name: 2 * each for name, each in super().compute_sums(outputs).items()}


class Unfinished(Metric):
    name = "unfinished"


@pytest.fixture
def installed(monkeypatch):
    """Installs metrics: {name of the entry point: name in this module}."""

    def install(**paths):
        found = {name: f"{__name__}:{path}" for name, path in paths.items()}
        monkeypatch.setattr(
            "ringmaster.registry.installed", lambda group: found if group == "ringmaster.metrics" else {}
        )

    return install


def outputs(logits, labels):
    labels = None if labels is None else torch.tensor(labels)
    return Outputs(output=None, batch={}, logits=logits, labels=labels, losses=None)


def test_built_in_metrics_have_their_names_sums_and_directions():
    assert metric_names()[:3] == ("loss", "perplexity", "accuracy")
    assert all(metric_named(name).name == name for name in metric_names())
    lower = {name for name in metric_names() if not metric_named(name).higher_is_better}
    assert lower == {"loss", "perplexity", "mse", "mae", "word_error_rate", "character_error_rate"}
    assert metric_named("perplexity").sums == metric_named("loss").sums == ("loss_sums", "loss_counts")
    assert EvaluationSpec.metrics[0] in metric_names()


@pytest.mark.parametrize(
    ("kind", "names"),
    [("causal", ("loss", "perplexity", "accuracy")), ("classifier", ("accuracy", "loss")), ("other", ("loss",))],
)
def test_each_kind_of_model_has_metrics_where_none_is_named(kind, names, installed):
    installed(errors="Errors")
    assert default_metrics(kind) == names


def test_accuracy_counts_each_row_and_suits_class_labels_alone():
    logits = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    sums = Accuracy().compute_sums(outputs(logits, [[1, 1], [1, -100]]))
    assert {name: each.tolist() for name, each in sums.items()} == {"hits": [1, 1], "labelled": [2, 1]}
    assert Accuracy().value({"hits": np.array([3.0, 0.0]), "labelled": np.array([4.0, 2.0])}).tolist() == [0.75, 0.0]
    several = Accuracy().compute_sums(outputs(torch.tensor([[1.0, -1.0], [1.0, 1.0]]), [[1.0, 0.0], [1.0, 0.0]]))
    assert {name: each.tolist() for name, each in several.items()} == {"hits": [1, 0], "labelled": [1, 1]}
    for unsuited in (
        outputs(None, [1, 0]),
        outputs(logits, None),
        outputs(logits, [1, 0]),
        outputs(torch.zeros(2, 1), [0, 0]),
        outputs(torch.zeros(2, 2), [0.5, 1.5]),
    ):
        assert Accuracy().compute_sums(unsuited) is None


def test_metrics_that_share_sums_are_computed_together_and_others_may_not_name_them(installed):
    installed(errors="Errors", weighted="Weighted")
    assert [metric.name for metric in metrics_named(["errors", "accuracy", "errors"])] == ["errors", "accuracy"]
    with pytest.raises(ValueError, match=r"the metrics accuracy and weighted both have a sum 'hits'. To fix: rename"):
        metrics_named(["accuracy", "weighted"])


def test_all_built_in_metrics_may_be_computed_together():
    assert tuple(metric.name for metric in metrics_named(metric_names())) == metric_names()
    assert [metric.name for metric in scored_metrics(["f1", "loss"])] == ["loss", "perplexity", "accuracy", "f1"]


def test_metrics_of_whole_rows_keep_a_row_on_one_device():
    assert why_not_divided(["loss", "accuracy", "f1"]) is None
    assert why_not_divided(["loss", "exact_match"]).startswith("the metric exact_match reads whole rows")
    assert why_not_divided(["recall_at_5"]).startswith("the metric recall_at_5 reads whole rows")


def test_a_faulty_entry_point_is_told(installed):
    installed(mistakes="Errors", path="outputs", unfinished="Unfinished", accuracy="Errors")
    with pytest.raises(ValueError, match=r"entry point 'mistakes' has the metric 'errors'.*To fix: give both one name"):
        metric_named("mistakes")
    with pytest.raises(ValueError, match=r"test_metrics:outputs is not a subclass of .*Metric"):
        metric_named("path")
    with pytest.raises(TypeError, match="compute_sums"):
        metric_named("unfinished")
    assert type(metric_named("accuracy")) is Accuracy, "a built-in metric cannot be shadowed"
