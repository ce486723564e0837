"""Rows of memory: an optimizer over a row updates every parameter as one over that parameter alone."""

import pytest
import torch

from ringmaster.techniques.multi_adapter.adapter_runs import LoraMatrices, LoraRun, evenly
from ringmaster.techniques.multi_adapter.parameter_rows import ParameterRow, lay_below, tree_of

SHAPES = {"a.x": (4, 24), "b.x": (16, 16), "c.x": (3, 7), "d.x": (5,), "e.x": (8, 40)}


def values(*, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.013, "weight_decay": 0.1, "amsgrad": True, "fused": True}),
        (torch.optim.SGD, {"lr": 0.013, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "foreach": True}),
    ],
)
def test_an_optimizer_of_a_row_computes_the_same_numbers(kind, options):
    tree = tree_of(values(seed=0))
    row = ParameterRow(tree)
    lay_below([row])
    alone = tree_of(values(seed=0))
    optimizers = [kind(row.segments, **options), kind(alone.parameters(), **options)]
    named = dict(tree.named_parameters())
    for step in range(4):
        for name, parameter in alone.named_parameters():
            parameter.grad = values(seed=step + 1)[name]
            named[name].grad.copy_(parameter.grad)
        for optimizer in optimizers:
            optimizer.step()
        lay_below([ParameterRow(tree_of(values(seed=9))), row])  # the row may move at any time
    states = row.states(optimizers[0])
    for name, parameter in alone.named_parameters():
        assert torch.equal(named[name], parameter)
        for key, value in optimizers[1].state[parameter].items():
            assert torch.equal(states[f"optimizer/{name}/{key}"], value)
    assert [segment.numel() for segment in row.segments] == [96 + 256, 21, 5, 320]


def test_rows_below_each_other_are_one_tensor_without_a_copy():
    trees = [tree_of(values(seed=i)) for i in range(3)]
    rows = [ParameterRow(tree) for tree in trees]
    before = [parameter.clone() for parameter in trees[1].parameters()]
    lay_below(rows)
    moves = [row.num_moves for row in rows]
    lay_below(rows)
    assert [row.num_moves for row in rows] == moves  # the rows are already in place
    assert all(torch.equal(p, q) for p, q in zip(trees[1].parameters(), before, strict=True))
    matrices = [tree.get_submodule("b").x for tree in trees]
    together = evenly(matrices)
    assert torch.equal(together, torch.stack([matrix.detach() for matrix in matrices]))
    assert together.untyped_storage().data_ptr() == matrices[0].untyped_storage().data_ptr()
    assert evenly([matrices[0], matrices[1], matrices[1]]) is None
    assert evenly([matrices[1], matrices[0]]) is None


@pytest.mark.parametrize("is_laid", [False, True])
def test_a_layer_that_is_used_twice_gets_the_sum_of_its_gradients(is_laid):
    trees = [tree_of({"a": torch.randn(2, 8), "b": torch.randn(6, 2)}) for _ in range(2)]
    if is_laid:
        lay_below([ParameterRow(tree) for tree in trees])
    pairs = [LoraMatrices(a=tree.a, b=tree.b, scaling=1.0) for tree in trees]
    run = LoraRun(start=0, num_rows=8, pairs=pairs)
    factors = [(torch.randn(2, 2, 8), torch.randn(2, 8, 8)), (torch.randn(2, 6, 8), torch.randn(2, 8, 2))]
    for step in range(2):
        run.has_gradients = False
        for _ in range(step + 1):
            run.take_gradients(*factors, product=into)
        for i, tree in enumerate(trees):
            torch.testing.assert_close(tree.a.grad, (step + 1) * factors[0][0][i] @ factors[0][1][i])
            torch.testing.assert_close(tree.b.grad, (step + 1) * factors[1][0][i] @ factors[1][1][i])


def into(first, second, *, out=None):
    return torch.bmm(first, second, out=out)
