"""Kinds of data of judged answers: single ones that are desirable or not, and pairs for reward models."""

import pytest

from ringmaster.techniques.data import fetch
from ringmaster.techniques.data.inference import infer_kind
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.metric import IGNORED
from tests.unit.data.prepared_rows import jsonl, opened, refused

LLAMA = ModelSpec(architecture="LlamaForCausalLM")


def marked(labels):
    return [{"prompt": f"say {i}: ", "completion": f"word {i}", "label": label} for i, label in enumerate(labels)]


@pytest.mark.parametrize("labels", [[True, False] * 3, [1, 0] * 3, ["true", "False"] * 3], ids=str)
def test_a_completion_is_desirable_or_not(tmp_path, labels):
    rows = marked(labels)
    prepared, training, tokenizer = opened(tmp_path, "unpaired-preference", rows)
    batch = fetch(training, range(6))
    assert batch["desirable"].tolist() == [1, 0] * 3
    learnt = batch["input_ids"][4][batch["labels"][4] != IGNORED]
    assert tokenizer.decode(learnt, skip_special_tokens=True) == "word 4"
    assert dict(prepared.columns)["label"] == "label"


def test_the_tokens_are_those_of_completions(tmp_path):
    rows = marked([True, False])
    _, training, _ = opened(tmp_path, "unpaired-preference", rows)
    _, plain, _ = opened(tmp_path, "completion", [{**row, "label": None} for row in rows])
    for name in ("input_ids", "labels"):
        assert fetch(training, range(2))[name].tolist() == fetch(plain, range(2))[name].tolist()


def test_all_wrong_marks_are_named_with_their_rows(tmp_path):
    said = refused(tmp_path, "unpaired-preference", marked([True, "good", 2, False]))
    assert "row 2: the label is 'good', and neither true nor false" in said
    assert "row 3: the label is 2, and neither true nor false" in said


def test_marked_completions_are_known_by_their_columns(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", marked([True, False]))
    assert infer_kind(DataSpec(path=path), LLAMA) == "unpaired-preference"


def test_marked_completions_are_not_learnt_as_text_or_as_they_are(tmp_path):
    said = refused(tmp_path, None, marked([True, False]), seq_len=8)
    assert "it has ['completion', 'label', 'prompt']. To fix: set text_column, or data.kind" in said
    assert "for the loss kto" in refused(tmp_path, "completion", marked([True, False]))


PAIRS = [{"prompt": f"say {i}", "chosen": f" word {i}", "rejected": f" no word {i} and more"} for i in range(4)]


@pytest.mark.parametrize("margins", [None, [0, 1.5, "2", -1]], ids=str)
def test_comparisons_have_the_tokens_of_preferences_with_a_mask_and_a_margin(tmp_path, margins):
    rows = PAIRS if margins is None else [{**row, "margin": m} for row, m in zip(PAIRS, margins, strict=True)]
    prepared, training, tokenizer = opened(tmp_path, "comparison", rows)
    _, plain, _ = opened(tmp_path, "preference", PAIRS)
    batch, tokens = fetch(training, range(4)), fetch(plain, range(4))["input_ids"]
    assert batch["margin"].tolist() == ([0.0] * 4 if margins is None else [0.0, 1.5, 2.0, -1.0])
    assert prepared.num_labels == 1
    assert "labels" not in batch
    assert batch["input_ids"].tolist() == tokens.tolist()
    texts = tokenizer.batch_decode(
        [ids[mask.bool()] for ids, mask in zip(batch["input_ids"][1], batch["attention_mask"][1], strict=True)],
        skip_special_tokens=True,
    )
    assert texts == ["say 1 word 1", "say 1 no word 1 and more"]


def test_comparisons_may_be_conversations(tmp_path):
    answers = {"chosen": "it is", "rejected": "no"}
    rows = [
        {
            "prompt": [{"role": "user", "content": "what"}],
            **{role: [{"role": "assistant", "content": text}] for role, text in answers.items()},
        }
    ] * 2
    _, training, tokenizer = opened(tmp_path, "comparison", rows)
    sample = training[0]
    for place, text in enumerate(answers.values()):
        assert text in tokenizer.decode(sample["input_ids"][place][sample["attention_mask"][place].bool()])


def test_a_missing_margin_is_0_and_a_wrong_one_is_refused(tmp_path):
    for missing in ({}, {"margin": None}, {"margin": ""}):  # as in a CSV file
        given = [{**PAIRS[0], "margin": "1"}, {**PAIRS[1], **missing}]
        _, training, _ = opened(tmp_path, "comparison", given)
        assert fetch(training, range(2))["margin"].tolist() == [1.0, 0.0]
    margins = (1, "much", 1e39, 2)
    rows = [{**row, "margin": margin} for row, margin in zip(PAIRS, margins, strict=True)]
    said = refused(tmp_path, "comparison", rows)
    assert "row 2: the margin is 'much', and not a finite number" in said
    assert "row 3: the margin is 1e+39, and not a finite number" in said


def test_rows_of_conversations(tmp_path):
    said = {"what": ("it", True), "who": ("she", False)}
    rows = [
        {
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": answer}],
            "label": label,
        }
        for question, (answer, label) in said.items()
    ]
    _, training, tokenizer = opened(tmp_path, "unpaired-preference", rows)
    batch = fetch(training, range(2))
    assert batch["desirable"].tolist() == [1, 0]
    assert "she" in tokenizer.decode(batch["input_ids"][1][batch["labels"][1] != IGNORED])
