"""Bytes of tensors are counted while the tensors are alive."""

import torch
from torch import nn

from ringmaster.techniques.estimates.rank_memory import LiveBytes, watch_layers

KIB = 1024


def test_bytes_live_until_nothing_refers_to_them():
    with LiveBytes() as live:
        a = torch.zeros(KIB)
        b = a + 1
        assert live.live == 8 * KIB
        del a
        assert (live.live, live.peak) == (4 * KIB, 8 * KIB)
        view = b[:10]
        del b
        assert live.live == 4 * KIB  # the view keeps the whole tensor alive
        del view
        assert live.live == 0


def test_storages_are_counted_once_and_as_they_are_resized():
    with LiveBytes() as live:
        a = torch.zeros(KIB)
        a.mul_(2).view(32, 32).add_(1)
        assert live.live == 4 * KIB
        a.untyped_storage().resize_(0)
        assert live.live == 0


def test_a_phase_has_a_peak_of_its_own():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    with LiveBytes() as live:
        x = torch.zeros(KIB, 64, requires_grad=True)
        watch_layers(live, list(model))
        live.enter("step")
        live.reset()
        model(x).sum().backward()
    assert set(live.peaks) >= {"forward 0", "forward 1", "backward 1", "backward 0"}
    assert live.peaks["forward 1"] > live.peaks["forward 0"]


def test_products_are_counted_as_floating_point_operations():
    a, b = torch.zeros(8, 16), torch.zeros(16, 4)
    with LiveBytes() as live:
        a @ b
    assert live.num_flops == 2 * 8 * 16 * 4
    assert live.num_bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert live.num_operators == 1
