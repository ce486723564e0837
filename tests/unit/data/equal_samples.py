"""Small data of every form, prepared; its digests are compared with those of earlier releases."""

import csv
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet

from ringmaster.techniques.data import prepare
from ringmaster.techniques.data.encoded_rows import RowManifest
from ringmaster.techniques.job_specs import DataSpec

PROSE = (
    "the model learns a token from each row it's we'll don't 12 345 x=y; (a+b) naïve 日本語 Ωμέγα end. 'quoted' "
    "a\u00a0b \u2003 e\u0301 🙂 <|endoftext|> -- ... \t tab"
)


def prose(num_lines: int, seed: int) -> str:
    """Lines of words, signs, runs of blanks and three kinds of newlines; the same in every run."""
    draw, words = random.Random(seed), PROSE.split(" ")
    ends = [".\n"] * 8 + ["\r\n", "\r", "\n\n\n", "  \n  ", " \t\n"]
    return "".join(" ".join(draw.choices(words, k=12)) + draw.choice(ends) for _ in range(num_lines))


def _rows(num_rows: int) -> list[dict]:
    return [{"text": prose(3, n), "at": f"2026-01-{1 + n % 28:02}", "n": n} for n in range(num_rows)]


def _jsonl(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _csv(path, rows) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def _parquet(path, rows) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def _texts(folder, num_files) -> str:
    for number in range(num_files):
        (folder / f"part-{number}.txt").write_bytes(prose(40, number).encode())
    return str(folder / "part-*.txt")


def _tokenizer(folder) -> str:
    spec = DataSpec(path=_jsonl(folder / "other.jsonl", _rows(50)), seq_len=16, vocab_size=400)
    return str(prepare(spec, cache_dir=folder / "cache").tokenizer_dir)


def _mixed_files(folder) -> DataSpec:
    for number in range(5):
        _jsonl(folder / f"m{number}.jsonl", _rows(20 + number))
    return DataSpec(path=str(folder / "m*.jsonl"), name="mixed", version="1")


# What is prepared, by name: a function of a folder.
CASES = {
    "one text": lambda folder: DataSpec(path=_texts(folder, 1)),
    "one text, none held out": lambda folder: DataSpec(path=_texts(folder, 1), held_out=0.0),
    "several texts": lambda folder: DataSpec(path=_texts(folder, 6), held_out=0.3),
    "one text, named": lambda folder: DataSpec(path=_texts(folder, 1), name="book", version="1"),
    "one text, a tokenizer": lambda folder: DataSpec(path=_texts(folder, 1), tokenizer=_tokenizer(folder)),
    "several texts, a tokenizer": lambda folder: DataSpec(
        path=_texts(folder, 6), held_out=0.3, tokenizer=_tokenizer(folder), name="books", version="2"
    ),
    "last texts": lambda folder: DataSpec(
        path=_texts(folder, 6), held_out=0.3, name="books", version="1", window={"last_rows": 4}
    ),
    "jsonl": lambda folder: DataSpec(path=_jsonl(folder / "a.jsonl", _rows(60))),
    "jsonl, a tokenizer": lambda folder: DataSpec(
        path=_jsonl(folder / "a.jsonl", _rows(60)), tokenizer=_tokenizer(folder), name="rows", version="1"
    ),
    "csv": lambda folder: DataSpec(path=_csv(folder / "a.csv", _rows(60))),
    "parquet": lambda folder: DataSpec(path=_parquet(folder / "a.parquet", _rows(60)), name="p", version="1"),
    "files of rows": _mixed_files,
    "last days": lambda folder: DataSpec(
        path=_jsonl(folder / "a.jsonl", _rows(60)),
        held_out_path=_csv(folder / "b.csv", _rows(70)[60:]),
        window={"last_days": 9},
        time_column="at",
        name="days",
        version="3",
    ),
    "last rows": lambda folder: DataSpec(
        path=_jsonl(folder / "a.jsonl", _rows(60)), window={"last_rows": 25}, name="last", version="3"
    ),
    "ids": lambda folder: DataSpec(
        path=_jsonl(folder / "a.jsonl", [{"input_ids": [n, n + 1, n + 2]} for n in range(70)]), seq_len=None
    ),
    "large ids": lambda folder: DataSpec(
        path=_jsonl(folder / "a.jsonl", [{"input_ids": [n, 70_000 + n] * (n % 5 + 1)} for n in range(70)]),
        name="ids",
        version="1",
    ),
}


def prepared_case(name, folder) -> tuple[str, ...]:
    """Prepares a case in an empty folder; returns the digests of its samples and, if it has a name, of its rows."""
    spec = CASES[name](folder)
    spec = DataSpec(**{**vars(spec), "vocab_size": 400, "seq_len": None if name == "ids" else 16})
    prepared = prepare(spec, cache_dir=folder / "cache")
    rows = RowManifest.read(Path(prepared.folder))
    return (prepared.digest, *(rows.digest(split) for split in ("training", "held_out") if rows is not None))
