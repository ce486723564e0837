"""A GGUF file has the model's tokenizer: what is read back gives the same tokens, and other kinds are refused."""

import json

import pytest
from transformers import AutoTokenizer

from ringmaster.errors import InputError
from tests.unit.features.foreign_models.tiny_models import (
    LLAMA3_TOKENIZER,
    TEXTS,
    VOCABULARY,
    byte_pairs,
    gemma_pieces,
    save,
    sentence_pieces,
)

gguf = pytest.importorskip("gguf")
from ringmaster.features.foreign_models import gguf_file  # noqa: E402 - needs gguf
from ringmaster.features.foreign_models.gguf_tokenizer import LLAMA3, GgufTokenizer  # noqa: E402

MORE = ["<think> so <|turn|> I've 1234", "\t tabs\r\n", "naïve 🦙 déjà vu", " leading", ""]
KINDS = {
    "qwen2": ("qwen2", byte_pairs, "gpt2", "qwen2"),
    "llama3": ("llama", lambda: byte_pairs(**LLAMA3_TOKENIZER), "gpt2", "llama-bpe"),
    "llama3-by-merges": ("llama", lambda: byte_pairs(regex=LLAMA3), "gpt2", "smaug-bpe"),
    "gpt2": ("llama", lambda: byte_pairs(regex=""), "gpt2", "gpt-2"),
    "llama2": ("llama", sentence_pieces, "llama", "default"),
    "gemma": ("gemma2", gemma_pieces, "llama", "default"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_back_makes_the_same_tokens(tmp_path, kind):
    model, make, family, pre = KINDS[kind]
    tokenizer = make()
    save(tmp_path / "model", model, tokenizer=tokenizer)
    gguf_file.write_model(str(tmp_path / "model"), tmp_path / "tiny.gguf")
    fields = gguf.GGUFReader(tmp_path / "tiny.gguf").fields
    assert (fields["tokenizer.ggml.model"].contents(), fields["tokenizer.ggml.pre"].contents()) == (family, pre)
    ours = AutoTokenizer.from_pretrained(tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for text in (*TEXTS, *MORE):
        assert theirs(text)["input_ids"] == ours(text)["input_ids"], text
    chat = [{"role": "user", "content": TEXTS[0]}]
    assert theirs.apply_chat_template(chat, tokenize=False) == ours.apply_chat_template(chat, tokenize=False)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_token_id, ours.eos_token_id)
    assert fields["tokenizer.ggml.add_bos_token"].contents() == (ours("a")["input_ids"][0] == ours.bos_token_id)


def test_types_and_scores_of_pieces(tmp_path):
    save(tmp_path / "model", "llama")
    gguf_file.write_model(str(tmp_path / "model"), tmp_path / "tiny.gguf")
    fields = gguf.GGUFReader(tmp_path / "tiny.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = [gguf.TokenType(each).name for each in fields["tokenizer.ggml.token_type"].contents()]
    assert types[:4] == ["UNKNOWN", "CONTROL", "CONTROL", "BYTE"] and (tokens[3], tokens[-1]) == ("<0x00>", "[PAD511]")
    assert types[-1] == "UNUSED"
    scores = dict(zip(tokens, fields["tokenizer.ggml.scores"].contents(), strict=True))
    ranked = [token for token in tokens if scores[token]]
    assert ranked == sorted(ranked, key=scores.__getitem__, reverse=True)  # the earlier word is merged first
    assert fields["tokenizer.ggml.add_space_prefix"].contents()


def test_the_last_token_of_a_turn_is_named(tmp_path):
    model = save(tmp_path / "model", "qwen2")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    turn = tokenizer.convert_tokens_to_ids("<|turn|>")
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, turn]
    model.generation_config.save_pretrained(tmp_path / "model")
    gguf_file.write_model(str(tmp_path / "model"), tmp_path / "tiny.gguf")
    assert gguf.GGUFReader(tmp_path / "tiny.gguf").fields["tokenizer.ggml.eot_token_id"].contents() == turn


FAULTS = {
    "WordPiece": ({"model": {"type": "WordPiece", "vocab": {}}}, "its model is WordPiece, and GGUF has BPE"),
    "lower": ({"normalizer": {"type": "Lowercase"}}, "it has a normalizer, Lowercase"),
    "regex": ({"pre_tokenizer": {"type": "Whitespace"}}, "it splits a text in none of the ways of gpt-2, llama-bpe"),
    "ends": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|turn|>", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"<|turn|>": {"id": "<|turn|>", "ids": [2], "tokens": ["<|turn|>"]}},
            }
        },
        "it adds the tokens [2] after a text, and GGUF can add [[0], [1]]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tokenizer_that_llama_cpp_has_not_is_refused(tmp_path, fault):
    byte_pairs().save_pretrained(tmp_path)
    changes, reason = FAULTS[fault]
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(InputError) as error:
        GgufTokenizer.read(sorted(tmp_path.iterdir()), num_embeddings=VOCABULARY)
    assert reason in str(error.value) and "To fix: " in str(error.value)
