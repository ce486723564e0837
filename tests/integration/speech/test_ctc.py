"""CTC models of speech against transformers' Trainer, and under every technique that divides a batch."""

from dataclasses import replace

import pytest

from ringmaster.techniques import EvaluationSpec
from tests.integration.speech.transformers_trainer import NUM_ROWS, NUM_STEPS, error_rate, trained_by_transformers
from tests.integration.techniques.test_conformance import LARGEST_DIFFERENCE, PARALLEL
from tests.integration.workbench import ADAMW, SGD, SINGLE, largest_difference
from tests.matrix import matrix
from tests.recordings import ctc_processor, spec_of, write_recordings
from tests.speech_models import HUBERT, WAV2VEC2

DRAWN = {"mask_time_prob": 0.1, "mask_time_length": 3, "mask_feature_prob": 0.1, "mask_feature_length": 2}
SMALL_SGD = replace(SGD, lr=1e-4)
GROUP_NORM = {"feat_extract_norm": "group"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    result = tmp_path_factory.mktemp("speech")
    write_recordings(result / "recordings", number=24)
    write_recordings(result / "others", number=6)
    ctc_processor(result / "processor")
    ctc_processor(result / "without mask", has_mask=False)
    return result


def data_of(folder, processor="processor"):
    held_out = str(folder / "others" / "rows.jsonl")
    return spec_of(folder / "recordings" / "rows.jsonl", folder / processor, held_out_path=held_out)


def with_config(model, **config):
    return replace(model, config={**model.config, **config})


@pytest.mark.parametrize(
    ("model", "processor", "optimizer"),
    matrix(
        [
            (WAV2VEC2, "processor", ADAMW),
            (HUBERT, "processor", ADAMW),
            (with_config(WAV2VEC2, **GROUP_NORM), "without mask", SMALL_SGD),
            (with_config(WAV2VEC2, ctc_loss_reduction="sum"), "processor", replace(SGD, lr=1e-5)),
        ],
        quick=[],
        ids=["wav2vec2", "hubert", "without a mask", "sum"],
    ),
)
def test_a_ctc_model_learns_what_transformers_trainer_teaches(bench, folder, tmp_path, model, processor, optimizer):
    job = bench.job(
        model,
        data=data_of(folder, processor),
        optimizer=optimizer,
        num_steps=NUM_STEPS,
        global_batch_size=NUM_ROWS,
        evaluation=EvaluationSpec(metrics=("loss", "word_error_rate", "character_error_rate")),
    )
    trained = bench.train(job, SINGLE, tmp_path / "own")
    # The sum of a batch, which transformers divides by nothing.
    factor = NUM_ROWS if model.config["ctc_loss_reduction"] == "sum" else 1
    theirs = trained_by_transformers(
        bench,
        job,
        tmp_path / "theirs",
        processor=folder / processor,
        lr=optimizer.lr / factor,
        rows_predicted=NUM_ROWS if processor == "without mask" else 1,  # padding counts as speech without a mask
    )
    assert trained.losses == pytest.approx([loss / factor for loss in theirs.losses], rel=1e-5)
    assert factor > 1 or theirs.losses[-1] < 0.8 * theirs.losses[0]  # sums depend on the lengths of texts
    assert largest_difference(trained.weights, {name: theirs.weights[name] for name in trained.weights}) < 1e-4
    tokenizer = theirs.tokenizer
    texts = tokenizer.batch_decode([each[each[:, 0] > -100].argmax(-1) for each in theirs.predictions])
    wanted = error_rate([(own, true) for own, true in zip(texts, theirs.texts, strict=True)])
    assert trained.outcome.result.metrics["character_error_rate"] == pytest.approx(wanted)


@pytest.mark.parametrize("optimizer", matrix([SMALL_SGD, ADAMW], quick=[SMALL_SGD], ids=["sgd", "adamw"]))
@pytest.mark.parametrize("layout", matrix(PARALLEL, quick=PARALLEL[3:4]))
def test_every_technique_trains_the_same(bench, folder, tmp_path, layout, optimizer):
    model = with_config(WAV2VEC2, hidden_dropout=0.1, **DRAWN)
    job = bench.job(model, data=data_of(folder), optimizer=optimizer, global_batch_size=4)
    assert bench.facts(job).whole_batch == ""
    trained, expected = bench.train(job, layout, tmp_path), bench.reference(job)
    assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE[job.optimizer.name]
    assert trained.losses == pytest.approx(expected.losses, rel=1e-6)
    assert trained.outcome.result.metrics == pytest.approx(expected.outcome.result.metrics, rel=1e-6)
