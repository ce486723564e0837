"""Data of kind prompt: the tokens of prompts, and the rows that reward functions read."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from ringmaster.features.on_policy.rollout import prompts_of
from ringmaster.techniques import DataSpec
from ringmaster.techniques.data import fetch, open_data, prepare, width_of
from ringmaster.techniques.data.row_tokenizer import RowTokenizer

LONG = "a column that is far longer than the prompt, and is never cut: " + "é" * 300


def opened(tmp_path, rows, **changes):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = {"kind": "prompt", "path": str(tmp_path / "rows.jsonl"), "vocab_size": 300, "held_out": 0.0, **changes}
    spec = DataSpec(**said)
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    return prepared, *open_data(spec, cache_dir=tmp_path / "cache", prepared=prepared)


def test_samples_have_the_prompts_tokens_and_their_rows(tmp_path):
    rows = [{"prompt": f"count {'to ' * i}{i}", "answer": i, "note": LONG if i == 3 else None} for i in range(8)]
    prepared, training, held_out = opened(tmp_path, rows)
    assert (len(training), len(held_out)) == (8, 0)
    assert {tensor.name for tensor in prepared.tensors} == {"input_ids", "attention_mask"}
    batch = fetch(training, [3, 0], width=width_of(training, [3, 0], multiple_of=8))
    assert prompts_of(batch) == [rows[3], rows[0]]
    tokenizer = RowTokenizer(prepared.tokenizer_dir)
    for place, row in enumerate((rows[3], rows[0])):
        is_own = batch["attention_mask"][place].bool()
        assert batch["input_ids"][place][is_own].tolist() == tokenizer.encode(row["prompt"])
    assert "labels" not in batch


def test_a_prompt_may_be_a_conversation(tmp_path):
    rows = [{"question": [{"role": "user", "content": f"say {i}"}], "answer": i} for i in range(8)]
    prepared, training, _ = opened(tmp_path, rows)
    batch = fetch(training, [5])
    assert prompts_of(batch) == [{"prompt": rows[5]["question"], "answer": 5}]
    tokens = batch["input_ids"][0][batch["attention_mask"][0].bool()].tolist()
    assert tokens == RowTokenizer(prepared.tokenizer_dir).prompt(rows[5]["question"])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "word " * 50}, "row 3: the prompt has .* tokens, and prompts are not cut at 8. To fix"),
        ({"prompt": ""}, "row 3: the prompt is empty"),
        ({"prompt": 3}, "row 3: messages are not a list"),
    ],
)
def test_wrong_rows_are_refused_with_their_place(tmp_path, row, said):
    rows = [{"prompt": "one"}, {"prompt": "two"}, row]
    with pytest.raises(ValueError, match=said):
        opened(tmp_path, rows, seq_len=8)


def test_messages_for_rewards_lack_the_keys_that_a_table_fills_up(tmp_path):
    rows = [
        {"prompt": "one", "chosen": [{"role": "assistant", "content": "a", **more}]} for more in ({"name": "b"}, {})
    ]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*rows, *rows]), path)
    _, training, _ = opened(tmp_path, rows, path=str(path))
    assert prompts_of(fetch(training, [1])) == [rows[1]]


def test_columns_with_names_of_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"name completions, of an argument of rewards\. To fix: rename it"):
        opened(tmp_path, [{"prompt": "one", "completions": 1}] * 3)


def test_lengths_are_those_of_the_tokens_and_not_of_the_rows(tmp_path):
    rows = [{"prompt": "ab" * (i + 1), "note": LONG if i == 0 else None} for i in range(8)]
    prepared, training, _ = opened(tmp_path, rows, sampling="length-grouped")
    lengths = training.lengths()
    assert lengths.max() < len(LONG)
    assert prepared.lengths == tuple(int(each) for each in np.quantile(lengths, (0.5, 0.95), method="higher"))
