"""Samples are written and read as Arrow, which `datasets` opens; their digest depends on the samples alone."""

import subprocess
import sys

import datasets
import numpy as np
import pyarrow as pa
import pytest

from ringmaster.techniques.data import tokens
from ringmaster.techniques.data.arrow_files import (
    ArrowWriter,
    TableRows,
    column_of,
    fingerprint,
    open_split,
    padded,
    split_file,
    values_of,
)
from ringmaster.techniques.data.tokens import write_text
from ringmaster.techniques.data_source import Row
from ringmaster.techniques.job_specs import DataSpec

LENGTHS = np.array([2, 0, 3])
READ = """
import sys
from pathlib import Path
from ringmaster.techniques.data.arrow_files import TableRows, fingerprint, num_values, open_split, values_of
folder = Path(sys.argv[1])
rows = TableRows(open_split(folder, "training"))([2, 0])
print([values_of(rows[name])[0].tolist() for name in rows.column_names], fingerprint(folder), num_values(folder, "ids"))
assert not {"pandas", "pyarrow.compute"} & sys.modules.keys()
"""


def written(folder, *tables):
    folder.mkdir(exist_ok=True)
    with ArrowWriter(split_file(folder, "training")) as writer:
        for table in tables:
            writer.write(table)
    return folder


def some_table():
    pairs = np.arange(10, dtype=np.int32).reshape(5, 2)
    return pa.table({"ids": column_of(pairs, LENGTHS), "x": column_of(np.arange(12.0).reshape(3, 2, 2))})


def test_datasets_opens_what_is_written(tmp_path):
    opened = datasets.Dataset.from_file(str(split_file(written(tmp_path, some_table()), "training")))
    assert opened[2] == {"ids": [[4, 5], [6, 7], [8, 9]], "x": [[8.0, 9.0], [10.0, 11.0]]}


def test_rows_are_read_in_any_order_and_padded(tmp_path):
    rows = TableRows(open_split(written(tmp_path, some_table(), some_table()), "training"))([5, 0, 2])
    values, lengths = values_of(rows["ids"])
    assert padded(values, lengths, width=2, fill=-1).tolist() == [
        [[4, 6], [5, 7]],
        [[0, 2], [1, 3]],
        [[4, 6], [5, 7]],
    ]
    assert padded(values[:5], lengths[:2], width=4, fill=-1)[1].tolist() == [[0, 2, -1, -1], [1, 3, -1, -1]]
    assert values_of(rows["x"])[0][0].tolist() == [[8.0, 9.0], [10.0, 11.0]]


def test_a_rank_reads_rows_without_slow_imports(tmp_path):
    command = [sys.executable, "-c", READ, str(written(tmp_path, some_table()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[[[4, 5], [6, 7], [8, 9], [0, 1], [2, 3]], [[[8.0, 9.0], [10.0, 11.0]], [[0.0, ")


def test_numbers_that_are_missing_and_booleans_are_read():
    assert values_of(pa.array([1, None]))[0].tolist() == pytest.approx([1.0, np.nan], nan_ok=True)
    assert values_of(pa.chunked_array([[True], [False]]))[0].tolist() == [True, False]
    assert values_of(pa.array([0, 1, 2], pa.uint8()).slice(1))[0].tolist() == [1, 2]


def test_some_rows_of_a_column_are_read():
    table = some_table()
    values, lengths = values_of(table["ids"].slice(2))
    assert (values.tolist(), lengths.tolist()) == ([[4, 5], [6, 7], [8, 9]], [3])
    values, lengths = values_of(table["ids"].slice(1, 0))
    assert (values.shape, lengths.tolist()) == ((0, 2), [])
    assert values_of(table["x"].slice(1, 1))[0].tolist() == [[[4.0, 5.0], [6.0, 7.0]]]
    missing = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    assert values_of(missing)[0].tolist() == [[1, 2], [3, 4]]


def test_the_digest_does_not_depend_on_how_rows_were_written(tmp_path):
    table = some_table()
    whole = written(tmp_path / "a", table)
    parts = written(tmp_path / "b", table.slice(0, 1), table.slice(1))
    assert fingerprint(whole) == fingerprint(parts)
    assert fingerprint(whole) != fingerprint(written(tmp_path / "c", table.slice(1)))


@pytest.mark.parametrize(
    ("other", "said"),
    [({"x": np.zeros(2)}, "column 'x' has rows of .* and of double"), ({"y": np.zeros((2, 2, 2))}, "'x'")],
)
def test_columns_that_differ_are_refused(tmp_path, other, said):
    other = pa.table({name: column_of(values) for name, values in other.items()})
    with pytest.raises((ValueError, KeyError), match=said):
        written(tmp_path, some_table().select(["x"]), other)


@pytest.mark.parametrize(("largest", "dtype"), [(65535, np.uint16), (65536, np.uint32)])
def test_tokens_take_16_bits_as_long_as_their_ids_fit(tmp_path, monkeypatch, largest, dtype):
    monkeypatch.setattr(tokens, "DOCUMENTS_PER_CALL", 2)
    parts = [[1, 2, 3], [4, 5, 6, 7], [8, largest], [9], [10, 11, 12]]
    rows = [
        Row(file="a", number=n, value=None, content=ids, held_out=n % 2 == 1) for n, ids in enumerate(parts)
    ]  # fmt: skip
    found = write_text(tmp_path, spec=DataSpec(path="a", seq_len=2), rows=lambda: iter(rows), where="a")
    training, held_out = (values_of(open_split(tmp_path, split)["input_ids"])[0] for split in ("training", "held_out"))
    assert training.tolist() == [[1, 2], [3, 8], [largest, 10], [11, 12]]
    assert held_out.tolist() == [[4, 5], [6, 7]]
    assert training.dtype == held_out.dtype == dtype
    assert (found.vocab_size, found.num_samples, found.num_held_out) == (largest + 1, 4, 2)
