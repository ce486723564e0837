"""Tokens are written as they come, in 16 bits as long as their ids fit."""

import numpy as np
import pytest

from ringmaster.techniques.data import tokens
from ringmaster.techniques.data.arrays import ColumnWriter, blocks, open_columns, read_slices
from ringmaster.techniques.data.tokens import TokenWriter
from ringmaster.techniques.job import DataSpec


@pytest.mark.parametrize(("largest", "dtype"), [(65535, np.uint16), (65536, np.uint32)])
def test_columns_become_wider_with_the_first_id_that_needs_it(tmp_path, monkeypatch, largest, dtype):
    monkeypatch.setattr(tokens, "TOKENS_PER_WRITE", 4)
    parts = [[1, 2, 3], [4, 5, 6, 7], [8, largest], [9], [10, 11, 12]]
    with ColumnWriter(tmp_path) as columns:
        writer = TokenWriter(columns, seq_len=2)
        for number, part in enumerate(parts):
            writer.append(np.array(part, dtype=np.uint32), held_out=number % 2 == 1)
        writer.flush()
    training, held_out = (open_columns(tmp_path, split)["input_ids"] for split in ("training", "held_out"))
    assert training.tolist() == [[1, 2], [3, 8], [largest, 10], [11, 12]]
    assert held_out.tolist() == [[4, 5], [6, 7]]
    assert training.dtype == held_out.dtype == dtype
    found = writer.described(tmp_path, spec=DataSpec(path="a"), where="a")
    assert (found.vocab_size, found.num_samples, found.num_held_out) == (largest + 1, 4, 2)
    assert [value for block in blocks(tmp_path, "held_out", "input_ids") for value in block.tolist()] == [4, 5, 6, 7]


def test_parts_of_a_column_are_read_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("ringmaster.techniques.data.arrays.VALUES_PER_BLOCK", 3)
    with ColumnWriter(tmp_path) as columns:
        columns.append("training", {"n": np.arange(20)})
    found = read_slices(tmp_path, "training", "n", [(0, 2), (2, 4), (9, 14)])
    assert [(number, values.tolist()) for number, values in found] == [
        (0, [0, 1]),
        (1, [2, 3]),
        (2, [9, 10, 11]),
        (2, [12, 13]),
    ]
