"""Metrics of classes and numbers equal scikit-learn's, however an evaluation is divided."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk

from ringmaster.techniques.metric import metrics_text, why_undefined
from tests.drawing import draws
from tests.unit.evaluation.measuring import measured, rows_of

COUNTED = ("f1", "f1_macro", "f1_micro", "f1_weighted", "precision", "recall", "accuracy")
SINGLE = (*COUNTED, "matthews")
OF_TOKENS = ("f1_macro", "f1_micro", "f1_weighted", "accuracy", "matthews")
SEEDS = st.integers(0, 2**32 - 1)


def made(seed, *, num_rows, num_classes, shape=()):
    """Returns logits with ties between rows, and labels some of which are ignored."""
    draw = np.random.default_rng(seed)
    logits = np.round(draw.normal(size=(num_rows, *shape, num_classes)), 1) + 1e-3 * np.arange(num_classes)
    labels = draw.integers(0, num_classes, size=(num_rows, *shape))
    if shape:
        labels[draw.random(labels.shape) < 0.3] = -100
    return torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)


def expected(true, predicted, *, average):
    """Returns scikit-learn's values."""
    mean = average or "binary"
    some = {"zero_division": 0}
    return {
        "f1": sk.f1_score(true, predicted, average=mean, **some),
        "f1_macro": sk.f1_score(true, predicted, average="macro", **some),
        "f1_micro": sk.f1_score(true, predicted, average="micro", **some),
        "f1_weighted": sk.f1_score(true, predicted, average="weighted", **some),
        "precision": sk.precision_score(true, predicted, average=mean, **some),
        "recall": sk.recall_score(true, predicted, average=mean, **some),
        "accuracy": sk.accuracy_score(true, predicted),
    }


def parted(*args, **kwargs):
    """Returns metrics that are equal on one, two and three ranks, and where two ranks have the same rows."""
    one = measured(*args, **kwargs)
    for division in ({"num_parts": 2}, {"num_parts": 3}, {"num_parts": 1, "replicas": 2}, {"size": 100}):
        assert measured(*args, **{**kwargs, **division}) == pytest.approx(one, rel=1e-9, nan_ok=True)
    return one


@draws(50)
@given(seed=SEEDS, num_rows=st.integers(1, 12), num_classes=st.integers(2, 5))
def test_counts_of_one_label_a_row(seed, num_rows, num_classes):
    logits, labels = made(seed, num_rows=num_rows, num_classes=num_classes)
    true, predicted = labels.numpy(), logits.argmax(-1).numpy()
    found = parted((*SINGLE, "auroc"), {"labels": labels}, logits=logits)
    found.pop("auroc")  # measured together, as its values are gathered and the others' are not
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of single classes
        average = None if num_classes == 2 else "macro"
        wanted = {**expected(true, predicted, average=average), "matthews": sk.matthews_corrcoef(true, predicted)}
    assert found == pytest.approx(wanted, abs=1e-12)


@draws(25)
@given(seed=SEEDS, num_rows=st.integers(2, 6), num_classes=st.integers(2, 4))
def test_counts_of_one_label_a_token(seed, num_rows, num_classes):
    logits, labels = made(seed, num_rows=num_rows, num_classes=num_classes, shape=(7,))
    labels[0, 0] = 0
    counted = labels.numpy() != -100
    true, predicted = labels.numpy()[counted], logits.argmax(-1).numpy()[counted]
    wanted = {**expected(true, predicted, average="macro"), "matthews": sk.matthews_corrcoef(true, predicted)}
    found = parted(OF_TOKENS, {"labels": labels}, logits=logits)
    assert found == pytest.approx({name: wanted[name] for name in OF_TOKENS}, abs=1e-12)


@pytest.mark.parametrize("name", ["f1", "precision", "recall"])
def test_tokens_have_entities_or_averages(name):
    with pytest.raises(ValueError, match=f"{name} needs one prediction a row: .*For tokens: entity_f1 .*, f1_macro or"):
        measured((name,), {"labels": torch.zeros(2, 3).long()}, logits=torch.ones(2, 3, 2))


@draws(50)
@given(seed=SEEDS, num_rows=st.integers(1, 12), num_classes=st.integers(2, 5))
def test_counts_of_several_labels_a_row(seed, num_rows, num_classes):
    draw = np.random.default_rng(seed)
    logits = torch.tensor(draw.normal(size=(num_rows, num_classes)))
    labels = torch.tensor(draw.integers(0, 2, size=(num_rows, num_classes))).double()
    wanted = expected(labels.numpy().astype(int), (logits > 0).int().numpy(), average="macro")
    assert parted(COUNTED, {"labels": labels}, logits=logits) == pytest.approx(wanted, abs=1e-12)


@draws(50)
@given(seed=SEEDS, num_rows=st.integers(2, 30))
def test_auroc_of_two_classes(seed, num_rows):
    logits, labels = made(seed, num_rows=num_rows, num_classes=2)
    labels[:2] = torch.tensor([0, 1])
    # In doubles, as the metric computes them: fp32 differences of tied logits differ by rounding.
    scores = (logits.double()[:, 1] - logits.double()[:, 0]).numpy()
    found = parted(("auroc",), {"labels": labels}, logits=logits)["auroc"]
    assert found == pytest.approx(sk.roc_auc_score(labels, scores), abs=1e-12)


@draws(50)
@given(seed=SEEDS, num_rows=st.integers(4, 30), num_classes=st.integers(3, 4))
def test_auroc_of_more_classes_is_the_mean_of_one_against_the_rest(seed, num_rows, num_classes):
    logits, labels = made(seed, num_rows=num_rows, num_classes=num_classes)
    labels[:num_classes] = torch.arange(num_classes)
    shares = logits.double().softmax(-1).numpy()
    wanted = sk.roc_auc_score(labels, shares, multi_class="ovr", average="macro")
    assert parted(("auroc",), {"labels": labels}, logits=logits)["auroc"] == pytest.approx(wanted, abs=1e-12)
    several = torch.nn.functional.one_hot(labels, num_classes).double()
    wanted = sk.roc_auc_score(several, logits, average="macro")
    assert parted(("auroc",), {"labels": several}, logits=logits)["auroc"] == pytest.approx(wanted, abs=1e-12)


@draws(50)
@given(seed=SEEDS, num_rows=st.integers(2, 20))
def test_errors_of_predicted_numbers(seed, num_rows):
    draw = np.random.default_rng(seed)
    labels = draw.normal(size=num_rows) * 10 + draw.integers(-3, 3)
    predicted = labels + draw.normal(size=num_rows)
    found = parted(("mse", "mae", "r2"), {"labels": torch.tensor(labels)}, logits=torch.tensor(predicted)[:, None])
    wanted = {
        "mse": sk.mean_squared_error(labels, predicted),
        "mae": sk.mean_absolute_error(labels, predicted),
        "r2": sk.r2_score(labels, predicted),
    }
    assert found == pytest.approx(wanted, rel=1e-9)


def test_nothing_counted_has_no_metric():
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    unlabelled, equal = {"labels": torch.tensor([-100, -100])}, {"labels": torch.tensor([1, 1])}
    assert all(math.isnan(value) for value in measured((*SINGLE, "auroc"), unlabelled, logits=logits).values())
    undefined = measured(("auroc", "accuracy"), equal, logits=logits)
    assert math.isnan(undefined["auroc"])
    why = "auroc has no value, as the evaluated rows are all of one class. To fix: evaluate more rows"
    assert why_undefined(undefined) == [why]
    assert why_undefined({"auroc": 0.5, "loss": math.nan, "of_a_removed_package": math.nan}) == []
    assert math.isnan(measured(("r2",), {"labels": torch.tensor([0.1, 0.1, 0.1])}, logits=torch.ones(3, 1))["r2"])
    partly = {"labels": torch.tensor([0, -100, 1])}
    assert measured(("auroc",), partly, logits=torch.tensor([[1.0, 0], [0, 5], [0, 1]]))["auroc"] == 1.0


@pytest.mark.parametrize(
    ("names", "labels", "logits"),
    [
        (("f1", "matthews", "auroc", "accuracy"), torch.tensor([0.5, 1.0]), torch.ones(2, 1)),
        (("f1", "matthews", "auroc"), torch.tensor([0, 1]), torch.ones(2, 3, 2)),
        (("matthews",), torch.ones(2, 3), torch.ones(2, 3)),
        (("auroc",), torch.ones(2, 3).long(), torch.ones(2, 3, 2)),
        (("f1", "matthews"), torch.zeros(2, 1).long(), torch.ones(2, 1, 5000)),
        (("mse", "mae", "r2"), torch.tensor([0, 1]), torch.ones(2, 2)),
    ],
)
def test_outputs_that_do_not_suit_are_refused_with_what_is_needed(names, labels, logits):
    for name in names:
        with pytest.raises(ValueError, match=rf"{name} cannot be computed: .*\. {name} needs .*\. To fix: name other"):
            measured((name,), {"labels": labels}, logits=logits)


@pytest.mark.parametrize("name", ["f1", "f1_micro", "matthews", "auroc"])
@pytest.mark.parametrize("num_classes", [2, 3])
def test_a_bootstrap_draws_rows_as_if_they_were_there_several_times(name, num_classes):
    logits, labels = made(7, num_rows=9, num_classes=num_classes)
    counts = np.random.default_rng(1).multinomial(9, np.full(9, 1 / 9), size=5)
    found = rows_of(name, {"labels": labels}, logits=logits).drawn(counts.astype(float))
    for drawn, value in zip(counts, found, strict=True):
        again = np.repeat(np.arange(9), drawn)
        wanted = measured((name,), {"labels": labels[again]}, logits=logits[again])[name]
        assert value == pytest.approx(wanted, nan_ok=True)


@pytest.mark.parametrize(
    ("values", "num_rows", "text"),
    [
        ({"accuracy": 0.70703, "loss": 0.5}, 256, "accuracy 0.707, loss 0.5 of 256 rows"),
        ({"lm-eval/boolq": 0.5, "loss": 2.0}, 1024, "loss 2 of 1,024 rows, lm-eval/boolq 0.5"),
        ({"latency/p99_s": 0.01}, 256, "latency/p99_s 0.01"),
        ({"loss": 2.0}, 1, "loss 2 of 1 row"),
        ({"loss": 2.0}, None, "loss 2"),
        ({}, 256, ""),
    ],
)
def test_metrics_say_of_how_many_rows_they_are(values, num_rows, text):
    assert metrics_text(values, num_rows=num_rows) == text
