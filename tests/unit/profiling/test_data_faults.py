"""A batch whose data is not fit to train on is refused before anything is planned."""

import json

import pytest

from ringmaster.codec import from_json
from ringmaster.errors import StepError
from ringmaster.techniques import DataSpec, Job, ModelSpec, registry
from ringmaster.techniques.estimates.job_preflight import preflight_job
from ringmaster.techniques.preflight_result import PreflightOrder
from ringmaster.techniques.technique import GangShape

BERT = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def preflight(folder, *, evaluated=(), **data):
    job = Job(
        name="a",
        model=ModelSpec(architecture="BertForSequenceClassification", config=BERT),
        data=from_json(DataSpec, {"kind": "text-classification", "seq_len": 16, "vocab_size": 300, **data}),
        global_batch_size=2,
        num_steps=3,
    )
    order = PreflightOrder(
        jobs=(job,),
        shapes=(GangShape(kind="cpu", num_devices=1, memory_bytes=1 << 33),),
        techniques={"single": registry.dotted_path("single")},
        cache_dir=str(folder / "cache"),
        evaluated=evaluated,
    )
    return preflight_job(job, order)


def test_all_faults_of_the_data_are_reported_at_once(tmp_path):
    rows = [json.dumps({"text": f"words {n}", "label": ["pos", "neg"][n % 2]}) for n in range(60)]
    for name, lines in (("both", rows), ("one", rows[::2]), ("held", rows[:4])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    held_out_path = str(tmp_path / "held.jsonl")
    with pytest.raises(StepError) as caught:
        preflight(tmp_path, path=str(tmp_path / "one.jsonl"), held_out_path=held_out_path, labels=("pos", "neg"))
    constant, leak = caught.value.faults
    assert "all 30 rows to train on have the label pos" in constant
    assert "2 rows of the evaluation split are among those that are trained on" in leak
    assert "To fix: " in constant
    assert "To fix: " in leak
    assert preflight(tmp_path, path=str(tmp_path / "both.jsonl")).candidates


def test_data_of_one_label_is_evaluated_on(tmp_path):
    """As trusted rows on which two versions are compared."""
    rows = [json.dumps({"text": f"words {n}", "label": "pos"}) for n in range(20)]
    (tmp_path / "one.jsonl").write_text("\n".join(rows))
    spec = {"path": str(tmp_path / "one.jsonl"), "labels": ("pos", "neg"), "held_out": 0}
    with pytest.raises(StepError, match="nothing to learn"):
        preflight(tmp_path, **spec)
    assert preflight(tmp_path, **spec, evaluated=("a",)).data["num_samples"] == 20
