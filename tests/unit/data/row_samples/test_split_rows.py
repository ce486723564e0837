"""Which rows are held out where no path or split names them."""

import csv
import json

import datasets
import pytest

from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.job_specs import DataSpec

NUM_ROWS = 200


@pytest.mark.parametrize("is_kept", [True, False])
def test_rows_of_several_files_are_held_out_one_by_one(tmp_path, bert_tokenizer, is_kept):
    """One file for each class: whole files would leave no row of the second class to train on."""
    for label in ("good", "bad"):
        with (tmp_path / f"{label}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["text", "label"], *([f"{label} one {i}", label] for i in range(NUM_ROWS))])
    tokenizer = bert_tokenizer if is_kept else None
    spec = DataSpec(
        kind="text-classification", path=str(tmp_path / "*.csv"), tokenizer=tokenizer, vocab_size=300, held_out=0.2
    )
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    assert 0.1 < prepared.num_held_out / (2 * NUM_ROWS) < 0.3
    for samples in open_data(spec, cache_dir=tmp_path / "cache", prepared=prepared):
        assert {samples[i]["labels"].item() for i in range(len(samples))} == {0, 1}


def test_equal_rows_of_two_files_are_on_one_side(tmp_path, bert_tokenizer):
    rows = [{"text": f"one {i}", "label": i % 2} for i in range(NUM_ROWS)]
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = DataSpec(kind="text-classification", path=str(tmp_path / "*.jsonl"), tokenizer=bert_tokenizer, held_out=0.2)
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    assert prepared.num_held_out % 2 == prepared.num_samples % 2 == 0
    assert prepared.num_held_out > 0


def test_equal_rows_of_a_data_set_are_on_one_side(tmp_path):
    rows = {"text": [f"one {i % 20}" for i in range(NUM_ROWS)], "label": [i % 2 for i in range(NUM_ROWS)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    spec = DataSpec(kind="text-classification", dataset=str(tmp_path / "saved"), vocab_size=300, held_out=0.3)
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    assert prepared.num_held_out % 10 == prepared.num_samples % 10 == 0
    assert prepared.num_held_out > 0
