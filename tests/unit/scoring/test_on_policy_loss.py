"""On-policy distillation on given completions, against the formulas and TRL's function."""

import pytest
import torch

from ringmaster.techniques.loss import LossInputs, loss_function
from ringmaster.techniques.metric import IGNORED

NAME = "on-policy-distillation"


def inputs_of(loss, *, seed=0):
    draw = torch.Generator().manual_seed(seed)
    logits, theirs = (4 * torch.randn(3, 1, 6, 11, generator=draw) for _ in range(2))
    labels = torch.randint(11, (3, 1, 6), generator=draw)
    labels[:, :, :2] = IGNORED
    labels[1, :, 4:] = IGNORED
    logits.requires_grad_()
    reference = loss.compared(theirs, labels)
    given = LossInputs(output=None, batch={}, logits=logits, labels=labels, totals={}, reference=reference)
    return given, theirs


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_divergence_is_trls(beta, temperature):
    trainer = pytest.importorskip("trl.experimental.gkd", reason="no trl, whose function this is").GKDTrainer
    loss = loss_function(NAME, {"beta": beta, "temperature": temperature})
    given, theirs = inputs_of(loss)
    sums, counts = loss.row_sums(given)
    expected = trainer.generalized_jsd_loss(
        given.logits[:, 0], theirs[:, 0], labels=given.labels[:, 0], beta=beta, temperature=temperature
    )
    assert float(sums.sum() / counts.sum()) == pytest.approx(float(expected), rel=1e-5)
    assert counts.tolist() == [4, 2, 4]
    (own,) = torch.autograd.grad(sums.sum() / counts.sum(), given.logits)
    (other,) = torch.autograd.grad(expected, given.logits)
    assert torch.allclose(own, other, atol=1e-6)


def test_the_policy_gradient_has_the_reverse_divergence_of_each_token_as_its_advantage():
    loss = loss_function(NAME, {"loss_type": "policy_gradient", "temperature": 0.7})
    given, theirs = inputs_of(loss)
    sums, counts = loss.row_sums(given)
    log_p, log_q = ((each / 0.7).log_softmax(-1) for each in (given.logits, theirs))
    is_counted = given.labels != IGNORED
    own, other = (
        each.gather(-1, given.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * is_counted for each in (log_p, log_q)
    )
    assert torch.allclose(sums, (own - other).sum((1, 2)), atol=1e-5)
    (found,) = torch.autograd.grad(sums.sum(), given.logits)
    (expected,) = torch.autograd.grad(-((other - own).detach() * own).sum(), given.logits)
    assert torch.allclose(found, expected, atol=1e-5)
    assert counts.tolist() == [4, 2, 4]


def test_a_model_of_the_teachers_probabilities_has_the_loss_0():
    for options in ({}, {"beta": 0.0}, {"beta": 0.4}, {"loss_type": "policy_gradient"}):
        loss = loss_function(NAME, options)
        given, _ = inputs_of(loss)
        same = LossInputs(**{**vars(given), "reference": loss.compared(given.logits.detach(), given.labels)})
        assert loss.row_sums(same)[0].abs().max() < 1e-5


def test_wrong_options_and_other_vocabularies_are_refused():
    for wrong in (
        {"beta": 1.5},
        {"beta": -0.1},
        {"temperature": 0},
        {"loss_type": "jsd"},
        {"teacher": 3},
        {"lmbda": 2},
    ):
        with pytest.raises(ValueError, match="To fix"):
            loss_function(NAME, wrong)
    with pytest.raises(ValueError, match="lmbda is below 1, and loss_type policy_gradient is for completions"):
        loss_function(NAME, {"lmbda": 0.5, "loss_type": "policy_gradient"})
    loss = loss_function(NAME, {})
    given, theirs = inputs_of(loss)
    with pytest.raises(ValueError, match="the teacher has a vocabulary of 12 tokens, and the model one of 11"):
        loss.row_sums(LossInputs(**{**vars(given), "reference": torch.zeros(3, 1, 6, 12)}))
    with pytest.raises(ValueError, match=r"no completions\. To fix"):
        loss.row_sums(LossInputs(**{**vars(given), "labels": given.labels[:, 0], "reference": theirs}))
