"""Losses of tokens: their values and gradients are those of their formulas."""

import math

import pytest
import torch

from ringmaster.techniques.serving.token_losses import LOSSES

L, Q, A = -1.0, -1.5, 2.0
RATIO = math.exp(L - Q)


@pytest.mark.parametrize(
    ("name", "config", "value", "gradient"),
    [
        ("cross_entropy", {}, -0.5 * L, -0.5),
        ("importance_sampling", {}, -RATIO * A, -RATIO * A),
        ("ppo", {}, -1.2 * A, 0.0),
        ("ppo", {"clip_high_threshold": 2.0}, -RATIO * A, -RATIO * A),
        ("cispo", {}, -1.2 * A * L, -1.2 * A),
        ("cispo", {"clip_high_threshold": 2.0}, -RATIO * A * L, -RATIO * A),
        ("dro", {"beta": 0.5}, -(L * A - 0.25 * (L - Q) ** 2), -(A - 0.5 * (L - Q))),
    ],
)
def test_values_and_gradients(name, config, value, gradient):
    loss = LOSSES[name]
    logprobs = torch.tensor([L], requires_grad=True)
    inputs = {"weights": torch.tensor([0.5]), "logprobs": torch.tensor([Q]), "advantages": torch.tensor([A])}
    result = loss.compute(logprobs, inputs, {**loss.config, **config}).sum()
    result.backward()
    assert (float(result), float(logprobs.grad)) == pytest.approx((value, gradient), rel=1e-6)


def test_a_negative_advantage_is_clipped_from_below():
    loss = LOSSES["ppo"]
    inputs = {"logprobs": torch.tensor([0.0]), "advantages": torch.tensor([-1.0])}
    assert float(loss.compute(torch.tensor([-1.0]), inputs, loss.config)) == pytest.approx(0.8)
