"""Benchmark of the first minute: `ringmaster run` compared with a script of transformers' Trainer for each model.

    python -m benchmarks.start                    # five rounds, about 40 minutes on two quiet cores
    python -m benchmarks.start --only one         # the single fine-tune; `six` for the six of a small BERT
    python -m benchmarks.start --steps 10         # the start and the end more than the training; writes nothing

Both are whole commands, in turns: `one` is a BERT of 22 M parameters for 138 steps, `six` are six kinds of fine-tunes
of one small BERT. Ringmaster runs cold (a new home), then warm (the same home: prepared data and measured speeds), and
then ready (from a terminal, after another command of which the servers have stayed).
The scripts run one after another, at the number of threads that is fastest for them. Writes
benchmarks/results/start.json and the section of docs/benchmarks.md between the markers `<!-- start -->`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from benchmarks.page import write_section

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "start.json"
SCRIPT = Path(__file__).parent / "trainer_scripts.py"
COLD, WARM, READY, TRAINER = "Ringmaster, new home", "Ringmaster, warm", "Ringmaster, ready", "Trainer scripts"
GOALS = {
    ("one", COLD): 1.2,
    ("one", WARM): 1.1,
    ("one", READY): 1.03,
    ("six", COLD): 1.1,
    ("six", WARM): 1.1,
    ("six", READY): 1.0,
}  # times the scripts
FIRST_STEP_GOALS_S = {COLD: 8.0, WARM: 5.0, READY: 2.0}
MINILM = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
SMALL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
NUM_ROWS = 2500
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
         "TRANSFORMERS_VERBOSITY": "error", "DO_NOT_TRACK": "true"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """Models to train: a batch file's content, and the tasks of the scripts."""

    name: str
    batch: Mapping[str, Any]
    tasks: Sequence[Mapping[str, Any]]


def main() -> None:
    """Measures all contenders, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["one", "six"])
    parser.add_argument("--steps", type=int, help="of each model, to test this benchmark")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-start-") as folder:
        data = Path(folder) / "data"
        write_data(data)
        every = (one(data, options.steps), six(data, options.steps))
        cases = [case for case in every if options.only in (None, case.name)]
        rows = [row for case in cases for row in measure(case, Path(folder), rounds=options.rounds)]
    text = table(rows)
    print(text)
    if not (options.only or options.steps):
        RESULTS.write_text(json.dumps({"date": date.today().isoformat(), "rows": rows}, indent=1) + "\n")
        write_section("start", text)


def write_data(folder: Path) -> None:
    """Writes texts of uneven length with a class, the same with a number, pairs, a tokenizer, and a base."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    sys.path.insert(0, str(ROOT / "examples" / "recipes"))
    import make_data

    folder.mkdir()
    make_data.DATA = folder
    make_data.main()
    sentences: dict[str, list[str]] = {}
    with (folder / "docstrings.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            sentences.setdefault(row["label"], []).append(row["text"])
    draw = random.Random(0)
    rows: list[tuple[str, str | float]] = []
    for _ in range(NUM_ROWS):
        label = draw.choice(sorted(sentences))
        rows.append((" ".join(draw.choices(sentences[label], k=draw.choice([1, 2, 3]))), label))
    write_rows(folder / "classes.csv", rows)
    write_rows(folder / "numbers.csv", [(text, len(text) / 100) for text, _ in rows])
    torch.manual_seed(0)
    config = BertConfig(**SMALL, vocab_size=2048)
    BertForMaskedLM(config).save_pretrained(folder / "base")
    for file in (folder / "tokenizer").iterdir():
        (folder / "base" / file.name).write_bytes(file.read_bytes())


def write_rows(file: Path, rows: Sequence[tuple[str, str | float]]) -> None:
    """Writes texts and their labels."""
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows([("text", "label"), *rows])


def one(data: Path, steps: int | None) -> Case:
    """Returns one fine-tune of 138 steps of a BERT of 22 M parameters."""
    num_steps = steps or 138
    config = MINILM | {"vocab_size": 30522}
    job = job_fields(num_steps) | {
        "name": "bert",
        "model": {"architecture": "BertForSequenceClassification", "config": config},
        "data": text_data(data, "classes.csv"),
    }
    return Case(name="one", batch={"name": "one", "jobs": [job]}, tasks=[task("bert", data, num_steps, config=config)])


def six(data: Path, steps: int | None) -> Case:
    """Returns six fine-tunes of a small BERT: full, LoRA, head, regression, embedding, distilled."""
    num_steps = steps or 100
    classes, base = text_data(data, "classes.csv"), str(data / "base")
    classifier = {"architecture": "BertForSequenceClassification", "from_pretrained": base}

    def job(name: str, **fields: Any) -> dict[str, Any]:
        return job_fields(num_steps) | {"name": name, "model": classifier, "data": classes, **fields}

    jobs = [
        job("full"),
        job("lora", adapter={"kind": "lora", "rank": 8, "alpha": 16, "targets": ["query", "key", "value"]}),
        job("head", freeze=["*", "!classifier.*"]),
        job(
            "regression",
            data=text_data(data, "numbers.csv") | {"kind": "text-regression"},
            evaluation={"metrics": ["mse"]},
        ),
        job(
            "embedding",
            model={"architecture": "BertModel", "from_pretrained": base},
            data=text_data(data, "pairs.jsonl"),
            loss="contrastive",
            evaluation={"metrics": ["loss"]},
        ),
        job("distilled", adaptation={"kind": "distilled", "teacher": "full", "temperature": 2.0, "weight": 0.5}),
    ]
    tasks = [task(each["name"], data, num_steps, base=base) for each in jobs]
    return Case(name="six", batch={"name": "six", "jobs": jobs}, tasks=tasks)


def job_fields(num_steps: int) -> dict[str, Any]:
    """Returns what all jobs have."""
    return {
        "num_steps": num_steps,
        "global_batch_size": 16,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "evaluation": {"metrics": ["accuracy", "loss"]},
    }


def text_data(data: Path, file: str) -> dict[str, Any]:
    """Returns a job's data."""
    return {"path": str(data / file), "tokenizer": str(data / "tokenizer"), "seq_len": 128, "held_out": 0.1}


def task(name: str, data: Path, num_steps: int, **fields: Any) -> dict[str, Any]:
    """Returns the argument of the script."""
    file = {"regression": "numbers.csv", "embedding": "pairs.jsonl"}.get(name, "classes.csv")
    common = {"path": str(data / file), "tokenizer": str(data / "tokenizer"), "num_steps": num_steps}
    return {"name": name, **common, **fields}


def measure(case: Case, folder: Path, *, rounds: int) -> Iterator[dict[str, Any]]:
    """Runs the contenders in turns."""
    threads = best_threads(case, folder)
    for number in range(rounds):
        home = folder / f"{case.name}-{number}"
        home.mkdir()
        for who in (TRAINER, COLD, WARM, READY):
            if who == TRAINER:
                figures = by_scripts(case, home, threads=threads)
            elif who == READY:
                figures = ready(case, home)
            else:
                figures = by_ringmaster(case, home)
            row = {"case": case.name, "round": number, "who": who, "load": os.getloadavg()[0], **figures}
            print(json.dumps(row), file=sys.stderr, flush=True)
            yield row


def best_threads(case: Case, folder: Path) -> int:
    """Returns the number of threads at which the scripts train the first model fastest."""
    few = Case(name=case.name, batch={}, tasks=[{**case.tasks[0], "num_steps": 12}])
    seconds = {}
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        into = folder / f"{case.name}-threads-{threads}"
        into.mkdir()
        seconds[threads] = by_scripts(few, into, threads=threads)["training_s"]
    return min(seconds, key=seconds.__getitem__)


def by_scripts(case: Case, home: Path, *, threads: int) -> dict[str, Any]:
    """Runs a script for each model, one after another."""
    rows = []
    for each in case.tasks:
        argument = {**each, "folder": str(home / f"script-{each['name']}"), "teacher": str(home / "script-full")}
        started_s = time.time()
        lines = run([sys.executable, SCRIPT, json.dumps(argument)], {"OMP_NUM_THREADS": str(threads)}, home)
        rows.append(
            {
                "seconds": time.time() - started_s,
                "first_step_s": lines[0]["first_step_at"] - started_s,
                "training_s": lines[-1]["training_s"],
            }
        )
    return {
        "seconds": sum(row["seconds"] for row in rows),
        "first_step_s": rows[0]["first_step_s"],
        "training_s": sum(row["training_s"] for row in rows),
        "threads": threads,
    }


def ready(case: Case, home: Path) -> dict[str, Any]:
    """Runs `ringmaster run` after another one of which all has stayed, and ends that."""
    command, folder = [sys.executable, "-m", "ringmaster.flows.entry"], {"RINGMASTER_HOME": str(home / "home")}
    environment = {**os.environ, **QUIET, **folder}
    with terminal() as stderr:
        by_ringmaster(case, home, stderr=stderr)
        while (
            "command server"
            not in subprocess.run(
                [*command, "status"], env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=home
            ).stdout
        ):
            time.sleep(1.0)
        figures = by_ringmaster(case, home, stderr=stderr)
    subprocess.run([*command, "down"], env=environment, stderr=subprocess.DEVNULL, check=True, cwd=home)
    return figures


@contextmanager
def terminal() -> Iterator[int]:
    """Yields a terminal that nobody looks at, whose output is read and dropped."""
    ours, theirs = os.openpty()

    def drop() -> None:
        with suppress(OSError):  # its last process has closed it
            while os.read(ours, 65536):
                pass

    reader = threading.Thread(target=drop)
    reader.start()
    try:
        yield theirs
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


def by_ringmaster(case: Case, home: Path, *, stderr: int | None = None) -> dict[str, Any]:
    """Runs `ringmaster run` as a whole command. stderr: a terminal; by default a file."""
    file = home / "batch.yaml"
    file.write_text(yaml.safe_dump(dict(case.batch)))
    started_s = time.time()
    command = [sys.executable, "-m", "ringmaster.flows.entry", "run", file, "--json"]
    result = run(command, {"RINGMASTER_HOME": str(home / "home")}, home, stderr=stderr)[-1]
    ended_s = time.time()
    assert result["status"] == "done", result
    return {
        "seconds": ended_s - started_s,
        "first_step_s": first_step_at(home / "home" / "mlflow.db", since_s=started_s) - started_s,
        "training_s": result["makespan_s"],
        "after_last_job_s": ended_s - max(job["end_s"] for job in result["jobs"]),
    }


def first_step_at(database: Path, *, since_s: float) -> float:
    """Returns when the first step of a run has ended, in seconds since the epoch.

    Steps are reported together: those of the first report have its time and their own seconds.
    """
    query = (
        "SELECT timestamp / 1000.0, step, value FROM metrics WHERE key = 'train/step_s' AND timestamp = (SELECT "
        "min(timestamp) FROM metrics WHERE key = 'train/step_s' AND timestamp > ?) ORDER BY step"
    )
    with sqlite3.connect(database) as connection:
        rows = connection.execute(query, [since_s * 1000]).fetchall()
    return float(rows[0][0] - sum(seconds for _, _, seconds in rows[1:]))


def run(
    command: Sequence[str | Path], environment: Mapping[str, str], home: Path, *, stderr: int | None = None
) -> list[Any]:
    """Runs a command; returns the JSON objects that it printed, a line each. stderr: by default a file in the home."""
    with (home / "errors.txt").open("a") as errors:
        done = subprocess.run(
            list(map(str, command)), env={**os.environ, **QUIET, **environment}, stdout=subprocess.PIPE,
            stderr=errors if stderr is None else stderr, text=True, check=False, cwd=home,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{(home / 'errors.txt').read_text()[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the medians of each case in Markdown, and the ratios to the scripts within a round."""
    lines = [
        "| | whole command, s | times the scripts | goal | first step after, s | goal | training, s | after it, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        theirs = {row["round"]: row["seconds"] for row in rows if (row["case"], row["who"]) == (case, TRAINER)}
        for who in (TRAINER, COLD, WARM, READY):
            chosen = [row for row in rows if (row["case"], row["who"]) == (case, who)]
            keys = ("seconds", "first_step_s", "training_s")
            median = {key: statistics.median(row[key] for row in chosen) for key in keys}
            times = statistics.median(row["seconds"] / theirs[row["round"]] for row in chosen)
            after = [row["after_last_job_s"] for row in chosen if "after_last_job_s" in row]
            lines.append(
                f"| {case}: {who} | {median['seconds']:.1f} | {times:.2f} | {GOALS.get((case, who), '')} | "
                f"{median['first_step_s']:.1f} | {FIRST_STEP_GOALS_S.get(who, '')} | {median['training_s']:.1f} | "
                f"{f'{statistics.median(after):.1f}' if after else ''} |"
            )
    loads = [row["load"] for row in rows]
    threads = sorted({row["threads"] for row in rows if "threads" in row})
    return f"""{date.today().isoformat()}, {len(os.sched_getaffinity(0))} cores, {platform.machine()}, load
{min(loads):.1f} to {max(loads):.1f} while measuring; medians of {max(row["round"] for row in rows) + 1} round(s).
The scripts have {" and ".join(map(str, threads))} thread(s).

{chr(10).join(lines)}

"""


if __name__ == "__main__":
    main()
