"""Weights that do not fit are found in the headers of their files, as a rank would find them later."""

import dataclasses
import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.models import weight_values
from ringmaster.techniques.models.build import build_model, check_weights
from ringmaster.techniques.models.export import export_model
from tests.unit.models.conftest import FOUR, LLAMA, TOKENS

MIXTRAL = ModelSpec(
    architecture="MixtralForCausalLM",
    config={**LLAMA.config, "num_key_value_heads": 2, "num_local_experts": 4},
)
TIED = dataclasses.replace(LLAMA, config={**LLAMA.config, "tie_word_embeddings": True})
EMBEDDING = "model.embed_tokens.weight"


def saved(folder, spec, data=TOKENS, *, shard_size="50GB"):
    """Saves a model as `save_pretrained` does."""
    build_model(spec, data=data, seed=0).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def changed(folder, change):
    """Changes the tensors of the first file of a folder."""
    file = min(folder.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def refusal(spec, data, weights_from=None):
    """Returns why weights are refused by their headers, which must be why a rank would refuse them; None if not."""
    found = []
    for act in (check_weights, lambda spec, **kwargs: build_model(spec, seed=0, **kwargs)):
        found.append(None)
        try:
            act(spec, data=data, weights_from=weights_from)
        except ValueError as error:
            found[-1] = str(error)
    assert (found[0] is None) == (found[1] is None), found
    if found[0] is not None:
        assert "To fix: " in found[0]
        assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(("spec", "data"), [*FOUR, (TIED, TOKENS), (MIXTRAL, TOKENS)])
def test_weights_that_fit_are_taken(tmp_path, spec, data):
    folder = saved(tmp_path, spec, data, shard_size="10KB")
    assert (folder / "model.safetensors.index.json").is_file()
    check_weights(ModelSpec(from_pretrained=str(folder)), data=data)
    check_weights(spec, data=data, weights_from=folder)


def removed(tensors):
    del tensors[EMBEDDING]


def cut(tensors):
    tensors[EMBEDDING] = tensors[EMBEDDING][:, :3].contiguous()


@pytest.mark.parametrize(
    ("spec", "change", "said"),
    [
        (LLAMA, removed, f"{EMBEDDING} is missing"),
        (TIED, removed, f"{EMBEDDING} is missing"),
        (LLAMA, cut, f"{EMBEDDING} is [64, 3], not [64, 16]"),
        (LLAMA, lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight is missing"),
        (MIXTRAL, lambda tensors: tensors.pop(next(k for k in tensors if "experts.2.w1" in k)), "MixtralForCausalLM"),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(tmp_path, spec, change, said):
    folder = changed(saved(tmp_path, spec), change)
    assert said in refusal(ModelSpec(from_pretrained=str(folder)), TOKENS)
    assert said in refusal(spec, TOKENS, weights_from=folder)


def test_a_body_may_lack_the_head_that_stays_fresh(tmp_path):
    folder = saved(tmp_path, dataclasses.replace(LLAMA, architecture="LlamaModel"))
    fresh = {"architecture": "LlamaForSequenceClassification", "config": {"num_labels": 3}}
    assert refusal(ModelSpec(from_pretrained=str(folder), **fresh), TOKENS) is None
    of_head = {"architectures": ["LlamaForTokenClassification"]}
    changed(folder, lambda tensors: tensors.pop("norm.weight"))
    assert "model.norm.weight is missing" in refusal(ModelSpec(from_pretrained=str(folder), config=of_head), TOKENS)


def shortened(folder):
    file = min(folder.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 5)


def without_a_shard(folder):
    max(folder.glob("*.safetensors")).unlink()


def of_a_tensor_elsewhere(folder):
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    places = sorted(set(said["weight_map"].values()))
    name = next(name for name, file in said["weight_map"].items() if file == places[0])
    said["weight_map"][name] = places[1]
    index.write_text(json.dumps(said))


def of_text(folder):
    min(folder.glob("*.safetensors")).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")


def without_places(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shortened, "is not a valid safetensors file"),
        (without_a_shard, "cannot be read: No such file"),
        (of_a_tensor_elsewhere, "which lacks it"),
        (of_text, "is not a valid safetensors file"),
        (without_places, "does not map tensors to files"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, said):
    folder = saved(tmp_path, LLAMA, shard_size="10KB")
    damage(folder)
    with pytest.raises(ValueError, match="To fix: copy or save the model again") as refused:
        check_weights(ModelSpec(from_pretrained=str(folder)), data=TOKENS)
    assert said.split(" of ")[0] in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float8_e4m3fn])
def test_values_that_need_scales_are_refused(tmp_path, dtype):
    folder = changed(saved(tmp_path, LLAMA), lambda t: t.update({EMBEDDING: t[EMBEDDING].abs().to(dtype)}))
    with pytest.raises(ValueError, match=f"{EMBEDDING} is stored as .*quantized"):
        check_weights(ModelSpec(from_pretrained=str(folder)), data=TOKENS)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}, "compressed-tensors"),
        ({"quant_method": "gguf"}, "gguf"),
        ({"quant_method": "imagined"}, "imagined"),
        ({"bits": 4}, "by an unknown method"),
    ],
)
def test_a_quantized_model_that_cannot_be_trained_is_refused(tmp_path, monkeypatch, said, named):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    folder = saved(tmp_path, LLAMA)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    with pytest.raises(ValueError, match=rf"is quantized \({named}\) and cannot be loaded.*To fix: name the"):
        check_weights(ModelSpec(from_pretrained=str(folder)), data=TOKENS)
    with pytest.raises(ValueError, match=rf"is quantized \({named}\) and cannot be loaded.*To fix: name the"):
        build_model(ModelSpec(from_pretrained=str(folder)), data=TOKENS, seed=0)


QUERY = "model.layers.0.self_attn.q_proj.weight"


def in_fp8(tensors):
    """Stores the matrices of the layers in fp8, in blocks of 16 x 16, as published models are."""
    for name in [name for name in tensors if "_proj" in name]:
        height, width = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(-(-height // 16), -(-width // 16))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: None, None),
        (lambda tensors: tensors.pop(QUERY), f"{QUERY} is missing"),
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda tensors: tensors.update({QUERY: torch.zeros(8, 8).to(torch.float8_e4m3fn)}), f"{QUERY} is [8, 8]"),
        (lambda tensors: tensors.update({f"{QUERY}_scale_inv": torch.ones(7, 7)}), "conversion of the weights"),
    ],
)
def test_weights_in_fp8_are_checked_as_a_rank_would_convert_them(tmp_path, change, said):
    folder = changed(saved(tmp_path, LLAMA), lambda tensors: (in_fp8(tensors), change(tensors)))
    describe_as_fp8(folder)
    found = refusal(ModelSpec(from_pretrained=str(folder)), TOKENS)
    assert found is None if said is None else said in found


def describe_as_fp8(folder):
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def test_weights_in_fp8_without_their_scales_are_refused(tmp_path):
    folder = changed(saved(tmp_path, LLAMA), lambda tensors: (in_fp8(tensors), tensors.pop(f"{QUERY}_scale_inv")))
    describe_as_fp8(folder)
    with pytest.raises(ValueError, match=f"fit LlamaForCausalLM: {QUERY} is stored as F8_E4M3, as quantized models"):
        check_weights(ModelSpec(from_pretrained=str(folder)), data=TOKENS)


@pytest.mark.parametrize(("fp8", "num_gpus"), [(True, 0), (True, 1), (False, 0)])
def test_what_is_converted_does_not_depend_on_the_devices_that_a_process_sees(tmp_path, monkeypatch, fp8, num_gpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    folder = changed(saved(tmp_path, LLAMA), in_fp8 if fp8 else lambda tensors: None)
    describe_as_fp8(folder)
    check_weights(ModelSpec(from_pretrained=str(folder)), data=TOKENS)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("generation_config.json", '{"max_new_tokens": -1}'),
        ("generation_config.json", '{"cache_implementation": "imagined"}'),
        ("generation_config.json", "[]"),
        ("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "nothing", "r": 4}'),
        ("model.safetensors.index.json", '{"weight_map": {}}'),
    ],
)
def test_files_beside_the_weights_are_read_as_a_rank_reads_them(tmp_path, file, content):
    folder = saved(tmp_path, LLAMA)
    (folder / file).write_text(content)
    if file.startswith("model"):
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    found = []
    for act in (check_weights, lambda spec, **kwargs: build_model(spec, seed=0, **kwargs)):
        with pytest.raises(Exception, match=r".") as refused:
            act(ModelSpec(from_pretrained=str(folder)), data=TOKENS)
        found.append((refused.type, str(refused.value)))
    assert found[0] == found[1]


def test_weights_under_a_name_that_no_rank_reads_are_refused(tmp_path, users):
    folder = saved(tmp_path / "model", LLAMA)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert "no file named model.safetensors" in refusal(ModelSpec(from_pretrained=str(folder)), TOKENS)
    spec, base = ModelSpec(factory=f"{users}:tied"), tmp_path / "base"
    model = build_model(spec, data=TOKENS, seed=0)
    export_model(base, spec=spec, model=model, state=model.state_dict(), prepared=TOKENS)
    (base / "model.safetensors").rename(base / "weights.safetensors")
    assert "model.safetensors cannot be read" in refusal(spec, TOKENS, weights_from=base)


def test_the_adapter_of_a_base_is_checked_too(tmp_path):
    base = saved(tmp_path / "base", LLAMA)
    folder, shape = tmp_path / "adapter", (4, LLAMA.config["hidden_size"])
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 8}))
    names = [f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_{m}.weight" for n in (0, 1) for m in "AB"]
    tensors = {name: torch.zeros(shape if "lora_A" in name else shape[::-1]) for name in names}
    save_file(tensors, folder / "adapter_model.safetensors")
    assert refusal(LLAMA, TOKENS, weights_from=folder) is None
    save_file({**tensors, names[0]: torch.zeros(4, 3)}, folder / "adapter_model.safetensors")
    assert "lora_A.weight is [4, 3], not [4, " in refusal(LLAMA, TOKENS, weights_from=folder)
    tensors.pop(names[0])
    save_file(tensors, folder / "adapter_model.safetensors")
    assert "lora_A.weight is missing" in refusal(LLAMA, TOKENS, weights_from=folder)


def test_the_base_of_a_factory_is_checked(tmp_path, users):
    spec = ModelSpec(factory=f"{users}:tied")
    model = build_model(spec, data=TOKENS, seed=0)
    folder = tmp_path / "base"
    export_model(folder, spec=spec, model=model, state=model.state_dict(), prepared=TOKENS)
    assert refusal(spec, TOKENS, weights_from=folder) is None
    wider = dataclasses.replace(spec, kwargs={"width": 9})
    assert "blocks.0.bias is [8], not [9]" in refusal(wider, TOKENS, weights_from=folder)
    changed(folder, lambda tensors: tensors.pop("blocks.1.bias"))
    assert "blocks.1.bias is missing" in refusal(spec, TOKENS, weights_from=folder)


def test_weights_that_are_in_the_tensor_store_alone_are_refused_with_the_way_to_them(tmp_path):
    folder = saved(tmp_path / "m", LLAMA)
    (folder / "model.safetensors").rename(folder / "model.safetensors.stored")
    with pytest.raises(
        ValueError, match=r"are in the tensor store alone. To fix: let `ringmaster lineage restore FOLDER`"
    ):
        check_weights(LLAMA, data=TOKENS, weights_from=folder)


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("-inf"), "infinity")])
def test_weights_that_are_not_finite_are_named_with_their_file(tmp_path, monkeypatch, value, kind):
    def lose(tensors):
        tensors[EMBEDDING][-1, 0] = value

    folder = changed(saved(tmp_path, LLAMA), lose)
    spec = ModelSpec(from_pretrained=str(folder))
    lost = f"model: {EMBEDDING} in {folder / 'model.safetensors'} holds {kind}. To fix: "
    assert refusal(spec, TOKENS).startswith(lost)
    assert refusal(LLAMA, TOKENS, folder).startswith(lost)
    monkeypatch.setattr(weight_values, "weight_bytes", lambda _: 1 << 40)
    assert refusal(spec, TOKENS).startswith(lost), "the ends of the tensors of large models are read"


def test_what_the_ends_of_large_tensors_do_not_show_is_found_when_they_are_loaded(tmp_path, monkeypatch):
    def lose(tensors):
        tensors[EMBEDDING][len(tensors[EMBEDDING]) // 2] = float("nan")

    spec = ModelSpec(from_pretrained=str(changed(saved(tmp_path, LLAMA), lose)))
    monkeypatch.setattr(weight_values, "weight_bytes", lambda _: 1 << 40)
    monkeypatch.setattr(weight_values, "SAMPLE_BYTES", 1)
    check_weights(spec, data=TOKENS)
    with pytest.raises(ValueError, match=f"{EMBEDDING} in .* holds NaN"):
        build_model(spec, data=TOKENS, seed=0)
