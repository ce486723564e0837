"""Slices of rows, and metrics on them."""

import numpy as np
import pytest

from ringmaster.tasks.evaluation.examination import figure, masks_of, measure
from ringmaster.tasks.evaluation.scores import CAUSAL, CLASSIFIER, Scores
from ringmaster.tasks.evaluation.suite import SliceEntry

LABELS = np.array([0, 0, 0, 1, 1, 1, 1, 2])


def scores(hits, **more):
    hits = np.asarray(hits, float)
    sums = {"hits": hits, "labelled": np.ones(len(hits))}
    return Scores(kind=CLASSIFIER, num_rows=len(hits), sums=sums, columns={"labels": LABELS}, **more)


def test_rows_are_divided_by_a_column_by_length_and_by_a_function():
    lengths = np.array([5, 63, 64, 127, 128, 500, 1, 2])
    parity = np.where(LABELS % 2, "odd", "even")
    every = scores([1] * 8, num_tokens=lengths, slices={"parity": parity})
    found = {
        entry.name: {name: mask.nonzero()[0].tolist() for name, mask in masks_of(entry, every)}
        for entry in (
            SliceEntry(name="class", column="labels"),
            SliceEntry(name="length", tokens=[64, 128]),
            SliceEntry.model_construct(name="parity", by="mine:parity"),
        )
    }
    assert found == {
        "class": {"0": [0, 1, 2], "1": [3, 4, 5, 6], "2": [7]},
        "length": {"0-63": [0, 1, 6, 7], "64-127": [2, 3], ">=128": [4, 5]},
        "parity": {"even": [0, 1, 2, 7], "odd": [3, 4, 5, 6]},
    }


def test_a_slice_that_got_worse_is_seen_where_the_whole_got_better():
    labels = np.repeat([0, 1], [300, 60])
    draw = np.random.default_rng(0)
    old = (draw.random(360) < 0.7).astype(float)
    new = old.copy()
    new[:300] = np.maximum(old[:300], draw.random(300) < 0.7)
    new[300:] = np.minimum(old[300:], draw.random(60) < 0.5)

    def made(hits):
        sums = {"hits": hits, "labelled": np.ones(360)}
        return Scores(kind=CLASSIFIER, num_rows=360, sums=sums, columns={"labels": labels})

    whole, kept, lost = measure(
        made(new), made(old), metrics=["accuracy"], slices=[SliceEntry(name="class", column="labels")]
    )
    assert (whole.slice, kept.slice, lost.slice) == ("all", "class=0", "class=1")
    assert whole.value == pytest.approx(new.mean())
    assert whole.low < whole.value < whole.high
    assert whole.gain == pytest.approx(new.mean() - old.mean())
    assert whole.gain > 0
    assert whole.p_better < 0.01
    assert lost.gain < 0
    assert lost.p_worse < 0.01


def test_what_the_rows_do_not_have_is_told():
    plain = scores([1] * 8)
    with pytest.raises(ValueError, match=r"no column year.*: labels"):
        measure(plain, metrics=["accuracy"], slices=[SliceEntry(name="era", column="year")])
    with pytest.raises(ValueError, match="not texts"):
        measure(plain, metrics=["accuracy"], slices=[SliceEntry(name="length", tokens=[3])])
    with pytest.raises(ValueError, match="no loss"):
        measure(plain, metrics=["loss"])
    with pytest.raises(ValueError, match="8 rows cannot be compared with 2"):
        measure(plain, Scores(kind=CAUSAL, num_rows=2), metrics=["accuracy"])


def test_the_figure_has_a_line_for_each_slice_and_escapes_names():
    measured = measure(
        scores([1, 0, 1, 1, 1, 0, 1, 1]), scores([1] * 8), metrics=["accuracy"],
        slices=[SliceEntry(name="class", column="labels")],
    )  # fmt: skip
    drawn = figure("<shop>", measured, other="shop@champion")
    assert drawn.startswith("<svg")
    assert "&lt;shop&gt;" in drawn
    assert "<shop>" not in drawn
    for name in ("all (8)", "class=0 (3)", "class=2 (1)"):
        assert name in drawn
    assert drawn.count("<circle") == 2 * 4
    assert "NaN" not in drawn
