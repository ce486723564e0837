"""Preparation of data of real sizes: the peak of memory, and megabytes a second on one core.

    python -m benchmarks.data [--megabytes 1000] [--rows 1000000]

Makes up a text file of that size and files of that many rows, and prepares each in a process of its own on one core:
it is read, the text is encoded by a given tokenizer, or by one that is trained first, and its tokens are written. One
case prepares rows again after a tenth of them was added in a new file, as a retraining run finds them; another checks
named rows as a batch does before it starts. Memory is the largest resident size of the process, from its start to its
end. Speed is by processor time, as the machine may be shared, and with the import of libraries.

Writes benchmarks/results/data.json, and the section of docs/benchmarks.md between the markers `<!-- data -->`, after
each case, so that a run that is interrupted leaves those before.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import date
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "data.json", ROOT / "docs" / "benchmarks.md"
MEGABYTE = 1_000_000
NUM_WORDS, WORDS_A_LINE, LINES_A_BLOCK, LINES_A_ROW = 50_000, 12, 200_000, 3
ROWS_A_GROUP = 100_000

# The given tokenizer is trained on this much text. Chats are a tenth of the rows, as they take longest.
TOKENIZER_BYTES, SHARE_OF_CHATS = 20 * MEGABYTE, 10

CHILD = """
import json, os, resource, sys, time
from pathlib import Path
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from ringmaster.techniques.interface.job import DataSpec
said = json.loads(sys.argv[1])
start_s, start_cpu_s = time.perf_counter(), time.process_time()
spec, tokenizer = DataSpec(seq_len=512, vocab_size=8192, **said["spec"]), None
if said["is_checked"]:
    from ringmaster.tasks.batch.data_schema import Dataset
    from ringmaster.tasks.datasets.catalogue import Entry
    from ringmaster.tasks.datasets.checking import data_findings
    entry = Entry(name="rows", dataset=Dataset(path=spec.path, columns={"text": "text"}), folder=Path("/"))
    assert data_findings(spec, entry) == []
else:
    from ringmaster.techniques.runtime.data import prepare
    tokenizer = str(prepare(spec, cache_dir=Path(said["cache"])).tokenizer_dir)
seconds = time.perf_counter() - start_s
peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
found = {"seconds": seconds, "cpu_s": time.process_time() - start_cpu_s, "peak_bytes": peak_bytes}
print(json.dumps({**found, "tokenizer": tokenizer}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", help="where the files are written; default: a temporary folder")
    args = parser.parse_args()
    cases: list[dict[str, Any]] = []
    with TemporaryDirectory(dir=args.folder) as folder:
        for case in measured(Path(folder), num_bytes=args.megabytes * MEGABYTE, num_rows=args.rows):
            print(line_of(case), flush=True)
            cases.append(case)
            write(cases)


def measured(folder: Path, *, num_bytes: int, num_rows: int) -> Iterator[dict[str, Any]]:
    """Yields what each case took, the most important first. Files are deleted where no later case needs them."""

    def case(name: str, spec: dict[str, Any], *, is_checked: bool = False) -> dict[str, Any]:
        found = prepare_in_child(folder, spec, is_checked=is_checked)
        shutil.rmtree(folder / "cache" / "data", ignore_errors=True)
        sizes = [path.stat().st_size for path in folder.glob(Path(spec["path"]).name)]
        return {"name": name, "bytes": sum(sizes), **found}

    write_text(folder / "short.txt", num_bytes=min(TOKENIZER_BYTES, num_bytes))
    found = prepare_in_child(folder, {"path": str(folder / "short.txt")})
    tokenizer = {"tokenizer": keep(found["tokenizer"], folder)}
    write_text(folder / "text.txt", num_bytes=num_bytes)
    text = {"path": str(folder / "text.txt")}
    yield case("one text file", {**text, **tokenizer})
    shutil.rmtree(folder / "cache" / "tokens")

    jsonl(folder / "rows-1.jsonl", rows(0, num_rows))
    named = {"path": str(folder / "rows-*.jsonl"), **tokenizer, "name": "rows", "version": "1"}
    yield case(f"{num_rows:,} rows of JSONL, named", named)
    yield case("the check of these rows before a batch starts", named, is_checked=True)
    jsonl(folder / "rows-2.jsonl", rows(num_rows, num_rows // 10))
    yield case("the rows with a tenth more in a new file", named)
    for path in folder.glob("rows-*.jsonl"):
        path.unlink()

    jsonl(folder / "labels.jsonl", labelled(rows(0, num_rows)))
    labels = {"path": str(folder / "labels.jsonl"), "kind": "text-classification"}
    yield case(f"{num_rows:,} rows of text-classification", {**labels, **tokenizer})
    (folder / "labels.jsonl").unlink()

    comma_separated(folder / "rows.csv", rows(0, num_rows))
    yield case(f"{num_rows:,} rows of CSV", {"path": str(folder / "rows.csv"), **tokenizer})
    (folder / "rows.csv").unlink()

    yield case("one text file, a tokenizer is trained", text)
    num_chats = num_rows // SHARE_OF_CHATS
    jsonl(folder / "chat.jsonl", chats(rows(0, 2 * num_chats)))
    yield case(
        f"{num_chats:,} rows of chat, a tokenizer is trained", {"path": str(folder / "chat.jsonl"), "kind": "chat"}
    )
    parquet(folder / "rows.parquet", rows(0, num_rows))
    yield case(f"{num_rows:,} rows of Parquet", {"path": str(folder / "rows.parquet"), **tokenizer})


def labelled(made: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields rows with one of three classes."""
    for row in made:
        yield {**row, "label": ("good", "bad", "neither")[row["number"] % 3]}


def chats(made: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields conversations of one turn, of two rows each."""
    for question, answer in zip(made, made, strict=False):
        messages = [("user", question), ("assistant", answer)]
        yield {"messages": [{"role": role, "content": row["text"]} for role, row in messages]}


def prepare_in_child(folder: Path, spec: dict[str, Any], *, is_checked: bool = False) -> dict[str, Any]:
    """Prepares data, or checks its rows, in a process of its own on one core; returns what it took."""
    said = json.dumps({"spec": spec, "cache": str(folder / "cache"), "is_checked": is_checked})
    ran = subprocess.run([sys.executable, "-c", CHILD, said], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def keep(tokenizer: str, folder: Path) -> str:
    """Returns a copy of a tokenizer outside the cache."""
    return str(shutil.copytree(tokenizer, folder / "tokenizer"))


def lines() -> Iterator[str]:
    """Yields lines of made-up words without end.

    The frequencies of words fall as those of real words do (Zipf), and new words keep coming: every tenth line has a
    number of its own.
    """
    draw = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgké"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 10))) for _ in range(NUM_WORDS)]
    signs = draw.choices(["", "", "", "", ",", ".", "'s", ")"], k=NUM_WORDS)
    total, sums = 0.0, []
    for rank in range(NUM_WORDS):
        total += 1 / (rank + 1)
        sums.append(total)
    drawn = draw.choices([a + b for a, b in zip(words, signs, strict=True)], cum_weights=sums, k=12 * LINES_A_BLOCK)
    block = [" ".join(drawn[start : start + WORDS_A_LINE]) for start in range(0, len(drawn), WORDS_A_LINE)]
    numbers = count()
    while True:
        draw.shuffle(block)
        for line in block:
            number = next(numbers)
            yield f"{line}.\n" if number % 10 else f"{line} {number}.\n"


def rows(start: int, num_rows: int) -> Iterator[dict[str, Any]]:
    """Yields rows of some lines each, from row `start` on."""
    endless = islice(lines(), start * LINES_A_ROW, None)
    for number in range(num_rows):
        yield {"text": "".join(islice(endless, LINES_A_ROW)), "number": start + number}


def write_text(path: Path, *, num_bytes: int) -> None:
    """Writes a text file of a size."""
    endless = lines()
    with path.open("w") as file:
        while file.tell() < num_bytes:
            file.writelines(islice(endless, 10_000))


def jsonl(path: Path, made: Iterable[dict[str, Any]]) -> None:
    """Writes rows as JSONL."""
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in made)


def comma_separated(path: Path, made: Iterable[dict[str, Any]]) -> None:
    """Writes rows as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "number"])
        writer.writeheader()
        writer.writerows(made)


def parquet(path: Path, made: Iterable[dict[str, Any]]) -> None:
    """Writes rows as Parquet."""
    import pyarrow
    import pyarrow.parquet

    rest = iter(made)
    schema = pyarrow.schema({"text": pyarrow.string(), "number": pyarrow.int64()})
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while group := list(islice(rest, ROWS_A_GROUP)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))


def write(cases: list[dict[str, Any]]) -> None:
    """Writes the result as JSON, and as a table in the docs."""
    machine = f"{os.cpu_count()} cores, {processor()}, shared"
    result = {"date": date.today().isoformat(), "machine": machine, "cases": cases}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    text = f"""{result["date"]}, {machine}; one core for each case, `vocab_size` 8,192, `seq_len` 512, one run;
a tokenizer is given where none is trained.

| | size, MB | seconds | of the processor | MB in a second of it | peak of memory, MB |
|---|---:|---:|---:|---:|---:|
{chr(10).join(map(line_of, cases))}
"""
    page = PAGE.read_text()
    PAGE.write_text(re.sub(r"(?s)(<!-- data -->\n).*?(<!-- /data -->)", lambda m: m[1] + text + m[2], page))


def line_of(case: dict[str, Any]) -> str:
    """Returns the row of the table."""
    size, cpu_s, peak = case["bytes"] / MEGABYTE, case["cpu_s"], case["peak_bytes"] / MEGABYTE
    return f"| {case['name']} | {size:,.0f} | {case['seconds']:.0f} | {cpu_s:.0f} | {size / cpu_s:.1f} | {peak:.0f} |"


def processor() -> str:
    """Returns the name of the processor, where the system says it."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


if __name__ == "__main__":
    main()
