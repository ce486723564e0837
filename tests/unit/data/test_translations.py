"""Inputs and targets of encoder-decoders have the tokens of `tokenizer(text, text_target=...)`, with its languages."""

import json
from dataclasses import replace

import pytest
import torch

from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.data.row_kind import SampleContext
from ringmaster.techniques.data.row_tokenizer import RowTokenizer
from ringmaster.techniques.data.sources.text_rows import Seq2Seq, Seq2SeqOptions
from ringmaster.techniques.data.tokenizer_folders import load_tokenizer
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.models.build import build_model

PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", "a", "b", "c", "d", "▁a", "▁b", "▁c", "▁d"]
ROWS = [
    {"input": "a b c", "target": "d c"},
    {"input": "a </s>", "target": "d </s> a"},
    {"input": "b", "target": "c c c d d d a"},
]
LANGUAGES = {"NllbTokenizer": ("eng_Latn", "fra_Latn"), "MBartTokenizer": ("en_XX", "fr_XX")}
LANGUAGES["MBart50Tokenizer"] = LANGUAGES["MBartTokenizer"]


def saved_tokenizer(folder, name, **settings):
    """Saves a small tokenizer of a class of transformers that marks languages."""
    import transformers

    if name == "NllbTokenizer":
        vocabulary = {piece: number for number, piece in enumerate(PIECES)}
        merges = [("▁", letter) for letter in "abcd"]
        codes = ["eng_Latn", "fra_Latn", "deu_Latn"]
        tokenizer = transformers.NllbTokenizer(
            vocab=vocabulary, merges=merges, additional_special_tokens=codes, **settings
        )
    else:
        scores = [(piece, 0.0 if piece.startswith("<") else -1.0 - number) for number, piece in enumerate(PIECES)]
        tokenizer = getattr(transformers, name)(vocab=scores, **settings)
    tokenizer.save_pretrained(str(folder))
    return str(folder)


def prepared_rows(tmp_path, tokenizer, **fields):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spec = DataSpec(kind="seq2seq", path=str(file), tokenizer=tokenizer, held_out=0, **fields)
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    training, _ = open_data(spec, cache_dir=tmp_path / "cache", prepared=prepared)
    samples = [training[number] for number in range(len(training))]
    return prepared, [
        (each["input_ids"][each["attention_mask"].bool()].tolist(), each["labels"][each["labels"] != -100].tolist())
        for each in samples
    ]


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, {}) for name in LANGUAGES), ("NllbTokenizer", {"legacy_behaviour": True})],
)
def test_tokens_are_those_of_the_tokenizers_own_call(tmp_path, name, settings):
    source, target = LANGUAGES[name]
    folder = saved_tokenizer(tmp_path / "given", name, src_lang=source, tgt_lang=target, **settings)
    prepared, samples = prepared_rows(tmp_path, folder)
    tokenizer = load_tokenizer(folder)
    for row, sample in zip(ROWS, samples, strict=True):
        # The characters of mBART's special tokens are the tokens themselves: it has no way to read them as text.
        is_split = name != "MBartTokenizer"
        expected = tokenizer(row["input"], text_target=row["target"], split_special_tokens=is_split)
        assert sample == (expected["input_ids"], expected["labels"])
    assert tokenizer.convert_tokens_to_ids(target) in samples[0][1]
    assert f"inputs are marked {source}, and targets {target}" in prepared.notes


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_reference_is_what_samples_are(tmp_path, name):
    source, target = LANGUAGES[name]
    folder = tmp_path / "given"
    saved_tokenizer(folder, name, src_lang=source, tgt_lang=target)
    spec = DataSpec(kind="seq2seq", path="rows.jsonl", tokenizer=str(folder))
    context = SampleContext(
        spec=spec, options=Seq2SeqOptions(prefix="c "), max_length=9, _tokenizer=RowTokenizer(folder)
    )
    for row in ROWS[:2]:
        assert Seq2Seq().reference(row, context=context) == Seq2Seq().sample(row, context=context)
    assert Seq2Seq().reference(ROWS[2], context=context) is None, "as it is cut"


def test_long_targets_are_cut_before_their_last_special_tokens(tmp_path):
    for name, expected in {
        "NllbTokenizer": ["fra_Latn", "▁c", "</s>"],
        "MBartTokenizer": ["▁c", "</s>", "fr_XX"],
    }.items():
        source, target = LANGUAGES[name]
        folder = saved_tokenizer(tmp_path / name, name, src_lang=source, tgt_lang=target)
        prepared, samples = prepared_rows(tmp_path, folder, seq_len=3)
        assert load_tokenizer(folder).convert_ids_to_tokens(samples[2][1]) == expected
        assert prepared.num_truncated == 3


def test_options_name_the_languages_and_are_kept_in_the_tokenizer(tmp_path):
    folder = saved_tokenizer(tmp_path / "given", "NllbTokenizer")
    options = {"source_language": "deu_Latn", "target_language": "fra_Latn"}
    prepared, samples = prepared_rows(tmp_path, folder, options=options)
    kept = load_tokenizer(str(prepared.tokenizer_dir))
    assert (kept.src_lang, kept.tgt_lang) == ("deu_Latn", "fra_Latn")
    assert [kept.convert_ids_to_tokens(ids[0]) for ids in samples[0]] == ["deu_Latn", "fra_Latn"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"neither its files nor target_language name it\. To fix: set data.target_language"),
        ({"target_language": "french"}, "no token for the language 'french'.*codes: .*fra_Latn"),
        ({"target_language": "fra_Latn", "source_language": "xx"}, "no token for the language 'xx'"),
    ],
)
def test_languages_that_are_not_known_are_refused(tmp_path, options, says):
    folder = saved_tokenizer(tmp_path / "given", "NllbTokenizer")
    with pytest.raises(ValueError, match=says):
        prepared_rows(tmp_path, folder, options=options)


def test_languages_for_a_tokenizer_without_any_are_refused(tmp_path, bert_tokenizer):
    with pytest.raises(ValueError, match=r"marks no languages\. To fix: remove source_language and target_language"):
        prepared_rows(tmp_path, bert_tokenizer, options={"target_language": "fra_Latn"})


@pytest.mark.parametrize(
    ("architecture", "name", "starts"),
    [
        ("M2M100ForConditionalGeneration", "NllbTokenizer", ("</s>", "fra_Latn")),
        ("MBartForConditionalGeneration", "MBartTokenizer", ("fr_XX", None)),
        ("MBartForConditionalGeneration", "MBart50Tokenizer", ("</s>", "fr_XX")),
    ],
)
def test_models_generate_what_begins_as_the_targets(tmp_path, architecture, name, starts):
    source, target = LANGUAGES[name]
    folder = saved_tokenizer(tmp_path / "given", name, src_lang=source, tgt_lang=target)
    prepared, samples = prepared_rows(tmp_path, folder)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1, "decoder_attention_heads": 1}
    sizes |= {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 32}
    model = build_model(ModelSpec(architecture=architecture, config=sizes), data=prepared, seed=0)
    tokenizer = load_tokenizer(folder)
    expected = [None if each is None else tokenizer.convert_tokens_to_ids(each) for each in starts]
    settings = model.generation_config
    assert [settings.decoder_start_token_id, settings.forced_bos_token_id] == expected
    read = []
    model.get_decoder().register_forward_pre_hook(
        lambda _, args, given: read.append(given.get("input_ids", *args)), with_kwargs=True
    )
    model(input_ids=torch.tensor([samples[0][0]]), labels=torch.tensor([samples[0][1]]))
    assert read[0][0, 0] == settings.decoder_start_token_id, "as in training"


@pytest.mark.parametrize(
    ("name", "file"),
    [("MarianTokenizer", "source.spm"), ("T5Tokenizer", "spiece.model"), ("LlamaTokenizer", "tokenizer.model")],
)
def test_a_tokenizer_without_its_package_names_the_package(tmp_path, monkeypatch, name, file):
    monkeypatch.setattr("ringmaster.techniques.data.tokenizer_folders.find_spec", lambda _: None)
    for each in (file, "target.spm"):
        (tmp_path / each).write_bytes(b"\n\x0e\n\x05<unk>")
    (tmp_path / "vocab.json").write_text('{"</s>": 0, "<unk>": 1, "<pad>": 2}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    with pytest.raises(ValueError, match=r"without the package sentencepiece\. To fix: .*pip install sentencepiece"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved", "translation"])
def test_translations_in_objects_are_read_by_their_keys(tmp_path, form):
    import datasets

    pairs = [{"en": each["input"], "fr": each["target"]} for each in ROWS]
    rows = datasets.Dataset.from_list([{"id": "x", "translation": each} for each in pairs])
    where = {"path": str(tmp_path / f"pairs.{form}")}
    if form in ("jsonl", "parquet"):
        getattr(rows, {"jsonl": "to_json", "parquet": "to_parquet"}[form])(where["path"])
    else:
        if form == "translation":
            rows = rows.cast_column("translation", datasets.Translation(languages=["en", "fr"]))
        where = {"dataset": str(tmp_path / "pairs")}
        datasets.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(where["dataset"])
    tokenizer = saved_tokenizer(tmp_path / "tokenizer", "MBartTokenizer")
    options = {"source_language": "en_XX", "target_language": "fr_XX"}
    spec = DataSpec(kind="seq2seq", tokenizer=tokenizer, held_out=0, options=options, **where)
    with pytest.raises(ValueError, match=r"no column for input_column, target_column; .*COLUMN\.KEY.*translation\.en"):
        prepare(spec, cache_dir=tmp_path / "cache")
    whole = {**options, "input_column": "translation", "target_column": "translation"}
    with pytest.raises(
        ValueError, match=r"is an object, .*set input_column to COLUMN\.KEY, with one of its keys en, fr"
    ):
        prepare(replace(spec, options=whole), cache_dir=tmp_path / "cache")
    columns = {"input_column": "translation.en", "target_column": "translation.fr"}
    spec = replace(spec, options={**options, **columns})
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    training, _ = open_data(spec, cache_dir=tmp_path / "cache", prepared=prepared)
    _, expected = prepared_rows(tmp_path, tokenizer, options=options)
    assert [training[n]["labels"][training[n]["labels"] != -100].tolist() for n in range(3)] == [y for _, y in expected]
    assert "columns that are not read: id" in prepared.notes
    if "dataset" in where:
        leaking = prepare(replace(spec, held_out_split="test"), cache_dir=tmp_path / "cache")
        assert "rows of the evaluation split" in "".join(leaking.training_faults).replace("1 row of", "rows of")


def test_a_row_without_the_key_of_a_language_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"translation": {"en": "a", "fr": "b"}}\n{"translation": {"en": "a"}}\n')
    options = {"input_column": "translation.en", "target_column": "translation.fr"}
    spec = DataSpec(kind="seq2seq", path=str(tmp_path / "rows.jsonl"), held_out=0, options=options)
    with pytest.raises(ValueError, match=r"line 2 has no column 'translation.fr'.* To fix: add the value"):
        prepare(spec, cache_dir=tmp_path / "cache")
