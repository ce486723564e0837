"""Batches that make a store and read it: what waits for what, what is read, and what the lineage says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringmaster.flows.lineage.home import lineage_home
from ringmaster.techniques.retrieval.knowledge_store import KnowledgeStore
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


def ringmaster(folder, *arguments):
    environment = {**os.environ, "RINGMASTER_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "ringmaster.flows.entry", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run(folder, name, jobs):
    (folder / f"{name}.json").write_text(json.dumps({"name": name, "jobs": jobs}))
    result = ringmaster(folder, "run", f"{name}.json")
    assert (result["status"], result["faults"]) == ("done", [])
    return {job["name"]: Path(job["model_dir"]) for job in result["jobs"]}


def parents_of(folder, job):
    with in_home(folder / "home"), lineage_home() as lineage:
        return {lineage.find(parent).label for parent in lineage.find(f"facts.{job}/1").record.parents}


def test_a_reader_waits_for_the_store_that_a_job_of_its_batch_makes(tmp_path):
    write(tmp_path)
    models = run(tmp_path, "facts", [READER, STORE, ENCODER])
    assert parents_of(tmp_path, "reader") == {"facts.wiki/1"}
    assert parents_of(tmp_path, "wiki") == {"facts.encoder/1"}
    assert KnowledgeStore.open(models["wiki"]).manifest.num_passages == NUM_PASSAGES
    # It has read what the trained encoder finds: in another batch, the same store trains the same weights.
    data = {**READER["data"], "retriever": {"store": str(models["wiki"]), "k": 2}}
    again = run(tmp_path, "again", [{**READER, "data": data}])
    assert is_bit_equal(*(weights_in(each["reader"]) for each in (models, again)))
    reproduced = ringmaster(tmp_path, "reproduce", "facts.reader/1", "--share", "1")
    assert reproduced["is_equal"], reproduced
