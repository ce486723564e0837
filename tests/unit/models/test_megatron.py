"""Conversion of Llamas between the layouts of Hugging Face and Megatron-LM, exact to the bit."""

import argparse
import json
import os
import weakref
from dataclasses import replace

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


def classic(folder, source, *, tp=2, pp=2):
    """Divides a Llama as Megatron-LM's classic checkpoints do; returns the tensors of each rank and stage.

    By hand: heads of 8 columns in 2 groups of 2 query heads, embeddings padded to 128 rows a rank.
    """
    named, result = load_file(source / "model.safetensors"), {}
    for r, stage in [(r, stage) for r in range(tp) for stage in range(pp)]:
        mine = result.setdefault((r, stage), {})
        for local in range(4 // pp):
            ours, theirs = f"model.layers.{stage * 4 // pp + local}.", f"decoder.layers.{local}."
            q, k, v, o = (named[f"{ours}self_attn.{each}_proj.weight"] for each in "qkvo")
            groups = [torch.cat([q[16 * g : 16 * g + 16], k[8 * g : 8 * g + 8], v[8 * g : 8 * g + 8]]) for g in (0, 1)]
            gate, up, down = (named[f"{ours}mlp.{each}_proj.weight"] for each in ("gate", "up", "down"))
            mine[f"{theirs}self_attention.linear_qkv.weight"] = torch.cat(groups).chunk(tp)[r]
            mine[f"{theirs}self_attention.linear_proj.weight"] = o.chunk(tp, dim=1)[r]
            mine[f"{theirs}mlp.linear_fc1.weight"] = torch.cat([gate.chunk(tp)[r], up.chunk(tp)[r]])
            mine[f"{theirs}mlp.linear_fc2.weight"] = down.chunk(tp, dim=1)[r]
            mine[f"{theirs}self_attention.linear_qkv.layer_norm_weight"] = named[f"{ours}input_layernorm.weight"]
            mine[f"{theirs}mlp.linear_fc1.layer_norm_weight"] = named[f"{ours}post_attention_layernorm.weight"]
        ends = {"embedding.word_embeddings.weight": "model.embed_tokens.weight"} if stage == 0 else {}
        ends |= {"output_layer.weight": "lm_head.weight"} if stage == pp - 1 else {}
        for theirs, ours in ends.items():
            padded = torch.cat([named[ours], torch.zeros(128 * tp - 100, 32)])
            mine[theirs] = padded.chunk(tp)[r]
        if stage == pp - 1:
            mine["decoder.final_layernorm.weight"] = named["model.norm.weight"]
    for (r, stage), mine in result.items():
        place = folder / (f"mp_rank_{r:02d}" if pp == 1 else f"mp_rank_{r:02d}_{stage:03d}")
        place.mkdir(parents=True)
        save_file({name: each.contiguous() for name, each in mine.items()}, place / "model.safetensors")
    return folder


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


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 4), (2, 1)])
def test_classic_checkpoints_are_put_together(tmp_path, tp, pp):
    source = hugging_face(tmp_path / "hf")
    folder = classic(tmp_path / "megatron", source, tp=tp, pp=pp)
    (folder / "config.json").write_text((source / "config.json").read_text())
    convert(str(folder), tmp_path / "back", to="hf")
    assert torch.equal(logits(source), logits(tmp_path / "back"))


def megatrons_own(folder, source, *, args, plain_norms=False):
    """A checkpoint in Megatron-LM's own form: pickled weights with their arguments, and no config.json."""
    own = folder / "own" / "iter_0000030"
    for path in classic(folder / "ours", source, pp=1).iterdir():
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


def test_a_stage_that_is_missing_is_told(tmp_path):
    folder = classic(tmp_path / "megatron", hugging_face(tmp_path / "hf"))
    (folder / "mp_rank_01_001").rename(tmp_path / "aside")
    with pytest.raises(ValueError, match="lacks folders of ranks"):
        convert(str(folder), tmp_path / "back", to="hf")
