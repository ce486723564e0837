"""A GGUF file is imported as the model that it holds; what cannot be read is refused with a remedy."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ringmaster import extras
from ringmaster.features.foreign_models.conversion import converted_gguf
from tests.integration.lineage.family import answer, run
from tests.matrix import matrix

gguf = pytest.importorskip("gguf")

NUM_HEADS, VOCABULARY = 2, 96
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write(file, *, quantized=False, architecture="llama"):
    """Writes a small Llama as llama.cpp names it, and returns it."""
    torch.manual_seed(0)
    model, writer = LlamaForCausalLM(LlamaConfig(**CONFIG)), gguf.GGUFWriter(str(file), architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(32)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(VOCABULARY - 3))])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3, *[6] * (VOCABULARY - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, tensor in model.state_dict().items():
        values, name = tensor.numpy(), name.removesuffix(".weight")
        if name.endswith(("q_proj", "k_proj")):  # llama.cpp interleaves the halves that rotate together
            values = values.reshape(NUM_HEADS, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            target = f"blk.{number}.{NAMES[rest]}.weight"
        else:
            target = f"{NAMES[name]}.weight"
        kind = gguf.GGMLQuantizationType.Q8_0
        if quantized and values.ndim == 2:
            writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize(("quantized", "largest"), [(False, 0.0), (True, 1e-3)])
def test_the_folder_holds_the_files_weights_and_tokenizer(tmp_path, quantized, largest):
    model = write(tmp_path / "tiny.gguf", quantized=quantized)
    with converted_gguf(tmp_path / "tiny.gguf") as folder:
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert len(AutoTokenizer.from_pretrained(folder)) == VOCABULARY
    for name, tensor in model.state_dict().items():
        assert float((loaded.state_dict()[name] - tensor).abs().max()) <= largest


@pytest.mark.full
def test_it_is_recorded_and_restored_as_any_imported_model(tmp_path, family_home):
    model = write(tmp_path / "tiny.gguf")
    first = answer("import", tmp_path / "tiny.gguf", "--name", "tiny-gguf")
    assert answer("import", tmp_path / "tiny.gguf", "--name", "tiny-gguf")["id"] == first["id"]
    assert answer("show", "tiny-gguf")["model"]["origin"]["source"] == str(tmp_path / "tiny.gguf")
    answer("restore", "tiny-gguf", tmp_path / "restored")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "restored")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("fault", matrix(["cut", "text", "unknown"], quick=["unknown"]))
def test_what_cannot_be_read_is_refused_with_a_remedy(tmp_path, empty_home, fault):
    file = tmp_path / "tiny.gguf"
    write(file, architecture="no-such-architecture" if fault == "unknown" else "llama")
    if fault != "unknown":
        file.write_bytes(file.read_bytes()[:5000] if fault == "cut" else b"no model at all")
    code, _, message = run("import", file, "--name", "x")
    assert code == 2
    assert "cannot be read as a GGUF file" in message and "To fix: download it again" in message.replace("\n", " ")


def test_without_the_extra_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(extras.PACKAGES, "gguf", ("no_such_package",))
    with pytest.raises(ValueError, match="needs no_such_package, not installed") as error:
        converted_gguf(tmp_path / "x.gguf").__enter__()
    assert "pip install 'ringmaster-ml[gguf]'" in str(error.value)
