"""Conversion of Llamas between the layouts of Hugging Face and Megatron-LM, exact to the bit."""

import argparse
import json
import os
import re
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from ringmaster.errors import InputError
from ringmaster.flows import cli
from ringmaster.techniques.models import conversion
from ringmaster.techniques.models.conversion import _lazy, convert

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


def rank(folder, name):
    return load_file(folder / "release" / name / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("kv_heads", "tp", "pp"), [(2, 2, 2), (4, 2, 2), (4, 4, 1), (2, 1, 4)])
def test_there_and_back_is_bit_equal(tmp_path, kv_heads, tp, pp, tied):
    source = hugging_face(tmp_path / "hf", kv_heads=kv_heads, tied=tied)
    convert(str(source), tmp_path / "megatron", to="megatron", tp=tp, pp=pp)
    assert len(list((tmp_path / "megatron" / "release").iterdir())) == tp * pp
    done = convert(str(tmp_path / "megatron"), tmp_path / "back", to="hf")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(source), logits(tmp_path / "back"))
    assert (tmp_path / "back" / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    assert done["from"] == "megatron" and done["tokenizer_files"] == ["generation_config.json", "tokenizer.json"]


def test_rows_stand_where_megatron_has_them(tmp_path):
    """The expected layout is written by hand: 2 ranks, 2 stages, heads of 8 columns, 2 groups of 2 query heads."""
    source = hugging_face(tmp_path / "hf")
    convert(str(source), tmp_path / "megatron", to="megatron", tp=2, pp=2)
    whole = load_file(source / "model.safetensors")
    late = rank(tmp_path / "megatron", "mp_rank_01_001")  # holds layers 2 and 3, which it calls 0 and 1
    mine = {name: whole[f"model.layers.3.self_attn.{name}_proj.weight"] for name in "qkv"}
    expected = torch.cat([mine["q"][16:32], mine["k"][8:16], mine["v"][8:16]])  # the second group
    assert torch.equal(late["decoder.layers.1.self_attention.linear_qkv.weight"], expected)
    gate, up = (whole[f"model.layers.3.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(late["decoder.layers.1.mlp.linear_fc1.weight"], torch.cat([gate[24:], up[24:]]))
    down, o = whole["model.layers.3.mlp.down_proj.weight"], whole["model.layers.3.self_attn.o_proj.weight"]
    assert torch.equal(late["decoder.layers.1.mlp.linear_fc2.weight"], down[:, 24:])
    assert torch.equal(late["decoder.layers.1.self_attention.linear_proj.weight"], o[:, 16:])
    norm = whole["model.layers.3.post_attention_layernorm.weight"]
    assert torch.equal(late["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"], norm)
    assert torch.equal(late["decoder.final_layernorm.weight"], whole["model.norm.weight"])
    output = late["output_layer.weight"]  # rows 128 to 255 of 256: all padding
    assert output.shape == (128, 32) and torch.equal(output, whole["lm_head.weight"][-1:].expand(128, -1))
    first = rank(tmp_path / "megatron", "mp_rank_00_000")["embedding.word_embeddings.weight"]
    assert torch.equal(first[:100], whole["model.embed_tokens.weight"])
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"


def megatrons_own(folder, source, *, args, plain_norms=False):
    """A checkpoint in Megatron-LM's own form: pickled weights with their arguments, and no config.json."""
    convert(str(source), folder / "ours", to="megatron", tp=2)
    own = folder / "own" / "iter_0000030"
    for path in (folder / "ours" / "release").iterdir():
        named = load_file(path / "model.safetensors")
        if plain_norms:
            swaps = {"self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight"}
            swaps |= {"mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight"}
            named = {_swapped(name, swaps): value for name, value in named.items()}
        (own / path.name).mkdir(parents=True)
        stored = {"args": args, "checkpoint_version": 3.0, "iteration": 30, "model": {**named, "x._extra_state": None}}
        torch.save(stored, own / path.name / "model_optim_rng.pt")
    (folder / "own" / "latest_checkpointed_iteration.txt").write_text("30\n")
    return folder / "own"


def _swapped(name, swaps):
    for old, new in swaps.items():
        name = name.replace(old, new)
    return name


ARGS = {
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_layers": 4,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "norm_epsilon": 1e-6,
    "rotary_base": 10000,
    "max_position_embeddings": 64,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 256,
    "vocab_size": 100,
}


@pytest.mark.parametrize("plain_norms", [False, True])
def test_megatrons_own_files_are_read_with_its_arguments(tmp_path, plain_norms):
    source = hugging_face(tmp_path / "hf")
    own = megatrons_own(tmp_path, source, args=argparse.Namespace(**ARGS), plain_norms=plain_norms)
    convert(str(own), tmp_path / "back", to="hf")
    assert torch.equal(logits(source), logits(tmp_path / "back"))


def test_the_documented_lines_make_files_that_megatron_has(tmp_path):
    source = hugging_face(tmp_path / "hf")
    convert(str(source), tmp_path / "megatron", to="megatron", tp=2, pp=2)
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(lines.replace("DESTINATION", str(tmp_path / "megatron")), {})
    for file in (tmp_path / "megatron" / "release").glob("*/model.safetensors"):
        file.unlink()
    convert(str(tmp_path / "megatron"), tmp_path / "back", to="hf")
    assert torch.equal(logits(source), logits(tmp_path / "back"))


class Bomb:
    """An object that runs code when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def test_pickles_are_not_run(tmp_path):
    own = megatrons_own(tmp_path, hugging_face(tmp_path / "hf"), args=Bomb(tmp_path / "exploded"))
    with pytest.raises(ValueError, match="holds more than weights, and pickles are not run"):
        convert(str(own), tmp_path / "back", to="hf")
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "back").exists()


def test_large_models_are_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("ringmaster.techniques.models.conversion.SHARD_BYTES", 20_000)
    source = hugging_face(tmp_path / "hf")
    convert(str(source), tmp_path / "copy", to="hf")
    assert len(list((tmp_path / "copy").glob("model-*-of-*.safetensors"))) > 3
    assert torch.equal(logits(source), logits(tmp_path / "copy"))


@pytest.mark.parametrize("to", ["hf", "megatron"])
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
    convert(str(source), tmp_path / "out", to=to, tp=1, pp=1)
    assert 0 < most[0] <= 4  # q, k, v, and the one before them, of 39 tensors


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"to": "onnx"}, "unknown format 'onnx'"),
        ({"to": "hf", "tp": 2}, "only with megatron"),
        ({"to": "megatron", "pp": 3}, "4 layers cannot be divided into 3 equal stages"),
        ({"to": "megatron", "tp": 4}, "2 key-value heads cannot be divided over 4 ranks"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(tmp_path, given, said):
    source = hugging_face(tmp_path / "hf")
    with pytest.raises(ValueError, match=said):
        convert(str(source), tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_other_models_and_places_are_refused_with_the_remedy(tmp_path):
    source = hugging_face(tmp_path / "hf")
    with pytest.raises(ValueError, match="is there already"):
        convert(str(source), source, to="hf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no model that is known\. To fix"):
        convert(str(tmp_path / "empty"), tmp_path / "out", to="hf")
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
    arguments = ["convert", source, str(tmp_path / "out"), "--to", "megatron", "--tp", "2", "--json"]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert (said["from"], said["to"], said["num_tensors"]) == ("hf", "megatron", 39)
    again = CliRunner().invoke(cli.app, arguments)
    assert isinstance(again.exception, InputError) and "is there already" in str(again.exception)


def test_a_stage_that_is_missing_is_told(tmp_path):
    convert(str(hugging_face(tmp_path / "hf")), tmp_path / "megatron", to="megatron", tp=2, pp=2)
    (tmp_path / "megatron" / "release" / "mp_rank_01_001").rename(tmp_path / "aside")
    with pytest.raises(ValueError, match="lacks folders of ranks"):
        convert(str(tmp_path / "megatron"), tmp_path / "back", to="hf")
