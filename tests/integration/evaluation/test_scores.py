"""Scores by row: their sums equal an evaluation's, and literal cases are read as the model reads its data."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ringmaster.codec import to_json
from ringmaster.features.adaptation.rewriting import EvaluationOrder
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation.scores import Cases, score_models
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment, slots_of
from ringmaster.techniques import DataSpec, EvaluationSpec, Job
from ringmaster.techniques.data import prepare
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_model
from ringmaster.techniques.scoring.scored_rows import TrainingData
from tests.integration.evaluating import evaluate_model
from tests.integration.workbench import DIGITS, LLAMA, VIT, write_prose

DEVICE = Device(kind="cpu", index=0, name="cpu", memory_bytes=2**32, cores=())
METRICS = ("loss", "perplexity", "accuracy")
IMAGES = Job(
    name="digits",
    model=VIT,
    data=DIGITS,
    num_steps=1,
    global_batch_size=32,
    evaluation=EvaluationSpec(metrics=METRICS, max_batches=3),
)


def odd_or_even(row):
    return "odd" if int(row["labels"]) % 2 else "even"


def mean_of_all(output, batch):
    """A loss that mixes rows unless it gets one row at a time."""
    logits = output.logits.float()
    return (logits - logits.mean(0, keepdim=True)).square().sum() + logits.square().sum(), len(logits)


@pytest.fixture
def environment(bench, tmp_path):
    return GangEnvironment(server=bench.server, devices=(DEVICE,), cache_dir=tmp_path / "cache")


def exported(folder: Path, job: Job, *, cache_dir: Path, seed: int = 0) -> Path:
    prepared = prepare(job.data, cache_dir=cache_dir)
    model = build_model(job.model, data=prepared, seed=seed)
    export_model(folder, spec=job.model, model=model, state=model.state_dict(), prepared=prepared)
    return folder


@pytest.fixture
def words(tmp_path):
    file = write_prose(tmp_path / "words.txt", num_lines=80)
    data = DataSpec(path=str(file), seq_len=16, vocab_size=300, held_out=0.3)
    return replace(IMAGES, name="words", model=LLAMA, data=data, global_batch_size=4)


def evaluated(job, folder, data, environment):
    slot, cache_dir = slots_of([DEVICE])[0], str(environment.cache_dir)
    return evaluate_model(EvaluationOrder(job=job, model_dir=str(folder), data=data, slot=slot, cache_dir=cache_dir))


def test_sums_over_rows_are_what_an_evaluation_says_of_images(environment, tmp_path):
    folders = {f"m{i}": exported(tmp_path / f"m{i}", IMAGES, cache_dir=environment.cache_dir, seed=i) for i in (1, 2)}
    data = to_json(prepare(IMAGES.data, cache_dir=environment.cache_dir))
    slicers = {"parity": f"{__name__}:odd_or_even"}
    found = score_models(
        {**folders, "none": tmp_path / "none"},
        job=IMAGES,
        data=data,
        slicers=slicers,
        environment=environment,
        device=DEVICE,
    )
    assert set(found.faults) == {"none"}
    assert "holds no model" in found.faults["none"]
    for name, folder in folders.items():
        scores = found.scores[name]
        assert scores.kind == "classifier"
        assert scores.num_rows == 96
        assert {name: scores.rows(name).value for name in METRICS} == pytest.approx(
            evaluated(IMAGES, folder, data, environment), rel=1e-5
        )
        assert scores.probabilities.shape == (96, 10)
        assert np.allclose(scores.probabilities.sum(1), 1)
        assert ((scores.predictions == scores.columns["labels"]) == scores.sums["hits"].astype(bool)).all()
        odd = scores.columns["labels"] % 2 == 1
        assert (scores.slices["parity"] == np.where(odd, "odd", "even")).all()
    assert (found.scores["m1"].sums["loss_sums"] != found.scores["m2"].sums["loss_sums"]).any()


def test_sums_over_rows_are_what_an_evaluation_says_of_text(environment, words, tmp_path):
    folder = exported(tmp_path / "model", words, cache_dir=environment.cache_dir)
    data = to_json(prepare(words.data, cache_dir=environment.cache_dir))
    scores = score_models({"it": folder}, job=words, data=data, environment=environment, device=DEVICE).scores["it"]
    assert scores.kind == "causal"
    assert {name: scores.rows(name).value for name in METRICS} == pytest.approx(
        evaluated(words, folder, data, environment), rel=1e-5
    )
    assert (scores.num_tokens == 16).all()
    assert np.allclose(scores.log_probabilities, -scores.sums["loss_sums"])


def test_all_rows_are_scored_but_those_that_are_trained_on(environment, tmp_path):
    folder = exported(tmp_path / "model", IMAGES, cache_dir=environment.cache_dir)
    data = prepare(IMAGES.data, cache_dir=environment.cache_dir)
    asked = {"job": IMAGES, "data": to_json(data), "is_whole": True, "environment": environment, "device": DEVICE}
    whole = score_models({"it": folder}, **asked).scores["it"]
    assert whole.num_rows == data.num_samples + data.num_held_out
    trained_on = TrainingData(spec=IMAGES.data, prepared=to_json(data))
    fair = score_models({"it": folder}, **asked, trained_on=trained_on).scores["it"]
    assert fair.num_rows == data.num_held_out
    assert (fair.columns["labels"] == whole.columns["labels"][data.num_samples :]).all()
    fewer = score_models({"it": folder}, **asked, trained_on=trained_on, max_rows=7).scores["it"]
    assert (fewer.columns["labels"] == fair.columns["labels"][:7]).all()


def test_a_loss_of_ones_own_is_asked_row_by_row(environment, tmp_path):
    job = replace(IMAGES, loss=f"{__name__}:mean_of_all")
    folder = exported(tmp_path / "model", job, cache_dir=environment.cache_dir)
    data = to_json(prepare(job.data, cache_dir=environment.cache_dir))
    found = score_models(
        {"it": folder}, job=job, data=data, max_rows=5, keep_inputs=True, environment=environment, device=DEVICE
    )
    scores = found.scores["it"]
    assert (scores.num_rows, scores.sums["loss_counts"].tolist()) == (5, [1.0] * 5)
    # The same rows, given as literal columns, have the same scores.
    cases = Cases(columns=scores.inputs)
    again = score_models({"it": folder}, job=job, cases=cases, environment=environment, device=DEVICE).scores["it"]
    assert np.allclose(again.sums["loss_sums"], scores.sums["loss_sums"])
    assert np.allclose(again.probabilities, scores.probabilities)


def test_texts_of_any_length_get_the_log_probability_that_they_have_alone(environment, words, tmp_path):
    folder = exported(tmp_path / "model", words, cache_dir=environment.cache_dir)
    texts = ("bane", "banor dukan.", "fe", "fo banor dukan tan.", "ba")

    def scored(*some):
        found = score_models({"it": folder}, job=words, cases=Cases(texts=some), environment=environment, device=DEVICE)
        assert not found.faults
        return found.scores["it"].log_probabilities

    together = scored(*texts)
    alone = [scored(text)[0] for text in texts]
    assert together == pytest.approx(alone, rel=1e-5)
    assert all(math.isfinite(value) and value < 0 for value in together)


def test_texts_for_a_model_without_a_tokenizer_are_told_how_to_be_read(environment, tmp_path):
    folder = exported(tmp_path / "model", IMAGES, cache_dir=environment.cache_dir)
    found = score_models({"it": folder}, job=IMAGES, cases=Cases(texts=("a",)), environment=environment, device=DEVICE)
    assert "`encode`" in found.faults["it"]


# Evaluations over ranks are compared in test_metrics_over_ranks.py.
@pytest.mark.full
def test_a_model_that_two_devices_divide_has_the_scores_of_one(environment, tmp_path, words):
    latency = "latency/p50_s/tokens=8,new_tokens=2"
    job = replace(words, evaluation=replace(words.evaluation, metrics=("loss", "accuracy", latency)))
    folders = {
        f"m{seed}": exported(tmp_path / str(seed), words, cache_dir=tmp_path / "cache", seed=seed) for seed in (0, 1)
    }
    asked = {"job": job, "max_rows": 12, "environment": environment, "device": DEVICE}
    one = score_models(folders, **asked).scores
    two = score_models(folders, **asked, more_devices=(replace(DEVICE, index=1),)).scores
    for name in folders:
        for metric in ("loss", "accuracy"):
            assert two[name].rows(metric).value == pytest.approx(one[name].rows(metric).value, rel=1e-5)
        assert two[name].log_probabilities == pytest.approx(one[name].log_probabilities, rel=1e-5)
        assert two[name].num_rows == one[name].num_rows == 12
        assert two[name].rows(latency).value > 0


def test_a_model_that_cannot_be_divided_is_told(environment, tmp_path):
    folder = exported(tmp_path / "images", IMAGES, cache_dir=tmp_path / "cache")
    found = score_models(
        {"it": folder}, job=IMAGES, environment=environment, device=DEVICE, more_devices=(replace(DEVICE, index=1),)
    )
    assert "cannot be evaluated on 2 devices: tensor parallelism is for causal" in found.faults["it"]
