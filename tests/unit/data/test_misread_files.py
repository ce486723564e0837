"""Files that would be read in another way than they are meant are refused, and those that are meant so are read."""

import codecs
import csv
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch import load_batch
from ringmaster.techniques.data.file_patterns import matching
from ringmaster.techniques.data.row_files import read_rows

NUM_ROWS = 60


def rows_of(path, **options):
    return [row for _, row in read_rows(str(path), **options)]


def fault_of(path, **options):
    with pytest.raises(ValueError) as caught:
        rows_of(path, **options)
    return str(caught.value)


@pytest.fixture
def csv_file(tmp_path):
    """A function that writes a CSV file of 60 rows, some of its lines replaced: {line: text}."""

    def write(changed=(), *, header="text,label", end="\n"):
        lines = [header, *(f"words {n},{'pos' if n % 2 else 'neg'}" for n in range(NUM_ROWS))]
        for line, text in dict(changed).items():
            lines[line - 1] = text
        (tmp_path / "d.csv").write_bytes((end.join(lines) + end).encode())
        return tmp_path / "d.csv"

    return write


# CSV


def test_a_quote_that_is_never_closed_is_refused_with_its_line(csv_file):
    said = fault_of(csv_file({12: '"words 10,pos'}))
    assert "d.csv, line 12 begins a value in quotes that is never closed. To fix: close the quote" in said


@pytest.mark.parametrize("late", ['"words 13",neg', 'words 13,"neg"', 'words "13,neg'])
def test_a_quote_that_is_closed_before_other_characters_is_refused(csv_file, late):
    said = fault_of(csv_file({12: '"words 10,pos', 15: late}))
    assert "d.csv, line 12 " in said
    assert "To fix: " in said


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("line", [2, 12, 58])
def test_rows_inside_a_quoted_value_are_refused(csv_file, line, end):
    said = fault_of(csv_file({line: '"words,pos', line + 3: 'words",neg'}, end=end))
    assert f"d.csv, line {line} has a value in quotes that holds 4 rows, by their 'label'" in said


def test_rows_inside_the_last_value_are_refused(csv_file):
    lines = {n + 2: f"{'pos' if n % 2 else 'neg'},words {n}" for n in range(NUM_ROWS)}
    said = fault_of(csv_file({**lines, 12: 'pos,"words', 15: 'neg,words"'}, header="label,text"))
    assert "d.csv, line 12 has a value in quotes that holds 4 rows, by their 'label'" in said


@pytest.mark.parametrize(
    "changed",
    [
        {5: 'words, "pos"'}, {5: 'words,  "pos"'}, {5: ' "words",pos'}, {5: ' "many, words",pos'},
        {5: 'words, "pos', 6: 'words",neg'}, {1: 'text, "label"'},
    ],
)  # fmt: skip
def test_quotes_behind_spaces_are_refused(csv_file, changed):
    said = fault_of(csv_file(changed))
    assert f"d.csv, line {next(iter(changed))} has " in said
    assert "To fix: remove spaces before quotes, e.g. with pandas: read_csv('d.csv', skipinitialspace=True)" in said


@pytest.mark.parametrize(
    "text", ['" ""words"""', '"a, ""b"""', '"a, "', '"a, ""b"" c, "', ' "a" said b', 'he said "b"']
)
def test_quotes_inside_values_are_read(csv_file, text):
    wanted, label = next(csv.reader([f"{text},pos"]))
    assert {"text": wanted, "label": label} in rows_of(csv_file({5: f"{text},pos"}))


@pytest.mark.parametrize("mark", ["", codecs.BOM_UTF8.decode()])
def test_a_header_inside_a_file_is_refused(csv_file, mark):
    said = fault_of(csv_file({30: f"{mark}text,label"}))
    assert "d.csv, line 30 repeats the header, as where files were joined. To fix: remove the line" in said


@pytest.mark.parametrize(("sign", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")])
def test_other_separators_are_refused_with_their_name(csv_file, sign, name):
    said = fault_of(csv_file({5: f'"many, words"{sign}"pos"'}, header=f'"text"{sign}"label"'))
    assert f"which seems to be separated by {name}. To fix: " in said
    assert f"read_csv('d.csv', sep={sign!r})" in said


def test_values_of_several_lines_are_read(csv_file):
    poem = '"roses are red,\nviolets are blue,\nsugar is ""sweet"", pos\n",pos'
    rows = rows_of(csv_file({2: poem, 3: '"one\n\ntwo",neg', 61: '"",pos'}))
    assert len(rows) == NUM_ROWS
    assert rows[0] == {"text": 'roses are red,\nviolets are blue,\nsugar is "sweet", pos\n', "label": "pos"}
    assert rows[1]["text"] == "one\n\ntwo"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_all_line_ends_of_csv_are_read(csv_file, end):
    assert len(rows_of(csv_file(end=end))) == NUM_ROWS


@pytest.mark.parametrize("header", ["text,text", "text,text ", '"text",text'])
def test_two_columns_of_one_name_are_refused(csv_file, header):
    said = fault_of(csv_file(header=header))
    assert "d.csv, line 1 has two columns 'text'. To fix: rename" in said


@pytest.mark.parametrize("header", ["Text,text", ",text", "text,"])
def test_columns_of_other_names_are_read(csv_file, header):
    assert len(rows_of(csv_file(header=header))) == NUM_ROWS


def test_columns_without_a_name_are_read_beside_others(tmp_path):
    (tmp_path / "d.csv").write_text("text,label,,\nwords,pos,,\n")
    assert rows_of(tmp_path / "d.csv") == [{"text": "words", "label": "pos", "": ""}]


def test_lines_before_the_header_may_be_empty(tmp_path):
    (tmp_path / "d.csv").write_text("\n\ntext,label\n\nwords,pos\n")
    assert list(read_rows(str(tmp_path / "d.csv"))) == [(5, {"text": "words", "label": "pos"})]


def test_nul_bytes_of_csv_are_refused(csv_file):
    assert "line 12" in (said := fault_of(csv_file({12: "wo\0rds,pos"})))
    assert "NUL" in said


@pytest.mark.parametrize("name", ["d.csv", "d.txt", "d.jsonl"])
def test_utf_16_without_a_mark_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes('{"text": "words"},pos\n'.encode("utf-16-le") * 20)
    assert "To fix: " in fault_of(tmp_path / name)


# JSONL


def test_a_mark_at_the_beginning_is_no_text(tmp_path):
    line = json.dumps({"text": "words"}).encode() + b"\n"
    (tmp_path / "d.jsonl").write_bytes(codecs.BOM_UTF8 + line + codecs.BOM_UTF8 + line)
    assert rows_of(tmp_path / "d.jsonl") == [{"text": "words"}] * 2
    (tmp_path / "d.txt").write_bytes(codecs.BOM_UTF8 + b"words")
    assert rows_of(tmp_path / "d.txt") == ["words"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"text": "a", "text": "b"}', "has the key 'text' twice"),
        ('{"text": {"a": 1, "a": 1}}', "has the key 'a' twice"),
        ('{"text": "a"},', "is not valid JSON: Extra data"),
        ('{"text": "a",}', "is not valid JSON: "),
        ('{"text": "a"}{"text": "b"}', "is not valid JSON: Extra data"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"n": ' + "9" * 5000 + "}", "is not valid JSON: "),
    ],
)
def test_wrong_lines_are_refused(tmp_path, line, what):
    (tmp_path / "d.jsonl").write_text('{"text": "words"}\n' + line + "\n")
    said = fault_of(tmp_path / "d.jsonl")
    assert f"d.jsonl, line 2 {what}" in said
    assert "To fix: " in said


@pytest.mark.parametrize("before", ["", codecs.BOM_UTF8.decode(), "\n"])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_has_a_remedy_of_its_own(tmp_path, indent, before):
    (tmp_path / "d.jsonl").write_text(before + json.dumps([{"text": "words"}, {"text": "more"}], indent=indent))
    remedy = fault_of(tmp_path / "d.jsonl").partition("To fix: ")[2]
    assert remedy == "make a line of each object of an array: jq -c '.[]' d.jsonl > rows.jsonl"


def test_half_characters_of_columns_that_are_not_read_are_no_fault(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": "\\ud83d\\ude00", "other": ["\\ud83d"]}\n')
    assert rows_of(tmp_path / "d.jsonl", columns=["text"]) == [{"text": "\U0001f600", "other": ["\ud83d"]}]
    assert "line 1 has half of a surrogate pair, '\\ud83d'" in fault_of(tmp_path / "d.jsonl", columns=["other"])


def test_two_columns_of_one_name_in_parquet_are_refused(tmp_path):
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    assert "d.parquet has two columns 'text'. To fix: rename" in fault_of(tmp_path / "d.parquet")


# Endings


def batch_faults(folder, **data):
    job = {"model": {"architecture": "LlamaForCausalLM", "config": {}}, "num_steps": 1}
    (folder / "b.yaml").write_text(json.dumps({"jobs": [{"name": "a", **job, "data": {"seq_len": 8, **data}}]}))
    try:
        return load_batch(folder / "b.yaml") and ""
    except BatchFileError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("d.ndjson", "jsonl"), ("d.ndjson", None), ("D.JSONL", None), ("d", "jsonl"), ("d.json", "jsonl"),
        ("d.data", "jsonl"), ("d.TXT", None), ("d.csv", "text"),
    ],
)  # fmt: skip
def test_files_are_read_by_their_format_or_their_ending(tmp_path, name, format):
    (tmp_path / name).write_text('{"text": "words"}\n' * 3)
    assert batch_faults(tmp_path, path=name, **({} if format is None else {"format": format})) == ""
    assert len(rows_of(tmp_path / name, format=format)) == (
        1 if "text" in (format, name.lower()[-4:]) or name[-3:].lower() == "txt" else 3
    )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("d.json", "jq -c '.[]' d.json > rows.jsonl"), ("d.jsonl.gz", "gzip -dc d.jsonl.gz > OTHER"),
        ("d.csv.GZ", "gzip -dc d.csv.GZ > OTHER"), ("d.csv.zip", "unzip -p d.csv.zip"), ("d.jsonl.zst", "zstd -dc d."),
        ("d.tar", "name files that end in"), ("d.tsv", "by commas"), ("d.xlsx", "as CSV"), ("d", "give their format"),
    ],
)  # fmt: skip
def test_other_endings_have_a_remedy_of_their_own(tmp_path, name, remedy):
    (tmp_path / name).write_text('{"text": "words"}\n')
    assert remedy in batch_faults(tmp_path, path=name).partition("To fix: ")[2]
    assert remedy in fault_of(tmp_path / name).partition("To fix: ")[2]


def test_compressed_files_are_told_by_their_content(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(gzip.compress(b'{"text": "words"}\n' * 100))
    said = fault_of(tmp_path / "d.jsonl")
    assert "is compressed, as .gz files are. To fix: decompress it: gzip -dc d.jsonl > OTHER" in said


# Folders


def names_below(folder):
    return matching(str(folder / "**" / "*")).names


def test_what_systems_leave_in_folders_is_left_out(tmp_path):
    for name in (".ipynb_checkpoints/a.jsonl", "x/.DS_Store", "x/Thumbs.db", "__MACOSX/x/a.jsonl", "desktop.ini"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text("x")
    (tmp_path / "d" / "x" / "a.jsonl").write_text('{"text": "words"}\n')
    assert names_below(tmp_path / "d") == ("x/a.jsonl",)
    assert batch_faults(tmp_path, path="d") == ""
    assert matching(str(tmp_path / "d" / ".ipynb_checkpoints" / "*.jsonl")).names == ("a.jsonl",)
    assert matching(str(tmp_path / "d" / ".*" / "*.jsonl")).names == (".ipynb_checkpoints/a.jsonl",)


def test_links_to_folders_are_followed_once(tmp_path):
    for folder in ("d/x", "other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.jsonl").write_text("{}")
    (tmp_path / "d" / "y").symlink_to(tmp_path / "other")
    (tmp_path / "d" / "x" / "up").symlink_to(tmp_path / "d")
    (tmp_path / "other" / "self").symlink_to(tmp_path / "other")
    assert names_below(tmp_path / "d") == ("x/a.jsonl", "y/a.jsonl")


def test_a_link_to_nothing_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(ValueError, match=r"b\.jsonl is a link to a file that does not exist. To fix: "):
        names_below(tmp_path)
    (tmp_path / "b.jsonl").unlink()
    assert names_below(tmp_path) == ("a.jsonl",)
