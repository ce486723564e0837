"""Rows of features: what is measured on the rows to train on, and how it encodes all others."""

import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ringmaster.errors import DataError
from ringmaster.features.ludwig.batch import FACTORY
from ringmaster.features.ludwig.feature_model import FeaturePredictor
from ringmaster.features.ludwig.feature_rows import ValueEncoder, measured_numbers
from ringmaster.techniques import DataSpec, ModelSpec
from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_model
from ringmaster.techniques.models.model_folders import model_of_folder
from ringmaster.techniques.training.bound_loss import bind_loss

FEATURES = [
    {"name": "size", "type": "number"},
    {"name": "town", "type": "category"},
    {"name": "new", "type": "binary"},
    {"name": "note", "type": "text"},
    {"name": "rent", "type": "number", "is_output": True},
    {"name": "kind", "type": "category", "is_output": True},
]
TRAINED = [
    {"size": 2, "town": "b", "new": "no", "note": "a quiet flat", "rent": 10, "kind": "x"},
    {"size": 4, "town": "a", "new": "yes", "note": "", "rent": 20, "kind": "y"},
]
HELD_OUT = [{"size": 99, "town": "c", "new": "yes", "note": "one more", "rent": 30, "kind": "y"}]


def written(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


@pytest.fixture
def spec(tmp_path):
    return DataSpec(
        kind="features", kwargs={"features": FEATURES},
        path=written(tmp_path / "train.csv", TRAINED), held_out_path=written(tmp_path / "test.csv", HELD_OUT),
    )  # fmt: skip


def model_of(prepared, **options):
    spec = ModelSpec(factory=FACTORY, kwargs={"options": options, "combiner": {"num_fc_layers": 1}})
    return spec, build_model(spec, data=prepared, seed=0)


def test_the_rows_to_train_on_alone_are_measured(spec, tmp_path):
    prepared = prepare(spec, cache_dir=tmp_path)
    facts = {each["name"]: each for each in prepared.features}
    assert (facts["size"]["shift"], facts["size"]["scale"]) == (3.0, 1.0)
    assert facts["town"]["categories"] == ["<UNK>", "a", "b"]
    assert facts["kind"]["categories"] == ["x", "y"]
    _, held_out = open_data(spec, cache_dir=tmp_path, prepared=prepared)
    row = held_out[0]
    assert (row["input_0"], row["input_1"], row["input_2"], row["labels_1"]) == (96.0, 0, 1, 1)
    assert row["labels"] == pytest.approx((30 - 15) / 5)


def test_the_digest_changes_with_what_is_measured(spec, tmp_path):
    """Other names of the same numbers of categories are other data."""
    renamed = [{**row, "town": {"a": "d", "b": "e"}[row["town"]]} for row in TRAINED]
    other = replace(spec, path=written(tmp_path / "other.csv", renamed))
    one, two = (prepare(each, cache_dir=tmp_path) for each in (spec, other))
    assert one.digest != two.digest


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [("rent", "much", "rent is 'much', which is not a number"), ("rent", "", "rent"), ("kind", "", "kind"),
     ("size", "large", "size is 'large'")],
)  # fmt: skip
def test_wrong_rows_are_refused_with_their_places(spec, tmp_path, column, value, message):
    path = written(tmp_path / "wrong.csv", [*TRAINED, {**TRAINED[0], column: value}])
    with pytest.raises(ValueError, match=r"wrong\.csv, row 4") as error:
        prepare(replace(spec, path=path), cache_dir=tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize("value", ["maybe", None])
def test_a_binary_feature_has_two_values(spec, tmp_path, value):
    rows = [*TRAINED, {**TRAINED[0], "new": value}] if value else TRAINED[:1]
    with pytest.raises(ValueError, match="binary feature new"):
        prepare(replace(spec, path=written(tmp_path / "wrong.csv", rows)), cache_dir=tmp_path)


COLOURED = [
    {"name": "size", "type": "number", "normalization": None},
    {"name": "town", "type": "category"},
    {"name": "kind", "type": "category", "is_output": True},
]


def coloured(tmp_path, **changes):
    """Returns prepared rows of three features. changes: what the last one has in place of the others' values."""
    rows = [{"size": n, "town": "ab"[n % 2], "kind": "xy"[n % 2]} for n in range(4)]
    rows = [*rows, {**rows[0], **changes}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = DataSpec(
        kind="features", kwargs={"features": COLOURED}, path=str(tmp_path / "rows.jsonl"), held_out=0,
    )  # fmt: skip
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    return prepared, open_data(spec, cache_dir=tmp_path / "cache", prepared=prepared)[0]


def test_a_category_that_pandas_writes_as_missing_is_missing(tmp_path):
    prepared, training = coloured(tmp_path, town=math.nan)
    assert prepared.features[1]["categories"] == ["<UNK>", "a", "b"]
    assert int(training[4]["input_1"]) == 0
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 5: category output kind has no value"):
        coloured(tmp_path, kind=math.nan)


def test_a_category_that_an_earlier_model_learnt_from_missing_values_keeps_its_number():
    encode = ValueEncoder({"name": "town", "type": "category", "categories": ["<UNK>", "a", "nan"], "unknown": True})
    assert int(encode(math.nan, None)) == 2


@pytest.mark.parametrize("value", [["a", "b"], {"of": "a"}])
def test_what_is_no_name_of_a_category_is_refused_with_its_row(tmp_path, value):
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 5: town is (list|dict)"):
        coloured(tmp_path, town=value)


def test_categories_that_read_alike_are_told(tmp_path):
    prepared, _ = coloured(tmp_path, town=" a")
    assert [note for note in prepared.notes if note.startswith("town: classes that differ in how")]


@pytest.mark.parametrize(
    ("normalization", "values"), [(None, [2**40 + n for n in range(9)]), ("zscore", [1, 2, 1e300])]
)
def test_numbers_that_become_equal_are_refused(normalization, values):
    with pytest.raises(ValueError, match=rf"{len(values)} different values of column 'x' become \d numbers of 32 bits"):
        measured_numbers({"name": "x", "normalization": normalization}, values, column="x")


def test_a_number_that_is_too_large_for_another_models_scale_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"size is 1e\+40, which is not a number of 32 bits"):
        ValueEncoder({"name": "size", "type": "number", "shift": 0.0, "scale": 1.0})(1e40, None)


def test_a_missing_column_is_told_with_those_that_are_there(spec, tmp_path):
    path = written(tmp_path / "wrong.csv", [{"size": 1, "town": "a"}])
    with pytest.raises((ValueError, DataError), match="no column new, note, rent, kind; its rows have size, town"):
        prepare(replace(spec, path=path), cache_dir=tmp_path)


def test_the_loss_is_the_weighted_sum_of_the_means(spec, tmp_path):
    prepared = prepare(spec, cache_dir=tmp_path)
    model_spec, model = model_of(prepared)
    training, _ = open_data(spec, cache_dir=tmp_path, prepared=prepared)
    batch = training.rows([0, 1])
    output = model(**batch)
    rent, kind = output["outputs"]
    loss = bind_loss("weighted-outputs", model, model_spec, options={"weights": [1.0, 0.25]})
    expected = torch.nn.functional.mse_loss(rent[:, 0], batch["labels"])
    expected = expected + 0.25 * torch.nn.functional.cross_entropy(kind, batch["labels_1"])
    total, count = loss(output, batch)
    assert (total / count).item() == pytest.approx(expected.item())
    sums, counts = loss.by_row(output, batch)
    assert sums.sum().item() == pytest.approx(total.item())
    assert counts.tolist() == [1, 1]


@pytest.mark.parametrize("encoder", ["embed", "parallel_cnn", "bert"])
def test_padding_changes_nothing(spec, tmp_path, encoder):
    """A row's outputs do not depend on the longest text of its batch."""
    prepared = prepare(spec, cache_dir=tmp_path)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 8) | {"num_hidden_layers": 1, "num_attention_heads": 2}
    _, model = model_of(prepared, note={"type": encoder, **(sizes if encoder == "bert" else {})})
    training, _ = open_data(spec, cache_dir=tmp_path, prepared=prepared)
    batch = training.rows([0])
    wider = {**batch, "input_3": torch.nn.functional.pad(batch["input_3"], (0, 5))}
    one, other = (model.eval()(**each)["outputs"] for each in (batch, wider))
    for first, second in zip(one, other, strict=True):
        assert torch.allclose(first, second, atol=1e-6)


def test_an_exported_model_predicts_alone(spec, tmp_path):
    """From rows with the units and names of the data, also those that training does not know."""
    prepared = prepare(spec, cache_dir=tmp_path)
    model_spec, model = model_of(prepared)
    folder = tmp_path / "model"
    export_model(folder, spec=model_spec, model=model, state=model.state_dict(), prepared=prepared)
    rows = [*HELD_OUT, {"town": "a"}]
    _, held_out = open_data(spec, cache_dir=tmp_path, prepared=prepared)
    rent, kind = model.eval()(**held_out.rows([0]))["outputs"]
    first, second = FeaturePredictor(folder).predict(rows)
    assert first["rent"] == pytest.approx(rent.item() * 5 + 15, rel=1e-5)
    assert first["kind"] == ["x", "y"][kind.argmax()]
    assert np.isfinite(second["rent"])


def test_other_data_is_encoded_as_a_model_says(spec, tmp_path):
    prepared = prepare(spec, cache_dir=tmp_path)
    model_spec, model = model_of(prepared)
    folder = tmp_path / "model"
    export_model(folder, spec=model_spec, model=model, state=model.state_dict(), prepared=prepared)
    later = replace(spec, path=written(tmp_path / "later.csv", [{**row, "size": 50 + row["size"]} for row in TRAINED]))
    with pytest.raises(ValueError, match="encoded_as"):
        build_model(model_of_folder(folder), data=prepare(later, cache_dir=tmp_path), seed=0, weights_from=folder)
    same = replace(later, kwargs={**later.kwargs, "encoded_as": str(folder)})
    data = prepare(same, cache_dir=tmp_path)
    assert data.features[0]["shift"] == 3.0
    build_model(model_of_folder(folder), data=data, seed=0, weights_from=folder)
