"""Rows that are refused: each is named with its place, and all of a file together."""

import pytest

from tests.unit.data.prepared_rows import REVIEWS, conversation, jsonl, opened, refused


@pytest.mark.parametrize(
    ("kind", "row", "says"),
    [
        ("text-classification", {"text": "a"}, "has no column for label_column; its rows have text. To fix: set"),
        ("text-classification", {"text": 3, "label": "a"}, "rows.jsonl, row 1: the text is int, not text"),
        ("text-classification", {"text": "", "label": "a"}, "row 1: the text is empty. To fix: add text, or remove"),
        (
            "text-classification",
            {"text": " \t\u200b", "label": "a"},
            "row 1: the text is .* has no visible character",
        ),
        ("embedding", {"anchor": "a", "positive": " \n"}, "the positive is .* has no visible character"),
        ("embedding", {"anchor": "a", "positive": "\x00\u3164\ufe0f"}, "the positive is .* has no visible character"),
        ("text-classification", {"text": "a", "label": 0.5}, "row 1: label 0.5 .* set data.kind to text-regression"),
        ("text-classification", {"text": "a", "label": None}, "line 1 has no value in 'label'. To fix: add the value"),
        ("text-classification", {"text": "a", "label": ""}, "row 1: label '' in column 'label' is not a class"),
        ("text-classification", {"text": "a", "label": "3.47"}, "label '3.47' .* set data.kind to text-regression"),
        ("text-classification", {"text": "a", "label": [1, 0, 1]}, "row 1: label 1 is twice among the labels of a row"),
        ("text-regression", {"text": "a", "label": "b"}, "row 1: label 'b' is not a finite number"),
        ("text-regression", {"text": "a", "label": 1e39}, r"row 1: label 1e\+39 is not a finite number of 32 bits"),
        ("text-classification", {"text": "\ud800", "label": "a"}, "line 1 has half of a surrogate pair"),
        ("token-classification", {"tokens": ["a"], "labels": ["x", "y"]}, "there are 1 tokens and 2 labels"),
        ("token-classification", {"tokens": "a", "labels": ["x"]}, "tokens are str, not a list"),
        ("chat", {"messages": []}, "row 1: messages are not a list with a message"),
        ("chat", {"messages": [{"role": "user"}]}, "message 1 has neither content nor tool_calls"),
        ("chat", {"messages": [{"content": "a"}]}, "message 1 has no role"),
        (
            "chat",
            {"messages": [{"role": "assistant", "content": 3}]},
            "row 1: message 1 has a content that is int, and only text is read. To fix: give a text",
        ),
        ("chat", {"messages": [{"role": "user", "content": "a"}]}, "no message is the assistant's"),
        (
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": [{"role": "user", "content": "c"}]},
            "chosen and rejected are of different types",
        ),
        ("embedding", {"anchor": "a", "positive": " "[:0]}, "the positive is empty"),
        ("seq2seq", {"input": ["a"], "target": "b"}, "the input is list, not text"),
        ("image-classification", {"image": "none.png", "label": "a"}, "none.png cannot be read"),
    ],
)
def test_wrong_rows_name_their_place(tmp_path, kind, row, says):
    with pytest.raises(ValueError, match=says):
        opened(tmp_path, kind, [row])


def test_wrong_rows_of_a_file_are_reported_together(tmp_path, chat_tokenizer):
    good, wrong = {"messages": conversation(1)}, {"messages": []}
    rows = [good, wrong, {"messages": [{"role": "user", "content": "a"}]}, good, *[wrong] * 4]
    said = refused(tmp_path, "chat", rows, tokenizer=chat_tokenizer)
    assert "row 2: messages are not a list with a message; " in said
    assert "row 3: no message is the assistant's, so there is nothing to learn; " in said
    assert "row 7: messages" in said
    assert "row 8" not in said
    assert said.count("To fix: ") == 1
    assert said.endswith("give [{role: user, content: ...}, ...]; remove the row")


def test_a_row_that_cannot_be_read_is_reported_with_wrong_ones_before_it(tmp_path, bert_tokenizer):
    rows = [*REVIEWS, {"text": ["a"], "label": "good"}, {"text": None, "label": "good"}]
    said = refused(tmp_path, "text-classification", rows, tokenizer=bert_tokenizer)
    assert f"row {len(rows) - 1}: the text is list, not text; " in said
    assert f"line {len(rows)} has no value in 'text'. To fix: " in said


def test_wrong_rows_to_train_on_and_held_out_are_reported_together(tmp_path, bert_tokenizer):
    held_out = jsonl(tmp_path / "held.jsonl", [{"text": None, "label": "good"}])
    said = refused(
        tmp_path,
        "text-classification",
        [*REVIEWS, {"text": "a", "label": None}],
        tokenizer=bert_tokenizer,
        held_out_path=held_out,
    )
    assert "has no value in 'label'; " in said
    assert "held.jsonl, line 1 has no value in 'text'. To fix: " in said
