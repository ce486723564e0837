"""Values, names and options that Python or a library cannot take are refused with their place and a remedy."""

import json
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from ringmaster.techniques.data import prepare
from ringmaster.techniques.data.file_patterns import matching, opened
from ringmaster.techniques.data.file_rows import moment
from ringmaster.techniques.data.row_files import read_rows
from ringmaster.techniques.job_specs import DataSpec

HUGE = "9" * 400


def prepared(path, **fields):
    return prepare(DataSpec(path=str(path), vocab_size=300, **fields), cache_dir=path.parent / "cache")


def fault_of(path, **fields):
    with pytest.raises(ValueError) as caught:
        prepared(path, **fields)
    return str(caught.value)


def jsonl(folder, last):
    rows = [json.dumps({"text": f"word {n}", "label": n % 2}) for n in range(40)]
    (folder / "d.jsonl").write_text("\n".join([*rows, last]))
    return folder / "d.jsonl"


@pytest.mark.parametrize("label", [HUGE, f'"{"9" * 5000}"'])
def test_a_class_may_be_a_number_of_any_size(tmp_path, label):
    path = jsonl(tmp_path, f'{{"text": "x", "label": {label}}}')
    assert prepared(path, kind="text-classification").num_labels == 3


def test_a_number_to_predict_that_no_float_holds_is_refused(tmp_path):
    said = fault_of(jsonl(tmp_path, f'{{"text": "x", "label": {HUGE}}}'), kind="text-regression")
    assert "d.jsonl, row 41: label " in said
    assert "is not a finite number of 32 bits" in said


def test_a_list_of_labels_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "d.csv").write_text("text,label\n" + f'word,"{"[" * 99_000},{"]" * 99_000}"\n')
    assert "looks like a list, but is not valid JSON" in fault_of(tmp_path / "d.csv", kind="text-classification")


@pytest.mark.parametrize("number", [2**32, 2**64 - 1, 10**30])
def test_token_ids_of_any_size_are_refused(tmp_path, number):
    (tmp_path / "d.jsonl").write_text(json.dumps({"input_ids": [1, number]}) + "\n")
    said = fault_of(tmp_path / "d.jsonl", seq_len=2, options={"text_column": "input_ids"})
    assert "token ids of more than 32 bits" in said


@pytest.mark.parametrize("value", [1_780_000_000_000, float("nan"), float("inf"), 10**400])
def test_numbers_that_are_no_times_in_seconds_are_refused(value):
    with pytest.raises(ValueError, match="is not a valid time"):
        moment(value)


def test_a_time_that_python_does_not_have_is_refused_with_its_file(tmp_path):
    times = pyarrow.array([2**62], pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "t": times}), tmp_path / "d.parquet")
    with pytest.raises(ValueError, match=r"d\.parquet cannot be read: a value of type timestamp.*To fix: "):
        list(read_rows(str(tmp_path / "d.parquet")))
    assert len(list(read_rows(str(tmp_path / "d.parquet"), columns=["text"]))) == 1


@pytest.mark.parametrize("name", ["data [v2]/a.txt", "data/a[1].txt", "a*/b?.txt"])
def test_what_is_there_is_itself_whatever_signs_its_name_has(tmp_path, name):
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("text")
    (tmp_path / "a1.txt").write_text("another")
    files = matching(str(tmp_path / name))
    assert [files.path(each) for each in files.names] == [str(tmp_path / name)]
    files = matching(str((tmp_path / name).parent / "*.txt"))
    assert [files.path(each) for each in files.names] == [str(tmp_path / name)]


def test_a_wrong_glob_has_a_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"is not a glob: .* To fix: "):
        matching(str(tmp_path / "**a" / "*.csv"))


def test_a_named_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ValueError, match="it is a folder or a device"), opened(str(tmp_path / "pipe.png")):
        pass


@pytest.mark.parametrize(
    "kwargs",
    [{"image_size": "8"}, {"image_size": 0}, {"image_size": 10**9}, {"image_size": 8.0}, {"mode": 1}, {"std": 0},
     {"std": [1, 0, 1]}, {"mean": [1, 2]}, {"mean": "x"}, {"mean": float("nan")}],
)  # fmt: skip
def test_options_of_images_are_checked_once_and_not_with_each_row(tmp_path, kwargs):
    from PIL import Image

    for number in range(8):
        (tmp_path / "images" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        pixels = np.full((8, 8, 3), number, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / "ab"[number % 2] / f"{number}.png")
    said = fault_of(tmp_path / "images", kind="image-classification", kwargs=kwargs)
    assert said.startswith(f"data: {next(iter(kwargs))} ")
    assert "To fix: " in said
