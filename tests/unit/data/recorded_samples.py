"""Data of every kind, prepared and read; what comes out is compared with what release 0.3 made of the same files.

    python -m tests.unit.data.recorded_samples

writes the record anew. Do so only for a kind whose samples are meant to change.
"""

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from ringmaster.codec import from_json, to_json
from ringmaster.techniques.data import fetch, open_data, prepare, sampler_of, width_of
from ringmaster.techniques.data.encoded_rows import RowManifest
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from tests.unit.data.conftest import saved_tokenizer
from tests.unit.data.equal_samples import _csv, _jsonl, _parquet, _tokenizer, prose

RECORD = Path(__file__).with_name("recorded_samples.json")
NUM_ROWS = 70


def _line(number):
    return prose(1, number).strip() or "none"


def _labelled(label):
    return [{"text": _line(n), "label": label(n), "at": f"2026-01-{1 + n % 28:02}"} for n in range(NUM_ROWS)]


def _chats():
    roles = [("user", "assistant"), ("human", "gpt")]
    rows = []
    for n in range(NUM_ROWS):
        turns = [(roles[0][turn % 2], _line(n * 7 + turn)) for turn in range(2 + 2 * (n % 3))]
        messages = [{"role": role, "content": text} for role, text in turns]
        if n % 5 == 0:
            messages[1]["weight"] = 0
            messages += [{"role": "user", "content": "again"}, {"role": "assistant", "content": _line(n)}]
        rows.append({"messages": messages, **({"system": "be brief"} if n % 4 == 0 else {})})
    return rows


def _words():
    return [
        {"tokens": _line(n).split()[:9], "labels": [("O", "B-x", "I-x", -100)[(n + k) % 4] for k in range(9)]}
        for n in range(NUM_ROWS)
        if len(_line(n).split()) >= 9
    ]


def _preferences():
    return [{"prompt": _line(n), "chosen": " " + _line(n + 1), "rejected": " " + _line(n + 2)} for n in range(NUM_ROWS)]


def _conversations():
    rows = []
    for n in range(NUM_ROWS):
        begin = [{"role": "user", "content": _line(n)}]
        answers = [[*begin, {"role": "assistant", "content": _line(n + k)}] for k in (1, 2)]
        rows.append({"chosen": answers[0], "rejected": answers[1]})
    return rows


def _image(number, size):
    draw = np.random.default_rng(number)
    return Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8))


def _images(folder):
    for number in range(24):
        file = folder / "images" / f"class-{number % 3}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        _image(number, (9 + number % 4, 12)).save(file)
    return str(folder / "images" / "**" / "*.png")


def _image_table(folder):
    rows = []
    for number in range(16):
        (folder / "pictures").mkdir(exist_ok=True)
        _image(number, (8, 8)).save(folder / "pictures" / f"{number}.png")
        rows.append({"file_name": f"pictures/{number}.png", "label": number % 2})
    return _csv(folder / "table.csv", rows)


def _saved(folder, rows, features=None):
    import datasets

    made = datasets.Dataset.from_list(rows, features=features)
    made.save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


def _class_features():
    import datasets

    return datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good", "so so"])}
    )


def _bert(folder):
    return saved_tokenizer(folder / "bert")


def _chat_tokenizer(folder):
    from ringmaster.techniques.data.row_tokenizer import complete_tokenizer

    given = _tokenizer(folder)
    complete_tokenizer(Path(given), has_padding=False, has_chat_template=True)
    return given


CLASSES = ("good", "bad", "so so")
SEVERAL = [{"text": _line(n), "label": [CLASSES[k] for k in range(3) if (n >> k) & 1]} for n in range(NUM_ROWS)]

# What is prepared, by name: a function of a folder that returns the fields of a `DataSpec`.
KINDS = {
    "classes": lambda f: {
        "kind": "text-classification", "path": _jsonl(f / "a.jsonl", _labelled(lambda n: CLASSES[n % 3])),
    },
    "classes, a tokenizer": lambda f: {
        "kind": "text-classification", "tokenizer": _tokenizer(f), "seq_len": 24,
        "path": _csv(f / "a.csv", _labelled(lambda n: CLASSES[n * n % 3])),
    },
    "classes in files of different classes, named": lambda f: {
        "kind": "text-classification", "tokenizer": _bert(f), "name": "r", "version": "1",
        "path": [_jsonl(f / "p1.jsonl", _labelled(lambda n: "z" + CLASSES[n % 2])),
                 _jsonl(f / "p2.jsonl", _labelled(lambda n: CLASSES[n % 3])), str(f / "p*.jsonl")][-1],
        "window": {"last_days": 20}, "time_column": "at",
    },
    "numbered classes, held out elsewhere": lambda f: {
        "kind": "text-classification", "tokenizer": _tokenizer(f), "name": "n", "version": "2",
        "path": _parquet(f / "a.parquet", _labelled(lambda n: n % 4 * 2)), "window": {"last_rows": 50},
        "held_out_path": _jsonl(f / "b.jsonl", _labelled(lambda n: n % 3 * 2)[:20]),
    },
    "given classes": lambda f: {
        "kind": "text-classification", "path": _jsonl(f / "a.jsonl", _labelled(lambda n: CLASSES[n % 3])),
        "labels": ("so so", "none", "bad", "good"), "tokenizer": _bert(f),
    },
    "several classes": lambda f: {"kind": "text-classification", "path": _jsonl(f / "a.jsonl", SEVERAL)},
    "several classes, a tokenizer": lambda f: {
        "kind": "text-classification", "tokenizer": _tokenizer(f),
        "path": [_jsonl(f / "q1.jsonl", SEVERAL[10:]), _jsonl(f / "q2.jsonl", SEVERAL[:40]), str(f / "q*.jsonl")][-1],
    },
    "pairs": lambda f: {
        "kind": "text-classification", "tokenizer": _bert(f), "seq_len": 12,
        "path": _jsonl(f / "a.jsonl", [
            {"premise": _line(n), "hypothesis": _line(n + 3), "label": n % 2} for n in range(NUM_ROWS)]),
    },
    "numbers": lambda f: {
        "kind": "text-regression", "tokenizer": _tokenizer(f), "sampling": "length-grouped",
        "path": _jsonl(f / "a.jsonl", _labelled(lambda n: n / 7)),
    },
    "words": lambda f: {"kind": "token-classification", "path": _jsonl(f / "a.jsonl", _words())},
    "words, a tokenizer": lambda f: {
        "kind": "token-classification", "tokenizer": _tokenizer(f), "seq_len": 20,
        "path": _jsonl(f / "a.jsonl", _words()),
    },
    "targets": lambda f: {
        "kind": "seq2seq", "tokenizer": _tokenizer(f), "kwargs": {"prefix": "say: "},
        "path": _jsonl(f / "a.jsonl", [{"input": _line(n), "target": _line(n * 3)} for n in range(NUM_ROWS)]),
    },
    "chats": lambda f: {"kind": "chat", "path": _jsonl(f / "a.jsonl", _chats()), "seq_len": 96},
    "chats, a tokenizer": lambda f: {
        "kind": "chat", "tokenizer": _chat_tokenizer(f), "path": _jsonl(f / "a.jsonl", _chats()), "seq_len": 96,
        "name": "c", "version": "1", "sampling": "length-grouped",
    },
    "chats, packed": lambda f: {
        "kind": "chat", "tokenizer": _chat_tokenizer(f), "path": _jsonl(f / "a.jsonl", _chats()), "seq_len": 128,
        "packing": True,
    },
    "chats that lose their answers": lambda f: {
        "kind": "chat", "tokenizer": _chat_tokenizer(f), "path": _jsonl(f / "a.jsonl", _chats()), "seq_len": 60,
    },
    "completions": lambda f: {
        "kind": "completion", "tokenizer": _tokenizer(f), "held_out": 0.3,
        "path": _jsonl(f / "a.jsonl", [
            {"instruction": _line(n), "input": _line(n + 1) if n % 2 else "", "output": _line(n + 2)}
            for n in range(NUM_ROWS)]),
    },
    "completions, trained and packed": lambda f: {
        "kind": "completion", "packing": True, "seq_len": 80,
        "path": _csv(f / "a.csv", [{"prompt": _line(n), "completion": " " + _line(n + 2)} for n in range(NUM_ROWS)]),
    },
    "preferences": lambda f: {
        "kind": "preference", "tokenizer": _tokenizer(f), "path": _jsonl(f / "a.jsonl", _preferences()),
    },
    "preferences, trained": lambda f: {"kind": "preference", "path": _parquet(f / "a.parquet", _preferences())},
    "conversations": lambda f: {
        "kind": "preference", "tokenizer": _chat_tokenizer(f), "seq_len": 70,
        "path": _jsonl(f / "a.jsonl", _conversations()),
    },
    "prompts": lambda f: {
        "kind": "prompt", "tokenizer": _tokenizer(f),
        "path": _jsonl(f / "a.jsonl", [{"prompt": _line(n), "answer": n, "more": {"a": [n]}} for n in range(NUM_ROWS)]),
    },
    "embeddings": lambda f: {
        "kind": "embedding", "tokenizer": _bert(f),
        "path": _jsonl(f / "a.jsonl", [{"query": _line(n), "positive": _line(n + 1)} for n in range(NUM_ROWS)]),
    },
    "embeddings with negatives": lambda f: {
        "kind": "embedding",
        "path": _jsonl(f / "a.jsonl", [
            {"anchor": _line(n), "positive": _line(n + 1), "negative": _line(n + 2)} for n in range(NUM_ROWS)]),
    },
    "images": lambda f: {"kind": "image-classification", "path": _images(f), "kwargs": {"image_size": 8}},
    "images of a table": lambda f: {
        "kind": "image-classification", "path": _image_table(f),
        "kwargs": {"image_size": 6, "mean": [0.4, 0.5, 0.6], "std": 0.2},
    },
    "saved rows": lambda f: {
        "kind": "text-classification", "tokenizer": _bert(f),
        "dataset": _saved(f, [{"text": _line(n), "label": n % 3} for n in range(NUM_ROWS)], _class_features()),
    },
    "saved columns": lambda f: {
        "dataset": _saved(f, [{"x": [n / 3, n], "input_ids": [n, n + 1], "labels": n % 2} for n in range(NUM_ROWS)]),
    },
    "saved columns, none held out": lambda f: {
        "held_out": 0.0,
        "dataset": _saved(f, [{"x": [n / 3, n], "labels": n % 2, "ok": n % 2 == 0} for n in range(NUM_ROWS)]),
    },
    "saved text": lambda f: {"seq_len": 16, "dataset": _saved(f, [{"text": _line(n)} for n in range(NUM_ROWS)])},
    "digits": lambda f: {"source": "digits"},
}  # fmt: skip


OF_A_RELEASE = ("name", "source", "folder", "notes", "training_faults")
"""What a description says of its place, and what the checks of a release find."""


def recorded_kind(name, folder) -> dict:
    """Prepares a kind of data in an empty folder, and reads it; returns digests of all that comes out."""
    spec = from_json(DataSpec, {"vocab_size": 400, "held_out": 0.2, **KINDS[name](folder)})
    cache_dir = folder / "cache"
    prepared = prepare(spec, cache_dir=cache_dir)
    description = to_json(prepared)
    manifest = RowManifest.read(Path(prepared.folder))
    job = Job(name="j", model=ModelSpec(architecture="LlamaForCausalLM", config={}), data=spec, loss="causal-lm",
              global_batch_size=6, num_steps=4, seed=3)  # fmt: skip
    training, held_out = open_data(spec, cache_dir=cache_dir, prepared=prepared)
    sampler = sampler_of(job, training)
    batches = []
    for step in range(3):
        indices = sampler.indices(step)
        batch = fetch(training, indices, width=width_of(training, indices, multiple_of=8))
        batches.append([indices.tolist(), _digest(batch)])
    return {
        "description": {key: value for key, value in description.items() if key not in OF_A_RELEASE},
        "rows": None if manifest is None else {split: manifest.digest(split) for split in manifest.rows},
        "training": _digest(fetch(training, range(len(training)))),
        "held_out": _digest(fetch(held_out, range(len(held_out)))) if len(held_out) else None,
        "first": _digest(training[0]),
        "batches": batches,
    }


def _digest(batch) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(batch.items()):
        array = np.ascontiguousarray(tensor.numpy())
        sha.update(f"{name} {array.dtype.str} {array.shape}".encode() + array.tobytes())
    return sha.hexdigest()[:16]


def _record() -> None:
    found = {}
    for name in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = recorded_kind(name, Path(folder))
    RECORD.write_text(json.dumps(json.loads(json.dumps(found)), indent=1) + "\n")


if __name__ == "__main__":
    _record()
