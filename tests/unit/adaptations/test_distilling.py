from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from ringmaster.features.adaptation.trainer import Teacher, distilled_loss, softened_divergence
from ringmaster.techniques import AdaptationSpec
from ringmaster.techniques.metric import IGNORED
from ringmaster.techniques.training.bound_loss import BoundLoss, classification_loss, next_token_loss

NEXT_TOKEN = BoundLoss(compute=next_token_loss, inputs=frozenset({"input_ids"}), shifted=True)
ROWS, TOKENS, WORDS = 4, 5, 7


def a_teacher(num_words: int = WORDS) -> Teacher:
    torch.manual_seed(1)

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WORDS, num_words)

        def forward(self, input_ids):
            return {"logits": self.table(input_ids)}

    return Teacher(model=Table(), loss=NEXT_TOKEN, autocast=nullcontext)


def a_batch():
    torch.manual_seed(2)
    tokens = torch.randint(WORDS, (ROWS, TOKENS))
    labels = tokens.clone()
    labels[0, 2:] = IGNORED
    return {"input_ids": tokens, "labels": labels}, torch.randn(ROWS, TOKENS, WORDS, requires_grad=True)


def loss_with(weight: float, temperature: float = 2.0, teacher: Teacher | None = None) -> BoundLoss:
    said = AdaptationSpec(kind="distilled", teacher="t", weight=weight, temperature=temperature)
    return distilled_loss(NEXT_TOKEN, teacher or a_teacher(), said)


def test_without_weight_it_is_the_plain_loss():
    batch, logits = a_batch()
    total, count = loss_with(0.0)({"logits": logits}, batch)
    expected, number = NEXT_TOKEN({"logits": logits}, batch)
    assert torch.equal(total, expected)
    assert count == number == ROWS * (TOKENS - 1) - 3


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_rest_is_the_divergence_from_the_softened_teacher(temperature):
    batch, logits = a_batch()
    total, _ = loss_with(1.0, temperature)({"logits": logits}, batch)
    taught = a_teacher().model(batch["input_ids"])["logits"]
    p, q = (functional.softmax(each / temperature, -1) for each in (taught, logits))
    each = (p * (p / q).log()).sum(-1)[:, :-1]
    counted = batch["labels"][:, 1:] != IGNORED
    assert total.item() == pytest.approx(temperature**2 * each[counted].sum().item(), rel=1e-5)


def test_a_student_like_its_teacher_has_nothing_to_learn_from_it():
    batch, _ = a_batch()
    taught = a_teacher().model(batch["input_ids"])["logits"].detach().requires_grad_()
    total, _ = loss_with(1.0)({"logits": taught}, batch)
    total.backward()
    assert total.item() == pytest.approx(0.0, abs=1e-6)
    assert taught.grad.abs().max() < 1e-6


def test_parts_of_a_batch_add_up_to_the_whole():
    batch, logits = a_batch()
    loss = loss_with(0.5)
    whole, count = loss({"logits": logits}, batch)
    halves = [loss({"logits": logits[i : i + 2]}, {k: v[i : i + 2] for k, v in batch.items()}) for i in (0, 2)]
    assert sum(part.item() for part, _ in halves) == pytest.approx(whole.item(), rel=1e-6)
    assert sum(int(number) for _, number in halves) == int(count)


def test_the_teacher_learns_nothing():
    batch, logits = a_batch()
    teacher = a_teacher()
    loss_with(0.5, teacher=teacher)({"logits": logits}, batch)[0].backward()
    assert all(parameter.grad is None for parameter in teacher.model.parameters())


def test_what_cannot_be_compared_is_refused():
    batch, logits = a_batch()
    with pytest.raises(ValueError, match="the same vocabulary"):
        loss_with(0.5, teacher=a_teacher(num_words=WORDS + 1))({"logits": logits}, batch)
    own = BoundLoss(compute=lambda *_: (torch.zeros(()), 1), inputs=None)
    with pytest.raises(ValueError, match="not a cross entropy"):
        distilled_loss(own, a_teacher(), AdaptationSpec(kind="distilled", teacher="t"))
    regression = BoundLoss(compute=classification_loss, inputs=frozenset({"input_ids"}))
    loss = distilled_loss(regression, a_teacher(), AdaptationSpec(kind="distilled", teacher="t"))
    one = {"logits": torch.zeros(ROWS, TOKENS, WORDS)}
    with pytest.raises(ValueError, match="distill a classifier"):
        loss(one, {**batch, "labels": torch.zeros(ROWS, TOKENS, WORDS)})


def test_positions_that_are_not_counted_weigh_nothing():
    divergence = partial(softened_divergence, temperature=1.0)
    z, v = torch.randn(2, 3, WORDS), torch.randn(2, 3, WORDS)
    counted = torch.tensor([[True, True, False], [False, False, False]])
    assert divergence(z, v, counted=counted) == pytest.approx(
        float(divergence(z[0, :2], v[0, :2], counted=torch.ones(2, dtype=torch.bool))), rel=1e-5
    )
