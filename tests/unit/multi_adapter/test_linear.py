"""Products of several adapters at once equal, bit by bit, the product of each alone."""

import itertools
import os

import pytest
import torch

from ringmaster.techniques.multi_adapter.shared_linear import _product
from ringmaster.techniques.processes.rank_environment import rank_environment

SIDES = (1, 2, 3, 8, 64, 257)


def test_tests_compute_as_gangs_do():
    """One thread is used, as several divide a product's sums differently. Results do not depend on memory addresses."""
    gangs = rank_environment()
    for name in ("OMP_NUM_THREADS", "MKL_CBWR"):
        assert os.environ[name] == gangs[name]
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("num_adapters", [1, 2, 5])
@pytest.mark.parametrize("layout", ["as it is", "transposed", "first transposed"])
def test_each_is_what_it_is_alone(num_adapters, layout):
    """The sizes include vectors, and products so small that torch uses another kernel for a batch of them."""
    draw = torch.Generator().manual_seed(0)
    for rows, inner, columns in itertools.product(SIDES, repeat=3):
        first = torch.randn(num_adapters, rows, inner, generator=draw)
        second = torch.randn(num_adapters, inner, columns, generator=draw)
        if layout == "transposed":
            second = second.mT.contiguous().mT
        if layout == "first transposed":
            first = first.mT.contiguous().mT
        alone = torch.stack([a @ b for a, b in zip(first, second, strict=True)])
        assert torch.equal(_product(first, second), alone), (rows, inner, columns)
        out = torch.empty_like(alone)
        _product(first, second, out=out)
        assert torch.equal(out, alone), (rows, inner, columns)
