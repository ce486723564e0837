"""Faults of rows are reported with file and line, the first few of a file at once."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from ringmaster.techniques.data import prepare
from ringmaster.techniques.data.row_files import read_rows
from ringmaster.techniques.job_specs import DataSpec

GOOD = json.dumps({"text": "many words, one after another " * 20})


def fault_of(path, **fields):
    with pytest.raises(ValueError) as caught:
        prepare(
            DataSpec(**{"path": str(path), "seq_len": 16, "vocab_size": 300, **fields}),
            cache_dir=path.parent / "c",
        )
    return str(caught.value)


def test_all_faults_of_a_file_are_reported_up_to_the_fifth(tmp_path):
    wrong = ["[1, 2]", '{"text": null}', '{"text"', '{"body": "x"}', "null", '{"text": 3}', "7"]
    (tmp_path / "a.jsonl").write_text("\n".join([GOOD, *wrong, GOOD]))
    said = fault_of(tmp_path / "a.jsonl")
    assert "a.jsonl, line 2 is not a JSON object but a list;" in said
    assert "line 3 has no text in column 'text': it is null;" in said
    assert "line 4 is not valid JSON: Expecting" in said
    assert "line 5 has no text (nor input_ids) in column 'text'; it has ['body'];" in said
    assert "line 6 is not a JSON object but null. To fix: " in said
    assert "line 7" not in said
    assert said.count("To fix") == 1
    for remedy in ('write rows as {"text": ...}', "remove the row", "one object a line", "set text_column"):
        assert remedy in said.partition("To fix: ")[2]


def test_a_single_fault_has_its_own_remedy_alone(tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{GOOD}\n{{"text": 3}}\n')
    said = fault_of(tmp_path / "a.jsonl")
    assert (
        said
        == f"{tmp_path}/a.jsonl, line 2 has no text in column 'text': it is of type int. To fix: give it a text, or "
        + ("remove the row")
    )


def test_rows_of_csv_with_another_number_of_values(tmp_path):
    (tmp_path / "a.csv").write_text("text,n\nfine,1\ntoo, many,1\nfew\nfine,2\n")
    said = fault_of(tmp_path / "a.csv")
    assert "a.csv, line 3 has another number of values than the header: 3 and not 2;" in said
    assert "a.csv, line 4 has another number of values than the header: 1 and not 2." in said
    assert said.endswith("To fix: put quotes around values with commas")


def test_long_values_of_csv_are_read(tmp_path):
    (tmp_path / "a.csv").write_text('text\n"' + "word " * 100_000 + '"\n')
    assert len(next(read_rows(str(tmp_path / "a.csv")))[1]["text"]) == 500_000


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_other_bytes_than_utf8_are_found(tmp_path, name):
    begin = b"text\n" + b"fine\n" * 20_000
    (tmp_path / name).write_bytes(begin + "né".encode("latin-1") + b"e\nfine\n\xffx\n")
    if name == "a.jsonl":
        (tmp_path / name).write_bytes(f"{GOOD}\n".encode() + b'{"text": "n\xe9e"}\n')
    said = fault_of(tmp_path / name)
    places = {"a.jsonl": f"line 2 at byte {len(GOOD) + 12} of the file (0xe9)"}
    at = len(begin) + 1
    wanted = places.get(
        name, f"line 20002 at byte {at} of the file (0xe9), line 20004 at byte {at + 8} of the file (0xff)"
    )
    assert f"{tmp_path}/{name} cannot be read: it is not UTF-8 in {wanted}. To fix: convert it" in said
    assert f"iconv -f ISO-8859-1 -t UTF-8 {name}" in said


ROWS_OF_HALVES = {
    "language-modeling": {"text": "ab \ud83d"},
    "text-classification": {"text": "ab", "label": "pos\ud83d"},
    "token-classification": {"tokens": ["ab", "c\ud83d"], "tags": ["O", "O"]},
    "completion": {"prompt": "ab", "completion": "\ud83d"},
    "preference": {"prompt": "ab", "chosen": "c", "rejected": "\ud83d"},
    "chat": {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "\ud83d"}]},
}


@pytest.mark.parametrize("kind", ROWS_OF_HALVES)
def test_half_a_character_is_refused(tmp_path, kind):
    row = json.dumps(ROWS_OF_HALVES[kind])
    (tmp_path / "a.jsonl").write_text(f"{row.replace(chr(92) + 'ud83d', 'fine')}\n{row}\n")
    said = fault_of(tmp_path / "a.jsonl", kind=kind)
    assert r"a.jsonl, line 2 has half of a surrogate pair, '\ud83d', which is not a character. To fix: " in said


def test_two_halves_are_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{GOOD}\n{{"text": "ab \\ud83d\\ude00 \\\\ud83d"}}\n' * 40)
    spec = DataSpec(path=str(tmp_path / "a.jsonl"), seq_len=16, vocab_size=300, held_out=0)
    assert prepare(spec, cache_dir=tmp_path / "c").num_samples > 0


def test_half_a_character_in_a_list_of_labels_is_refused(tmp_path):
    row = 'words,"[""a\\ud83d"", ""b""]"'
    (tmp_path / "a.csv").write_text("text,label\n" + f"{row}\n" * 40)
    assert "has half of a surrogate pair" in fault_of(tmp_path / "a.csv", kind="text-classification")


def test_a_name_that_is_not_utf8_is_refused(tmp_path):
    folder = tmp_path / "n\udcffe"  # a byte of Latin-1
    folder.mkdir()
    (folder / "a.jsonl").write_text(f"{GOOD}\n")
    said = fault_of(tmp_path / "*" / "a.jsonl")
    assert said.endswith("a.jsonl has a name that is not UTF-8. To fix: rename the file, or its folder")


def test_nulls_of_parquet_are_refused(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["many words", None, "x"]}), tmp_path / "a.parquet")
    said = fault_of(tmp_path / "a.parquet")
    assert "a.parquet, line 2 has no text in column 'text': it is null. To fix: " in said


def test_text_and_ids_are_not_mixed(tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{GOOD}\n{{"text": [1, 2, 3]}}\n')
    said = fault_of(tmp_path / "a.jsonl")
    assert "a.jsonl, line 2 has token ids, and the rows before it have text. To fix: give all rows as one" in said


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_an_empty_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    assert f"{name} is empty. To fix: " in fault_of(tmp_path / name)


def test_an_empty_file_among_others_has_no_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text(f"{GOOD}\n" * 4)
    (tmp_path / "b.jsonl").write_text("")
    spec = DataSpec(path=str(tmp_path / "*.jsonl"), seq_len=16, vocab_size=300, held_out=0)
    assert prepare(spec, cache_dir=tmp_path / "c").num_samples > 0
