"""Whisper against transformers' Seq2SeqTrainer, its word error rate too, and under every technique that divides."""

from dataclasses import replace

import pytest

from ringmaster.techniques import EvaluationSpec
from tests.integration.speech.transformers_trainer import NUM_ROWS, NUM_STEPS, error_rate, trained_by_transformers
from tests.integration.techniques.test_conformance import LARGEST_DIFFERENCE, PARALLEL
from tests.integration.workbench import ADAMW, SGD, SINGLE, largest_difference
from tests.matrix import matrix
from tests.recordings import spec_of, whisper_processor, write_recordings
from tests.speech_models import WHISPER

RATES = ("word_error_rate", "character_error_rate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    result = tmp_path_factory.mktemp("speech")
    write_recordings(result / "recordings", number=24)
    write_recordings(result / "others", number=6)
    whisper_processor(result / "processor")
    return result


@pytest.fixture(scope="module")
def data(folder):
    held_out = str(folder / "others" / "rows.jsonl")
    return spec_of(folder / "recordings" / "rows.jsonl", folder / "processor", held_out_path=held_out)


@pytest.mark.full  # the techniques below train it in make test
def test_a_whisper_learns_what_transformers_trainer_teaches(bench, folder, data, tmp_path):
    evaluation = EvaluationSpec(metrics=("loss", *RATES), max_new_tokens=20)
    job = bench.job(
        WHISPER,
        data=data,
        optimizer=replace(ADAMW, lr=1e-2),
        num_steps=NUM_STEPS,
        global_batch_size=NUM_ROWS,
        evaluation=evaluation,
    )
    trained = bench.train(job, SINGLE, tmp_path / "own")
    theirs = trained_by_transformers(bench, job, tmp_path / "theirs", processor=folder / "processor", lr=1e-2)
    assert trained.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert theirs.losses[-1] < 0.8 * theirs.losses[0]
    assert largest_difference(trained.weights, {name: theirs.weights[name] for name in trained.weights}) < 1e-4
    tokens = theirs.predictions.masked_fill(theirs.predictions < 0, theirs.tokenizer.pad_token_id)
    texts = theirs.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert any(texts)
    pairs = [*zip(texts, theirs.texts, strict=True)]
    metrics = trained.outcome.result.metrics
    wanted = error_rate([(own.split(), true.split()) for own, true in pairs])
    assert metrics["word_error_rate"] == pytest.approx(wanted)
    assert metrics["character_error_rate"] == pytest.approx(error_rate([(own.strip(), true) for own, true in pairs]))


@pytest.mark.parametrize("optimizer", matrix([SGD, ADAMW], quick=[SGD], ids=["sgd", "adamw"]))
@pytest.mark.parametrize("layout", matrix(PARALLEL, quick=PARALLEL[:1]))
def test_every_technique_trains_the_same(bench, data, tmp_path, layout, optimizer):
    metrics = ("loss",) if "fsdp" in layout.technique else ("loss", *RATES)
    job = bench.job(
        WHISPER,
        data=data,
        optimizer=optimizer,
        global_batch_size=4,
        evaluation=EvaluationSpec(metrics=metrics, max_new_tokens=6),
    )
    assert bench.facts(job).whole_batch == ""
    trained, expected = bench.train(job, layout, tmp_path), bench.reference(job)
    assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE[job.optimizer.name]
    assert trained.losses == pytest.approx(expected.losses, rel=1e-6)
    assert trained.outcome.result.metrics == pytest.approx(expected.outcome.result.metrics, rel=1e-5)
