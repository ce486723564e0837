"""What a model must read of a row, and what it must not: found by a probe, before anything is trained."""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from ringmaster.errors import StepError
from ringmaster.techniques import DataSpec, Job, ModelSpec
from ringmaster.techniques.data import fetch, open_data, prepare
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.probing import probe

WORDS = ["<a>", "<pad>", "<s>", "</s>", "<unk>", *(f"w{n}" for n in range(40))]
SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32,
}  # fmt: skip
GPT2 = {"vocab_size": len(WORDS), "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 2, "eos_token_id": 3}
BART = {
    "vocab_size": len(WORDS), "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 40,
    "eos_token_id": 3,
}  # fmt: skip
XLNET = {"vocab_size": len(WORDS), "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, "pad_token_id": 1}
POSITIONS = {**SIZES, "pad_token_id": 1, "max_position_embeddings": 20}


@pytest.fixture
def job_of(tmp_path):
    """A function that returns a job with a saved model and a tokenizer, for texts of 2 to 28 words, and its data."""

    def make(name, config, *, data=None, changes=None, **tokens):
        folder, file = tmp_path / "model", tmp_path / "rows.jsonl"
        cls = getattr(transformers, name)
        torch.manual_seed(0)
        cls(cls.config_class(**config)).save_pretrained(folder)
        inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if tokens.pop("ends", False):
            inner.post_processor = processors.TemplateProcessing(
                single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 3)]
            )
        named = {key: value for key, value in {"pad_token": "<pad>", "eos_token": "</s>", **tokens}.items() if value}
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **named)
        fast.save_pretrained(folder)
        texts = [" ".join(f"w{(7 * n + i) % 40}" for i in range(2 + n % 27)) for n in range(54)]
        file.write_text(
            "".join(json.dumps({"text": text, "label": "ab"[n % 2]}) + "\n" for n, text in enumerate(texts))
        )
        kind = {} if name.endswith("LMHeadModel") else {"kind": "text-classification"}
        spec = DataSpec(path=str(file), tokenizer=str(folder), **kind, **(data or {}))
        model = ModelSpec(from_pretrained=str(folder), config=changes or {})
        job = Job(name="job", model=model, data=spec, num_steps=2, global_batch_size=4)
        return job, prepare(spec, cache_dir=tmp_path)

    return make


def check(tmp_path, job, prepared):
    probe(job, data=prepared, cache_dir=tmp_path)


PADDINGS = [
    ("LlamaForSequenceClassification", {**SIZES, "pad_token_id": 0}, {}),
    ("LlamaForSequenceClassification", SIZES, {}),
    ("LlamaForSequenceClassification", {**SIZES, "pad_token_id": 0}, {"pad_token": "", "ends": True}),
    ("LlamaForSequenceClassification", {**SIZES, "pad_token_id": 0}, {"pad_token": "</s>", "ends": True}),
    ("LlamaForSequenceClassification", SIZES, {"pad_token": "", "eos_token": ""}),
    ("GPT2ForSequenceClassification", {**GPT2, "pad_token_id": 0}, {}),
    ("BartForSequenceClassification", {**BART, "pad_token_id": 0}, {"ends": True}),
    ("XLNetForSequenceClassification", XLNET, {}),
    ("RobertaForSequenceClassification", POSITIONS, {}),
]


@pytest.mark.parametrize(("name", "config", "tokens"), PADDINGS)
def test_a_classifier_reads_no_padding(tmp_path, job_of, name, config, tokens):
    job, prepared = job_of(name, config, **tokens)
    check(tmp_path, job, prepared)
    model = build_model(job.model, data=prepared, seed=0).eval()
    batch = fetch(open_data(job.data, cache_dir=tmp_path, prepared=prepared)[0], range(12))
    del batch["labels"]
    with torch.no_grad():
        for row, logits in enumerate(model(**batch).logits):
            there = batch["attention_mask"][row].bool()
            alone = model(**{key: value[row : row + 1, there] for key, value in batch.items()}).logits[0]
            assert torch.allclose(alone, logits, atol=1e-6)


def test_a_model_gets_the_padding_that_its_tokenizer_lacks(job_of):
    _, prepared = job_of("LlamaForSequenceClassification", {**SIZES, "pad_token_id": 0}, pad_token="")
    assert prepared.pad_token_id == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepared.tokenizer_dir)
    assert tokenizer.pad_token_id == 0


@pytest.mark.parametrize(
    ("name", "config", "how", "fault"),
    [
        (
            "LlamaForSequenceClassification", SIZES, {"changes": {"pad_token_id": 0}},
            "finds the last token of a row by its padding token, 0, and rows are padded with 1. To fix: set model",
        ),
        (
            "LlamaForSequenceClassification", {**SIZES, "pad_token_id": 6}, {"pad_token": "", "data": {"held_out": 0}},
            "takes the token 6 for padding, and some rows end with it. To fix: give a tokenizer with a padding token",
        ),
        (
            "BartForSequenceClassification", BART, {"pad_token": "</s>", "ends": True},
            "finds the end of a row by the token that ends a text, 3, and rows are padded with 3. To fix: give",
        ),
        (
            "BertLMHeadModel", {**SIZES, "is_decoder": False}, {"data": {"seq_len": 16}},
            "reads the tokens that it learns to predict: .* To fix: set model.config.is_decoder to true",
        ),
        (
            "XLNetLMHeadModel", XLNET, {"data": {"seq_len": 16}},
            "reads the tokens that it learns to predict: .* To fix: train a causal language model",
        ),
    ],
)  # fmt: skip
def test_what_a_model_must_not_read_is_refused(tmp_path, job_of, name, config, how, fault):
    with pytest.raises(StepError, match=fault):
        check(tmp_path, *job_of(name, config, **how))


CLASSES = ("Roberta", "MPNet", "Camembert", "XLMRoberta", "Longformer", "Data2VecText", "Esm")


@pytest.mark.parametrize("name", CLASSES)
def test_positions_before_the_first_token_hold_none(tmp_path, job_of, name):
    more = {"attention_window": 4} if name == "Longformer" else {"mask_token_id": 4} if name == "Esm" else {}
    job, prepared = job_of(f"{name}ForSequenceClassification", {**POSITIONS, **more})
    assert (prepared.seq_len, prepared.num_truncated > 0) == (18, True)
    check(tmp_path, job, prepared)
    job, prepared = job_of(f"{name}ForSequenceClassification", {**POSITIONS, **more}, data={"seq_len": 19})
    with pytest.raises(StepError, match=r"has positions for 18 tokens, and .* has 19 tokens a sample. To fix: lower"):
        check(tmp_path, job, prepared)


@pytest.mark.parametrize("max_whole", [1024, 8])
def test_positions_that_no_config_names_are_counted_by_a_row_that_needs_all(tmp_path, job_of, monkeypatch, max_whole):
    monkeypatch.setattr("ringmaster.techniques.probing.rows.MAX_WHOLE", max_whole)
    monkeypatch.setattr("ringmaster.techniques.models.architectures.num_positions", lambda config: None)
    job, prepared = job_of("RobertaForSequenceClassification", POSITIONS, data={"seq_len": 18})
    check(tmp_path, job, prepared)
    job, prepared = job_of("RobertaForSequenceClassification", POSITIONS, data={"seq_len": 19})
    with pytest.raises(StepError, match=r"its forward fails on a row of 19 tokens: .* To fix: lower data.seq_len"):
        check(tmp_path, job, prepared)


def test_a_fresh_model_has_positions_for_its_samples(tmp_path, job_of):
    _, prepared = job_of("RobertaForSequenceClassification", POSITIONS, data={"seq_len": 600})
    config = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    spec = ModelSpec(architecture="RobertaForSequenceClassification", config=config)
    assert build_model(spec, data=prepared, seed=0).config.max_position_embeddings == 600 + prepared.pad_token_id + 1
