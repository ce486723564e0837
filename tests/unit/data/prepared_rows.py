"""Rows of a test, written to a file and prepared."""

import json

import pytest
from transformers import AutoTokenizer

from ringmaster.codec import from_json
from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.job_specs import DataSpec

NUM_ROWS = 40


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def opened(tmp_path, kind, rows, **spec):
    """The prepared data of some rows, its training samples, and its tokenizer, if it has one."""
    path = jsonl(tmp_path / "rows.jsonl", rows)
    given = from_json(DataSpec, {"kind": kind, "path": path, "vocab_size": 300, "held_out": 0, **spec})
    prepared = prepare(given, cache_dir=tmp_path / "cache")
    training, _ = open_data(given, cache_dir=tmp_path / "cache", prepared=prepared)
    tokenizer = prepared.tokenizer_dir and AutoTokenizer.from_pretrained(prepared.tokenizer_dir)
    return prepared, training, tokenizer


def refused(tmp_path, kind, rows, **spec):
    with pytest.raises(ValueError) as caught:
        opened(tmp_path, kind, rows, **spec)
    return str(caught.value)


REVIEWS = [{"text": f"review {i}", "label": ["good", "bad", "so so"][i % 3]} for i in range(NUM_ROWS)]


def conversation(i):
    return [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": f"what is {i}?"},
        {"role": "assistant", "content": f"it is {i}"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
