"""Model cards of the Hugging Face hub: a written card can be read again, and errors are reported."""

import pytest
import yaml

from ringmaster.model_lineage import DatasetInput, ModelRecord, Origin
from ringmaster.model_lineage.model_pages import CARD, hub_card, read_card


def record(kind="fine-tuned", **more):
    data = DatasetInput(name="stdlib", digest="d1", source="/usr/lib")
    return ModelRecord(
        model_id="m-1", registered_name="writer", version=2, uri="models:/writer/2", kind=kind, datasets=(data,), **more
    )


@pytest.mark.parametrize(
    ("kind", "relation"), [("fine-tuned", "finetune"), ("lora", "adapter"), ("quantized", "quantized")]
)
def test_a_card_tells_its_base_and_is_read_again(kind, relation, tmp_path):
    (tmp_path / CARD).write_text(hub_card(record(kind), base_models=["org/base"], metrics={"loss": 1.5}))
    said = read_card(tmp_path)
    assert (said.base_models, said.relation) == (("org/base",), relation)
    text = (tmp_path / CARD).read_text()
    assert f"# writer version 2\n\n{kind.capitalize()} from `org/base`" in text
    assert "- loss: 1.5" in text


def test_several_parents_are_a_list_and_none_are_left_out(tmp_path):
    head = yaml.safe_load(hub_card(record("merged"), base_models=["a", "b"]).split("---")[1])
    assert (head["base_model"], head["base_model_relation"]) == (["a", "b"], "merge")
    assert "base_model" not in yaml.safe_load(hub_card(record("pretrained"), base_models=[]).split("---")[1])


def test_what_an_imported_models_own_card_said_stays():
    text = hub_card(record("imported", origin=Origin(source="org/tuned", relation="adapter")), base_models=["org/base"])
    assert yaml.safe_load(text.split("---")[1])["base_model_relation"] == "adapter"


@pytest.mark.parametrize("text", ["", "# A model\n", "---\n---\nHello", "---\nlicense: mit\n---\n"])
def test_a_card_that_names_no_base_says_nothing(text, tmp_path):
    (tmp_path / CARD).write_text(text)
    assert read_card(tmp_path).base_models == ()


def test_no_card_says_nothing(tmp_path):
    assert read_card(tmp_path).base_models == ()


@pytest.mark.parametrize("text", ["---\nbase_model: [a\n---\n", "---\n- a\n---\n"])
def test_a_card_that_is_wrong_is_told(text, tmp_path):
    (tmp_path / CARD).write_text(text)
    with pytest.raises(ValueError, match=r"README.md .*To fix"):
        read_card(tmp_path)


def test_a_card_that_is_not_utf_8_is_told(tmp_path):
    (tmp_path / CARD).write_bytes("---\nlicense: für\n---\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"README.md is not UTF-8 .*To fix"):
        read_card(tmp_path)
