"""The loss of CTC models is that of transformers, and each row's is its own."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from ringmaster.features.speech.ctc import Ctc
from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.loss import LossInputs
from ringmaster.techniques.training.bound_loss import bind_loss
from tests.unit.compat.test_transformers import SPEECH

SPEC = ModelSpec(architecture="Wav2Vec2ForCTC")
NUM_SAMPLES = (400, 300, 350)


def model_of(**config):
    torch.manual_seed(0)
    return Wav2Vec2ForCTC(Wav2Vec2Config(**{**SPEECH, "mask_time_prob": 0.0, **config})).eval()


def batch_of(*labels):
    draw = torch.Generator().manual_seed(0)
    mask = torch.zeros(len(labels), max(NUM_SAMPLES), dtype=torch.long)
    for row, number in enumerate(NUM_SAMPLES[: len(labels)]):
        mask[row, :number] = 1
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(each) for each in labels], True, -100)
    wave = torch.randn(mask.shape, generator=draw) * mask
    return {"input_values": wave, "attention_mask": mask, "labels": padded}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("has_mask", [True, False])
def test_the_loss_is_that_of_transformers(reduction, has_mask):
    model, batch = model_of(ctc_loss_reduction=reduction), batch_of([1, 2, 2, 3], [4], [3, 1])
    if not has_mask:
        del batch["attention_mask"]
    loss = bind_loss(None, model, SPEC)
    output = model(**loss.forward_inputs(batch))
    assert "labels" not in loss.forward_inputs(batch)
    total, count = loss(output, batch)
    assert count == 3
    theirs = model(**batch).loss
    assert float(total / count if reduction == "mean" else total) == pytest.approx(float(theirs), rel=1e-6)
    by_row, _ = loss.by_row(output, batch)
    for row in range(3):
        alone = {name: value[row : row + 1] for name, value in batch.items()}
        assert float(by_row[row]) == pytest.approx(float(model(**alone).loss), rel=1e-5)


@pytest.mark.parametrize("ignores", [True, False])
def test_a_text_without_enough_frames_counts_as_nothing_or_is_infinite(ignores):
    model, batch = model_of(ctc_loss_reduction="sum", ctc_zero_infinity=ignores), batch_of([1] * 30)
    loss = bind_loss(None, model, SPEC)
    total, _ = loss(model(**loss.forward_inputs(batch)), batch)
    assert float(total) == (0 if ignores else torch.inf)


@pytest.mark.parametrize(
    ("labels", "config", "says"),
    [
        (None, {"ctc_loss_reduction": "mean"}, "reads logits .* To fix: train a model such as Wav2Vec2ForCTC"),
        (
            torch.ones(1, 2),
            {"ctc_loss_reduction": "none"},
            "ctc_loss_reduction is 'none'. To fix: set it to mean or sum",
        ),
    ],
)
def test_what_is_no_speech_is_refused(labels, config, says):
    inputs = LossInputs(
        output=None,
        batch={},
        logits=torch.zeros(1, 4, 5),
        labels=labels,
        totals={},
        reference=None,
        model=SimpleNamespace(config=SimpleNamespace(**config)),
    )
    with pytest.raises(ValueError, match=says):
        Ctc().row_sums(inputs)
