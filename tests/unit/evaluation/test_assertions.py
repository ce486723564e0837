"""Assertions over rows of predictions."""

import json
import math
import weakref

import numpy as np
import pytest

from ringmaster.tasks.evaluation.model_assertions import Log, check, importable, rows_of
from ringmaster.tasks.evaluation.scores import CLASSIFIER, Scores
from ringmaster.tasks.evaluation.suite import AssertionEntry


def failures(rows, **said):
    (found,) = check([AssertionEntry.model_construct(**{**AssertionEntry(name="a").model_dump(), **made(said)})], rows)
    return [int(e.split(":")[0].removeprefix("row ")) for e in found.examples if e.startswith("row ")], found


def made(said):
    """The sections of an assertion, validated except for predicates, which need the folder of a file."""
    return {
        key: getattr(AssertionEntry(name="a", **{key: value}), key) if key != "predicate" else value
        for key, value in said.items()
    }


def predictions(*values, **more):
    return [{"prediction": v} | {key: column[i] for key, column in more.items()} for i, v in enumerate(values)]


def test_what_is_missing_or_no_number_is_not_finite():
    rows = [{"p": [0.1, 0.9]}, {"p": [math.nan, 1]}, {}, {"p": 1.0}, {"p": math.inf}, {"p": "x"}, {"p": None}]
    assert failures(rows, finite=["p"])[0] == [2, 3, 5, 6, 7]


def test_a_range_holds_numbers_only():
    rows = [{"p": 0.5}, {"p": 1.1}, {"p": math.nan}, {"p": "0.5"}, {}, {"p": [0.2, 2]}, {"p": 0}]
    assert failures(rows[:6], range={"field": "p", "min": 0, "max": 1})[0] == [2, 3, 4, 5, 6]
    assert failures(rows[:2], range={"field": "p", "max": 1})[0] == [2]


def test_confidence_is_the_largest_probability():
    rows = [{"probabilities": [0.4, 0.6]}, {"probabilities": [0.1, 0.9]}, {"confidence": 0.3}, {}]
    assert failures(rows, range={"field": "confidence", "min": 0.7})[0] == [1, 3, 4]


def test_as_many_rows_may_fail_as_is_allowed_and_none_of_no_rows_is_no_pass():
    rows = [{"p": 0.5}] * 9 + [{"p": 2.0}]
    bounds = {"field": "p", "max": 1.0}
    assert failures(rows, range=bounds, max_failures=0.1)[1].passed
    assert not failures(rows, range=bounds, max_failures=0.09)[1].passed
    empty = failures([], range=bounds)[1]
    assert not empty.passed
    assert "no rows" in empty.why


def test_a_share_is_of_all_rows_that_are_looked_at():
    rows = predictions(1, 1, 1, 0, country=["NZ", "NZ", "AU", "NZ"])
    assert failures(rows, share={"value": 1, "max": 0.75})[1].passed
    found = failures(rows, share={"value": 1, "max": 0.7})[1]
    assert found.examples == ("prediction 1 has 75.0% of the rows, not 0.0% to 70.0%",)
    assert not found.passed
    assert failures(rows, share={"value": 1, "max": 0.7}, where={"country": "NZ"})[1].passed


def test_a_group_agrees():
    rows = predictions(3, 3, 4, 5, 5, None, image=[1, 1, 1, 2, 2, 2])
    assert failures(rows, consistent={"by": "image"})[0] == [3, 6]


def test_neighbours_neither_flicker_nor_jump():
    flicker = predictions("car", "car", "van", "car", "van", "van", "bus")
    assert failures(flicker, steady={})[0] == [3, 4]
    prices = predictions(1.0, 1.2, 5.0, 5.1, math.nan)
    assert failures(prices, steady={"max_change": 0.5})[0] == [3, 5]
    two = predictions(1.0, 9.0, 1.1, 9.1, camera=["a", "b", "a", "b"])
    assert failures(two, steady={"max_change": 0.5, "by": "camera"})[1].passed


def test_a_predicate_of_ones_own_is_found_beside_its_file(tmp_path):
    (tmp_path / "own_predicates.py").write_text("def right(row): return row['prediction'] < row['limit']\n")
    rows = [{"prediction": 1, "limit": 2}, {"prediction": 3, "limit": 2}, {"prediction": 1}]
    with importable(tmp_path):
        places, found = failures(rows, predicate="own_predicates:right")
    assert places == [2, 3]
    assert "KeyError" in found.examples[1]


@pytest.mark.parametrize("raised", ["AssertionError", "RuntimeError", "StopIteration"])
def test_whatever_a_predicate_raises_is_that_rows_fault(raised, tmp_path):
    (tmp_path / f"raising_{raised}.py").write_text(f"def right(row): raise {raised}('a price of its own')\n")
    with importable(tmp_path):
        places, found = failures([{"prediction": 1}], predicate=f"raising_{raised}:right")
    assert places == [1]
    assert not found.passed
    assert f"raised {raised}: a price of its own" in found.examples[0]


def test_a_predicate_whose_module_cannot_be_imported_fails_by_itself(tmp_path):
    (tmp_path / "lacking_predicates.py").write_text("import a_library_that_is_not_there\n")
    with importable(tmp_path):
        places, found = failures([{"prediction": 1}] * 2, predicate="lacking_predicates:right")
    assert places == [1, 2]
    assert "lacking_predicates:right cannot be had: ModuleNotFoundError" in found.examples[0]


def test_scores_are_rows_as_a_log_has_them():
    scores = Scores(
        kind=CLASSIFIER, num_rows=2, predictions=np.array([1, 0]), probabilities=np.array([[0.2, 0.8], [0.7, 0.3]]),
        sums={"loss_sums": np.array([0.2, 0.4]), "loss_counts": np.array([1, 0])}, columns={"labels": np.array([1, 1])},
    )  # fmt: skip
    first, second = rows_of(scores)
    assert first == {"prediction": 1, "probabilities": [0.2, 0.8], "labels": 1, "loss": 0.2}
    assert math.isnan(second["loss"])


def test_logs_are_read_from_jsonl_and_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet  # noqa: F811

    rows = predictions(1, 2, p=[[0.5], [0.25]])
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert list(Log(tmp_path / "a.jsonl")) == list(Log(tmp_path / "a.parquet")) == rows
    for text, told in (("{", "line 1 is not JSON"), ("3", "not a JSON object")):
        (tmp_path / "b.jsonl").write_text(text)
        with pytest.raises(ValueError, match=told):
            list(Log(tmp_path / "b.jsonl"))
    with pytest.raises(ValueError, match="cannot be read"):
        list(Log(tmp_path / "none.jsonl"))


def test_a_log_is_read_once_and_never_whole(tmp_path):
    """Rows are released one by one, whatever the assertions ask. State of groups is stored on disk."""
    asked = [
        AssertionEntry(name="same", consistent={"by": "image"}),
        AssertionEntry(name="calm", steady={"max_change": 0.5, "by": "image"}),
        AssertionEntry(name="sane", finite=["prediction"]),
    ]
    num_rows = 1000  # many times as many as may be alive
    alive, most = weakref.WeakValueDictionary(), 0

    class Line(dict):
        """A row that supports weak references."""

    def rows():
        nonlocal most
        for i in range(num_rows):
            row = alive[i] = Line(prediction=i // 2, image=i // 2)
            most = max(most, len(alive))
            yield row

    found = check(asked, rows())
    assert [(one.num_rows, one.num_failures) for one in found] == [(num_rows, 0)] * 3
    assert most < 10


def test_the_first_failures_are_told_in_the_order_of_the_log():
    rows = predictions(*[1, 1, 2] * 4, image=[3, 3, 3, 2, 2, 2, 1, 1, 1, 0, 0, 0])
    places, found = failures(rows, consistent={"by": "image"})
    assert places == [3, 6, 9, 12]
    assert found.num_failures == 4
