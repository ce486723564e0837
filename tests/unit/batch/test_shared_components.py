"""Shared components in batch files: the jobs that come of them, and what is refused."""

import json
from dataclasses import replace

import pytest

from ringmaster.codec import to_json
from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch.batch import parse_batch
from ringmaster.tasks.recording.rows import dataset_inputs
from ringmaster.techniques.data import PreparedData, prepare
from ringmaster.techniques.job import COMPOSED, EXTRACTED
from ringmaster.techniques.job_specs import DataSpec

SHARED = {"encoder": {"jobs": {"a": "bert", "b": "bert"}, "weights": {"b": 0.5}}}


def job(name, **changes):
    model = {"architecture": "BertForSequenceClassification", "config": {"num_labels": 2}}
    return {"name": name, "model": model, "data": {"source": "digits"}, "num_steps": 5, **changes}


def batch_of(*jobs, shared=SHARED, folder=None):
    text = json.dumps({"name": "night", "shared_components": shared, "jobs": jobs})
    return parse_batch(text, folder=folder, name="night.json")


def faults_of(*jobs, shared=SHARED, folder):
    with pytest.raises(BatchFileError) as error:
        batch_of(*jobs, shared=shared, folder=folder)
    return str(error.value)


def test_the_jobs_become_a_composite_and_jobs_that_extract_their_models(tmp_path):
    batch = batch_of(
        job("alone"), job("a", global_batch_size=12, user="ana"), job("b", global_batch_size=8, seed=3), folder=tmp_path
    )
    assert [each.name for each in batch.jobs] == ["alone", "encoder", "a", "b"]
    _, composite, a, b = batch.jobs
    assert (composite.adaptation.kind, composite.num_steps, composite.global_batch_size) == (COMPOSED, 5, 4)
    assert [(each.adaptation.kind, each.num_steps, each.base) for each in (a, b)] == [(EXTRACTED, 0, "encoder")] * 2
    assert (composite.adaptation.composition.weights, b.adaptation.composition.index) == ((1.0, 0.5), 1)
    assert batch.users == {"a": "ana", "encoder": "ana"}
    assert type(batch).from_json(batch.to_json()) == batch


def test_all_faults_are_reported_at_once(tmp_path):
    text = faults_of(
        job("a", optimizer={"lr": 0.1}),
        job("b", optimizer={"lr": 0.2}, num_steps=6, exact=True, loss={"name": "simpo"}),
        job("encoder"),
        shared={
            "encoder": {"jobs": {"a": "bert", "b": "bert", "c": "bert"}, "weights": {"d": 2}},
            "x": {"jobs": {"a": "y"}},
        },
        folder=tmp_path,
    )
    for words in (
        "'encoder' is the name of a job",
        "shared_components.encoder.jobs.c: no job is named 'c'",
        "shared_components.encoder.weights.d: is not a job that shares it",
        "shared_components.x.jobs: are fewer than two",
        "shared_components.x.jobs.a: shares encoder already",
        "shared_components.encoder.jobs.b: ",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": {"lr": 0.2}}, "has optimizer"),
        ({"num_steps": 6}, "has num_steps 6, and a has 5"),
        ({"exact": True}, "has exact"),
        ({"negatives": {"path": "passages.jsonl", "refresh_every": 2}}, "has negatives"),
        ({"loss": "dpo"}, "has the loss dpo"),
        ({"optimizer": {"layer_decay": 0.9}}, "has optimizer.layer_decay"),
        ({"num_steps": None, "num_epochs": 1}, "has num_epochs"),
    ],
)
def test_what_is_refused(tmp_path, changes, words):
    assert words in faults_of(job("a"), job("b", **changes), folder=tmp_path)


def test_the_data_of_each_job_is_recorded_with_the_composite(tmp_path):
    composite = batch_of(job("a"), job("b"), folder=tmp_path).jobs[0]
    data = PreparedData(name="digits", digest="1", num_samples=9, num_held_out=1, kind="images", source="digits")
    other = replace(data, name="rows", digest="2")
    parts = tuple(
        {"job": part, "data": to_json(own)}
        for part, own in zip(composite.data.kwargs["jobs"], (data, other), strict=True)
    )
    inputs = dataset_inputs(composite.data, to_json(replace(data, parts=parts)))
    assert [(each.name, each.context) for each in inputs] == [
        ("digits", "training"),
        ("digits", "evaluation"),
        ("rows", "training"),
        ("rows", "evaluation"),
    ]


def test_composite_data_needs_shared_components(tmp_path):
    with pytest.raises(ValueError, match="shared_components"):
        prepare(DataSpec(kind="composite"), cache_dir=tmp_path)


def test_defaults_equal_what_they_stand_for(tmp_path):
    batch_of(job("a"), job("b", optimizer={"name": "adamw"}, precision="fp32"), folder=tmp_path)
