"""Batches that make a store and read it: what waits for what, what is read, and what the lineage says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringmaster.features.stores.knowledge_store import KnowledgeStore
from ringmaster.flows.lineage.home import lineage_home
from tests.integration.lineage.family import in_home
from tests.integration.workbench import is_bit_equal, weights_in
from tests.unit.retrieval.encoders import SIZES, WORDS, save_encoder

ROOT = Path(__file__).parents[3]
NUM_PASSAGES = 120
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
ENCODER = {
    "name": "encoder",
    "model": {"architecture": "BertModel", "config": {**SIZES, "max_position_embeddings": 64}},
    "data": {"kind": "embedding", "path": "pairs.jsonl", "tokenizer": "./encoder", "seq_len": 16},
    "loss": "contrastive",
    "optimizer": {"lr": 2e-3},
    "num_steps": 12,
    "evaluation": {"metrics": ["recall_at_1"]},
}
STORE = {
    "name": "wiki",
    "kind": "store",
    "base": "encoder",
    "model": ENCODER["model"],
    "data": {"path": "passages.jsonl", "tokenizer": "./encoder", "seq_len": 32},
}
READER = {
    "name": "reader",
    "model": {"architecture": "LlamaForCausalLM", "config": {**SIZES, "intermediate_size": 64}},
    "data": {
        "kind": "completion",
        "path": "questions.jsonl",
        "tokenizer": "./encoder",
        "seq_len": 32,
        "retriever": {"store": "wiki", "k": 2},
    },
    "num_steps": 6,
    "techniques": ["single"],
    "num_devices": [1],
}


def write(folder):
    save_encoder(folder / "encoder")
    texts = [f"{WORDS[i]} {WORDS[2 * i]}" for i in range(NUM_PASSAGES)]
    rows = {
        "passages": [{"id": f"p{i}", "text": text} for i, text in enumerate(texts)],
        "pairs": [{"anchor": WORDS[i], "positive": text} for i, text in enumerate(texts)],
        "questions": [{"prompt": WORDS[i], "completion": f" {WORDS[2 * i]}"} for i in range(NUM_PASSAGES)],
    }
    for name, values in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in values))


def command_in(folder, home, *arguments):
    environment = {**os.environ, "RINGMASTER_HOME": str(folder / home), "PYTHONPATH": str(ROOT / "src")}
    return [sys.executable, "-m", "ringmaster.flows.entry", *arguments, "--json"], environment


def ringmaster(folder, *arguments, home="home"):
    command, environment = command_in(folder, home, *arguments)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def batch_file(folder, name, jobs):
    (folder / f"{name}.json").write_text(json.dumps({"name": name, "jobs": jobs}))
    return f"{name}.json"


def run(folder, name, jobs):
    result = ringmaster(folder, "run", batch_file(folder, name, jobs))
    assert (result["status"], result["faults"]) == ("done", [])
    return {job["name"]: Path(job["model_dir"]) for job in result["jobs"]}


def parents_of(folder, job):
    with in_home(folder / "home"), lineage_home() as lineage:
        return {lineage.find(parent).label for parent in lineage.find(f"facts.{job}/1").record.parents}


def test_a_reader_waits_for_the_store_that_a_job_of_its_batch_makes(tmp_path):
    write(tmp_path)
    data = {**READER["data"], "kind": "rag"}
    rag = {**READER, "name": "rag", "data": data, "loss": {"name": "rag-sequence", "num_passages": 2}}
    models = run(tmp_path, "facts", [READER, rag, STORE, ENCODER])
    assert parents_of(tmp_path, "reader") == parents_of(tmp_path, "rag") == {"facts.wiki/1"}
    assert parents_of(tmp_path, "wiki") == {"facts.encoder/1"}
    assert KnowledgeStore.open(models["wiki"]).manifest.num_passages == NUM_PASSAGES
    # It has read what the trained encoder finds: in another batch, the same store trains the same weights.
    data = {**READER["data"], "retriever": {"store": str(models["wiki"]), "k": 2}}
    again = run(tmp_path, "again", [{**READER, "data": data}])
    assert is_bit_equal(*(weights_in(each["reader"]) for each in (models, again)))
    reproduced = ringmaster(tmp_path, "reproduce", "facts.reader/1", "--share", "1")
    assert reproduced["is_equal"], reproduced


def killed_at(folder, file, gang):
    """Runs a batch in a home of its own, kills all of its processes once a job has a gang, and resumes it."""
    (folder / "killed").mkdir()
    command, environment = command_in(folder, "killed", "run", file)
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True) as process:
        while not list((folder / "killed").glob(f"batches/*/*/gangs/*-{gang}")):
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    return ringmaster(folder, "run", file, "--resume", home="killed")


def test_negatives_are_mined_anew_by_the_retriever_so_far(tmp_path):
    write(tmp_path)
    negatives = {"path": "passages.jsonl", "refresh_every": 8, "k": 3}
    layout = {"techniques": ["single"], "num_devices": [1]}
    job = {**ENCODER, **layout, "num_steps": 24, "schedule": {"name": "cosine"}, "negatives": negatives}
    file = batch_file(tmp_path, "facts", [job])
    models = []
    for result in (ringmaster(tmp_path, "run", file), killed_at(tmp_path, file, "encoder.to-16")):
        assert (result["status"], result["faults"]) == ("done", [])
        trained = {each["name"]: each for each in result["jobs"]}
        steps = {name: (job["segments"][0]["first_step"], job["num_steps"]) for name, job in trained.items()}
        assert {name: each for name, each in steps.items() if "index" not in name} == {
            "encoder.to-8": (0, 8), "encoder.to-16": (8, 16), "encoder": (16, 24),
        }  # fmt: skip
        models.append({name: Path(each["model_dir"]) for name, each in trained.items()})
    for one, other in zip(*(each.values() for each in models), strict=True):
        if "index" in one.name:
            assert KnowledgeStore.open(one).digest == KnowledgeStore.open(other).digest
        else:
            assert is_bit_equal(weights_in(one), weights_in(other))
    assert not is_bit_equal(weights_in(models[0]["encoder.to-16"]), weights_in(models[0]["encoder"]))
    assert parents_of(tmp_path, "encoder") == {"facts.encoder.to-16/1", "facts.encoder.index-16/1"}
    assert parents_of(tmp_path, "encoder.index-16") == {"facts.encoder.to-16/1"}
    reproduced = ringmaster(tmp_path, "reproduce", "facts.encoder/1", "--share", "1")
    assert reproduced["is_equal"], reproduced
