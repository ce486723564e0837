"""Settings of data that a kind does not read are refused before any data is read."""

import pytest

from ringmaster.codec import digest, from_json, to_json
from ringmaster.techniques.data import prepare
from ringmaster.techniques.job_specs import DataSpec


@pytest.mark.parametrize(
    ("spec", "unread"),
    [
        ({"kind": "completion", "path": "a.jsonl", "label_column": "x", "labels": ("a",)}, "label_column, labels"),
        ({"kind": "completion", "path": "a.jsonl", "text_column": "foo"}, "text_column"),
        ({"kind": "chat", "path": "a.jsonl", "split": "fit", "held_out_split": "test"}, "split, held_out_split"),
        ({"kind": "chat", "dataset": "chats", "time_column": "at"}, "time_column"),
        ({"path": "a.jsonl", "image_column": "img", "labels": ("a",)}, "image_column, labels"),
        ({"dataset": "prose", "anchor_column": "one", "split": "fit"}, "anchor_column"),
    ],
)
def test_all_keys_that_a_kind_does_not_read_are_refused(tmp_path, spec, unread):
    with pytest.raises(ValueError, match=rf"does not read {unread}\. To fix: remove what it does not read"):
        prepare(from_json(DataSpec, {**spec, "seq_len": 8}), cache_dir=tmp_path)


def test_a_key_that_is_not_read_is_named_with_the_kinds_that_read_it(tmp_path):
    spec = DataSpec(kind="chat", path="a.jsonl", options={"tokens_column": "x"})
    with pytest.raises(
        ValueError, match=r"tokens_column is of token-classification\); its options are: messages_column"
    ):
        prepare(spec, cache_dir=tmp_path)


def test_the_stored_form_is_that_of_earlier_releases():
    """The names of prepared data and of models have its digest."""
    options = {"label_column": "stars", "labels": ("bad", "good"), "text_column": "body"}
    spec = DataSpec(kind="text-classification", path="a.csv", options=options)
    stored = to_json(spec)
    assert stored["label_column"] == "stars"
    assert (digest(spec), digest(DataSpec(source="digits"))) == ("3ce8085ceeab575b", "a8a812fb1c6e2598")
    assert from_json(DataSpec, {**stored, "messages_column": None}) == spec


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "text-classification", "path": "a.csv", "text_column": "body", "label_column": "y", "labels": ("a",)},
        {"path": "a.jsonl", "text_column": "body", "time_column": "at"},
        {"kind": "completion", "path": "a.jsonl", "name": "prose", "split": "fit", "text_column": "body"},
    ],
)
def test_keys_that_are_read_are_not_refused(tmp_path, monkeypatch, spec):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="matches no file"):
        prepare(from_json(DataSpec, {**spec, "seq_len": 8}), cache_dir=tmp_path)
