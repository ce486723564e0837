"""Samples have the tokens that the tokenizer's own call gives, whatever sort of tokenizer it is."""

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from transformers import AutoTokenizer

from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.data.class_labels import ClassLabels
from ringmaster.techniques.data.row_kind import SampleContext
from ringmaster.techniques.data.row_tokenizer import RowTokenizer
from ringmaster.techniques.data_source import data_source_named
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.metric import IGNORED
from tests.matrix import matrix
from tests.unit.data.encoding.tokenizers_of_sorts import BASES, SORTS, saved

# The tokenizer of characters has a million of them, and each of its calls takes as long as a whole test of another.
QUICK_SORTS = [sort for sort in SORTS if sort != "characters"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function of a sort that returns the folder of its tokenizer."""
    known = {}

    def folder(sort):
        if sort not in known:
            known[sort] = saved(sort, tmp_path_factory.mktemp("tokenizers") / "saved")
        return known[sort]

    return folder


def prepared(tmp_path, kind, rows, **spec):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = DataSpec(kind=kind, path=str(path), held_out=0, **spec)
    result = prepare(given, cache_dir=tmp_path / "cache")
    training, _ = open_data(given, cache_dir=tmp_path / "cache", prepared=result)
    samples = []
    for each in (training[i] for i in range(len(training))):
        kept = each["attention_mask"].bool()
        samples.append({name: each[name][kept].tolist() for name in each if each[name].shape == kept.shape})
    return result, samples


def texts_for(sort, number=12):
    words = SORTS[sort][1]
    draw = random.Random(sort)
    return [("" if len(words[0]) == 1 else " ").join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(number)]


def assert_equal(sample, whole):
    assert sample["input_ids"] == whole["input_ids"]
    types = whole.get("token_type_ids") or [0] * len(whole["input_ids"])
    assert sample.get("token_type_ids", [0] * len(types)) == types


@pytest.mark.parametrize("length", [64, 10, 9])
@pytest.mark.parametrize("is_pair", [False, True], ids=["texts", "pairs"])
@pytest.mark.parametrize("sort", matrix(SORTS, quick=QUICK_SORTS))
def test_texts_and_pairs_have_the_tokens_of_the_tokenizers_own_call(tmp_path, folders, sort, is_pair, length):
    folder, texts = folders(sort), texts_for(sort)
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(texts)]
    if is_pair:
        rows = [{**row, "text_pair": other} for row, other in zip(rows, reversed(texts), strict=True)]
    _, samples = prepared(tmp_path, "text-classification", rows, tokenizer=folder, seq_len=length)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row, sample in zip(rows, samples, strict=True):
        whole = tokenizer(row["text"], row.get("text_pair"), truncation=True, max_length=length)
        assert_equal(sample, whole)


@pytest.mark.parametrize("length", [64, 8])
@pytest.mark.parametrize("sort", matrix(SORTS, quick=QUICK_SORTS))
def test_words_have_the_tokens_and_places_of_the_tokenizers_own_call(tmp_path, folders, sort, length):
    folder, tokenizer = folders(sort), AutoTokenizer.from_pretrained(folders(sort))
    rows = [{"tokens": text.split() if " " in text else [*text]} for text in texts_for(sort)]
    rows = [{**row, "labels": [str(i % 3) for i in range(len(row["tokens"]))]} for row in rows]
    _, samples = prepared(
        tmp_path, "token-classification", rows, tokenizer=folder, seq_len=length, options={"labels": ("0", "1", "2")}
    )
    for row, sample in zip(rows, samples, strict=True):
        whole = tokenizer(row["tokens"], is_split_into_words=True, truncation=True, max_length=length)
        assert_equal(sample, whole)
        if tokenizer.is_fast:
            pairs = pairwise([None, *whole.word_ids()])
            first = [place if place != before else None for before, place in pairs]
            assert sample["labels"] == [IGNORED if place is None else place % 3 for place in first]


def test_words_of_a_byte_level_tokenizer_have_the_spaces_of_a_text(tmp_path, folders):
    given = tmp_path / "given"
    tokenizer = AutoTokenizer.from_pretrained(folders("byte-level"))
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["pre_tokenizer"]["add_prefix_space"] = False
    tokenizer.save_pretrained(given)
    (given / "tokenizer.json").write_text(json.dumps(content))
    rows = [{"tokens": ["what", "one", "two"], "labels": ["a", "b", "a"]}] * 3
    _, samples = prepared(tmp_path, "token-classification", rows, tokenizer=str(given))
    assert samples[0]["input_ids"] == AutoTokenizer.from_pretrained(given)("what one two")["input_ids"]


@pytest.mark.parametrize("sort", SORTS)
def test_the_reference_of_a_row_is_its_sample(folders, sort):
    folder, texts = folders(sort), texts_for(sort)
    for name, row in (
        ("text-classification", {"text": texts[0], "text_pair": None, "label": "a"}),
        ("text-classification", {"text": texts[0], "text_pair": texts[1], "label": "a"}),
        ("text-regression", {"text": texts[2] + "</s>", "text_pair": None, "label": 1.5}),
        ("token-classification", {"tokens": [*texts[0]], "label": ["a"] * len(texts[0])}),
    ):
        kind = data_source_named(name)
        spec = DataSpec(kind=name, path="rows.jsonl", tokenizer=folder)
        context = SampleContext(
            spec=spec, options=kind.options(spec), max_length=9, labels=ClassLabels(["b", "a"]),
            _tokenizer=RowTokenizer(folder),
        )  # fmt: skip
        sample, reference = kind.sample(row, context=context), kind.reference(row, context=context)
        if reference is None:
            assert "</s>" in str(row) and sort in ("bytes", "special letters")
            continue
        for each in reference.keys() & sample.keys():
            assert list(sample[each]) == list(reference[each]), (name, each)
        # One without room for a token has no call of the library's to be compared with.
        assert kind.reference(row, context=replace(context, max_length=1)) is None or sort in ("bytes", "unigram")


WRITTEN = "special tokens of the tokenizer in a text"


@pytest.mark.parametrize("sort", matrix(SORTS, quick=QUICK_SORTS))
def test_special_tokens_in_a_text_are_plain_text_and_said(tmp_path, folders, sort):
    folder, texts = folders(sort), texts_for(sort)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = (tokenizer.eos_token, tokenizer.cls_token, tokenizer.bos_token, tokenizer.pad_token)
    special = next(name for name in names if name is not None)
    rows = [{"text": text + special * (i in (2, 5)), "label": i % 2} for i, text in enumerate(texts)]
    result, samples = prepared(tmp_path, "text-classification", rows, tokenizer=folder, seq_len=64)
    number = tokenizer.convert_tokens_to_ids(special)
    more = samples[2]["input_ids"].count(number) - tokenizer(texts[2])["input_ids"].count(number)
    # The characters of a token may be the token itself.
    assert more == (1 if sort in ("esm", "characters", "special letters", "unigram") else 0)
    is_said = "; ".join(result.notes).startswith(f"2 rows have {WRITTEN}")
    assert is_said is (more == 0)


def test_rows_of_language_models_with_special_tokens_are_counted(tmp_path, folders):
    texts = ["one two three"] * 30
    texts[3], texts[4] = "one <s> two", "x " * 40_000 + "</s>"
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    spec = DataSpec(path=str(path), tokenizer=folders("byte-level"), seq_len=8, held_out=0)
    assert any(note.startswith(f"2 rows have {WRITTEN}") for note in prepare(spec, cache_dir=tmp_path / "c").notes)


def test_letters_that_are_special_tokens_are_tokens(folders):
    tokenizer = RowTokenizer(folders("special letters"))
    assert tokenizer.encode("GAT") == AutoTokenizer.from_pretrained(folders("special letters")).convert_tokens_to_ids(
        [*"GAT"]
    )
    assert tokenizer.unk_id not in tokenizer.encode("".join(BASES))
    assert tokenizer.unk_id in tokenizer.special_token_ids
    assert tokenizer.num_written == 0


def test_tokens_that_are_unknown_are_told_by_the_tokenizer(folders):
    assert RowTokenizer(folders("bases")).unk_id is None
    tokenizer = RowTokenizer(folders("esm"))
    assert set(tokenizer.encode("xyz")) == {tokenizer.unk_id}
