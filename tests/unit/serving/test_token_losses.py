"""Losses of tokens: their values and gradients are those of their formulas."""

import math

import pytest
import torch

from ringmaster.features.endpoint.compute.requests import LossRequest, TokenRow
from ringmaster.features.endpoint.compute.token_losses import LOSSES, loss_obstacle

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
    assert (result.item(), logprobs.grad.item()) == pytest.approx((value, gradient), rel=1e-6)


def test_a_negative_advantage_is_clipped_from_below():
    loss = LOSSES["ppo"]
    inputs = {"logprobs": torch.tensor([0.0]), "advantages": torch.tensor([-1.0])}
    assert float(loss.compute(torch.tensor([-1.0]), inputs, loss.config)) == pytest.approx(0.8)


def test_thresholds_of_a_token_take_the_place_of_the_config():
    inputs = {"logprobs": torch.full((2,), Q), "advantages": torch.full((2,), A)}
    thresholds = {"clip_high_threshold": torch.tensor([1.1, 9.0])}
    result = LOSSES["ppo"].values(torch.full((2,), L), {**inputs, **thresholds}, {}, lengths=[2])
    assert result.tolist() == pytest.approx([-1.1 * A, -RATIO * A])


def gspo_inputs(lengths, mask=None):
    total = sum(lengths)
    draw = torch.Generator().manual_seed(0)
    return {
        "logprobs": -torch.rand(total, generator=draw),
        "advantages": torch.randn(total, generator=draw),
        "sequence_ratio_mask": torch.ones(total) if mask is None else mask,
    }


def test_gspo_has_one_ratio_for_a_row_and_the_gradient_of_each_token():
    lengths, mask = [3, 2], torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    inputs = gspo_inputs(lengths, mask)
    logprobs = (-torch.rand(5, generator=torch.Generator().manual_seed(1))).requires_grad_()
    config = {"clip_low_threshold": 0.0, "clip_high_threshold": 100.0}
    LOSSES["gspo"].values(logprobs, inputs, config, lengths=lengths).sum().backward()
    log_ratios = (logprobs - inputs["logprobs"]).detach()
    ratios = [math.exp(log_ratios[1:3].mean())] * 3 + [math.exp(log_ratios[3:].mean())] * 2
    expected = [-ratio * advantage for ratio, advantage in zip(ratios, inputs["advantages"].tolist(), strict=True)]
    assert logprobs.grad.tolist() == pytest.approx(expected)


def test_gspo_drops_a_whole_row_beyond_the_thresholds():
    inputs = {**gspo_inputs([4]), "advantages": torch.ones(4)}
    logprobs = (inputs["logprobs"] + torch.tensor([0.5, 0.0, 0.0, 0.1])).requires_grad_()
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    loss = LOSSES["gspo"].values(logprobs, inputs, config, lengths=[4]).sum()
    loss.backward()
    assert loss.item() == pytest.approx(-4 * 1.1) and not logprobs.grad.any()


@pytest.mark.parametrize(
    ("change", "config", "reason"),
    [
        ({}, {}, "needs clip_low_threshold"),
        ({}, {"clip_low_threshold": 0.5}, "needs clip_high_threshold"),
        ({"sequence_ratio_mask": torch.zeros(3)}, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}, "no token"),
        ({"target_tokens": torch.ones(3, 2, dtype=torch.int64)}, {}, "of shape"),
        ({}, {"beta": 0.5}, "no setting 'beta'"),
    ],
)
def test_what_gspo_needs(change, config, reason):
    inputs = {"target_tokens": torch.ones(3, dtype=torch.int64), **gspo_inputs([3]), **change}
    row = TokenRow(tokens=(1, 2, 3), loss_inputs=inputs)
    assert reason in loss_obstacle(LossRequest(client="c", rows=(row,), loss="gspo", loss_config=config))
