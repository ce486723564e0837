"""A batch whose jobs share a component, from `ringmaster run` to models that transformers loads, and to the lineage."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests.integration.kinds import BERT, spec_of

TIMEOUT_S = 900.0
KINDS = {"classify": "text-classification", "tag": "token-classification"}
ARCHITECTURES = {"classify": "BertForSequenceClassification", "tag": "BertForTokenClassification"}


def job_of(name, folder):
    config = transformers.BertConfig(**BERT, vocab_size=300, num_labels=3)
    getattr(transformers, ARCHITECTURES[name])(config).save_pretrained(folder / f"{name}-start")
    return {
        "name": name,
        "model": {"from_pretrained": f"./{name}-start"},
        "data": {"kind": KINDS[name], "name": name, "seq_len": 64, "vocab_size": 300, "held_out": 0.3},
        "global_batch_size": 8 if name == "classify" else 4,
        "num_steps": 6,
        "evaluation": {"metrics": ["accuracy"]},
        "techniques": ["single"],
    }


def command(folder, *arguments, code=0):
    source = Path(__file__).parents[3]
    path = f"{source / 'src'}{os.pathsep}{source}"
    environment = {**os.environ, "RINGMASTER_HOME": str(folder / "home"), "PYTHONPATH": path, "COLUMNS": "200"}
    result = subprocess.run(
        [sys.executable, "-m", "ringmaster.flows.entry", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == code, result.stderr
    return result.stdout if code == 0 else result.stderr


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_both_jobs_end_with_a_model_of_their_own_that_has_the_common_component(tmp_path):
    batch = {
        "name": "night",
        "devices": {"cpu": 2},
        "datasets": {name: {"path": spec_of(KINDS[name], tmp_path).path} for name in KINDS},
        "shared_components": {"encoder": {"jobs": dict.fromkeys(KINDS, "bert.encoder")}},
        "jobs": [job_of(name, tmp_path) for name in KINDS],
    }
    (tmp_path / "night.yaml").write_text(json.dumps(batch))
    jobs = {job["name"]: job for job in json.loads(command(tmp_path, "run", "night.yaml", "--json"))["jobs"]}
    assert {name: (job["status"], job["num_steps"]) for name, job in jobs.items()} == {
        "encoder": ("done", 6),
        "classify": ("done", 0),
        "tag": ("done", 0),
    }
    start = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "classify-start").bert.encoder
    first, second = (
        getattr(transformers, ARCHITECTURES[name]).from_pretrained(jobs[name]["model_dir"]).bert.encoder.state_dict()
        for name in KINDS
    )
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(value, first[name]) for name, value in start.state_dict().items())
    for name in KINDS:
        assert jobs[name]["metrics"].keys() == {"accuracy"}
        shown = " ".join(command(tmp_path, "lineage", "show", f"night.{name}").split())
        assert "night.encoder/1" in shown and f"{name}-start" in shown and "shares encoder" in shown
    for name in ("encoder", "tag"):
        assert json.loads(command(tmp_path, "reproduce", f"night.{name}", "--json"))["is_equal"]
    row = f"{batch['datasets']['classify']['path']}:1"
    readers = json.loads(command(tmp_path, "datasets", "trace", row, "--json"))["models"]
    assert {reader["model"] for reader in readers} == {"night.encoder/1", "night.classify/1"}
    for what in (("--row", row), ("--base", "night.encoder/1")):
        refused = command(tmp_path, "lineage", "undo", *what, code=2)
        assert "night.tag/1 is of the jobs classify, tag, which were trained as one with a common encoder" in refused
