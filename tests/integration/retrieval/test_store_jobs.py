"""Jobs of kind store: the same store on any gang, from any checkpoint, and as a node of the lineage."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ringmaster.features.stores.job import IVF, StoreSettings
from ringmaster.features.stores.knowledge_store import KnowledgeStore, Passage
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.processes.gang_events import Steps, TrialMeasured
from tests.integration.workbench import Layout
from tests.matrix import matrix
from tests.unit.retrieval.encoders import SIZES, WORDS, build_store, save_encoder

SETTINGS = StoreSettings(index=IVF, num_lists=8, batch_size=8, max_length=64)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder") / "model")


@pytest.fixture(scope="module")
def passages():
    draw = random.Random(0)
    return [Passage(f"p{i}", " ".join(draw.choices(WORDS, k=draw.randint(3, 30)))) for i in range(200)]


@pytest.fixture(scope="module")
def job(encoder, passages, tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "passages.jsonl"
    file.write_text("".join(json.dumps({"id": each.id, "text": each.text}) + "\n" for each in passages))
    return Job(
        name="wiki",
        model=ModelSpec(from_pretrained=str(encoder)),
        data=DataSpec(kind="passages", path=str(file), held_out=0.0, seq_len=64, tokenizer=str(encoder)),
        num_steps=7,
        global_batch_size=32,
        features=(SETTINGS,),
    )


def test_a_store_is_the_same_on_any_gang_and_after_a_stop(bench, job, encoder, passages, tmp_path):
    plain = build_store(tmp_path / "plain", passages=passages, encoder=encoder, settings=SETTINGS)
    alone = bench.train(job, Layout("encode", 1), tmp_path / "alone")
    assert alone.outcome.status == "done", alone.outcome
    assert alone.outcome.result.metrics == {"index_recall": plain.manifest.recall, "num_passages": 200.0}

    def stop(gang, event):
        if isinstance(event, Steps):
            gang.send("stop")

    folder = tmp_path / "two"
    stopped = bench.train(job, Layout("encode", 2), folder, last_step=3)
    assert stopped.outcome.status == "done", stopped.outcome
    assert stopped.outcome.result.step == 3
    bench.train(job, Layout("encode", 2), folder, on_event=stop)
    ended = bench.train(job, Layout("encode", 2), folder)
    assert ended.outcome.status == "done", ended.outcome
    assert ended.outcome.result.first_step >= 3
    for trained in (alone, ended):
        store = KnowledgeStore.open(Path(trained.order.model_dir))
        assert store.digest == plain.digest
        assert list(store.passages) == passages
        assert np.array_equal(store.vectors, plain.vectors)


@pytest.mark.parametrize("has_encoder", matrix([True, False], quick=[True], ids=["encoder", "base"]))
def test_a_trial_of_a_store_measures_steps(bench, job, tmp_path, has_encoder):
    if not has_encoder:
        model = ModelSpec(architecture="BertModel", config={**SIZES, "max_position_embeddings": 64})
        job = replace(job, model=model, base="encoder")

    def steer(gang, event):
        if event.NAME == "ready":
            gang.send("measure")
        if isinstance(event, TrialMeasured):
            gang.send("stop")

    tried = bench.train(job, Layout("encode", 2), tmp_path, purpose="trial", on_event=steer)
    assert tried.outcome.status == "done", tried.outcome
    (measured, *_) = [event for event in tried.events if isinstance(event, TrialMeasured)]
    assert measured.profile["step_s"] > 0
