"""Weights that do not fit are found in the headers of their files, as a rank would find them later."""

import dataclasses
import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from ringmaster.techniques.job import ModelSpec
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
        (without_places, "does not say which file has which tensor"),
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
