"""`ringmaster export`: a model in one folder that `from_pretrained` reads, an adapter merged into its base."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from ringmaster.errors import InputError
from ringmaster.flows import cli

IDS = torch.arange(12).reshape(2, 6)


def export(*arguments):
    """Runs the command. Returns its answer."""
    done = CliRunner().invoke(cli.app, ["export", *map(str, arguments), "--json"], catch_exceptions=False)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft")


@pytest.fixture
def folders(peft, tmp_path, monkeypatch):
    """A base, and a LoRA on it whose weights are not those that it began with."""
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "home"))
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).save_pretrained(base)
    (base / "tokenizer_config.json").write_text('{"of": "base"}')
    on_base = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False)
    )
    on_base.save_pretrained(adapter)
    return base, adapter


def test_an_adapter_is_merged_into_one_folder_that_computes_what_both_do(folders, peft, tmp_path):
    base, adapter = folders
    assert export(adapter, tmp_path / "merged", "--merge")["is_merged"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    on_base = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    plain = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, on_base(IDS).logits)
        assert (merged(IDS).logits - plain(IDS).logits).abs().max() > 1e-3
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text()) == {"of": "base"}


def test_a_classifier_is_exported_with_the_head_that_was_trained(folders, peft, tmp_path):
    base, _ = folders
    config = peft.LoraConfig(r=4, task_type="SEQ_CLS", init_lora_weights=False, modules_to_save=["score"])
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3, pad_token_id=0)
    trained = peft.get_peft_model(plain, config)
    trained.save_pretrained(tmp_path / "classes")
    written = json.loads((tmp_path / "classes" / "adapter_config.json").read_text())
    written["modules_to_save"] = ["score"]  # as jobs write it: peft adds the name that other models' heads have
    (tmp_path / "classes" / "adapter_config.json").write_text(json.dumps(written))
    export(tmp_path / "classes", tmp_path / "merged", "--merge")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", pad_token_id=0)
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS + 1).logits, trained.eval()(IDS + 1).logits)


def test_without_merging_the_files_are_those_of_the_model(folders, tmp_path):
    base, adapter = folders
    for source in (base, adapter):
        assert not export(source, tmp_path / "out" / source.name)["is_merged"]
        assert {path.name: path.read_bytes() for path in source.iterdir()} == {
            path.name: path.read_bytes() for path in (tmp_path / "out" / source.name).iterdir()
        }


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("base", "out", "--merge"), "is not an adapter, and there is nothing to merge"),
        (("base", "adapter"), "adapter is there already"),
        (("no-such-model", "out"), "no model 'no-such-model'"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(folders, tmp_path, monkeypatch, arguments, why):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=why):
        export(*arguments)
    assert not (tmp_path / "out").exists()


def test_weights_that_are_references_are_not_exported(folders, tmp_path):
    base, _ = folders
    (base / "model.safetensors").rename(base / "model.safetensors.stored")
    with pytest.raises(ValueError, match="let `ringmaster lineage restore FOLDER` write them there again"):
        export(base, tmp_path / "out")
