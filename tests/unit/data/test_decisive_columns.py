"""Columns that change what a row means are read, or rows with them are refused; all others are named in a note."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from ringmaster.features.embeddings.embedding_rows import Embedding
from ringmaster.features.preference.preference_rows import Preference
from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.data.inference import with_options_of_data
from ringmaster.techniques.data.row_kind import SampleContext
from ringmaster.techniques.data.row_tokenizer import RowTokenizer
from ringmaster.techniques.data.sources.completion import Completion, CompletionOptions
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from tests.unit.data.conftest import saved_tokenizer

PAIR = {"sentence1": "one two", "sentence2": "three"}
ANSWERS = {"chosen": "it is", "rejected": "no"}


def turns(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture
def prepared(tmp_path):
    """A function prepared(kind, rows, **fields) that returns the description of rows, and their training samples."""

    def prepare_rows(kind, rows, *, form="jsonl", **fields):
        path = tmp_path / f"rows.{form}"
        if form == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            import datasets

            datasets.Dataset.from_list(rows).to_parquet(str(path))
        spec = DataSpec(kind=kind, path=str(path), held_out=0, **fields)
        result = prepare(spec, cache_dir=tmp_path / "cache")
        training, _ = open_data(spec, cache_dir=tmp_path / "cache", prepared=result)
        return result, [training[at] for at in range(len(training))]

    return prepare_rows


def text(result, tokens):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(result.tokenizer_dir).decode(tokens)


DECISIVE = [
    ("embedding", {**PAIR, "score": 0.0}, "score"),
    ("embedding", {**PAIR, "label": 0}, "label"),
    ("embedding", {**PAIR, "gold_label": "contradiction"}, "gold_label"),
    ("embedding", {**PAIR, "negatives": ["four"]}, "negatives"),
    ("text-classification", {"question": "what", "sentence": "one", "label": 1}, "question"),
    ("text-classification", {"text": "one", "context": "two", "label": 1}, "context"),
    ("completion", {"prompt": "a", "completion": "b", "label": False}, "label"),
    ("completion", {"prompt": "a", "completion": "b", "input": "c", "context": "d"}, "context"),
    ("completion", {"prompt": "a", "completion": "b", "image": "a.png"}, "image"),
    ("completion", {"prompt": "a", "completion": "b", "documents": [{"text": "c"}]}, "documents"),
    ("chat", {"messages": turns("a", "b"), "images": ["a.png"]}, "images"),
    ("chat", {"messages": turns("a", "b"), "functions": [{"name": "f"}]}, "functions"),
    ("chat", {"messages": turns("a", "b"), "documents": [{"text": "c"}]}, "documents"),
    ("chat", {"messages": turns("a", "b"), "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ("chat", {"conversations": turns("a", "b"), "kto_tag": False}, "kto_tag"),
    ("preference", {**ANSWERS, "conversations": turns("a", "b")}, "conversations"),
    ("seq2seq", {"instruction": "sum up", "input": "a", "output": "b"}, "instruction"),
    ("seq2seq", {"input": "a", "output": "b", "tgt_lang": "fra_Latn"}, "tgt_lang"),
    ("seq2seq", {"input": "a", "output": "b", "history": ["c"]}, "history"),
    ("embedding", {**PAIR, "relatedness_score": 1.0}, "relatedness_score"),
    ("embedding", {**PAIR, "is_paraphrase": False}, "is_paraphrase"),
    ("embedding", {**PAIR, "neg": "four"}, "neg"),
    ("text-classification", {"text": "one", "text_b": "two", "label": 1}, "text_b"),
    ("completion", {"prompt": "a", "completion": "b", "system_prompt": "c"}, "system_prompt"),
    ("completion", {"prompt": "a", "completion": "b", "reasoning_content": "c"}, "reasoning_content"),
    ("preference", {"prompt": "a", **ANSWERS, "label": 1}, "label"),
]


def test_a_system_prompt_of_conversations_is_read_by_either_name(prepared):
    rows = ([{name: "be odd", "messages": turns("what", "it is")}] * 2 for name in ("system", "system_prompt"))
    one, two = (prepared("chat", each) for each in rows)
    assert "be odd" in text(two[0], two[1][0]["input_ids"])
    np.testing.assert_array_equal(one[1][0]["input_ids"], two[1][0]["input_ids"])


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(("kind", "row", "column"), DECISIVE, ids=[f"{kind}-{name}" for kind, _, name in DECISIVE])
def test_rows_with_a_decisive_column_are_refused(prepared, kind, row, column, form):
    says = rf"line 2 has a value in '{column}', .*To fix: .*set data\.ignored_columns: \[{column}\]"
    first = row if form == "parquet" else {name: value for name, value in row.items() if name != column}
    with pytest.raises(ValueError, match=says):
        prepared(kind, [first, row], form=form)


def test_columns_that_are_to_be_ignored_are_not_refused_and_others_are_named(prepared):
    rows = [{**PAIR, "score": 0.0, "topic": "x"}, {"sentence1": "what", "sentence2": "it", "score": 5.0, "topic": "y"}]
    result, samples = prepared("embedding", rows, options={"ignored_columns": ["score"]})
    assert len(samples) == 2
    assert "columns that are not read: topic" in result.notes


def test_a_decisive_column_without_a_value_is_no_fault(prepared):
    rows = [{**PAIR, "score": None}, {"sentence1": "what", "sentence2": "it", "score": None}]
    assert len(prepared("embedding", rows)[1]) == 2


def test_the_text_that_the_options_name_is_the_only_one(prepared):
    rows = [{"review": "a", "context": "b", "label": 1}, {"review": "c", "context": "d", "label": 0}]
    result, _ = prepared("text-classification", rows, options={"text_column": "review"})
    assert "columns that are not read: context" in result.notes


@pytest.mark.parametrize("names", [("negative_1", "negative_2"), ("hard_negative_2", "negative_10")])
def test_numbered_negatives_are_read_in_their_order(prepared, tmp_path, bert_tokenizer, names):
    negatives = dict(zip(names[::-1], ("two", "three"), strict=True))
    rows = [{"anchor": "what", "positive": "one", **negatives}, {"anchor": "is", "positive": "it", **negatives}]
    _, samples = prepared("embedding", rows, tokenizer=bert_tokenizer)
    tokenizer = RowTokenizer(tmp_path / "bert")
    expected = [tokenizer.encode(each)[0] for each in ("what", "one", "three", "two")]
    assert samples[0]["input_ids"][:, 1].tolist() == expected
    spec = DataSpec(kind="embedding", path=str(tmp_path / "rows.jsonl"))
    job = Job(name="a", model=ModelSpec(architecture="BertModel"), data=spec, loss="contrastive", num_steps=1)
    assert with_options_of_data(job).loss_options == {"hard_negatives": 2}


@pytest.mark.parametrize("names", [(), ("negative",), ("negative_1", "negative_2")])
def test_negatives_of_a_saved_data_set_are_counted_as_those_of_files_are(tmp_path, names):
    columns = {name: [f"{name} {i}" for i in range(4)] for name in ("anchor", "positive", *names)}
    Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    spec = DataSpec(kind="embedding", dataset=str(tmp_path / "saved"))
    job = Job(name="a", model=ModelSpec(architecture="BertModel"), data=spec, loss="contrastive", num_steps=1)
    assert with_options_of_data(job).loss_options.get("hard_negatives", 0) == len(names)
    given = replace(job, loss_options={"hard_negatives": 0})
    assert with_options_of_data(given) == given


@pytest.mark.parametrize(
    ("kind", "row", "prompt"),
    [
        ("completion", {"instruction": "one", "context": "two", "response": "it"}, "one\n\ntwo"),
        ("preference", {"instruction": "one", "input": "two", **ANSWERS}, "one\n\ntwo"),
        ("preference", {"system": "three", "question": "one", **ANSWERS}, "three\n\none"),
    ],
)
def test_what_belongs_to_a_prompt_is_read(prepared, kind, row, prompt):
    result, samples = prepared(kind, [row, {**row, "system": "another"}])
    tokens, labels = samples[0]["input_ids"], samples[0]["labels"]
    tokens, labels = (tokens[0], labels[0]) if kind == "preference" else (tokens, labels)
    first = int((labels != -100).int().argmax())
    assert text(result, tokens[:first]) == prompt


@pytest.mark.parametrize("form", ["text", "list"])
@pytest.mark.parametrize("kind", ["preference", "completion"])
def test_answers_that_repeat_the_messages_of_the_prompt_lose_them(prepared, chat_tokenizer, kind, form):
    def rows(repeats):
        for question, chosen, rejected in (("what is it", "one", "two"), ("is it one", "yes", "three")):
            both = [turns(question, each)[0 if repeats else 1 :] for each in (chosen, rejected)]
            names = ("chosen", "rejected") if kind == "preference" else ("completion",)
            prompt = question if form == "text" else turns(question, "")[:1]
            yield {"prompt": prompt, **dict(zip(names, both, strict=False))}

    (_, repeated), (_, plain) = (
        prepared(kind, [*rows(repeats)], tokenizer=chat_tokenizer) for repeats in (True, False)
    )
    for one, other in zip(repeated, plain, strict=True):
        assert {name: each.tolist() for name, each in one.items()} == {n: each.tolist() for n, each in other.items()}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "one", "chosen": "it", "rejected": ""}, "row 1: the rejected is empty"),
        ({"prompt": "one", "chosen": "", "rejected": "it"}, "row 1: the chosen is empty"),
        (
            {"prompt": "one", "chosen": turns("one", "it"), "rejected": turns("one", "")},
            "row 1: the rejected has no message of its own",
        ),
        (
            {"chosen": turns("one", "it"), "rejected": turns("two", "it")},
            "row 1: the answers do not begin with a common",
        ),
        ({**ANSWERS, "system": "one"}, "row 1: an input or a system text has no prompt"),
        ({**ANSWERS, "prompt": "one", "history": [["a", "b"]]}, "row 1: a row has a history"),
        (
            {"prompt": turns("one", "")[:1], "input": "two", "chosen": turns("a", "b"), "rejected": turns("a", "c")},
            "row 1: an input cannot be combined with a prompt of messages",
        ),
    ],
)
def test_preferences_without_an_answer_or_a_prompt_are_refused(prepared, chat_tokenizer, row, says):
    with pytest.raises(ValueError, match=rf"{says}.* To fix: "):
        prepared("preference", [row, row], tokenizer=chat_tokenizer)


def test_the_reference_of_an_embedding_is_what_its_sample_is(bert_tokenizer):
    spec = DataSpec(kind="embedding", path="rows.jsonl", tokenizer=bert_tokenizer)
    context = SampleContext(spec=spec, options=None, max_length=5, _tokenizer=RowTokenizer(Path(bert_tokenizer)))
    first = {"anchor": "what is", "positive": "it", "negative": None, "negative 1": "[SEP]"}
    for row in (first, {**first, "anchor": "one two three what"}):  # which is cut
        expected, sample = (made(row, context=context) for made in (Embedding().reference, Embedding().sample))
        for name, values in expected.items():
            assert values.tolist() == sample[name].tolist()


def test_the_references_of_texts_are_what_samples_are(tmp_path, chat_tokenizer):
    from transformers import AutoTokenizer

    folder = tmp_path / "with end"
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer, eos_token="[SEP]")
    tokenizer.save_pretrained(folder)
    spec = DataSpec(path="rows.jsonl", tokenizer=str(folder))
    context = SampleContext(spec=spec, options=CompletionOptions(), max_length=20, _tokenizer=RowTokenizer(folder))
    for kind, row in (
        (Completion(), {"prompt": "what is", "completion": " it", "input": "one"}),
        (Preference(), {"prompt": "what", "chosen": "one two", "rejected": "it", "system": "is"}),
        (Preference(), {"prompt": None, "chosen": "what one two", "rejected": "what it"}),
    ):
        values = {**dict.fromkeys(("input", "system", "tools", "history")), **row}
        expected, sample = (made(values, context=context) for made in (kind.reference, kind.sample))
        assert expected is not None
        assert np.array_equal(expected["input_ids"], sample["input_ids"])


def test_an_optional_column_that_the_first_row_lacks_is_read(tmp_path, prepared):
    rows = [{"prompt": "what", "completion": "one"}, {"prompt": "what", "completion": "one", "input": "is it"}]
    tokenizer = saved_tokenizer(tmp_path / "given", eos_token="[SEP]")
    _, samples = prepared("completion", rows, tokenizer=tokenizer)
    num_tokens = [int((sample["input_ids"] != 0).sum()) for sample in samples]
    assert num_tokens[1] == num_tokens[0] + 2


@pytest.mark.parametrize(
    ("kind", "row", "late"),
    [
        ("text-classification", {"text": "one", "label": "a"}, {"sentence2": "two"}),
        ("embedding", {"anchor": "one", "positive": "two"}, {"hard_negative": "is"}),
    ],
)
def test_an_optional_column_of_all_rows_or_none_is_refused_where_it_is_late(prepared, bert_tokenizer, kind, row, late):
    with pytest.raises(ValueError, match=r"line 2 has a value in .*, which the first row lacks\. To fix: give all"):
        prepared(kind, [row, {**row, **late}], tokenizer=bert_tokenizer)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("text-classification", {"text": "one", "label": 1}),
        ("chat", {"messages": turns("what", "it is")}),
        ("prompt", {"prompt": "what"}),
    ],
)
def test_columns_that_only_later_rows_have_are_named(prepared, kind, row):
    rows = [row, {**row, "label": 0} if "label" in row else row, {**row, "topic": "x"}, {**row, "topic": None}]
    result, _ = prepared(kind, rows)
    assert [each for each in result.notes if "columns" in each] == [
        "1 row: columns that the first row lacks are not read: topic"
    ]
    result, _ = prepared(kind, rows, options={"ignored_columns": ["topic"]})
    assert not [each for each in result.notes if "columns" in each]
