"""`ringmaster export --format`: adapters as vLLM and Ollama read them, and what these would refuse."""

import json

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ringmaster.errors import InputError
from ringmaster.flows.cli import app
from tests.matrix import matrix
from tests.unit.features.foreign_models.tiny_models import save

gguf = pytest.importorskip("gguf")
peft = pytest.importorskip("peft")
from ringmaster.features.foreign_models import GgufType, gguf_file  # noqa: E402 - needs gguf
from ringmaster.features.foreign_models.engine_checks import OLLAMA, VLLM, engine_faults, vllm_rank  # noqa: E402

TARGETS = ["q_proj", "k_proj", "o_proj", "up_proj"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "home"))


def adapt(tmp_path, name="llama", **options):
    """A base and an adapter on it, whose second matrices are not zero."""
    save(tmp_path / "base", name)
    torch.manual_seed(1)
    config = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), peft.LoraConfig(**{**config, **options})
    )
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def export(*arguments):
    done = CliRunner().invoke(app, ["export", *map(str, arguments), "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return json.loads(done.stdout)


def tensors_of(file):
    return {each.name: gguf.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("name", matrix(["llama", "qwen2", "gemma2"], quick=["llama"]))
def test_what_ollama_adds_is_what_the_merged_model_has(tmp_path, name, use_rslora):
    adapter = adapt(tmp_path, name, use_rslora=use_rslora)
    answer = export(adapter, tmp_path / "ollama", "--format", "ollama")
    assert (tmp_path / "ollama" / "Modelfile").read_text() == "FROM ./base.gguf\nADAPTER ./adapter.gguf\n"
    assert answer["command"] == f"ollama create NAME -f {tmp_path / 'ollama' / 'Modelfile'}"
    export(adapter, tmp_path / "merged", "--merge")
    gguf_file.write_model(str(tmp_path / "merged"), tmp_path / "merged.gguf", type=GgufType.f16)
    base, merged = tensors_of(tmp_path / "ollama" / "base.gguf"), tensors_of(tmp_path / "merged.gguf")
    reader = gguf.GGUFReader(tmp_path / "ollama" / "adapter.gguf")
    lora = {each.name: each.data for each in reader.tensors}
    alpha = reader.fields["adapter.lora.alpha"].contents()
    adapted = {key.removesuffix(".lora_a") for key in lora if key.endswith(".lora_a")}
    assert len(adapted) == len(TARGETS) * 2 and set(lora) == {f"{key}.lora_{side}" for key in adapted for side in "ab"}
    for key, values in base.items():
        if key in adapted:  # as llama.cpp does: alpha over the rank, the second dimension of B in torch's order
            first, second = lora[f"{key}.lora_a"], lora[f"{key}.lora_b"]
            values = values + alpha / second.shape[1] * (second @ first)
        np.testing.assert_allclose(values, merged[key], atol=2e-3, rtol=2e-3, err_msg=key)
    fields = {key: reader.fields[key].contents() for key in ("general.type", "adapter.type", "general.architecture")}
    assert fields == {"general.type": "adapter", "adapter.type": "lora", "general.architecture": name}


def test_a_base_that_ollama_has_is_named_and_a_whole_model_is_one_file(tmp_path):
    adapter = adapt(tmp_path)
    export(adapter, tmp_path / "named", "--format", "ollama", "--base", "llama3.2:1b")
    assert {path.name for path in (tmp_path / "named").iterdir()} == {"Modelfile", "adapter.gguf"}
    assert (tmp_path / "named" / "Modelfile").read_text() == "FROM llama3.2:1b\nADAPTER ./adapter.gguf\n"
    export(adapter, tmp_path / "whole", "--format", "ollama", "--merge")
    assert (tmp_path / "whole" / "Modelfile").read_text() == "FROM ./model.gguf\n"
    assert tensors_of(tmp_path / "whole" / "model.gguf")


def test_vllm_gets_the_folder_of_peft_and_the_command_holds_its_rank(tmp_path):
    adapter = adapt(tmp_path, r=24)
    answer = export(adapter, tmp_path / "vllm", "--format", "vllm")
    assert answer["command"].startswith("vllm serve BASE --enable-lora --max-lora-rank 32 --lora-modules adapter=")
    for name, values in load_file(adapter / "adapter_model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "vllm" / "adapter_model.safetensors")[name], values)
    assert [vllm_rank(rank) for rank in (1, 2, 8, 16, 17, 512)] == [1, 8, 8, 16, 32, 512]


CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
WEIGHT = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
FAULTS = [
    (
        VLLM,
        {"peft_type": "PREFIX_TUNING"},
        {},
        "",
        "vllm loads LoRAs, and this is a PREFIX_TUNING. To fix: train a LoRA",
    ),
    (OLLAMA, {"peft_type": "IA3"}, {}, "", "ollama loads LoRAs, and this is a IA3. To fix: ringmaster export --merge"),
    (VLLM, {"modules_to_save": ["lm_head"]}, {}, "", "vllm loads no modules that were trained whole: lm_head"),
    (OLLAMA, {"modules_to_save": ["lm_head"]}, {}, "", "ollama loads no modules that were trained whole: lm_head"),
    (VLLM, {"use_dora": True}, {}, "", "vllm loads no DoRA"),
    (VLLM, {"bias": "all"}, {}, "", "vllm does not read bias"),
    (VLLM, {"rank_pattern": {"q_proj": 4}}, {}, "", "vllm does not read rank_pattern"),
    (VLLM, {"fan_in_fan_out": True}, {}, "", "vllm loads no adapter of layers whose weights are transposed"),
    (VLLM, {"r": 513}, {}, "", "vllm loads ranks up to 512, and this one is 513"),
    (
        VLLM,
        {},
        {WEIGHT.replace("q_proj", "qkv"): (8, 8)},
        "",
        "vllm loads no adapter of qkv, but of down_proj, embed_tokens",
    ),
    (OLLAMA, {}, {WEIGHT.replace("q_proj", "lm_head"): (8, 8)}, "", "ollama loads no adapter of lm_head"),
    (VLLM, {"r": "8"}, {}, "", 'adapter_config.json has r: "8"'),
    (OLLAMA, {"lora_alpha": None}, {}, "", "adapter_config.json has lora_alpha: null"),
    (OLLAMA, {}, {}, "qwen3", "ollama loads no adapters of a qwen3. To fix: ringmaster export --merge"),
    (OLLAMA, {}, {}, "gemma3_text", "ollama loads no adapters of a gemma3_text"),
]


@pytest.mark.parametrize(("engine", "config", "tensors", "model_type", "reason"), FAULTS)
def test_what_an_engine_refuses_is_said(engine, config, tensors, model_type, reason):
    known = {WEIGHT: (8, 8), **tensors}
    (fault,) = engine_faults(engine, {**CONFIG, **config}, known, model_type=model_type)
    assert fault.startswith(reason) and "To fix: " in fault
    assert not [*engine_faults(engine, CONFIG, {WEIGHT: (8, 8)}, model_type="llama")]


def test_all_faults_are_said_at_once_and_nothing_is_written(tmp_path):
    adapter = adapt(tmp_path, modules_to_save=["lm_head"], use_dora=True)
    for engine in (VLLM, OLLAMA):
        with pytest.raises(InputError) as error:
            export(adapter, tmp_path / "new" / "folder", "--format", engine)
        assert len(str(error.value).splitlines()) == 2
        assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--format", "vllm", "--merge"], "--merge makes a whole model, which vllm reads as it is"),
        (["--format", "vllm", "--base", "x"], "--base is of --format ollama"),
        (["--format", "ollama", "--push", "me/x"], "--push publishes the format hf"),
        (["--format", "ollama", "--base", "x\nSYSTEM y"], "is no name of a model in Ollama"),
    ],
)
def test_options_that_exclude_each_other(tmp_path, arguments, reason):
    adapter = adapt(tmp_path)
    with pytest.raises(InputError, match=reason):
        export(adapter, tmp_path / "x", *arguments)


def test_the_layout_of_vllm_is_of_adapters(tmp_path):
    save(tmp_path / "base", "llama")
    with pytest.raises(
        InputError, match=r"is a whole model, and the layout vllm is of adapters\. To fix: leave out --format"
    ):
        export(tmp_path / "base", tmp_path / "x", "--format", "vllm")


def test_an_adapter_of_what_gguf_has_no_name_for_is_refused(tmp_path):
    adapter = adapt(tmp_path)
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({key.replace("model.layers.1.", "model.layers.9."): value for key, value in weights.items()}, file)
    with pytest.raises(InputError, match=r"GGUF has no name for model\.layers\.9\."):
        export(adapter, tmp_path / "x", "--format", "ollama")
    assert not (tmp_path / "x").exists()


def test_a_base_that_cannot_be_fetched_is_said(tmp_path, monkeypatch):
    adapter = adapt(tmp_path)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "acme/gone"}))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"acme/gone could not be fetched: .* To fix: "):
        export(adapter, tmp_path / "x", "--format", "ollama")


def test_what_fails_while_it_is_written_leaves_nothing(tmp_path):
    save(tmp_path / "base", "llama")
    (tmp_path / "base" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="no tokenizer"):
        export(tmp_path / "base", tmp_path / "new" / "x", "--format", "ollama")
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("layout", [("--format", "vllm"), ("--format", "ollama"), ("--merge",), ()])
def test_a_place_in_a_file_is_refused(tmp_path, layout):
    adapter = adapt(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot be made: .*file is not a folder\. To fix: name a place in a folder"):
        export(adapter, tmp_path / "file" / "x", *layout)
