"""Labels that stand for none, and lists of labels."""

import csv
import json

import pytest

from ringmaster.codec import from_json
from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.metric import IGNORED
from tests.unit.data.prepared_rows import jsonl

WORDS = ["one", "two", "three"]


def opened(tmp_path, **spec):
    given = from_json(DataSpec, {"vocab_size": 300, "held_out": 0, **spec})
    prepared = prepare(given, cache_dir=tmp_path / "cache")
    return prepared, open_data(given, cache_dir=tmp_path / "cache", prepared=prepared)[0]


@pytest.mark.parametrize("is_kept", [True, False])
def test_words_without_a_label_do_not_count(tmp_path, bert_tokenizer, is_kept):
    path = jsonl(tmp_path / "rows.jsonl", [{"tokens": WORDS, "labels": [4, IGNORED, 7]}] * 3)
    tokenizer = bert_tokenizer if is_kept else None
    prepared, training = opened(tmp_path, kind="token-classification", path=path, tokenizer=tokenizer)
    assert prepared.labels == ("4", "7")
    labels = training[0]["labels"].tolist()
    assert [label for label in labels if label != IGNORED] == [0, 1]


def test_a_word_of_a_data_set_without_a_label_does_not_count(tmp_path, bert_tokenizer):
    import datasets  # local: the import takes seconds

    label = datasets.List(datasets.ClassLabel(names=["O", "B-X", "I-X"]))
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "labels": label})
    rows = {"tokens": [WORDS] * 3, "labels": [[0, -1, 1]] * 3}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    spec = {"kind": "token-classification", "dataset": str(tmp_path / "saved"), "tokenizer": bert_tokenizer}
    _, training = opened(tmp_path, **spec)
    assert training[0]["labels"].tolist() == [IGNORED, 0, IGNORED, 1, IGNORED]


def test_a_text_without_a_label_is_refused(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "a", "label": 1}, {"text": "a", "label": IGNORED}])
    with pytest.raises(ValueError, match=r"row 2: label -100 means no label. To fix: add the label"):
        opened(tmp_path, kind="text-classification", path=path)


@pytest.mark.parametrize(
    ("word", "what"), [(None, "null"), (float("nan"), "nan, which is not text"), ({}, "{}, which is not text")]
)
def test_a_word_that_is_no_text_is_refused(tmp_path, bert_tokenizer, word, what):
    path = jsonl(tmp_path / "rows.jsonl", [{"tokens": ["one", word], "labels": ["a", "b"]}])
    with pytest.raises(ValueError, match=rf"row 1: token 2 is {what}. To fix: "):
        opened(tmp_path, kind="token-classification", path=path, tokenizer=bert_tokenizer)


LISTS = [["drama", "war"], ["war"], ["comedy"]]


@pytest.mark.parametrize("is_kept", [True, False])
def test_lists_in_a_csv_are_read_as_json(tmp_path, bert_tokenizer, is_kept):
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["text", "label"], *([f"one {i}", json.dumps(each)] for i, each in enumerate(LISTS))]
        )
    spec = {"path": str(tmp_path / "rows.csv"), "tokenizer": bert_tokenizer if is_kept else None}
    prepared, training = opened(tmp_path, kind="text-classification", **spec)
    assert prepared.labels == ("comedy", "drama", "war")
    assert [training[i]["labels"].tolist() for i in range(3)] == [[0, 1, 1], [0, 0, 1], [1, 0, 0]]


def test_words_and_their_labels_may_be_lists_in_a_csv(tmp_path, bert_tokenizer):
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["tokens", "labels"], [json.dumps(WORDS), '["O", "X", "O"]']])
    path = str(tmp_path / "rows.csv")
    prepared, training = opened(tmp_path, kind="token-classification", path=path, tokenizer=bert_tokenizer)
    assert prepared.labels == ("O", "X")
    assert training[0]["labels"].tolist() == [IGNORED, 0, 1, 0, IGNORED]


def test_a_list_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\na,\"['drama', 'war']\"\nb,['war']\n")
    with pytest.raises(
        ValueError, match=r"row 2: .*looks like a list, but is not valid JSON;.* row 3: .* To fix: write it as"
    ):
        opened(tmp_path, kind="text-classification", path=str(tmp_path / "rows.csv"))


def test_names_in_brackets_are_classes(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "a", "label": "[other]"}, {"text": "b", "label": "war"}])
    assert opened(tmp_path, kind="text-classification", path=path)[0].labels == ("[other]", "war")


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_0_or_1_for_each_of_two_classes_is_refused(tmp_path, bert_tokenizer, is_kept):
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "one", "label": label} for label in ([0, 1], [1, 0])])
    spec = {"kind": "text-classification", "path": path, "tokenizer": bert_tokenizer if is_kept else None}
    with pytest.raises(ValueError, match=r"'label' has lists of 0 and 1, .* To fix: list the names of the classes"):
        opened(tmp_path, **spec)
    opened(tmp_path, **spec, labels=("0", "1"))
