"""Rows of token ids: labels and masks in further columns define what is learnt."""

import json

import pytest

from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.data.inference import infer_kind
from ringmaster.techniques.job_specs import DataSpec, ModelSpec

NONE = -100


@pytest.fixture(params=["jsonl", "saved", "parquet"])
def samples_of(request, tmp_path):
    """A function samples_of(rows, **fields) that returns the training samples of rows, from files and data sets."""

    def samples(rows, **fields):
        where = {"path": str(tmp_path / f"rows.{request.param}")}
        if request.param == "jsonl":
            (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            import datasets

            table = datasets.Dataset.from_list(rows)
            if request.param == "saved":
                where = {"dataset": str(tmp_path / "saved")}
                table.save_to_disk(where["dataset"])
            else:
                table.to_parquet(where["path"])
        spec = DataSpec(**where, held_out=0, **fields)
        prepared = prepare(spec, cache_dir=tmp_path / "cache")
        training, _ = open_data(spec, cache_dir=tmp_path / "cache", prepared=prepared)
        return [{name: each.tolist() for name, each in training[at].items()} for at in range(len(training))]

    return samples


def test_labels_count_and_padding_does_not(samples_of):
    rows = [
        {"input_ids": [5, 6, 7], "labels": [NONE, NONE, 7], "attention_mask": [1, 1, 1]},
        {"input_ids": [9, 8, 0, 0], "labels": [NONE, 8, NONE, NONE], "attention_mask": [1, 1, 0, 0]},
        {"input_ids": [0, 4, 3], "labels": [0, 4, 3], "attention_mask": [0, 1, 1]},
    ]
    assert samples_of(rows, seq_len=4) == [
        {"input_ids": [5, 6, 7, 0], "labels": [NONE, NONE, 7, NONE], "attention_mask": [1, 1, 1, 0]},
        {"input_ids": [9, 8, 0, 0], "labels": [NONE, 8, NONE, NONE], "attention_mask": [1, 1, 0, 0]},
        {"input_ids": [4, 3, 0, 0], "labels": [4, 3, NONE, NONE], "attention_mask": [1, 1, 0, 0]},
    ]


@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks", "loss_mask"])
def test_masks_of_what_is_learnt_count(samples_of, mask):
    rows = [{"input_ids": [5, 6, 7], mask: [0, 1, 1]}, {"input_ids": [9, 8], mask: [0, 1]}]
    assert [each["labels"] for each in samples_of(rows, seq_len=3)] == [[NONE, 6, 7], [NONE, 8, NONE]]
    for row in rows:
        row["labels"] = [*row["input_ids"][:-1], NONE]
    assert [each["labels"] for each in samples_of(rows[:1] * 2, seq_len=3)] == [[NONE, 6, NONE]] * 2


def test_ids_alone_are_a_stream_without_what_is_not_attended_to(samples_of):
    rows = [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}, {"input_ids": [9, 0], "attention_mask": [1, 0]}]
    assert [each["input_ids"] for each in samples_of(rows, seq_len=2)] == [[5, 6], [7, 9]]


def test_rows_of_labels_are_packed(samples_of):
    rows = [{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [9, 8], "labels": [NONE, 8]}]
    (sample,) = samples_of(rows, seq_len=4, kind="tokenized", packing=True)
    assert sample["labels"] == [NONE, 6, NONE, 8]
    assert sample["position_ids"] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"labels": [5, 6]}, "row 1: there are 3 input_ids and 2 labels"),
        ({"labels": [6, 7, NONE]}, "row 1: each of the labels is the next token, and the loss shifts them"),
        ({"labels": 1}, "row 1: labels is 1, not a list"),
        ({"labels": [5, -1, 7]}, "row 1: input_ids or labels are below 0"),
        ({"completion_mask": [0, 2, 1]}, "row 1: completion_mask has other values than 0 and 1"),
        ({"labels": [5, 6, 7], "attention_mask": [1, 0, 1]}, "row 1: attention_mask has a 0 between two tokens"),
        ({"labels": [5, 6, 7], "position_ids": [0, 0, 1]}, "row 1: position_ids do not count from 0"),
        ({"labels": [5, 6, 7], "token_type_ids": [0, 1, 1]}, "row 1: token_type_ids are not 0"),
        ({"label": 1}, "has token ids and a column 'label', which a stream of tokens loses"),
        ({"label_ids": [NONE, 6, 7]}, "has token ids and a column 'label_ids', which seems to mark what is learnt"),
        (
            {"response_mask": [0, 1, 1]},
            "has token ids and a column 'response_mask', which seems to mark what is learnt",
        ),
        ({"labels": [5, 6, 7], "seq_lengths": [1, 2]}, "has a value in 'seq_lengths', by which TRL marks"),
        (
            {"labels": [5, 6, 7], "loss_weights": [0, 1, 1]},
            "has a value in 'loss_weights', which seems to mark what is",
        ),
        ({"attention_mask": [1, 1]}, "has 3 token ids, and an attention_mask that is not as long"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(samples_of, row, says):
    with pytest.raises(ValueError, match=rf"{says}.*To fix: "):
        samples_of([{"input_ids": [5, 6, 7], **row}] * 2, seq_len=3)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize(
    ("row", "unread", "options"),
    [
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "source": "a"}, "source", {}),
        ({"input_ids": [5, 6, 7], "text": "five six seven"}, "input_ids", {}),
        ({"input_ids": [5, 6, 7], "text": "five six seven"}, None, {"ignored_columns": ["input_ids"]}),
        ({"body": "five six seven", "label": 1}, "label", {"text_column": "body"}),
        ({"text": "five six seven"}, None, {}),
    ],
)
def test_columns_that_a_stream_does_not_read_are_named(tmp_path, form, row, unread, options):
    import datasets

    rows = datasets.Dataset.from_list([row] * 8)
    where = {"path": str(tmp_path / f"rows.{form}")}
    if form == "saved":
        where = {"dataset": str(tmp_path / "saved")}
        rows.save_to_disk(where["dataset"])
    else:
        getattr(rows, {"jsonl": "to_json"}.get(form, "to_parquet"))(where["path"])
    spec = DataSpec(**where, kind="language-modeling", seq_len=2, vocab_size=300, held_out=0, options=options)
    notes = [each for each in prepare(spec, cache_dir=tmp_path / "cache").notes if each.startswith("columns")]
    assert notes == ([] if unread is None else [f"columns that are not read: {unread}"])


@pytest.mark.parametrize("first", [True, False])
def test_rows_of_which_some_have_labels_are_refused(tmp_path, first):
    rows = [{"input_ids": [5, 6]}, {"input_ids": [5, 6], "labels": [NONE, 6]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (rows if first else rows[::-1])))
    with pytest.raises(ValueError, match=r"line 2 has (no column 'labels'|token ids and a column 'labels')"):
        prepare(DataSpec(path=str(tmp_path / "rows.jsonl"), seq_len=2, held_out=0), cache_dir=tmp_path)


def test_the_kind_is_inferred(tmp_path):
    file = tmp_path / "rows.jsonl"
    model = ModelSpec(architecture="LlamaForCausalLM")
    for row, kind in (
        ({"input_ids": [1], "labels": [1], "text": "a"}, "tokenized"),
        ({"input_ids": [1], "attention_mask": [1]}, None),
    ):
        file.write_text(json.dumps(row) + "\n")
        assert infer_kind(DataSpec(path=str(file), seq_len=2), model) == kind
