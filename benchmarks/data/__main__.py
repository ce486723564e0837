"""Preparation of data of real sizes: the peak of memory, and megabytes a second on one core.

    python -m benchmarks.data [--megabytes 1000] [--rows 1000000] [--only CASES]

Makes up a text file of that size and files of that many rows, and prepares each in a process of its own on one core:
it is read, the text is encoded by a given tokenizer, or by one that is trained first, and its tokens are written. One
case prepares rows again after a tenth of them was added in a new file, as a retraining run finds them; another checks
named rows as a batch does before it starts. Memory is the largest resident size of the process, from its start to its
end. Speed is by processor time, as the machine may be shared, and with the import of libraries.

Writes benchmarks/results/data.json, and the section of docs/benchmarks.md between the markers `<!-- data -->`, after
each case, so that a run that is interrupted leaves those before. With `--only`, the other cases stay as they are there.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.page import write_section

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "data.json"
MEGABYTE = 1_000_000
NUM_WORDS, WORDS_A_LINE, LINES_A_BLOCK, LINES_A_ROW = 50_000, 12, 200_000, 3
ROWS_A_GROUP = 100_000

# The given tokenizer is trained on this much text. Chats with a trained one are fewer, as they take longest.
TOKENIZER_BYTES, ROWS_A_CHAT, SHARE_OF_TRAINED_CHATS = 20 * MEGABYTE, 2, 5

CHILD = """
import json, os, resource, sys, time
from pathlib import Path
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from ringmaster.techniques.job_specs import (DataSpec)
said = json.loads(sys.argv[1])
start_s, start_cpu_s = time.perf_counter(), time.process_time()
spec, tokenizer = DataSpec(seq_len=512, vocab_size=8192, **said["spec"]), None
if said["is_checked"]:
    from ringmaster.tasks.batch.schema import DatasetSection
    from ringmaster.tasks.datasets.catalogue import Entry
    from ringmaster.tasks.datasets.checking import data_findings
    entry = Entry(name="rows", dataset=DatasetSection(path=spec.path, columns={"text": "text"}), folder=Path("/"))
    assert data_findings(spec, entry) == []
else:
    from ringmaster.techniques.data import prepare
    tokenizer = str(prepare(spec, cache_dir=Path(said["cache"])).tokenizer_dir)
seconds = time.perf_counter() - start_s
peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
found = {"seconds": seconds, "cpu_s": time.process_time() - start_cpu_s, "peak_bytes": peak_bytes}
print(json.dumps({**found, "tokenizer": tokenizer}))
"""

GIVE_CHAT_TEMPLATE = """
import sys
from pathlib import Path
from ringmaster.techniques.data.row_tokenizer import complete_tokenizer
complete_tokenizer(Path(sys.argv[1]), has_padding=False, has_chat_template=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", help="where the files are written; default: a temporary folder")
    parser.add_argument("--only", help=f"some of {','.join(CASES)}; default: all")
    args = parser.parse_args()
    chosen = list(CASES) if args.only is None else args.only.split(",")
    if unknown := set(chosen) - set(CASES):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    for name in chosen:
        with TemporaryDirectory(dir=args.folder) as folder:
            bench = Bench(Path(folder), num_bytes=args.megabytes * MEGABYTE, num_rows=args.rows)
            write(name, [*CASES[name](bench)])


class Bench:
    """A folder with the files of a case, and a tokenizer. num_bytes: of text files; num_rows: of others."""

    def __init__(self, folder: Path, *, num_bytes: int, num_rows: int) -> None:
        self.folder, self.num_bytes, self.num_rows = folder, num_bytes, num_rows

    def tokenizer(self) -> dict[str, str]:
        """Returns the setting of a given tokenizer, which is trained first."""
        write_text(self.folder / "short.txt", num_bytes=min(TOKENIZER_BYTES, self.num_bytes))
        found = prepare_in_child(self.folder, {"path": str(self.folder / "short.txt")})
        return {"tokenizer": shutil.copytree(found["tokenizer"], str(self.folder / "tokenizer"))}

    def measured(self, name: str, spec: dict[str, Any], *, is_checked: bool = False) -> dict[str, Any]:
        """Returns what the preparation of the files at `spec["path"]` takes, or their check."""
        spec = {**spec, "path": str(self.folder / spec["path"])}
        found = prepare_in_child(self.folder, spec, is_checked=is_checked)
        shutil.rmtree(self.folder / "cache" / "data", ignore_errors=True)
        sizes = [path.stat().st_size for path in self.folder.glob(Path(spec["path"]).name)]
        case = {"name": name, "bytes": sum(sizes), **found}
        print(line_of(case), flush=True)
        return case


def text_case(bench: Bench) -> Iterator[dict[str, Any]]:
    """One text file under a given tokenizer."""
    write_text(bench.folder / "text.txt", num_bytes=bench.num_bytes)
    yield bench.measured("one text file", {"path": "text.txt", **bench.tokenizer()})


def trained_case(bench: Bench) -> Iterator[dict[str, Any]]:
    """One text file, on which a tokenizer is trained."""
    write_text(bench.folder / "text.txt", num_bytes=bench.num_bytes)
    yield bench.measured("one text file, a tokenizer is trained", {"path": "text.txt"})


def named_case(bench: Bench) -> Iterator[dict[str, Any]]:
    """Named rows of JSONL, their check, and the rows with a tenth more."""
    named = {"path": "rows-*.jsonl", **bench.tokenizer(), "name": "rows", "version": "1"}
    jsonl(bench.folder / "rows-1.jsonl", rows(0, bench.num_rows))
    yield bench.measured(f"{bench.num_rows:,} rows of JSONL, named", named)
    yield bench.measured("the check of these rows before a batch starts", named, is_checked=True)
    jsonl(bench.folder / "rows-2.jsonl", rows(bench.num_rows, bench.num_rows // 10))
    yield bench.measured("the rows with a tenth more in a new file", named)


def classification_case(bench: Bench) -> Iterator[dict[str, Any]]:
    """Rows with classes, and these with a tenth more in a new file, and then at the end of that file."""
    spec = {"path": "rows-*.jsonl", **bench.tokenizer(), "kind": "text-classification"}
    num_more = bench.num_rows // 10
    jsonl(bench.folder / "rows-1.jsonl", labelled(rows(0, bench.num_rows)))
    yield bench.measured(f"{bench.num_rows:,} rows of text-classification", spec)
    jsonl(bench.folder / "rows-2.jsonl", labelled(rows(bench.num_rows, num_more)))
    yield bench.measured("the rows of text-classification with a tenth more in a new file", spec)
    jsonl(bench.folder / "rows-1.jsonl", labelled(rows(bench.num_rows + num_more, num_more)), mode="a")
    yield bench.measured("these with a tenth more at the end of the first file", spec)


def chat_case(bench: Bench) -> Iterator[dict[str, Any]]:
    """Conversations under a given tokenizer, whose chat template is ChatML, and these with a tenth more."""
    tokenizer = bench.tokenizer()
    # In a process of its own: the largest size of this one would count as that of its children.
    subprocess.run([sys.executable, "-c", GIVE_CHAT_TEMPLATE, tokenizer["tokenizer"]], check=True)
    spec = {"path": "chat-*.jsonl", **tokenizer, "kind": "chat"}
    num_chats = bench.num_rows // ROWS_A_CHAT
    jsonl(bench.folder / "chat-1.jsonl", chats(rows(0, bench.num_rows)))
    yield bench.measured(f"{num_chats:,} rows of chat", spec)
    jsonl(bench.folder / "chat-2.jsonl", chats(rows(bench.num_rows, bench.num_rows // 10)))
    yield bench.measured("the rows of chat with a tenth more in a new file", spec)


def trained_chat_case(bench: Bench) -> Iterator[dict[str, Any]]:
    """Conversations on which a tokenizer is trained."""
    num_chats = bench.num_rows // ROWS_A_CHAT // SHARE_OF_TRAINED_CHATS
    jsonl(bench.folder / "chat.jsonl", chats(rows(0, num_chats * ROWS_A_CHAT)))
    yield bench.measured(f"{num_chats:,} rows of chat, a tokenizer is trained", {"path": "chat.jsonl", "kind": "chat"})


def csv_case(bench: Bench) -> Iterator[dict[str, Any]]:
    """Rows of a CSV file with classes."""
    comma_separated(bench.folder / "rows.csv", labelled(rows(0, bench.num_rows)))
    spec = {"path": "rows.csv", **bench.tokenizer(), "kind": "text-classification"}
    yield bench.measured(f"{bench.num_rows:,} rows of text-classification, CSV", spec)


def parquet_case(bench: Bench) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file with classes."""
    parquet(bench.folder / "rows.parquet", labelled(rows(0, bench.num_rows)))
    spec = {"path": "rows.parquet", **bench.tokenizer(), "kind": "text-classification"}
    yield bench.measured(f"{bench.num_rows:,} rows of text-classification, Parquet", spec)


CASES: Mapping[str, Callable[[Bench], Iterator[dict[str, Any]]]] = {
    "text": text_case,
    "named": named_case,
    "classification": classification_case,
    "csv": csv_case,
    "parquet": parquet_case,
    "chat": chat_case,
    "trained": trained_case,
    "trained-chat": trained_chat_case,
}
"""The cases by name, in the order of the table."""


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


def jsonl(path: Path, made: Iterable[dict[str, Any]], *, mode: str = "w") -> None:
    """Writes rows as JSONL; with the mode "a" behind those that are there."""
    with path.open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in made)


def comma_separated(path: Path, made: Iterable[dict[str, Any]]) -> None:
    """Writes rows as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "number", "label"])
        writer.writeheader()
        writer.writerows(made)


def parquet(path: Path, made: Iterable[dict[str, Any]]) -> None:
    """Writes rows as Parquet."""
    import pyarrow
    import pyarrow.parquet

    rest = iter(made)
    schema = pyarrow.schema({"text": pyarrow.string(), "number": pyarrow.int64(), "label": pyarrow.string()})
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while group := list(islice(rest, ROWS_A_GROUP)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))


def write(name: str, measurements: list[dict[str, Any]]) -> None:
    """Writes the measurements of a case together with those of the other cases, as JSON and as a table in the docs."""
    machine = f"{os.cpu_count()} cores, {processor()}, shared"
    dated = [{"case": name, "date": date.today().isoformat(), "machine": machine, **each} for each in measurements]
    known = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else []
    cases = [each for each in known if each.get("case") in CASES and each["case"] != name] + dated
    cases.sort(key=lambda each: list(CASES).index(each["case"]))
    RESULTS.write_text(json.dumps({"cases": cases}, indent=1) + "\n")
    machines = "; ".join(dict.fromkeys(f"{each['date']}, {each['machine']}" for each in cases))
    text = f"""{machines}; one core for each case, `vocab_size` 8,192, `seq_len` 512, one run;
a tokenizer is given where none is trained.

| | size, MB | seconds | of the processor | MB in a second of it | peak of memory, MB |
|---|---:|---:|---:|---:|---:|
{chr(10).join(map(line_of, cases))}
"""
    write_section("data", text)


def line_of(case: dict[str, Any]) -> str:
    """Returns the row of the table."""
    size, cpu_s, peak = case["bytes"] / MEGABYTE, case["cpu_s"], case["peak_bytes"] / MEGABYTE
    return f"| {case['name']} | {size:,.0f} | {case['seconds']:.0f} | {cpu_s:.0f} | {size / cpu_s:.1f} | {peak:.0f} |"


def processor() -> str:
    """Returns the name of the processor, where the system reports it."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


if __name__ == "__main__":
    main()
