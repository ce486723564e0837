"""The record of a job's data: set, version, split, window and rows."""

import json

import pytest

from ringmaster.codec import digest, to_json
from ringmaster.model_lineage.records import DatasetInput
from ringmaster.tasks.recording.rows import dataset_inputs, rows_text
from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.data.encoded_rows import RowManifest
from ringmaster.techniques.data.row_files import content_hash
from ringmaster.techniques.job_specs import DataSpec

TEXT = "a row that says something about the number {}, again and again and again"


@pytest.fixture
def spec(tmp_path):
    for name, numbers in (("train", range(30)), ("test", range(30, 36))):
        rows = [{"text": TEXT.format(n), "at": f"2026-01-{n + 1 if n < 30 else 1:02}"} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSpec(
        path=str(tmp_path / "train.jsonl"),
        held_out_path=str(tmp_path / "test.jsonl"),
        name="reviews",
        version="3",
        split="train",
        held_out_split="test",
        window={"last_days": 4},
        time_column="at",
        seq_len=8,
        vocab_size=300,
    )


def test_lineage_reaches_the_rows(spec, tmp_path):
    prepared = to_json(prepare(spec, cache_dir=tmp_path / "cache"))
    training, evaluation = dataset_inputs(spec, prepared)
    assert (training.name, training.label, training.context) == ("reviews", "reviews/3", "training")
    assert (training.split, training.window) == ("train", "last_days: 4")
    assert (evaluation.split, evaluation.window) == ("test", None), "what models are compared on stays as it is"
    assert (training.source, evaluation.source) == (spec.path, spec.held_out_path)
    rows = RowManifest.from_json(json.loads(rows_text(prepared)))
    assert rows.rows["training"] == tuple(sorted(content_hash(TEXT.format(n)) for n in range(25, 30)))
    assert rows.rows["held_out"] == tuple(sorted(content_hash(TEXT.format(n)) for n in range(30, 36)))
    assert training.rows_digest == rows.digest("training") != evaluation.rows_digest


def test_the_rows_have_one_name_however_they_are_cut_into_samples(spec, tmp_path):
    from dataclasses import replace

    one, other = (
        dataset_inputs(spec, to_json(prepare(spec, cache_dir=tmp_path / "cache")))[0]
        for spec in (spec, replace(spec, seq_len=4))
    )
    assert one.rows_digest == other.rows_digest
    assert one.digest != other.digest


def test_data_without_a_name_is_recorded_as_ever(tmp_path):
    (tmp_path / "a.txt").write_text("many words, one after another\n" * 100)
    spec = DataSpec(path=str(tmp_path / "a.txt"), seq_len=8, vocab_size=300)
    prepared = to_json(prepare(spec, cache_dir=tmp_path / "cache"))
    training, evaluation = dataset_inputs(spec, prepared)
    assert training == DatasetInput(
        name=spec.path, digest=prepared["digest"], source=spec.path, num_rows=prepared["num_samples"]
    )
    assert evaluation.facts() == {"num_rows": prepared["num_held_out"]}
    assert rows_text(prepared) is None


def test_other_files_to_evaluate_on_have_their_own_name_and_digest(spec, tmp_path):
    from dataclasses import replace

    plain = replace(spec, name=None, version=None, held_out_split=None, window=None, time_column=None)
    training, evaluation = dataset_inputs(plain, to_json(prepare(plain, cache_dir=tmp_path / "cache")))
    assert (training.name, evaluation.name) == (plain.path, plain.held_out_path)
    assert training.digest != evaluation.digest


def test_a_job_that_says_nothing_new_keeps_its_digest():
    said = to_json(DataSpec(path="a.txt"))
    assert not {"name", "version", "window", "held_out_path", "format", "time_column"} & set(said)
    assert digest(DataSpec(path="a.txt")) == digest(said)


def test_files_at_a_url_are_copied_once_and_read_like_others(spec, tmp_path):
    from dataclasses import replace
    from pathlib import Path

    import fsspec

    there = fsspec.filesystem("memory")
    for name in ("train", "test"):
        there.pipe_file(f"/store/{name}.jsonl", Path(tmp_path / f"{name}.jsonl").read_bytes())
    remote = replace(spec, path="memory://store/tr*.jsonl", held_out_path="memory://store/test.jsonl")
    here, far = (prepare(each, cache_dir=tmp_path / "cache") for each in (spec, remote))
    assert far.digest == here.digest
    assert far.source == "memory://store/tr*.jsonl"
    there.rm("/store", recursive=True)
    training, held_out = open_data(remote, cache_dir=tmp_path / "cache", prepared=far)
    assert (len(training), len(held_out)) == (here.num_samples, here.num_held_out)
