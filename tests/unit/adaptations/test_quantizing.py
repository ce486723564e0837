import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ringmaster.techniques import AdaptationSpec, ModelSpec
from ringmaster.techniques.data import PreparedData
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_quantized
from ringmaster.techniques.models.model_folders import quantization_of, tensor_shapes, weight_bytes
from ringmaster.techniques.models.quantization import (
    Int8Linear,
    int8_product,
    is_quantized,
    load_quantized,
    quantize,
    to_int8,
)
from ringmaster.techniques.models.sentence_embeddings import pooling_of
from tests.unit.models.conftest import LLAMA
from tests.unit.models.test_sentence_embeddings import base_in

METHODS = ["dynamic-int8", "weight-only-int8"]
DATA = PreparedData(
    name="words", digest="", num_samples=8, num_held_out=2, kind="tokens", vocab_size=64, seq_len=8, source=""
)


def said(method: str) -> AdaptationSpec:
    return AdaptationSpec(kind="quantized", method=method)


@pytest.fixture
def model() -> nn.Module:
    return build_model(LLAMA, data=DATA, seed=0).eval()


def test_rows_in_8_bits_are_off_by_half_a_step_at_most():
    rows = torch.randn(5, 33) * torch.tensor([1e-3, 1.0, 1e3, 0.0, 5.0]).unsqueeze(1)
    quantized, scale = to_int8(rows)
    assert quantized.dtype == torch.int8
    assert ((rows - quantized * scale).abs() <= scale / 2 * (1 + 1e-5)).all()
    assert not quantized[3].any()


def test_the_integer_product_is_exact():
    a, b = (torch.randint(-127, 128, (n, 19), dtype=torch.int8) for n in (3, 5))
    assert torch.equal(int8_product(a, b).long(), a.long() @ b.long().T)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_in_8_bits_is_near_the_one_it_was(is_dynamic, bias):
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 32, bias=bias), torch.randn(2, 7, 64)
    quantized = Int8Linear.of(linear, is_dynamic=is_dynamic)
    exact = linear(x)
    assert quantized(x).shape == exact.shape
    assert (quantized(x) - exact).norm() / exact.norm() < 0.02
    assert quantized(x.bfloat16()).dtype == torch.bfloat16
    assert not list(quantized.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_what_is_exported_is_read_back_bit_by_bit(tmp_path, model, method):
    tokens = torch.arange(8).unsqueeze(0)
    exact = model(tokens).logits
    plain_bytes = sum(p.numel() * 4 for p in model.parameters())
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    names = quantize(model, said(method))
    expected = model(tokens).logits
    export_quantized(tmp_path / "q", spec=LLAMA, model=model, names=names, method=method, prepared=DATA)

    again = build_model(LLAMA, data=DATA, seed=1, weights_from=tmp_path / "q").eval()
    assert torch.equal(again(tokens).logits, expected)
    assert is_quantized(again)
    assert (expected - exact).norm() / exact.norm() < 0.05
    headers = 5000  # safetensors headers and scales
    assert weight_bytes(tmp_path / "q") < plain_bytes - 3 * linear + headers
    shapes = tensor_shapes(tmp_path / "q")
    assert shapes["model.layers.0.mlp.up_proj.weight"][0] == "I8"
    assert shapes["model.layers.0.mlp.up_proj.weight_scale"] == ("F32", (32, 1))
    assert quantization_of(tmp_path / "q")["method"] == method
    # Loads it by its folder alone, as another tool would.
    alone = build_model(ModelSpec(from_pretrained=str(tmp_path / "q")), data=DATA, seed=1).eval()
    assert torch.equal(alone(tokens).logits, expected)


def test_transformers_refuses_it_rather_than_reads_nonsense(tmp_path, model):
    from transformers import AutoModelForCausalLM

    names = quantize(model, said(METHODS[0]))
    export_quantized(tmp_path / "q", spec=LLAMA, model=model, names=names, method=METHODS[0], prepared=DATA)
    with pytest.raises(ImportError, match="compressed-tensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "q")


def test_a_head_that_shares_the_embedding_stays_as_it_is():
    tied = ModelSpec(architecture=LLAMA.architecture, config={**LLAMA.config, "tie_word_embeddings": True})
    model = build_model(tied, data=DATA, seed=0)
    assert not any("lm_head" in name for name in quantize(model, said(METHODS[0])))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_that_do_not_fit_are_refused(tmp_path, model):
    names = quantize(model, said(METHODS[0]))
    export_quantized(tmp_path / "q", spec=LLAMA, model=model, names=names, method=METHODS[0], prepared=DATA)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["ringmaster_quantization"]["modules"] == list(names)
    other = ModelSpec(architecture=LLAMA.architecture, config={**LLAMA.config, "num_hidden_layers": 1})
    with pytest.raises(ValueError, match="do not fit"):
        build_model(other, data=DATA, seed=0, weights_from=tmp_path / "q")
    with pytest.raises(ValueError, match="quantize a model that has some"):
        quantize(nn.Sequential(nn.Conv2d(1, 1, 1)), said(METHODS[0]))


def test_factories_models_too(tmp_path):
    spec = ModelSpec(factory="torch.nn:Sequential")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    names = quantize(model, said(METHODS[1]))
    export_quantized(tmp_path / "q", spec=spec, model=model, names=names, method=METHODS[1], prepared=DATA)
    how = quantization_of(tmp_path / "q")
    assert how is not None
    again = load_quantized(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), tmp_path / "q", how)
    x = torch.randn(3, 8)
    assert torch.equal(again(x), model(x))
    assert load_file(tmp_path / "q" / "model.safetensors")["0.weight"].dtype == torch.int8


def test_modules_of_sentence_transformers_stay_beside_quantized_weights(tmp_path):
    base = base_in(tmp_path / "base", "Pooling", "Normalize", pooling_mode="cls")
    spec = ModelSpec(architecture="LlamaModel", config=LLAMA.config)
    model = build_model(spec, data=DATA, seed=0)
    names = quantize(model, said(METHODS[1]))
    export_quantized(tmp_path / "q", spec=spec, model=model, names=names, method=METHODS[1], prepared=DATA, base=base)
    assert pooling_of(str(tmp_path / "q")) == pooling_of(base)
    assert pooling_of(base).modes == ("cls",)
