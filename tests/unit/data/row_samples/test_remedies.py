"""Refusals of rows and files say where the fault is, and what mends it."""

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from ringmaster.codec import from_json
from ringmaster.techniques.data import prepare
from ringmaster.techniques.job_specs import DataSpec


def fault_of(tmp_path, **spec):
    with pytest.raises(ValueError) as caught:
        prepare(from_json(DataSpec, {"seq_len": 8, "vocab_size": 300, **spec}), cache_dir=tmp_path / "cache")
    return str(caught.value)


@pytest.mark.parametrize("kind", [None, "text-classification"])
def test_a_window_reads_the_time_of_parquet(tmp_path, kind):
    rows = [{"text": "many words " * 5, "label": i % 2, "at": 86_400 * i} for i in range(40)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    spec = DataSpec(
        path=str(tmp_path / "a.parquet"), kind=kind, time_column="at", window={"last_days": 9}, held_out=0,
        seq_len=8, vocab_size=300,
    )  # fmt: skip
    assert prepare(spec, cache_dir=tmp_path / "cache").num_samples > 0


@pytest.mark.parametrize("kind", [None, "text-classification"])
def test_a_null_in_a_data_set_has_its_row(tmp_path, kind):
    rows = {"text": ["a", None, "c"], "label": ["x", "y", "x"]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    said = fault_of(tmp_path, dataset=str(tmp_path / "saved"), kind=kind)
    assert "row 2 has no value in 'text'. To fix: " in said


def test_the_encoding_is_named_by_its_mark(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\na,b\n", encoding="utf-16")
    said = fault_of(tmp_path, path=str(tmp_path / "a.csv"))
    assert (
        "it is not UTF-8 but UTF-16, by its byte order mark. To fix: convert it: iconv -f UTF-16 -t UTF-8 a.csv" in said
    )


@pytest.mark.parametrize(("sign", "name"), [("\t", "tabs"), (";", "semicolons")])
def test_the_separator_of_the_header_is_named(tmp_path, sign, name):
    (tmp_path / "a.csv").write_text(f"text{sign}label\na{sign}b\n")
    said = fault_of(tmp_path, path=str(tmp_path / "a.csv"), kind="text-classification")
    assert f"seems to be separated by {name}. To fix: separate values by commas" in said
