"""Samples are compared with the library's own call on the rows, and what they lost of the rows is counted and said."""

import json

import pytest
from PIL import Image

from ringmaster.codec import from_json
from ringmaster.techniques.data import prepare
from ringmaster.techniques.data.row_tokenizer import RowTokenizer
from ringmaster.techniques.data.sample_checks import compared_places
from ringmaster.techniques.data.sources.text_rows import TextClassification
from ringmaster.techniques.job_specs import DataSpec
from tests.unit.data.conftest import CHAT_TEMPLATE, saved_tokenizer


def prepared_of(tmp_path, rows, **spec):
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {"kind": "text-classification", "path": str(file), "held_out": 0, **spec}
    return prepare(from_json(DataSpec, spec), cache_dir=tmp_path / "cache")


def rows_of(*texts):
    return [{"text": text, "label": "ab"[number % 2]} for number, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"input_ids": [2, 5, 3]}, r"its input_ids are \[4, 3\] from place 1 of 3 and the .* call gives \[5, 3\]"),
        ({"input_ids": [2, 4, 3, 3]}, r"its input_ids are \[\] from place 3 of 3 and the .* call gives \[3\] from"),
        ({"input_ids": [2, 4, 3], "labels": 1}, r"its labels are \[0\] from place 0 of 1 and .* gives \[1\]"),
    ],
)
def test_a_row_that_the_library_reads_otherwise_is_refused(tmp_path, bert_tokenizer, monkeypatch, reference, message):
    monkeypatch.setattr(TextClassification, "reference", lambda self, row, context: reference)
    with pytest.raises(ValueError, match=rf"d\.jsonl, row 1: {message}.* To fix: ") as caught:
        prepared_of(tmp_path, rows_of("one") * 2, tokenizer=bert_tokenizer)
    assert "row 2" in str(caught.value)


def test_equal_arrays_pass(tmp_path, bert_tokenizer, monkeypatch):
    monkeypatch.setattr(TextClassification, "reference", lambda self, row, context: {"input_ids": [2, 4, 3]})
    assert prepared_of(tmp_path, rows_of("one", "one"), tokenizer=bert_tokenizer).num_samples == 2


def test_rows_all_over_the_data_are_compared():
    assert compared_places(512, num_before=0)[:3] == [0, 16, 32]
    assert [len(compared_places(512, num_before=number)) for number in range(8)] == [32, 16, 8, 4, 2, 1, 1, 1]
    assert compared_places(3, num_before=0) == [0, 1, 2]
    assert compared_places(0, num_before=0) == []


@pytest.mark.parametrize(
    ("texts", "note", "is_refused"),
    [
        (["one", "two", "six"], "1 of 3 consist of the unknown token alone, such as d.jsonl, row 3", False),
        (["one", "six", "nine"], "2 of 3 consist of the unknown token alone, such as d.jsonl, row 2", True),
        (
            ["one", "one!", "one?", "two"],
            "1 of 4 different rows became the same as another one, such as d.jsonl",
            False,
        ),
        (["six", "nine", "ten", "two"], "2 of 4 different rows became the same as another one, such as d.jsonl", False),
    ],
)
def test_content_that_is_lost_is_counted(tmp_path, bert_tokenizer, texts, note, is_refused):
    found = prepared_of(tmp_path, rows_of(*texts), tokenizer=bert_tokenizer)
    assert note in found.summary("text-classification")
    assert any(fault.startswith(f"{note}. To fix: ") for fault in found.training_faults) == is_refused


def test_equal_rows_lose_nothing(tmp_path, bert_tokenizer):
    found = prepared_of(tmp_path, rows_of("one", "one", "one", "two"), tokenizer=bert_tokenizer)
    assert found.notes == found.training_faults == ()


def test_rows_that_differ_behind_the_cut_are_said_with_the_remedy(tmp_path, bert_tokenizer):
    found = prepared_of(tmp_path, rows_of("one two", "one it", "one is", "two"), tokenizer=bert_tokenizer, seq_len=3)
    assert "2 of 4 different rows became the same as another one" in found.summary("text-classification")
    assert found.training_faults == ()
    found = prepared_of(tmp_path, rows_of("one two", "one it", "one is", "one"), tokenizer=bert_tokenizer, seq_len=3)
    assert "raise seq_len" in "".join(found.training_faults)


def test_held_out_rows_are_counted_by_themselves(tmp_path, bert_tokenizer):
    (tmp_path / "h.jsonl").write_text(json.dumps({"text": "six", "label": "a"}) + "\n")
    found = prepared_of(
        tmp_path, rows_of("one", "two"), tokenizer=bert_tokenizer, held_out_path=str(tmp_path / "h.jsonl")
    )
    assert "held out: 1 of 1 consist of the unknown token alone, such as h.jsonl, row 1" in found.notes


def test_a_tokenizer_whose_end_of_text_is_its_unknown_token_has_no_unknown_texts(tmp_path):
    tokenizer = saved_tokenizer(tmp_path / "gpt", eos_token="[UNK]")
    found = prepared_of(tmp_path, rows_of("six", "one"), tokenizer=tokenizer)
    assert "unknown" not in found.summary("text-classification")


def test_kept_samples_are_counted_again(tmp_path, bert_tokenizer):
    rows = rows_of("one", "six", "nine")
    first = prepared_of(tmp_path, rows, tokenizer=bert_tokenizer)
    again = prepared_of(tmp_path, [*rows, *rows_of("two")], tokenizer=bert_tokenizer)
    assert "2 of 3 consist" in first.notes[0]
    assert "2 of 4 consist" in again.notes[0]


def test_images_of_one_colour_and_equal_images_are_counted(tmp_path):
    for number in range(4):
        image = Image.new("RGB", (4, 4), (number, 0, 0))
        if number == 3:
            image.putpixel((0, 0), (9, 9, 9))
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        image.save(tmp_path / "ab"[number % 2] / f"{number}.png")
        if number == 3:
            image.save(tmp_path / "b" / "same pixels.bmp")
    spec = {"kind": "image-classification", "path": str(tmp_path / "[ab]" / "*"), "held_out": 0, "image_size": 4}
    spec["kwargs"] = {"image_size": spec.pop("image_size")}
    found = prepare(from_json(DataSpec, spec), cache_dir=tmp_path / "cache")
    assert "3 of 5 are of one colour, such as 0.png, row 1" in found.notes
    assert "1 of 5 different rows became the same as another one, such as same pixels.bmp" in found.notes[1]
    assert "check the files of these images" in "".join(found.training_faults)


def lines_of(tmp_path, tokenizer, *texts):
    return prepared_of(tmp_path, [{"text": text} for text in texts], kind=None, tokenizer=tokenizer, seq_len=2)


def test_unknown_tokens_of_a_text_are_counted(tmp_path, bert_tokenizer):
    found = lines_of(tmp_path, bert_tokenizer, "one two three", "six is it")
    assert "1 of 6 tokens are the unknown token" in found.notes
    assert found.training_faults == ()
    found = lines_of(tmp_path, bert_tokenizer, "one six seven", "eight is nine")
    assert found.training_faults[0].startswith("4 of 6 tokens are the unknown token. To fix: set data.tokenizer")


def test_a_text_that_the_library_encodes_otherwise_is_refused(tmp_path, bert_tokenizer, monkeypatch):
    monkeypatch.setattr(RowTokenizer, "own_call", lambda self, text: {"input_ids": [2, 4, 4, 3]})
    with pytest.raises(ValueError, match=r"d\.jsonl, row 2: its input_ids are \[5\] from place 1 of 2 and the "):
        lines_of(tmp_path, bert_tokenizer, "one one", "one two")


ANSWERS = [{"prompt": f"one {n} ", "chosen": "it is", "rejected": "no"} for n in range(8)]
SAME = {"prompt": "two ", "chosen": "yes", "rejected": "yes"}
QUESTION = [{"role": "user", "content": "three"}]
SAME_TURNS = {
    "prompt": QUESTION,
    **{role: [{"role": "assistant", "content": "it is"}] for role in ("chosen", "rejected")},
}
TURNS = {**SAME_TURNS, "rejected": [{"role": "assistant", "content": "what"}]}


@pytest.mark.parametrize(("same", "other"), [(SAME, ANSWERS[0]), (SAME_TURNS, TURNS)], ids=["texts", "messages"])
@pytest.mark.parametrize(("num_same", "is_refused"), [(0, False), (2, False), (6, True), (8, True)])
def test_equal_answers_are_counted_and_refused_where_most_are(
    tmp_path, numbers_tokenizer, same, other, num_same, is_refused
):
    result = prepared_of(
        tmp_path, [same] * num_same + [other] * (8 - num_same), kind="preference", tokenizer=numbers_tokenizer
    )
    notes = [each for each in result.notes if "as both answers" in each]
    assert [each.split(", such as")[0] for each in notes] == (
        [f"{num_same} of 8 have one text as both answers"] if num_same else []
    )
    assert any("as both answers" in each for each in result.training_faults) == is_refused


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("preference", {"prompt": "what is it", "chosen": "what is it yes", "rejected": "what is it three"}),
        ("completion", {"prompt": "what is it\n", "completion": " what is it yes"}),
    ],
)
def test_answers_that_repeat_the_prompt_are_counted(tmp_path, numbers_tokenizer, kind, row):
    other = {**row, "prompt": "two"}
    notes = prepared_of(tmp_path, [row, row, other], kind=kind, tokenizer=numbers_tokenizer).notes
    assert [each for each in notes if each.startswith("2 rows: the text of the prompt also begins what follows it")]
    assert not any("the prompt also" in each for each in prepared_of(tmp_path, [other] * 2, kind=kind).notes)


@pytest.mark.parametrize("label", [-100, -100.0, "-100"])
def test_a_number_that_stands_for_no_label_elsewhere_is_counted(tmp_path, bert_tokenizer, label):
    rows = [{"text": "one", "label": 0.5}, {"text": "two", "label": label}]
    result = prepared_of(tmp_path, rows, kind="text-regression", tokenizer=bert_tokenizer)
    assert "1 row: the label -100 is learnt as a number; remove the row where it means no label" in result.notes


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"anchor": "one", "positive": "two", "negative": "two"}, "1 row: the positive is also a negative"),
        ({"anchor": "one", "positive": "one", "negative": "two"}, "1 row: the anchor is its own positive"),
        ({"anchor": "one", "positive": "two", "negative": "three"}, None),
    ],
)
def test_rows_with_one_text_twice_are_counted(tmp_path, bert_tokenizer, row, what):
    rows = [row, {"anchor": "what", "positive": "is", "negative": "it"}]
    notes = prepared_of(tmp_path, rows, kind="embedding", tokenizer=bert_tokenizer).notes
    assert [note[: len(what or "")] for note in notes] == ([what] if what else [])


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("chat", {"messages": [*QUESTION, {"role": "assistant", "content": "yes", "refusal": "no", "name": None}]}),
        ("completion", {"prompt": QUESTION, "completion": [{"role": "assistant", "content": "yes", "refusal": "no"}]}),
        ("prompt", {"prompt": [{**QUESTION[0], "refusal": "no"}]}),
    ],
)
def test_keys_of_messages_that_are_not_read_are_named(tmp_path, chat_tokenizer, kind, row):
    wanted = "2 rows: messages have keys that the chat template does not read: refusal"
    assert wanted in prepared_of(tmp_path, [row] * 2, kind=kind, tokenizer=chat_tokenizer).notes
    reads = saved_tokenizer(tmp_path / "reads", chat_template=f"{CHAT_TEMPLATE}{{# m.refusal #}}")
    assert wanted not in prepared_of(tmp_path, [row] * 2, kind=kind, tokenizer=reads).notes
