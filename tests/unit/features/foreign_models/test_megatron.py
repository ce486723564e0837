"""Conversion of Llamas between the layouts of Hugging Face and Megatron-Core, exact to the bit."""

import json
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from ringmaster.errors import InputError
from ringmaster.features.foreign_models import conversion
from ringmaster.features.foreign_models.conversion import _lazy, convert
from ringmaster.flows import cli

TOKENS = torch.arange(24).reshape(2, 12) % 100


def config(*, kv_heads=2, tied=False, layers=4):
    return LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        max_position_embeddings=64,
    )


def hugging_face(folder, **changes):
    torch.manual_seed(0)
    LlamaForCausalLM(config(**changes)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def logits(folder):
    with torch.no_grad():
        return LlamaForCausalLM.from_pretrained(folder)(TOKENS).logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_there_and_back_is_bit_equal(tmp_path, kv_heads, tied):
    source = hugging_face(tmp_path / "hf", kv_heads=kv_heads, tied=tied)
    convert(str(source), tmp_path / "megatron", to="megatron")
    done = convert(str(tmp_path / "megatron"), tmp_path / "back", to="hf")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(source), logits(tmp_path / "back"))
    assert (tmp_path / "back" / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    assert done["from"] == "megatron" and done["tokenizer_files"] == ["generation_config.json", "tokenizer.json"]


def test_large_models_are_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("ringmaster.features.foreign_models.conversion.SHARD_BYTES", 20_000)
    source = hugging_face(tmp_path / "hf")
    convert(str(source), tmp_path / "copy", to="hf")
    assert len(list((tmp_path / "copy").glob("model-*-of-*.safetensors"))) > 3
    assert torch.equal(logits(source), logits(tmp_path / "copy"))


@pytest.mark.parametrize("to", ["hf", "megatron", "dcp", "checkpoint"])
def test_a_few_tensors_at_a_time_are_held(tmp_path, monkeypatch, to):
    source = hugging_face(tmp_path / "hf")
    alive, most = weakref.WeakSet(), [0]

    def watched(files):
        return {
            name: replace(tensor, load=lambda load=tensor.load: watch(load())) for name, tensor in _lazy(files).items()
        }

    def watch(tensor):
        alive.add(tensor)
        most[0] = max(most[0], len(alive))
        return tensor

    monkeypatch.setattr(conversion, "_lazy", watched)
    convert(str(source), tmp_path / "out", to=to)
    assert 0 < most[0] <= 4  # q, k, v, and the one before them, of 39 tensors


def test_an_unknown_format_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"unknown format 'onnx'\. To fix: use hf, checkpoint, dcp or megatron"):
        convert(str(hugging_face(tmp_path / "hf")), tmp_path / "out", to="onnx")
    assert not (tmp_path / "out").exists()


def test_other_models_and_places_are_refused_with_the_remedy(tmp_path):
    source = hugging_face(tmp_path / "hf")
    with pytest.raises(ValueError, match="is there already"):
        convert(str(source), source, to="hf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no model that is known\. To fix"):
        convert(str(tmp_path / "empty"), tmp_path / "out", to="hf")
    with pytest.raises(ValueError, match=r"archive of NeMo 1: .* To fix"):
        convert(str(tmp_path / "model.nemo"), tmp_path / "out", to="hf")
    said = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**said, "model_type": "gpt2"}))
    with pytest.raises(ValueError, match="is a gpt2, and only Llamas"):
        convert(str(source), tmp_path / "out", to="megatron")
    (source / "config.json").write_text(json.dumps(said))
    named = load_file(source / "model.safetensors")
    save_file({**named, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, source / "model.safetensors")
    with pytest.raises(ValueError, match="without biases"):
        convert(str(source), tmp_path / "out", to="megatron")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", b"[" * 100_000, "config.json is not valid JSON"),
        ("config.json", b"[]", "config.json is not a JSON object"),
        ("config.json", b'{"model_type": "llama"}', "config has no num_attention_heads"),
        ("config.json", b'{"model_type": "llama", "num_attention_heads": "4"}', "config has no num_attention_heads"),
        ("model.safetensors", b"\xff" * 100, "model.safetensors cannot be read"),
    ],
)
def test_damaged_files_are_told_and_nothing_is_written(tmp_path, file, content, said):
    source = hugging_face(tmp_path / "hf")
    (source / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{said}.*To fix"):
        convert(str(source), tmp_path / "out", to="megatron")
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_did_or_what_is_wrong(tmp_path):
    source = str(hugging_face(tmp_path / "hf"))
    arguments = ["convert", source, str(tmp_path / "out"), "--to", "megatron", "--json"]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert (said["from"], said["to"], said["num_tensors"]) == ("hf", "megatron", 39)
    again = CliRunner().invoke(cli.app, arguments)
    assert isinstance(again.exception, InputError) and "is there already" in str(again.exception)
