"""GRPO's advantages and losses against their formulas, on given completions."""

import math
from dataclasses import replace

import pytest
import torch

from ringmaster.features.on_policy.loss import ADVANTAGES
from ringmaster.techniques.loss import LossInputs, loss_function

REWARDS = {"rewards": ["my_rewards:length"], "num_generations": 3, "max_new_tokens": 5}


def grpo(**options):
    return loss_function("grpo", {**REWARDS, **options})


@pytest.mark.parametrize(("scale", "divisor"), [("none", 1.0), ("group", 2.0001), ("batch", None)])
def test_advantages(scale, divisor):
    """The standard deviation of 1, 3, 5 is 2; rewards that are missing do not count."""
    rewards = torch.tensor([[1.0, 3.0, 5.0]])
    every = torch.tensor([1.0, 3.0, 5.0, 11.0, 19.0, math.nan, 19.0])
    divisor = divisor if scale != "batch" else float(every[~every.isnan()].std()) + 1e-4
    found = grpo(scale_rewards=scale).advantages(rewards, of_batch=every)
    assert torch.allclose(found, torch.tensor([[-2.0, 0.0, 2.0]]) / divisor)


def test_completions_without_a_reward_have_no_advantage():
    rewards = torch.tensor([[1.0, math.nan, 3.0], [math.nan] * 3])
    found = grpo().advantages(rewards, of_batch=rewards)
    std = math.sqrt(2.0) + 1e-4
    assert torch.allclose(found, torch.tensor([[-1 / std, 0.0, 1 / std], [0.0] * 3]))


def inputs_of(*, reference=None):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, 11, generator=draw, requires_grad=True)
    labels = torch.randint(11, (2, 3, 7), generator=draw)
    for row in range(2):
        for place in range(3):
            labels[row, place, : 2 + row] = -100
            labels[row, place, 4 + place + row :] = -100
    advantages = torch.randn(2, 3, generator=draw)
    batch = {"labels": labels, ADVANTAGES: advantages}
    return LossInputs(output=None, batch=batch, logits=logits, labels=labels, totals={}, reference=reference)


@pytest.mark.parametrize(("beta", "is_corrected"), [(0.0, True), (0.3, True), (0.3, False)])
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo", "dr_grpo"])
def test_losses(loss_type, beta, is_corrected):
    """The gradient is that of -A log p and of the divergence, averaged as the type says."""
    draw = torch.Generator().manual_seed(1)
    reference = -torch.rand(2, 3, 7, generator=draw) if beta else None
    given = inputs_of(reference=reference)
    assert given.logits is not None
    sums, counts = grpo(loss_type=loss_type, beta=beta, use_bias_correction_kl=is_corrected, temperature=0.5).row_sums(
        given
    )
    mean = sums.sum() / counts.sum()
    (gradient,) = torch.autograd.grad(mean, given.logits)

    expected, total, num_tokens = 0.0, 0.0, 0
    log_p = (given.logits / 0.5).log_softmax(-1)
    for row in range(2):
        for place in range(3):
            tokens = [t for t in range(7) if given.labels[row, place, t] != -100]
            summed = value = 0.0
            for t in tokens:
                own = log_p[row, place, t, given.labels[row, place, t]]
                advantage = given.batch[ADVANTAGES][row, place]
                term, its = -advantage * own, -advantage  # the ratio is 1, with the gradient of log p
                if beta:
                    log_q = reference[row, place, t] - own
                    divergence = log_q.exp() - log_q - 1
                    corrected = divergence + divergence.detach() * own if is_corrected else divergence
                    term, its = term + beta * corrected, its + beta * divergence.detach()
                summed, value = summed + term, value + its
            scale = {"grpo": 1 / len(tokens), "dr_grpo": 1 / 5}.get(loss_type, 1.0)
            expected, total, num_tokens = expected + summed * scale, total + value * scale, num_tokens + len(tokens)
    divisor = num_tokens if loss_type in ("dapo", "bnpo") else 6
    (wanted,) = torch.autograd.grad(expected / divisor, given.logits)
    assert float(mean.detach()) == pytest.approx(float(total) / divisor, rel=1e-5, abs=1e-6)
    assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-6)
    assert gradient.abs().max() > 1e-3


def test_a_batch_may_be_divided():
    given = inputs_of()
    loss = grpo(loss_type="dapo")
    sums, counts = loss.row_sums(given)
    alone = replace(
        given,
        logits=given.logits[1:],
        labels=given.labels[1:],
        batch={name: value[1:] for name, value in given.batch.items()},
    )
    assert torch.equal(loss.row_sums(alone)[0], sums[1:])
    assert torch.equal(loss.row_sums(alone)[1], counts[1:])


@pytest.mark.parametrize("scale", ["none", "batch"])
def test_rloo_compares_a_completion_with_the_others_of_its_prompt(scale):
    rewards = torch.tensor([[1.0, 3.0, 5.0], [0.0, math.nan, 4.0], [math.nan, 7.0, math.nan]])
    plain = torch.tensor([[-3.0, 0.0, 3.0], [-4.0, 0.0, 4.0], [0.0, 0.0, 0.0]])
    known = torch.tensor([-3.0, 0.0, 3.0, -4.0, 4.0])
    expected = plain if scale == "none" else plain / (float(known.std()) + 1e-4)
    found = grpo(loss_type="rloo", scale_rewards=scale).advantages(rewards, of_batch=rewards.flatten())
    assert torch.allclose(found, expected)


def test_rloo_is_a_policy_gradient_of_whole_completions():
    draw = torch.Generator().manual_seed(1)
    reference = -torch.rand(2, 3, 7, generator=draw)
    given = inputs_of(reference=reference)
    sums, counts = grpo(loss_type="rloo", beta=0.3, temperature=0.5).row_sums(given)
    assert counts.tolist() == [3, 3]
    mean = sums.sum() / counts.sum()
    (gradient,) = torch.autograd.grad(mean, given.logits, retain_graph=True)
    is_learnt = given.labels != -100
    log_p = (given.logits / 0.5).log_softmax(-1).gather(-1, given.labels.clamp(min=0).unsqueeze(-1))[..., 0]
    divergence = ((log_p.detach() - reference) * is_learnt).sum(-1)
    others = (divergence.sum(-1, keepdim=True) - divergence) / 2
    advantages = given.batch[ADVANTAGES] - 0.3 * (divergence - others)
    (wanted,) = torch.autograd.grad(-(advantages * (log_p * is_learnt).sum(-1)).mean(), given.logits)
    assert float(mean.detach()) == pytest.approx(-float(advantages.mean()), rel=1e-5, abs=1e-6)
    assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-6)
    assert gradient.abs().max() > 1e-3


def test_a_step_whose_completions_are_all_masked_has_the_mean_0():
    given = inputs_of()
    given.labels.fill_(-100)
    sums, counts = grpo(mask_truncated_completions=True).row_sums(given)
    assert float(sums.sum() / counts.sum()) == 0.0


def test_scales_that_rloo_does_not_have_are_refused():
    for options in ({"scale_rewards": "group"}, {"scale_rewards": "batch", "beta": 0.1}):
        with pytest.raises(ValueError, match=r"scale_rewards \w+ is not for loss_type rloo.*To fix: write"):
            grpo(loss_type="rloo", **options)


def test_options_are_checked():
    with pytest.raises(ValueError, match="rewards is missing"):
        loss_function("grpo", {})
    with pytest.raises(ValueError, match="reward_weights has 2 numbers for 1 rewards"):
        grpo(reward_weights=[1.0, 2.0])
    for wrong in ({"rewards": "my_rewards:length"}, {"rewards": ["length"]}, {"num_generations": 1}, {"beta": -1}):
        with pytest.raises(ValueError, match="To fix"):
            grpo(**wrong)
    assert not grpo().compares
    assert grpo(beta=0.1).compares
