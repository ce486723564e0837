from dataclasses import replace

import pytest
import torch
from torch import nn

from ringmaster.features.adaptation.rewriting import merge
from ringmaster.techniques import AdaptationSpec

SOUP = AdaptationSpec(kind="merged", method="average", parents=("a", "b"))
TASKS = replace(SOUP, method="task-arithmetic")


def a_model(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data.fill_(value)
    return model


def merged(said, *values, base=None) -> nn.Module:
    parents = [a_model(value) for value in values]
    return merge(None if base is None else a_model(base), parents, said, beat=lambda: None)


@pytest.mark.parametrize(
    ("said", "base", "expected"),
    [
        (SOUP, None, 3.0),
        (replace(SOUP, weights=(3.0, 1.0)), None, 2.0),
        (TASKS, 1.0, 5.0),  # 1 + (1 - 1) + (5 - 1)
        (replace(TASKS, weights=(0.5, 0.25)), 2.0, 2.25),  # 2 + 0.5 (1 - 2) + 0.25 (5 - 2)
        (replace(TASKS, weights=(0.0, -1.0)), 2.0, -1.0),  # forgets a task
    ],
)
def test_weights_and_buffers_are_merged(said, base, expected):
    state = merged(said, 1.0, 5.0, base=base).state_dict()
    assert state.pop("1.num_batches_tracked") == 0
    assert all(torch.allclose(tensor, torch.full_like(tensor, expected)) for tensor in state.values())


def test_shared_weights_are_merged_once():
    def tied(value: float) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        nn.init.constant_(model[0].weight, value)
        return model

    model = merge(None, [tied(1.0), tied(2.0)], SOUP, beat=lambda: None)
    assert model[0].weight is model[1].weight
    assert (model[0].weight == 1.5).all()


def test_many_equal_models_are_what_each_is():
    said = AdaptationSpec(kind="merged", method="average", parents=tuple("abcdefg"))
    torch.manual_seed(0)
    models = [a_model(1.0) for _ in "abcdefg"]
    weight = torch.randn(2, 3)
    for model in models:
        model[0].weight.data.copy_(weight)
    assert torch.equal(merge(None, models, said, beat=lambda: None)[0].weight, weight)
