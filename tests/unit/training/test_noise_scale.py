"""The noise scale against a quadratic problem whose gradients are known in closed form."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ringmaster.features.target.noise_scale import (
    DAMPING,
    FORMULA_ERROR,
    SQUARE_ROOT,
    TWO_SIDED_90,
    GradientNoise,
    NoiseBlock,
    learning_rate_factor,
    noise_blocks,
    probe_steps,
    ratio_interval,
    steps_ratio,
)
from ringmaster.features.target.trainer import PreconditionedNorm

BLOCKS = st.lists(st.builds(NoiseBlock, signal=st.floats(1e-6, 1e6), noise=st.floats(0, 1e9)), min_size=1, max_size=20)
SIZES = st.sampled_from([4, 16, 64, 256])


def measured_on_a_quadratic(*, curvature, place, spread, part_size, size, num_steps, seed=0):
    """Gradients of .5 x^T H x at a place, of samples whose gradients have independent deviations of `spread`."""
    draw, expected = np.random.default_rng(seed), curvature * place
    for step in range(num_steps):
        samples = expected + spread * draw.standard_normal((size, len(place)))
        part, whole = samples[:part_size].mean(0), samples.mean(0)
        yield GradientNoise.of(step, part=part @ part, whole=whole @ whole, part_size=part_size, size=size)


@pytest.mark.parametrize("part_size", [4, 8])
def test_signal_and_noise_are_those_of_the_closed_form(part_size):
    curvature, place = np.linspace(0.1, 2, 50), np.ones(50)
    signal, noise = float(((curvature * place) ** 2).sum()), 50 * 3.0**2

    (block,) = noise_blocks(
        [
            *measured_on_a_quadratic(
                curvature=curvature, place=place, spread=3.0, part_size=part_size, size=16, num_steps=2000
            )
        ],
        most=1,
    )

    assert block.signal / 2000 == pytest.approx(signal, rel=0.05)
    assert block.noise / 2000 == pytest.approx(noise, rel=0.02)
    assert block.scale == pytest.approx(noise / signal, rel=0.05)


def test_gradients_without_noise_have_none():
    measured = [GradientNoise.of(0, part=4.0, whole=4.0, part_size=8, size=16)]
    assert noise_blocks(measured) == [NoiseBlock(signal=4.0, noise=0.0)]


def test_a_signal_is_never_less_than_a_thousandth_of_the_gradient():
    (block,) = noise_blocks([GradientNoise.of(0, part=100.0, whole=10.0, part_size=8, size=16)])
    assert block == NoiseBlock(signal=pytest.approx(0.01), noise=pytest.approx(1440.0))


def test_blocks_hold_every_measurement_once():
    measured = [GradientNoise(step=step, signal=1.0, noise=float(step), num_samples=16) for step in range(47)]
    blocks = noise_blocks(measured)
    assert len(blocks) == 20 and sum(block.noise for block in blocks) == sum(range(47))
    assert noise_blocks([]) == []


@given(BLOCKS, SIZES, SIZES)
def test_no_noise_makes_a_prediction_leave_its_bounds_or_its_interval_narrower_than_its_error(blocks, size, new_size):
    least, most = sorted((size / new_size, 1.0))
    low, high = ratio_interval(blocks, size=size, new_size=new_size)
    ratio = steps_ratio(blocks, size=size, new_size=new_size)
    gain = learning_rate_factor(blocks, size=size, new_size=new_size)

    assert least * (1 - 1e-9) <= ratio <= most * (1 + 1e-9)
    error = math.exp(TWO_SIDED_90 * FORMULA_ERROR) * (1 - 1e-9)
    assert low * error <= ratio <= high / error and high / low < 1e3
    assert min(1.0, new_size / size) * (1 - 1e-9) <= gain <= max(1.0, new_size / size) * (1 + 1e-9)
    assert learning_rate_factor(blocks, size=size, new_size=new_size, rule=SQUARE_ROOT) == math.sqrt(new_size / size)


def test_blocks_that_differ_and_noise_that_may_rise_widen_the_interval():
    def width(*scales):
        blocks = [NoiseBlock(signal=1.0, noise=scale) for scale in scales]
        low, high = ratio_interval(blocks, size=16, new_size=64)
        return math.log(high / low)

    known = 2 * TWO_SIDED_90 * FORMULA_ERROR
    assert width(0.0) == pytest.approx(known)  # without noise, none can rise
    assert width(*[0.0] * 10, *[1e9] * 10) > known * 1.01
    assert width(16.0) > known * 1.1


@pytest.mark.parametrize(("scale", "ratio", "gain"), [(0.0, 1.0, 1.0), (16.0, 0.625, 1.6), (1e12, 0.25, 4.0)])
def test_a_larger_batch_saves_steps_where_gradients_are_noisy(scale, ratio, gain):
    blocks = [NoiseBlock(signal=1.0, noise=scale)]
    assert steps_ratio(blocks, size=16, new_size=64) == pytest.approx(ratio)
    assert learning_rate_factor(blocks, size=16, new_size=64) == pytest.approx(gain)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_gradients_count_as_the_optimizer_scales_them(optimizer):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
    optimizers = {
        "adamw": torch.optim.AdamW(weights, lr=0.1, betas=(0.9, 0.95)),
        "sgd": torch.optim.SGD(weights, lr=0.1),
    }
    seen = [torch.zeros_like(weight) for weight in weights]
    for _ in range(3):
        for weight, second in zip(weights, seen, strict=True):
            weight.grad = torch.randn_like(weight)
            second.mul_(0.95).add_(0.05 * weight.grad**2)
        optimizers[optimizer].step()
    expected = 0.0
    for weight, second in zip(weights, seen, strict=True):
        weight.grad = torch.randn_like(weight)
        root = (second / (1 - 0.95**3)).sqrt()
        scaling = 1 / (root + DAMPING * root.square().mean().sqrt()) if optimizer == "adamw" else 1.0
        expected += float(((scaling * weight.grad) ** 2).sum())

    norm = PreconditionedNorm(weights, optimizers[optimizer], device="cpu")

    assert float(norm.squared()) == pytest.approx(expected, rel=1e-5)


def test_a_probe_is_a_tenth_and_some_steps_at_least():
    assert [probe_steps(num_steps) for num_steps in (5, 100, 1000)] == [5, 20, 100]
