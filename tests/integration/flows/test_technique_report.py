"""`ringmaster techniques --model` reports what fits, and why the rest does not, for devices that are not present."""

import json

import pytest

from ringmaster.errors import InputError
from ringmaster.features.technique_report.technique_report import look_ahead, print_technique_report
from ringmaster.techniques.estimates.memory import CUBLAS_BYTES

MODEL = """
model:
  architecture: LlamaForCausalLM
  config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}
data: {source: python-stdlib, seq_len: 32, vocab_size: 512}
techniques: [single, ddp, fsdp]
global_batch_size: 8
num_steps: 20
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "home"))
    path = tmp_path / "small.yaml"
    path.write_text(MODEL)
    return path


@pytest.mark.full
def test_what_fits_and_what_does_not_for_devices_that_are_not_there(file, capsys):
    limit_bytes = CUBLAS_BYTES + int(1.9 * 2**20)
    found = look_ahead(file, job=None, num_devices=2, memory=f"{limit_bytes / 2**20}MiB", num_nodes=1)
    assert not found.faults
    (job,) = json.loads(json.dumps(found.to_json()))["jobs"]
    assert job["name"] == "small"
    assert {c["technique"] for c in job["candidates"]} == {"fsdp"}
    for candidate in job["candidates"]:
        assert candidate["forecast"]["source"] == "rehearsed"
        assert candidate["forecast"]["device_bytes"] <= limit_bytes
    reasons = {(r["technique"], r["config"] is None): r["reason"] for r in job["refused"]}
    assert reasons["single", True] == "one process drives one GPU"
    assert "GiB" in reasons["ddp", True]
    assert "GiB" in reasons["fsdp", False]
    print_technique_report(found)
    assert "one process drives one GPU" in capsys.readouterr().out


def test_what_makes_no_sense_is_told(file):
    for wrong in ({"num_devices": 2}, {"memory": "80GiB"}, {"num_devices": 2, "memory": "80 elephants"}):
        with pytest.raises(InputError):
            look_ahead(file, **{"job": None, "num_devices": None, "memory": None, "num_nodes": 1, **wrong})
    with pytest.raises(InputError, match="small"):
        look_ahead(file, job="large", num_devices=2, memory="1GiB", num_nodes=1)
