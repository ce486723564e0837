"""The kind of data of a data set that `save_to_disk` wrote, by its columns and the model's class."""

import json

import pytest

from ringmaster.techniques.data.inference import infer_kind
from ringmaster.techniques.job_specs import DataSpec, ModelSpec


@pytest.mark.parametrize("split", [None, "train"])
@pytest.mark.parametrize(
    ("columns", "architecture", "kind"),
    [
        (("messages",), "LlamaForCausalLM", "chat"),
        (("prompt", "chosen", "rejected"), "LlamaForCausalLM", "preference"),
        (("text", "label"), "LlamaForCausalLM", None),
        (("text", "label"), "BertForSequenceClassification", "text-classification"),
        (("input_ids", "label"), "BertForSequenceClassification", None),
        (("premises", "label"), "BertForSequenceClassification", None),
        (("image", "label"), "ViTForImageClassification", None),
    ],
)
def test_the_kind_of_a_saved_data_set_is_inferred(tmp_path, split, columns, architecture, kind):
    folder = tmp_path / (split or "")
    folder.mkdir(exist_ok=True)
    (folder / "dataset_info.json").write_text(json.dumps({"features": {name: {} for name in columns}}))
    assert infer_kind(DataSpec(dataset=str(tmp_path)), ModelSpec(architecture=architecture)) == kind


def test_the_kind_of_a_data_set_of_the_hub_stays_open(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert infer_kind(DataSpec(dataset="owner/chats"), ModelSpec(architecture="LlamaForCausalLM")) is None
