"""With a given tokenizer, the tokens of files are kept, and new files alone are read."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ringmaster.techniques.data import encoded_rows, file_patterns, prepare, tokens
from ringmaster.techniques.data.encoded_rows import RowManifest
from ringmaster.techniques.job_specs import DataSpec


@pytest.fixture
def tokenizer(jsonl, tmp_path):
    spec = DataSpec(path=str(jsonl("other.txt", 40)), format="jsonl", seq_len=16, vocab_size=300)
    return str(prepare(spec, cache_dir=tmp_path / "trained").tokenizer_dir)


@pytest.fixture
def given(tokenizer, tmp_path):
    """The spec of all rows of JSONL files under a given tokenizer."""
    return DataSpec(
        path=str(tmp_path / "*.jsonl"), tokenizer=tokenizer, seq_len=16, held_out=0.3, name="n", version="1"
    )


@pytest.fixture
def read(monkeypatch):
    """The names of the files of which tokens were made."""
    found = []
    original = encoded_rows.rows_of_file

    def rows_of_file(file, spec, reading):
        found.append(Path(file.path).name)
        return original(file, spec, reading)

    monkeypatch.setattr(encoded_rows, "rows_of_file", rows_of_file)
    return found


def rows(first, last, text):
    return [{"text": text(2, number), "at": f"2026-01-{1 + number:02}"} for number in range(first, last)]


def same_as_anew(spec, tmp_path):
    """Whether the samples and rows are those that are prepared without anything kept."""
    found, anew = (prepare(spec, cache_dir=tmp_path / name) for name in ("cache", f"cache-{os.urandom(4).hex()}"))
    manifests = [RowManifest.read(Path(each.folder)) for each in (found, anew)]
    return found.digest == anew.digest and manifests[0] == manifests[1]


def without_files_kept(spec, tmp_path, monkeypatch):
    """The same data prepared row by row."""
    original = tokens.write_text
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "write_text", lambda *said, blocks, **given: original(*said, **given))
        return prepare(spec, cache_dir=tmp_path / "by-row")


def test_only_new_files_are_read(given, jsonl, text, read, tmp_path):
    jsonl("a.jsonl", rows(0, 9, text))
    jsonl("b.jsonl", rows(9, 15, text))
    first = prepare(given, cache_dir=tmp_path / "cache")
    assert read == ["a.jsonl", "b.jsonl"]
    jsonl("c.jsonl", rows(15, 28, text))
    second = prepare(given, cache_dir=tmp_path / "cache")
    assert read == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert second.num_samples + second.num_held_out > first.num_samples + first.num_held_out
    assert same_as_anew(given, tmp_path)


def test_a_changed_file_is_read_again(given, jsonl, text, read, tmp_path):
    jsonl("a.jsonl", rows(0, 9, text))
    jsonl("b.jsonl", rows(9, 15, text))
    prepare(given, cache_dir=tmp_path / "cache")
    jsonl("b.jsonl", rows(9, 16, text))
    prepare(given, cache_dir=tmp_path / "cache")
    assert read == ["a.jsonl", "b.jsonl", "b.jsonl"]
    assert same_as_anew(given, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"held_out": 0.5},
        {"seq_len": 8},
        {"window": {"last_rows": 11}},
        {"window": {"last_rows": 1000}},
        {"window": {"last_days": 12}, "time_column": "at"},
        {"window": {"since": "2026-01-05", "until": "2026-01-20"}, "time_column": "at"},
    ],
)
def test_splits_and_windows_are_chosen_from_what_is_kept(given, jsonl, text, read, tmp_path, monkeypatch, changes):
    for number in range(12):
        jsonl(f"{number:02}.jsonl", rows(2 * number, 2 * number + 2, text))
    for window in ({}, {"window": {"last_days": 20}, "time_column": "at"}):
        prepare(replace(given, **window), cache_dir=tmp_path / "cache")
    read.clear()
    spec = replace(given, **changes)
    found, by_row = prepare(spec, cache_dir=tmp_path / "cache"), without_files_kept(spec, tmp_path, monkeypatch)
    assert read == []
    assert found.digest == by_row.digest
    assert RowManifest.read(Path(found.folder)) == RowManifest.read(Path(by_row.folder))


def test_held_out_files_need_no_time(given, jsonl, text, tmp_path, monkeypatch):
    jsonl("a.jsonl", rows(0, 20, text))
    held_out = tmp_path / "held-out.txt"
    held_out.write_text(text(30, 7))
    window = {"window": {"last_days": 9}, "time_column": "at"}
    spec = replace(given, held_out_path=str(held_out), **window)
    assert prepare(spec, cache_dir=tmp_path / "cache").digest == without_files_kept(spec, tmp_path, monkeypatch).digest


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_the_cut_of_a_single_text_file_is_kept_with_its_share(tokenizer, text, tmp_path, monkeypatch, share):
    (tmp_path / "a.txt").write_text(text(300))
    spec = DataSpec(path=str(tmp_path / "a.txt"), tokenizer=tokenizer, seq_len=16, held_out=share)
    prepare(replace(spec, held_out=0.1), cache_dir=tmp_path / "cache")
    assert prepare(spec, cache_dir=tmp_path / "cache").digest == without_files_kept(spec, tmp_path, monkeypatch).digest


def test_another_tokenizer_reads_all_again(given, jsonl, text, read, tmp_path):
    jsonl("a.jsonl", rows(0, 20, text))
    prepare(given, cache_dir=tmp_path / "cache")
    other = prepare(replace(given, tokenizer=None, vocab_size=280), cache_dir=tmp_path / "cache").tokenizer_dir
    prepare(replace(given, tokenizer=str(other)), cache_dir=tmp_path / "cache")
    assert read == ["a.jsonl", "a.jsonl"]


def test_what_was_not_used_for_long_is_removed(given, jsonl, text, tmp_path):
    first = jsonl("a.jsonl", rows(0, 20, text))
    prepare(given, cache_dir=tmp_path / "cache")
    (old,) = [path for path in (tmp_path / "cache" / "encoded").iterdir() if path.is_dir()]
    first.unlink()
    jsonl("b.jsonl", rows(0, 25, text))
    os.utime(old, (0, 0))
    prepare(given, cache_dir=tmp_path / "cache")
    assert not old.exists()
    assert len([path for path in (tmp_path / "cache" / "encoded").iterdir() if path.is_dir()]) == 1


def test_a_window_without_rows_is_refused(given, jsonl, text, tmp_path):
    jsonl("a.jsonl", rows(0, 20, text))
    spec = replace(given, window={"since": "2027-01-01"}, time_column="at")
    with pytest.raises(ValueError, match="data set n holds no text"):
        prepare(spec, cache_dir=tmp_path / "cache")


def test_ids_among_text_are_refused_with_their_line(given, jsonl, text, tmp_path):
    jsonl("a.jsonl", [*rows(0, 3, text), {"text": [1, 2]}])
    with pytest.raises(ValueError, match=r"a.jsonl, line 4 has token ids.*To fix: give all rows as one"):
        prepare(given, cache_dir=tmp_path / "cache")


def test_of_files_at_a_url_only_new_ones_are_copied_and_read(given, jsonl, text, read, tmp_path, monkeypatch):
    import fsspec

    store = fsspec.filesystem("memory")
    copied = []
    original = file_patterns.opened
    monkeypatch.setattr(file_patterns, "opened", lambda path: copied.append(path) or original(path))
    for name, first in (("a.jsonl", 0), ("b.jsonl", 9)):
        store.pipe_file(f"/nightly/{name}", jsonl(name, rows(first, first + 9, text)).read_bytes())
    spec = replace(given, path="memory://nightly/*.jsonl")
    prepare(spec, cache_dir=tmp_path / "cache")
    store.pipe_file("/nightly/c.jsonl", jsonl("c.jsonl", rows(18, 27, text)).read_bytes())
    found = prepare(spec, cache_dir=tmp_path / "cache")
    assert [Path(path).name for path in copied] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert read == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert found.digest == prepare(given, cache_dir=tmp_path / "other").digest
    store.rm("/nightly", recursive=True)
