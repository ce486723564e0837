"""Data files that are small and become large: refused with their cause, and read in bounded batches."""

import csv
import json
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest

from ringmaster.techniques.data import row_files
from ringmaster.techniques.data import row_files as limits
from ringmaster.techniques.data.row_files import read_rows
from ringmaster.techniques.data.tokenizer_folders import load_tokenizer

LONG = "x" * 870_000


@pytest.mark.parametrize("use_dictionary", [True, False], ids=["dictionary", "plain"])
def test_a_parquet_file_that_becomes_a_thousand_times_as_large_is_refused(tmp_path, use_dictionary):
    file = tmp_path / "bomb.parquet"
    table = pyarrow.table({"text": [LONG] * (row_files.MIN_EXPANDED_BYTES // len(LONG) + 1)})
    pyarrow.parquet.write_table(table, file, compression="zstd", use_dictionary=use_dictionary)
    assert file.stat().st_size < 105_000
    with pytest.raises(ValueError, match=r"bomb.parquet has [\d,]+ bytes and decompresses to .* To fix: "):
        for _ in read_rows(str(file)):
            pass


@pytest.mark.parametrize("nested", [False, True])
def test_long_texts_that_a_parquet_file_stores_once_are_read_few_at_a_time(tmp_path, monkeypatch, nested):
    monkeypatch.setattr(row_files, "BYTES_PER_BATCH", 1 << 20)
    monkeypatch.setattr(row_files, "REPEATED_ROWS_PER_BATCH", 4)
    file, text = tmp_path / "long.parquet", "x" * 200_000
    values = [[{"content": text}]] * 400 if nested else [text] * 400
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), file, compression="zstd")
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_rows(str(file))) == 400
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(text), "all rows were in memory at once"


def test_rows_of_a_parquet_file_are_those_of_its_table(tmp_path):
    file = tmp_path / "some.parquet"
    table = pyarrow.table(
        {"text": ["a", None, "a", "b"], "n": [1, 2, None, 4], "m": [[{"a": "x"}], [], None, [{"a": None}]]}
    )
    pyarrow.parquet.write_table(table, file, row_group_size=3)
    assert [row for _, row in read_rows(str(file))] == table.to_pylist()
    assert [row for _, row in read_rows(str(file), columns=["n"])] == table.select(["n"]).to_pylist()


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_row_that_is_too_long_is_refused_with_its_place(tmp_path, monkeypatch, suffix):
    for module in (limits, row_files):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 1000)
    file, texts = tmp_path / f"rows{suffix}", ["short", "x" * 2000]
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)
    elif suffix == ".csv":
        with file.open("w") as stream:
            csv.writer(stream).writerows([["text"], *([text] for text in texts)])
    else:
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.raises(ValueError, match=r"rows\.\w+, (line|row) \d has more than 0 MiB, .* To fix: divide it"):
        for _ in read_rows(str(file)):
            pass


def test_a_tokenizer_of_gigabytes_is_refused(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(limits.MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(ValueError, match=r"tokenizer.json has 256 MiB, and the files of a tokenizer have at most 256"):
        load_tokenizer(str(tmp_path))
