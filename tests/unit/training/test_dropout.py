"""Dropout by hash: its rate, its independence, and equal masks however a batch is divided."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ringmaster.techniques.training.dropout import (
    Draws,
    UnsampledShapeError,
    current,
    drawing,
    find_sites,
    kept,
    kind_of,
    mixed,
    name_modules,
    random_bits,
    use,
)
from ringmaster.techniques.training.recomputation import drawing_again

CPU = torch.device("cpu")
RATES = [0.05, 0.1, 0.5, 0.9]


def keys(number, *, seed=0):
    return mixed(np.arange(number, dtype=np.uint64) + np.uint64(seed << 32))


def sigmas(sample, *, p):
    """The distance of the mean of independent draws from p, in standard deviations."""
    return abs(float(sample.double().mean()) - p) / (p * (1 - p) / sample.numel()) ** 0.5


@pytest.mark.parametrize("p", RATES)
def test_as_many_are_dropped_as_asked_for(p):
    assert sigmas(~kept(keys(64), (128, 256), p, CPU), p=p) < 4


def test_bits_are_all_equally_likely():
    bits = random_bits(keys(32), (64, 256), CPU)
    for bit in range(8, 32):  # the lowest bits are not used
        assert sigmas((bits >> bit) & 1, p=0.5) < 4.5, bit


@pytest.mark.parametrize("shift", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 1)], ids=str)
def test_neighbours_are_independent(shift):
    """Rows are samples, steps or layers. Each has its own key."""
    mask = kept(keys(64), (128, 128), 0.3, CPU)
    other = torch.roll(mask, shift, dims=(0, 1, 2))
    assert sigmas(~mask & ~other, p=0.09) < 4.5


def test_an_element_does_not_depend_on_how_long_the_tensor_is():
    """Padding to a micro-batch's longest sample changes the length."""
    long, short = (kept(keys(3), (4, n, n), 0.5, CPU) for n in (24, 16))
    assert torch.equal(long[:, :, :16, :16], short)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, hidden):
        query = self.linear(hidden).view(len(hidden), -1, 2, 4).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(query, query, query, dropout_p=0.2, is_causal=True)
        hidden = hidden + self.dropout(attended.transpose(1, 2).flatten(2))
        keep = 0.8 + torch.rand((len(hidden), 1, 1))  # stochastic depth drops a path as a whole
        return hidden + functional.dropout(hidden, 0.1, self.training) * keep.floor()


class Model(nn.Module):
    """A model with a table that all samples share, a layer that is called twice, and optional recomputation."""

    def __init__(self, *, recompute=False):
        super().__init__()
        self.table, self.drop = nn.Parameter(torch.randn(6, 8)), nn.Dropout(0.5)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.recompute = recompute

    def forward(self, hidden):
        hidden = hidden + self.drop(self.table)
        for layer in [*self.layers, self.layers[0]]:
            hidden = (
                checkpoint(layer, hidden, use_reentrant=False, context_fn=drawing_again)
                if self.recompute
                else layer(hidden)
            )
        return hidden.square().sum()


SHARED = (("drop", 0),)


def gradients(parts, *, recompute=False, seed=3):
    torch.manual_seed(0)
    model, batch = Model(recompute=recompute), torch.randn(6, 6, 8)
    name_modules(model)
    with drawing():
        for part in parts:
            use(Draws(seed=seed, samples=part, shared=SHARED))
            model(batch[list(part)]).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


WHOLE = [range(6)]


@pytest.mark.parametrize("parts", [[(0, 1, 2), (3, 4, 5)], [(5,), (0, 3), (1, 2, 4)], [*zip(range(6))]], ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_every_division_draws_the_same(parts, recompute):
    expected, found = gradients(WHOLE), gradients(parts, recompute=recompute)
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_another_seed_draws_otherwise():
    assert (gradients(WHOLE, seed=4) - gradients(WHOLE)).abs().max() > 0.1


def test_layers_draw_otherwise_and_so_does_a_layer_that_is_called_again():
    draws = Draws(seed=0, samples=range(2))
    masks = []
    for place in ("layers.0", "layers.1", "layers.0"):
        draws.enter_module(place)
        masks.append(draws.kept((2, 64), 0.5, CPU))
        draws.leave_module()
    assert not any(torch.equal(one, other) for one, other in ((masks[0], masks[1]), (masks[0], masks[2])))


def test_what_holds_samples_is_found_by_running():
    model = Model()
    name_modules(model)
    sites = find_sites(lambda num: model(torch.randn(num, 6, 8)))
    assert (sites.draws, sites.shared, sites.reason) == (True, SHARED, "")
    assert kind_of(("layers.0.dropout", 1)) == ("layers.*.dropout", 1)


def test_tokens_that_were_routed_have_no_sample():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, hidden):
            return self.drop(hidden.flatten(0, 1)[::2])

    model = Routed()
    name_modules(model)
    assert "dropout in drop draws for tensors without" in find_sites(lambda num: model(torch.randn(num, 7, 4))).reason
    with drawing():
        use(Draws(seed=0, samples=range(3)))
        with pytest.raises(UnsampledShapeError, match="does not hold the 3 samples"):
            functional.dropout(torch.ones(7, 4), 0.5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_attention_is_torchs_but_for_the_mask(causal, mask):
    """The dropout rate is almost zero, and several query heads share a key head."""
    query, key, value = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    given = {None: None, "bool": torch.rand(5, 5) > 0.3, "float": torch.randn(5, 5)}[None if causal else mask]
    options = {"attn_mask": given, "is_causal": causal, "enable_gqa": True}
    expected = functional.scaled_dot_product_attention(query, key, value, **options)
    with drawing():
        use(Draws(seed=0, samples=range(2)))
        found = functional.scaled_dot_product_attention(query, key, value, dropout_p=1e-12, **options)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["dropout1d", "dropout2d", "dropout3d"])
def test_whole_channels_are_dropped(name):
    values = torch.ones(3, 64, *[4] * int(name[-2]))
    with drawing():
        use(Draws(seed=0, samples=range(3)))
        dropped = getattr(functional, name)(values, 0.4)
    channels = dropped.flatten(2)
    assert torch.equal(channels.amin(-1), channels.amax(-1))
    assert channels.unique().tolist() == pytest.approx([0.0, 1 / 0.6])


def test_torch_is_as_it_was_afterwards():
    before = (functional.dropout, functional.scaled_dot_product_attention, torch.rand, torch.rand_like)
    with pytest.raises(RuntimeError, match="mine"), drawing():
        assert functional.dropout is not before[0]
        raise RuntimeError("mine")
    assert (functional.dropout, functional.scaled_dot_product_attention, torch.rand, torch.rand_like) == before
    assert current() is None


def test_evaluation_and_rates_of_none_and_all_are_torchs():
    values = torch.ones(2, 8)
    with drawing():
        use(Draws(seed=0, samples=range(2)))
        assert torch.equal(functional.dropout(values, 0.5, training=False), values)
        assert torch.equal(functional.dropout(values, 0.0), values)
        assert not functional.dropout(values, 1.0).any()


def test_scalars_and_random_tensors_agree_over_parts():
    """A scalar, such as one that drops a layer as a whole, is one number for all samples."""
    found = []
    for part in ((0, 1, 2), (0,), (1, 2)):
        with drawing():
            use(Draws(seed=0, samples=part))
            found.append((torch.rand([]), torch.rand(len(part), 3), torch.rand_like(torch.empty(len(part), 2))))
    assert found[0][0] == found[1][0] == found[2][0]
    for i in (1, 2):
        assert torch.equal(found[0][i], torch.cat([found[1][i], found[2][i]]))
        assert 0 <= float(found[0][i].min()) <= float(found[0][i].max()) < 1
