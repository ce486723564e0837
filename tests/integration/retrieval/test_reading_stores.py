"""Batches and evaluations that name a version of a store: which passages they read, and what the lineage says."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ringmaster.errors import InputError
from ringmaster.features.stores.knowledge_store import KnowledgeStore
from ringmaster.flows import settings
from ringmaster.flows.batch.run_folder import with_stores
from ringmaster.flows.lineage.home import lineage_home
from ringmaster.flows.retraining.examine import reading_store
from ringmaster.tasks.batch import parse_batch
from ringmaster.tasks.recording.ancestry import Ancestry
from ringmaster.tasks.retraining.promotion import read_decisions
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques import DataSpec
from ringmaster.techniques.data.row_source import retriever_of
from tests.integration.retrieval.test_store_commands import call, home

__all__ = ["home"]


def batch(folder, **retriever):
    (folder / "rows.jsonl").write_text('{"prompt": "city1", "completion": "river1"}\n')
    data = {"path": "rows.jsonl", "retriever": retriever}
    job = {"name": "reader", "model": {"architecture": "LlamaForCausalLM"}, "data": data, "num_steps": 1}
    return parse_batch(json.dumps({"jobs": [job]}), folder=folder, name="batch.json")


def texts(data):
    return {each.text for each in KnowledgeStore.open(Path(retriever_of(data).store)).passages}


def test_a_batch_reads_the_version_that_it_names(home, tmp_path):
    (tmp_path / "new.jsonl").write_text('{"id": "paris", "text": "city2 color9"}\n')
    call("store", "update", "wiki", "--data", tmp_path / "new.jsonl")
    with lineage_home() as lineage, closing(Journal.of_file(tmp_path / "journal.db")) as journal:
        read = with_stores(batch(tmp_path, store="wiki/1", k=2), lineage.ledger, journal, settings.home())
        (job,) = read.jobs
        assert "city2 river2" in texts(job.data)
        assert retriever_of(job.data).k == 2
        ancestry = Ancestry(ledger=lineage.ledger, journal=journal, jobs={job.name: job})
        assert ancestry.stores(job) == ["models:/wiki/1"]
        assert ancestry.stores(batch(tmp_path, store="wiki/1").jobs[0]) == ["models:/wiki/1"]
        assert ancestry.parents(job) == []
        newer = reading_store(batch(tmp_path, store="wiki/1").jobs[0].data, "wiki/2", lineage)
        assert "city2 color9" in texts(newer)
        assert "city2 river2" not in texts(newer)
        here = reading_store(newer, str(tmp_path / "store"), lineage)
        assert "city2 river2" in texts(here)


def test_what_is_no_store_is_refused_with_all_jobs(home, tmp_path):
    with lineage_home() as lineage:
        with pytest.raises(InputError, match=r"store wiki/9: .*wiki"):
            with_stores(batch(tmp_path, store="wiki/9"), lineage.ledger, None, settings.home())
        with pytest.raises(InputError, match="reader/1 is not a knowledge store"):
            with_stores(batch(tmp_path, store="reader/1"), lineage.ledger, None, settings.home())
        with pytest.raises(InputError, match="no data that reads a store"):
            reading_store(DataSpec(path="a.jsonl"), "wiki/1", lineage)


@pytest.fixture
def data(home, tmp_path):
    """Questions on the store, which has a second version, for the model in the folder `reader`."""
    (tmp_path / "new.jsonl").write_text('{"id": "paris", "text": "city2 color9"}\n')
    call("store", "update", "wiki", "--data", tmp_path / "new.jsonl")
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2)).save_pretrained(tmp_path / "reader")
    questions = [{"prompt": f"city{1 + number % 3}", "completion": f"river{1 + number % 3}"} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    rows = {"kind": "completion", "path": str(tmp_path / "rows.jsonl"), "seq_len": 64}
    return json.dumps({**rows, "retriever": {"store": "wiki/1", "k": 1}})


# A promotion compares in the same way, below.
@pytest.mark.full
def test_one_model_is_compared_with_itself_reading_another_version(data, tmp_path):
    asked = ["evaluate", tmp_path / "reader", "--data", data, "--all-rows", "--metric", "loss"]
    one, other = (call(*asked, "--store", f"wiki/{version}")["metrics"][0]["value"] for version in (2, 1))
    assert one != other  # what it reads has changed
    compared = call(*asked, "--store", "wiki/2", "--against-store", "wiki/1")
    assert compared["against"].endswith("reader with wiki/1")
    (line,) = compared["metrics"]
    assert (line["value"], line["other"], line["gain"]) == pytest.approx((one, other, other - one))
    assert line["num_rows"] == 12
    with pytest.raises(InputError, match="compares one model with itself"):
        call("evaluate", tmp_path / "reader", tmp_path / "encoder", *asked[2:], "--against-store", "wiki/1")


def test_a_version_of_a_store_is_promoted_by_what_a_model_answers_with_it(data, tmp_path):
    call("promote", "wiki/1", "--why", "the first")
    policy = tmp_path / "policy.yaml"
    policy.write_text("name: answers\nmetric: loss\nsignificance: null\n")
    options = ["--data", data, "--all-rows"]
    with pytest.raises(InputError, match="give --reader with stores"):
        call("promote", "wiki/2", "--policy", policy, *options)
    done = call("promote", "wiki/2", "--policy", policy, *options, "--reader", tmp_path / "reader")
    other = ["--store", "wiki/2", "--against-store", "wiki/1", "--metric", "loss"]
    (line,) = call("evaluate", tmp_path / "reader", *options, *other)["metrics"]
    assert done["compared"]["gain"] == pytest.approx(line["gain"])
    assert line["gain"] != 0
    assert done["promoted"] == (line["gain"] > 0)
    assert done["champion"] == (2 if line["gain"] > 0 else 1)
    with lineage_home() as lineage:
        (decision,) = read_decisions(lineage.ledger, lineage.find("wiki/2").record)
    assert (decision.champion_before, decision.outcome) == (1, "promoted" if done["promoted"] else "kept")
