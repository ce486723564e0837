"""Settings of data that a kind does not read are refused before any data is read."""

import pytest

from ringmaster.techniques.data import prepare
from ringmaster.techniques.job import DataSpec


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
        prepare(DataSpec(**spec, seq_len=8), cache_dir=tmp_path)


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
        prepare(DataSpec(**spec, seq_len=8), cache_dir=tmp_path)
