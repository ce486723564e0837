import pytest
import torch
from torch import nn

from ringmaster.features.adaptation.pruning import is_two_of_four, largest, prune, two_of_four
from ringmaster.features.adaptation.trainer import mask_gradients
from ringmaster.techniques import AdaptationSpec

MAGNITUDE = AdaptationSpec(kind="pruned", method="magnitude", sparsity=0.75)
TWO_OF_FOUR = AdaptationSpec(kind="pruned", method="2:4")


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8, bias=False))


def test_the_smallest_weights_of_each_layer_go():
    weight = torch.tensor([[0.1, -0.5, 0.3, -0.2], [4.0, -3.0, 2.0, 1.0]])
    assert largest(weight, sparsity=0.5).tolist() == [[False, False, False, False], [True, True, True, True]]
    assert two_of_four(weight).tolist() == [[False, True, True, False], [True, True, False, False]]


def test_equal_weights_go_in_their_order():
    assert largest(torch.ones(2, 2), sparsity=0.5).tolist() == [[False, False], [True, True]]
    assert two_of_four(torch.ones(1, 4)).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("sparsity", [0.01, 0.5, 0.9])
def test_as_many_weights_go_as_were_asked_for(sparsity):
    weight = torch.randn(17, 23)
    assert int((~largest(weight, sparsity=sparsity)).sum()) == round(sparsity * 17 * 23)


def test_linear_layers_are_pruned_and_nothing_else():
    model = a_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    masks = prune(model, MAGNITUDE)
    assert set(masks) == {"1.weight", "3.weight"}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name] * masks.get(name, torch.tensor(1)))
    assert (model[1].weight == 0).sum() == 36


def test_two_of_four_leaves_widths_alone_that_four_does_not_divide():
    model = a_model()
    assert set(prune(model, TWO_OF_FOUR)) == {"1.weight"}
    assert is_two_of_four(model[1].weight)
    assert not is_two_of_four(a_model()[1].weight)


def test_an_output_head_stays_whole():
    model = a_model()
    model.get_output_embeddings = lambda: model[3]
    assert set(prune(model, MAGNITUDE)) == {"1.weight"}


def test_a_model_without_layers_to_prune_is_refused():
    with pytest.raises(ValueError, match="no linear or convolution"):
        prune(nn.Sequential(nn.Embedding(4, 4)), MAGNITUDE)
    with pytest.raises(ValueError, match="prune by magnitude"):
        prune(nn.Sequential(nn.Linear(6, 4)), TWO_OF_FOUR)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_masked_gradients_leave_pruned_weights_at_zero(optimizer):
    model = a_model()
    masks = prune(model, MAGNITUDE)
    steps = optimizer(model.parameters())
    mine = [(p, masks[name]) for name, p in model.named_parameters() if name in masks]
    for _ in range(5):
        model(torch.randint(10, (3,))).square().sum().backward()
        mask_gradients(mine)
        steps.step()
        steps.zero_grad()
    for parameter, mask in mine:
        assert torch.equal(parameter != 0, mask)
