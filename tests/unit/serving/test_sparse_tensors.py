"""Matrices in compressed sparse rows: their values are in their places, and parts that do not fit are refused."""

import numpy as np
import pytest

from ringmaster.features.endpoint.server.sparse_tensors import SparseTensor


def tensor(values, rows, columns, shape):
    return SparseTensor.of(np.asarray(values), rows=np.asarray(rows), columns=np.asarray(columns), shape=shape)


def test_values_are_in_their_places():
    matrix = tensor([5, 6, 7], [0, 1, 1, 3], [1, 0, 1], (3, 2))
    assert matrix.dense(fill=-1).tolist() == [[-1, 5], [-1, -1], [6, 7]]
    assert matrix.places().tolist() == [1, 4, 5]


@pytest.mark.parametrize(
    ("values", "rows", "columns", "shape"),
    [
        ([], [], [], (-1, 2)),
        ([], [0], [], (0, -1)),
        ([1], [0, 1], [0], (1,)),
        ([1], [0, 1], [0, 1], (1, 2)),
        ([1], [1, 1], [0], (1, 2)),
        ([1], [0, 2], [0], (1, 2)),
        ([1, 2], [0, 2, 1, 2], [0, 1], (3, 2)),
        ([1], [0, 1], [2], (1, 2)),
        ([1], [0, 1], [-1], (1, 2)),
    ],
)
def test_parts_that_do_not_fit_are_refused(values, rows, columns, shape):
    with pytest.raises(ValueError, match="a sparse tensor"):
        tensor(values, rows, columns, shape)
