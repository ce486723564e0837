"""Files in parts: what is known of a file does not change where it grows, and lines keep their numbers."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringmaster.techniques.data import encoded_rows, prepare
from ringmaster.techniques.data.encoded_rows import known_files
from ringmaster.techniques.data.file_rows import DataFile
from ringmaster.techniques.data.row_files import content_hash, rows_and_errors, to_json_text
from ringmaster.techniques.job_specs import DataSpec


def rows_in_parts(path):
    known = known_files(DataFile(str(path), False), format=None)
    return [row for file, _ in known for row in rows_and_errors(str(path), lines=file.lines)]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(encoded_rows, "BLOCK_BYTES", 100)


@pytest.mark.parametrize("seed", range(5))
def test_rows_and_their_numbers_are_those_of_the_whole_file(small, tmp_path, seed):
    draw, path = random.Random(seed), tmp_path / "a.jsonl"
    content = "".join(
        (json.dumps({"n": n, "text": "é" * draw.randrange(30)}) if draw.random() < 0.8 else "")
        + draw.choice(["\n", "\r\n", "\n\n", "\r"])
        for n in range(60)
    )
    path.write_bytes(content.encode() + draw.choice([b"", b'{"n": 60}']))
    assert rows_in_parts(path) == [*rows_and_errors(str(path))]


def test_a_wrong_line_of_any_part_has_its_number(small, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n' * 70 + "{\n" + '{"n": 1}\n' * 9)
    (fault,) = (row for number, row in rows_in_parts(path) if number == 71)
    assert fault.place == f"{path}, line 71"


def test_lines_at_the_end_change_the_last_part_alone(small, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n' * 40)
    before = [digest for _, digest in known_files(DataFile(str(path), False), format=None)]
    with path.open("a") as file:
        file.write('{"n": 2}\n' * 20)
    after = [digest for _, digest in known_files(DataFile(str(path), False), format=None)]
    assert len(before) > 3
    assert after[: len(before) - 1] == before[:-1]


@pytest.mark.parametrize("name", ["a.csv", "a.txt"])
def test_other_files_are_one_part_and_known_by_their_content(small, tmp_path, name):
    path = tmp_path / name
    path.write_text("n\n" * 200)
    ((whole, content),) = known_files(DataFile(str(path), None), format=None)
    assert whole == DataFile(str(path), None)
    path.write_text("m\n" * 200)
    assert [digest for _, digest in known_files(DataFile(str(path), None), format=None)] != [content]


def test_an_empty_file_has_no_rows(tmp_path):
    (tmp_path / "a.jsonl").touch()
    assert rows_in_parts(tmp_path / "a.jsonl") == []


def test_text_that_was_added_to_a_file_is_encoded_alone(jsonl, text, tmp_path, monkeypatch):
    found, original = [], encoded_rows.rows_of_file
    monkeypatch.setattr(
        encoded_rows, "rows_of_file", lambda file, *said: found.append(file.lines.first_line) or original(file, *said)
    )
    trained = DataSpec(path=str(jsonl("other.txt", 40)), format="jsonl", seq_len=16, vocab_size=300)
    tokenizer = prepare(trained, cache_dir=tmp_path / "trained").tokenizer_dir
    monkeypatch.setattr(encoded_rows, "BLOCK_BYTES", 1000)
    spec = DataSpec(path=str(jsonl("a.jsonl", 30)), tokenizer=str(tokenizer), seq_len=16)
    prepare(spec, cache_dir=tmp_path / "cache")
    num_before = len(found)
    with Path(spec.path).open("a") as file:
        file.write(json.dumps({"text": text(3, 99)}) + "\n")
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    assert num_before > 4
    assert len(found) - num_before <= 2
    assert prepared.digest == prepare(spec, cache_dir=tmp_path / "anew").digest


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.none() | st.lists(st.text())))
@example({"text": 'a\ud800\u2028"\\', "label": "é"})
def test_the_text_of_a_row_is_that_of_json(row):
    assert to_json_text(row) == json.dumps(row)
    assert to_json_text(row, is_sorted=True) == json.dumps(row, sort_keys=True)
    assert content_hash(row) == content_hash(dict(reversed(row.items())))
