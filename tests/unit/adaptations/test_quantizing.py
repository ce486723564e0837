import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ringmaster.features.adaptation.rewrite import Rewrite
from ringmaster.techniques import AdaptationSpec, DataSpec, Job, ModelSpec
from ringmaster.techniques.data import PreparedData
from ringmaster.techniques.job import ADAPTATIONS, INT4_METHODS, INT8_METHODS, QUANTIZED
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_quantized
from ringmaster.techniques.models.model_folders import quantization_of, tensor_shapes, weight_bytes
from ringmaster.techniques.models.quantization import (
    is_quantized,
    load_quantized,
    packed,
    quantize,
    torchao_config,
    unpacked,
)
from ringmaster.techniques.models.sentence_embeddings import pooling_of
from ringmaster.techniques.scoring.row_scores import _laid_out
from ringmaster.techniques.technique import GangShape
from tests.unit.models.conftest import LLAMA
from tests.unit.models.test_sentence_embeddings import base_in

METHODS = ADAPTATIONS[QUANTIZED]
GROUP_SIZE = 8
NEAR = {**dict.fromkeys(INT8_METHODS, 0.05), **dict.fromkeys(INT4_METHODS, 0.3)}
DATA = PreparedData(
    name="words", digest="", num_samples=8, num_held_out=2, kind="tokens", vocab_size=64, seq_len=8, source=""
)
TOKENS = torch.arange(8).unsqueeze(0)
pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="the extra torchao is not installed")


def said(method: str, *, group_size: int = GROUP_SIZE) -> AdaptationSpec:
    return AdaptationSpec(kind=QUANTIZED, method=method, group_size=group_size)


@pytest.fixture
def model() -> nn.Module:
    return build_model(LLAMA, data=DATA, seed=0).eval()


def exported(folder, model, method, *, spec=LLAMA, **more):
    """The folder of a model that is quantized in place."""
    how = quantize(model, said(method))
    export_quantized(folder, spec=spec, model=model, quantization=how, prepared=DATA, **more)
    return folder


def test_eight_values_lie_in_an_int32():
    values = torch.arange(-8, 8, dtype=torch.int8).reshape(2, 8).repeat(1, 2)
    assert packed(values).shape == (2, 2)
    assert packed(values)[0, 0].item() == 0x76543210
    assert torch.equal(unpacked(packed(values)), values)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_near_the_one_it_was_and_torchaos(method, bias):
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    linear, x = nn.Linear(64, 32, bias=bias), torch.randn(2, 7, 64)
    exact, layers = linear(x), nn.ModuleList([nn.ModuleDict({"linear": linear})])
    quantize(layers, said(method, group_size=32))
    quantized = layers[0]["linear"]
    assert (quantized(x) - exact).norm() / exact.norm() < NEAR[method] / 2
    by_hand = nn.Linear(64, 32, bias=bias)
    torch.manual_seed(0)
    by_hand.reset_parameters()
    quantize_(by_hand, torchao_config(method, group_size=32))
    assert torch.equal(quantized(x), by_hand(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(quantized(x.bfloat16()).float(), exact, rtol=0.2, atol=0.2)
    assert not any(parameter.requires_grad for name, parameter in quantized.named_parameters() if name == "weight")


@pytest.mark.parametrize("method", METHODS)
def test_what_is_exported_is_read_back_bit_by_bit(tmp_path, model, method):
    exact = model(TOKENS).logits
    folder = exported(tmp_path / "q", model, method)
    expected = model(TOKENS).logits
    again = build_model(LLAMA, data=DATA, seed=1, weights_from=folder).eval()
    assert torch.equal(again(TOKENS).logits, expected)
    assert is_quantized(again) and not is_quantized(build_model(LLAMA, data=DATA, seed=0))
    assert (expected - exact).norm() / exact.norm() < NEAR[method]
    assert quantization_of(folder)["method"] == method
    # Loads it by its folder alone, as another tool would.
    alone = build_model(ModelSpec(from_pretrained=str(folder)), data=DATA, seed=1).eval()
    assert torch.equal(alone(TOKENS).logits, expected)


@pytest.mark.parametrize(
    ("method", "stored", "bits"),
    [
        ("dynamic-int8", {"weight": ("I8", (32, 16)), "weight_scale": ("F32", (32, 1))}, 8),
        ("weight-only-int8", {"weight": ("I8", (32, 16)), "weight_scale": ("F32", (32, 1))}, 8),
        ("dynamic-int8-int4", {"weight": ("I8", (32, 16)), "weight_scale": ("F32", (32, 2))}, 8),
        (
            "weight-only-int4",
            {"weight_packed": ("I32", (32, 2)), "weight_scale": ("F32", (32, 2)), "weight_shape": ("I64", (2,))},
            4,
        ),
    ],
)
def test_the_files_have_the_layout_of_compressed_tensors(tmp_path, model, method, stored, bits):
    plain_bytes = sum(p.numel() * 4 for p in model.parameters())
    folder = exported(tmp_path / "q", model, method)
    name, shapes = "model.layers.0.mlp.up_proj", tensor_shapes(folder)
    assert {key.removeprefix(f"{name}."): shapes[key] for key in shapes if key.startswith(name)} == stored
    numbers = sum(model.get_submodule(name).weight.numel() for name in quantization_of(folder)["modules"])
    scales = 4 * sum(shape[0] * shape[1] for key, (_, shape) in shapes.items() if key.endswith("weight_scale"))
    headers = 200 * len(shapes)
    assert weight_bytes(folder) < plain_bytes - 4 * numbers + numbers * bits // 8 + scales + headers


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
@pytest.mark.parametrize("method", METHODS)
def test_transformers_loads_it_with_the_same_numbers(tmp_path, model, method):
    from transformers import AutoModelForCausalLM

    folder = exported(tmp_path / "q", model, method)
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    theirs, own = loaded.eval()(TOKENS).logits, model(TOKENS).logits
    for name in quantization_of(folder)["modules"]:
        assert torch.equal(loaded.get_submodule(name).weight, model.get_submodule(name).weight.dequantize())
    # The largest input of a token is 127.5 scales: the last digit of a quotient decides to which side it is rounded.
    assert (theirs - own).norm() / own.norm() < (0.01 if method.startswith("dynamic") else 1e-5)


def test_transformers_refuses_it_rather_than_reads_nonsense(tmp_path, model, monkeypatch):
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import quantizer_compressed_tensors

    monkeypatch.setattr(quantizer_compressed_tensors, "is_compressed_tensors_available", lambda: False)
    folder = exported(tmp_path / "q", model, METHODS[0])
    with pytest.raises(ImportError, match="compressed"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("method", INT8_METHODS)
def test_models_of_earlier_releases_are_read(tmp_path, model, method):
    """They have 8 bits with scales of max |w| / 127, and neither groups nor a zero point."""
    exact, folder = model(TOKENS).logits, exported(tmp_path / "q", model, method)
    plain, tensors = build_model(LLAMA, data=DATA, seed=0), load_file(folder / "model.safetensors")
    for name in quantization_of(folder)["modules"]:
        weight = plain.get_submodule(name).weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors |= {f"{name}.weight": (weight / scale).round().to(torch.int8), f"{name}.weight_scale": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["ringmaster_quantization"]["group_size"]
    (folder / "config.json").write_text(json.dumps(config))
    read = build_model(LLAMA, data=DATA, seed=1, weights_from=folder).eval()
    name = "model.layers.0.mlp.up_proj"
    stored = tensors[f"{name}.weight"] * tensors[f"{name}.weight_scale"]
    assert torch.equal(read.get_submodule(name).weight.dequantize(), stored)
    assert (read(TOKENS).logits - exact).norm() / exact.norm() < NEAR[method]


@pytest.mark.parametrize("method", [METHODS[0], METHODS[3]])
def test_a_head_that_shares_the_embedding_stays_as_it_is(tmp_path, method):
    tied = ModelSpec(architecture=LLAMA.architecture, config={**LLAMA.config, "tie_word_embeddings": True})
    model = build_model(tied, data=DATA, seed=0).eval()
    folder = exported(tmp_path / "q", model, method, spec=tied)
    assert not any("lm_head" in name for name in quantization_of(folder)["modules"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    again = build_model(tied, data=DATA, seed=1, weights_from=folder).eval()
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_weights_that_do_not_fit_are_refused(tmp_path, model):
    folder = exported(tmp_path / "q", model, METHODS[0])
    for config in ({"num_hidden_layers": 1}, {"num_hidden_layers": 3}, {"intermediate_size": 48}):
        other = ModelSpec(architecture=LLAMA.architecture, config={**LLAMA.config, **config})
        with pytest.raises(ValueError, match="do not fit"):
            build_model(other, data=DATA, seed=0, weights_from=folder)
    with pytest.raises(ValueError, match="quantize a model that has some"):
        quantize(nn.Sequential(nn.Conv2d(1, 1, 1)), said(METHODS[0]))


def test_a_missing_package_is_named(tmp_path, model, monkeypatch):
    folder = exported(tmp_path / "q", model, METHODS[0])
    monkeypatch.setattr("ringmaster.extras.find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"the quantized model in .* needs torchao, not installed. To fix: pip"):
        build_model(LLAMA, data=DATA, seed=0, weights_from=folder)
    job = Job(name="q", model=LLAMA, data=DataSpec(source="digits"), num_steps=0, features=(said(METHODS[0]),))
    one = GangShape(kind="cpu", num_devices=1, memory_bytes=1 << 30)
    reason = Rewrite().supports(job, one, SimpleNamespace())
    assert reason == "a quantized model needs torchao, not installed. To fix: pip install 'ringmaster-ml[torchao]'"


@pytest.mark.parametrize("method", METHODS)
def test_it_is_not_divided_over_devices(model, method):
    quantize(model, said(method))
    with pytest.raises(ValueError, match="cannot be evaluated on 2 devices: its weights are quantized"):
        _laid_out(model, LLAMA, None, device=torch.device("cpu"), mesh=SimpleNamespace(size=lambda: 2))


def test_factories_models_too(tmp_path):
    spec = ModelSpec(factory="torch.nn:Sequential")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    folder = exported(tmp_path / "q", model, METHODS[1], spec=spec)
    how = quantization_of(folder)
    assert how is not None
    again = load_quantized(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), folder, how)
    x = torch.randn(3, 8)
    assert torch.equal(again(x), model(x))
    assert load_file(folder / "model.safetensors")["0.weight"].dtype == torch.int8


def test_modules_of_sentence_transformers_stay_beside_quantized_weights(tmp_path):
    base = base_in(tmp_path / "base", "Pooling", "Normalize", pooling_mode="cls")
    spec = ModelSpec(architecture="LlamaModel", config=LLAMA.config)
    model = build_model(spec, data=DATA, seed=0)
    folder = exported(tmp_path / "q", model, METHODS[1], spec=spec, base=base)
    assert pooling_of(str(folder)) == pooling_of(base)
    assert pooling_of(base).modes == ("cls",)
