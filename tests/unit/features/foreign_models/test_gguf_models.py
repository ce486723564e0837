"""A GGUF file has the model's values, rounded to its type, under the names, the layout and the keys of the format."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from ringmaster.errors import InputError
from ringmaster.features.foreign_models import GgufType
from ringmaster.flows.cli import app
from tests.matrix import matrix
from tests.unit.features.foreign_models.tiny_models import CONFIGS, TEMPLATE, logits_of, model_of, save

gguf = pytest.importorskip("gguf")
from ringmaster.features.foreign_models import gguf_file  # noqa: E402 - needs gguf

OPTIONAL = {"OUTPUT", "ROPE_FREQS", "ATTN_ROT_EMBD", "FFN_GATE_INP", "FFN_GATE_EXP", "FFN_DOWN_EXP", "FFN_UP_EXP"}
KEYS = {
    value
    for group in (gguf.Keys.General, gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope, gguf.Keys.Tokenizer)
    for value in vars(group).values()
    if isinstance(value, str)
}


def rounded(values, kind):
    """Values as a type holds them."""
    if kind != "q8_0":
        return values.to({"f16": torch.float16, "bf16": torch.bfloat16}[kind]).float()
    blocks = values.reshape(-1, 32)
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    steps = blocks * (1 / scale)
    return (steps.sign() * (steps.abs() + 0.5).floor() * scale.half().float()).reshape(values.shape)


def round_matrices(model, kind):
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = rounded(parameter.data, kind)


@pytest.mark.parametrize("kind", GgufType)
@pytest.mark.parametrize("name", matrix(list(CONFIGS), quick=["llama", "gemma3_text"]))
def test_transformers_reads_the_models_logits_to_the_rounding_of_the_type(tmp_path, name, kind):
    model = save(tmp_path / "model", name)
    done = gguf_file.write_model(str(tmp_path / "model"), tmp_path / "tiny.gguf", type=kind)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    exact = logits_of(model)
    round_matrices(model, kind)
    found = logits_of(read)
    torch.testing.assert_close(found, logits_of(model), atol=2e-5, rtol=2e-5)
    assert 0 < float((found - exact).std()) < 0.1 * float(exact.std())
    assert (done.num_unquantized, done.type) == (0, kind)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "tiny.gguf"}


@pytest.mark.parametrize("name", CONFIGS)
def test_names_shapes_types_and_keys_are_those_of_the_format(tmp_path, name):
    model = save(tmp_path / "model", name)
    gguf_file.write_model(str(tmp_path / "model"), tmp_path / "tiny.gguf", type=GgufType.q8_0)
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    architecture = reader.fields["general.architecture"].contents()
    (arch,) = (arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    known = {
        gguf.TENSOR_NAMES[tensor].format(bid=i): tensor.name
        for tensor in gguf.MODEL_TENSORS[arch]
        for i in range(model.config.num_hidden_layers)
    }
    found = {tensor.name.rpartition(".")[0]: tensor for tensor in reader.tensors if tensor.name.endswith(".weight")}
    assert set(found) <= set(known)
    assert {tensor for tensor in known if known[tensor] not in OPTIONAL} <= set(found)
    assert ("output" in found) == (not model.config.tie_word_embeddings)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for parameter, values in model.named_parameters():
        tensor = next(each for each in reader.tensors if each.name == names.get_name(parameter, (".weight", ".bias")))
        assert tensor.shape.tolist() == list(values.shape)[::-1], parameter
        assert tensor.tensor_type.name == ("F32" if values.ndim == 1 else "Q8_0"), parameter
    keys = {key.replace("{arch}", architecture) for key in KEYS}
    assert {key for key in reader.fields if not key.startswith("GGUF.")} <= keys
    values = {key: reader.fields[key].contents() for key in reader.fields}
    assert values["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    assert values[f"{architecture}.block_count"] == model.config.num_hidden_layers
    assert values[f"{architecture}.attention.key_length"] == values[f"{architecture}.rope.dimension_count"]
    assert values["tokenizer.chat_template"] == TEMPLATE
    assert len(values["tokenizer.ggml.tokens"]) == len(values["tokenizer.ggml.token_type"]) == 512


def test_queries_and_keys_of_a_llama_rotate_neighbouring_columns(tmp_path):
    """As llama.cpp does: the scores of attention are those of transformers."""
    model = save(tmp_path / "model", "llama")
    gguf_file.write_model(str(tmp_path / "model"), tmp_path / "tiny.gguf", type=GgufType.f16)
    tensors = {each.name: each.data for each in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    stored = torch.from_numpy(np.array(tensors["blk.0.attn_q.weight"], dtype=np.float32))
    ours = model.model.layers[0].self_attn.q_proj.weight.detach()
    num_heads, size = 4, 16
    for head in range(num_heads):
        rows = [head * size + half + i for i in range(size // 2) for half in (0, size // 2)]
        torch.testing.assert_close(stored[head * size : (head + 1) * size], ours[rows], atol=1e-3, rtol=1e-3)


def test_a_norm_of_gemma_is_stored_with_the_one_that_is_added(tmp_path):
    model = save(tmp_path / "model", "gemma2")
    gguf_file.write_model(str(tmp_path / "model"), tmp_path / "tiny.gguf")
    tensors = {each.name: each.data for each in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    expected = 1 + model.model.norm.weight.detach().numpy()
    np.testing.assert_array_equal(tensors["output_norm.weight"], expected)


def test_frequencies_of_llama_3_are_a_tensor_and_yarn_is_keys(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = save(tmp_path / "scaled", "llama", rope_parameters=rope | {"original_max_position_embeddings": 32})
    gguf_file.write_model(str(tmp_path / "scaled"), tmp_path / "scaled.gguf")
    (factors,) = (
        each for each in gguf.GGUFReader(tmp_path / "scaled.gguf").tensors if each.name == "rope_freqs.weight"
    )
    plain = 1e4 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(plain / factors.data, scaled.model.rotary_emb.inv_freq.numpy(), rtol=1e-6)
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="scaled.gguf", dtype=torch.float32, config=AutoConfig.from_pretrained(tmp_path / "scaled")
    )
    torch.testing.assert_close(logits_of(read), logits_of(scaled), atol=0.05, rtol=0.05)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    save(tmp_path / "yarn", "qwen2", rope_parameters=yarn)
    gguf_file.write_model(str(tmp_path / "yarn"), tmp_path / "yarn.gguf")
    fields = gguf.GGUFReader(tmp_path / "yarn.gguf").fields
    keys = ("type", "factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow")
    assert [fields[f"qwen2.rope.scaling.{key}"].contents() for key in keys] == ["yarn", 4.0, 32, 32.0, 1.0]


def test_rows_that_are_no_whole_blocks_stay_f16(tmp_path):
    save(tmp_path / "model", "llama", intermediate_size=80)
    done = gguf_file.write_model(str(tmp_path / "model"), tmp_path / "tiny.gguf", type=GgufType.q8_0)
    tensors = {each.name: each.tensor_type.name for each in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    assert done.num_unquantized == 2
    assert (tensors["blk.1.ffn_down.weight"], tensors["blk.1.ffn_up.weight"]) == ("F16", "Q8_0")


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "bf16"), (torch.float32, "f16")])
def test_the_type_follows_that_of_the_weights(tmp_path, dtype, kind):
    model = save(tmp_path / "model", "qwen2")
    model.to(dtype).save_pretrained(tmp_path / "model")
    done = CliRunner().invoke(
        app, ["convert", str(tmp_path / "model"), str(tmp_path / "deep" / "tiny.gguf"), "--to", "gguf", "--json"]
    )
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["type"], answer["architecture"], answer["file"]) == (kind, "qwen2", str(tmp_path / "deep/tiny.gguf"))
    assert (tmp_path / "deep" / "tiny.gguf").stat().st_size == answer["num_bytes"]


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def other_architecture(folder):
    edit_config(folder, model_type="gpt2", architectures=["GPT2LMHeadModel"])


def adapter(folder):
    (folder / "adapter_config.json").write_text("{}")


def quantized(folder):
    edit_config(folder, quantization_config={"quant_method": "compressed-tensors"})


def classifier(folder):
    edit_config(folder, architectures=["LlamaForSequenceClassification"])


def other_rope(folder):
    edit_config(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})


def partial_rope(folder):
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})


def other_activation(folder):
    edit_config(folder, hidden_act="relu")


def no_layer(folder):
    edit_config(folder, num_hidden_layers=3)


def one_layer_less(folder):
    edit_config(folder, num_hidden_layers=1)


def other_size(folder):
    edit_config(folder, intermediate_size=64)


def no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def too_few_embeddings(folder):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 512, "content": "<more>"})
    file.write_text(json.dumps(content))


def too_large(folder):
    model = model_of("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e5
    model.save_pretrained(folder)


FAULTS = {
    other_architecture: "GPT2LMHeadModel is not converted to GGUF. To fix: give one of LlamaForCausalLM",
    adapter: "is an adapter, without the weights of its base. To fix: merge it first",
    quantized: "is quantized already",
    classifier: "LlamaForSequenceClassification is not converted",
    other_rope: "its positions are scaled by dynamic, which llama has not",
    partial_rope: "only a part of each head is rotated",
    other_activation: "its activation is relu, and llama has silu",
    no_layer: "the weights lack model.layers.2.input_layernorm.weight",
    one_layer_less: "GGUF has no name for model.layers.1.input_layernorm.weight",
    other_size: "has the shape [96, 64], and the config [64, 64]",
    no_tokenizer: "the model has no tokenizer.json",
    too_few_embeddings: "it has a token 512, and the model embeddings of 512",
    too_large: "blk.1.ffn_up.weight has a value of 1e+05, which f16 cannot hold. To fix: write it as bf16",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_the_format_cannot_hold_is_refused_and_nothing_is_written(tmp_path, fault):
    save(tmp_path / "model", "llama")
    fault(tmp_path / "model")
    done = CliRunner().invoke(
        app, ["convert", str(tmp_path / "model"), str(tmp_path / "new" / "tiny.gguf"), "--to", "gguf", "--type", "f16"]
    )
    assert isinstance(done.exception, InputError)
    assert FAULTS[fault] in str(done.exception)
    assert not list((tmp_path / "new").glob("*")) and (fault is too_large or not (tmp_path / "new").exists())


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("gemma2", {"query_pre_attn_scalar": 128}, "query_pre_attn_scalar is 128, and 256 in llama.cpp"),
        ("gemma2", {"attn_logit_softcapping": None}, "its logits have no soft caps"),
        ("gemma2", {"tie_word_embeddings": False}, "its output layer is not its embeddings"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "its attention has a soft cap"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 7}, "its layers attend in another order"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "its attention is bidirectional"),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 2},
            "its layers attend in another order: qwen2 has no windows",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path, name, fields, reason):
    save(tmp_path / "model", name)
    edit_config(tmp_path / "model", **fields)
    with pytest.raises(InputError) as error:
        gguf_file.write_model(str(tmp_path / "model"), tmp_path / "tiny.gguf")
    assert reason in str(error.value)
    assert not (tmp_path / "tiny.gguf").exists()


def test_an_existing_file_is_kept_and_a_type_is_of_gguf_alone(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"mine")
    with pytest.raises(InputError, match=r"is there already\. To fix: name a new file"):
        gguf_file.write_model(str(tmp_path), tmp_path / "tiny.gguf")
    assert (tmp_path / "tiny.gguf").read_bytes() == b"mine"
    done = CliRunner().invoke(app, ["convert", str(tmp_path), str(tmp_path / "x"), "--to", "hf", "--type", "f16"])
    assert str(done.exception) == "--type is of gguf, and --to is hf. To fix: leave out --type"


def test_a_file_that_cannot_be_completed_leaves_nothing(tmp_path, monkeypatch):
    save(tmp_path / "model", "llama")
    full = OSError("5 requested and 3 written")  # as numpy says it
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match="5 requested and 3 written") as error:
        gguf_file.write_model(str(tmp_path / "model"), tmp_path / "new" / "tiny.gguf")
    assert error.value.filename == str(tmp_path / "new" / "tiny.gguf") and not list((tmp_path / "new").iterdir())
