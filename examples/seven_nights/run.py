"""Seven retraining runs in a few minutes, with a simulated clock and new data for each day.

    .venv/bin/python examples/seven_nights/run.py

Each run prints its expectations, its report, and whether they hold; the exit status is 1 where one does not. All files
are written into a separate home, `.ringmaster/seven-nights`, which is emptied first.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HOME = Path(os.environ.get("RINGMASTER_HOME", ".ringmaster")).absolute() / "seven-nights"
SUBJECTS = ["the cat", "a dog", "my friend", "the baker", "an old man", "our neighbour"]
VERBS = ["sat on", "ran to", "saw", "painted", "slept near", "talked about"]
PLACES = ["the mat", "a house", "the bridge", "the market", "a quiet garden"]

Answer = dict[str, Any]


@dataclass(frozen=True)
class Expectation:
    """An expectation of a retraining run's result."""

    title: str
    holds: Callable[[Answer], bool]


@dataclass(frozen=True)
class Night:
    """A retraining run: its date, the events before it, and its expectations."""

    date: str
    before: str
    happens: Callable[[], None]
    expected: tuple[Expectation, ...]


def text(seed: int, *, num_rows: int = 60) -> str:
    """Returns rows of short sentences, different for each seed, from one distribution."""
    draw = random.Random(seed)

    def sentence() -> str:
        return f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(PLACES)}."

    return rows([" ".join(sentence() for _ in range(6)) for _ in range(num_rows)])


def garbage(seed: int) -> str:
    """Returns rows of random letters."""
    draw = random.Random(seed)
    return rows(["".join(draw.choices("qxzjkvwy ", k=150)) for _ in range(120)])


def rows(texts: list[str]) -> str:
    """Returns texts as JSONL."""
    return "".join(json.dumps({"text": line}) + "\n" for line in texts)


def put(path: str, content: str) -> None:
    """Writes a data file."""
    file = HOME / "data" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)


def say(*, rate_of_notes: str = "") -> None:
    """Writes the retraining file, optionally with a mistyped learning rate of `notes`."""
    text = (HERE / "retraining.yaml").read_text()
    if rate_of_notes:
        text = text.replace("    job: *job\n", f"    job: {{<<: *job, optimizer: {{lr: {rate_of_notes}}}}}\n", 1)
    (HOME / "retraining.yaml").write_text(text)


def first_data() -> None:
    """Writes the files before the first run."""
    say()
    for seed, name in enumerate(("guide", "notes", "trusted")):
        put(f"{name}/2026-11-01.jsonl", text(seed))
    put("menu.jsonl", text(7))


def second_data() -> None:
    """Adds a day's data for two models, and a few rows for the third."""
    put("guide/2026-11-02.jsonl", text(10))
    put("notes/2026-11-02.jsonl", text(11))
    put("menu.jsonl", text(7) + text(12, num_rows=2))


def mistyped() -> None:
    """Adds data, removes the poisoned file, and mistypes a learning rate."""
    (HOME / "data/guide/2026-11-03.jsonl").unlink()
    put("guide/2026-11-04.jsonl", text(30))
    put("notes/2026-11-04.jsonl", text(31))
    say(rate_of_notes="1e30")


def due(*names: str) -> Expectation:
    """Expects exactly these models to be due."""
    title = f"due: {', '.join(names) or 'nothing'}"
    return Expectation(title, lambda answer: {m["model"] for m in answer["models"] if m["is_due"]} == set(names))


def outcome(name: str, *outcomes: str) -> Expectation:
    """Expects one of some outcomes for a model."""
    return Expectation(f"{name}: {' or '.join(outcomes)}", lambda answer: model(answer, name)["outcome"] in outcomes)


def why(name: str, words: str) -> Expectation:
    """Expects words in the reasons that are given for a model."""
    return Expectation(
        f"{name}: “{words}”", lambda answer: words in model(answer, name)["why_due"] + model(answer, name)["why"]
    )


def model(answer: Answer, name: str) -> dict[str, Any]:
    """Returns a model's row."""
    return next(m for m in answer["models"] if m["model"] == name)


NO_TRIALS = Expectation("no trial: nothing is measured twice", lambda answer: answer["num_trials"] == 0)
NIGHTS = (
    Night(
        "2026-11-02",
        "the first night: nothing is known",
        first_data,
        (
            due("guide", "notes", "menu"),
            *(outcome(name, "promoted") for name in ("guide", "notes", "menu")),
        ),
    ),
    Night(
        "2026-11-03",
        "new data for guide and notes, too little for menu",
        second_data,
        (
            due("guide", "notes"),
            outcome("guide", "promoted"),
            outcome("notes", "promoted"),
            why("menu", "100 are required"),
            NO_TRIALS,
        ),
    ),
    Night(
        "2026-11-04",
        "the data of guide is poisoned",
        lambda: put("guide/2026-11-03.jsonl", garbage(20)),
        (due("guide"), outcome("guide", "kept"), why("guide", "the new model is worse"), NO_TRIALS),
    ),
    Night(
        "2026-11-05",
        "the poison is taken away; the learning rate of notes is mistyped: its job fails, the others continue",
        mistyped,
        (
            due("guide", "notes"),
            outcome("guide", "promoted", "kept"),
            outcome("notes", "failed"),
            why("notes", "the loss became"),
            NO_TRIALS,
        ),
    ),
    Night(
        "2026-11-06",
        "the learning rate is mended",
        say,
        (due("notes"), outcome("notes", "promoted", "kept"), NO_TRIALS),
    ),
    Night(
        "2026-11-07",
        "nothing is new",
        lambda: None,
        (due(), Expectation("nothing is trained", lambda answer: answer["batch"] is None), NO_TRIALS),
    ),
    Night(
        "2026-11-09",
        "a night was missed; menu grows old, guide has new data",
        lambda: put("guide/2026-11-08.jsonl", text(60)),
        (
            due("guide", "menu"),
            why("menu", "7 days ago"),
            Expectation("one night was missed", lambda answer: answer["missed"] == 1),
            NO_TRIALS,
        ),
    ),
)


def main() -> int:
    """Performs all retraining runs; returns the exit status."""
    for name in (
        "RINGMASTER_DATABASE",
        "PREFECT_API_URL",
        "MLFLOW_TRACKING_URI",
        "RINGMASTER_TENSORS",
        "RINGMASTER_CHECKPOINTS",
    ):
        os.environ.pop(name, None)  # servers in use must not be reached
    shutil.rmtree(HOME, ignore_errors=True)
    os.environ["RINGMASTER_HOME"] = str(HOME)
    from ringmaster.flows import settings

    settings.prepare_environment(HOME)
    HOME.mkdir(parents=True, exist_ok=True)  # it exists already, unless Prefect's own home is elsewhere
    from rich.console import Console
    from rich.markdown import Markdown

    from ringmaster.flows.batch.flow_runs import result_of
    from ringmaster.flows.caller import Caller
    from ringmaster.flows.retrain_daily import retrain_daily
    from ringmaster.techniques.processes.forkserver_client import ForkServer

    def retrained(at_s: float) -> dict[str, Any]:
        """Runs the retraining at a time; returns its result also where models have failed."""
        caller = Caller(fork_server=server, clock=lambda: at_s)
        return result_of(lambda: retrain_daily(file=str(HOME / "retraining.yaml"), caller=caller))

    console, started_s, num_wrong = Console(), time.monotonic(), 0
    with ForkServer(preload=["transformers:LlamaForCausalLM"]) as server:  # shared by all runs, which import torch once
        for number, night in enumerate(NIGHTS, start=1):
            console.rule(f"night {number}, {night.date}: {night.before}")
            night.happens()
            at_s = datetime.fromisoformat(f"{night.date}T02:00").replace(tzinfo=UTC).timestamp()
            answer = retrained(at_s)
            console.print(Markdown(answer["report"]))
            for expectation in night.expected:
                is_so = expectation.holds(answer)
                num_wrong += not is_so
                console.print(f"  {'as expected' if is_so else '[red]NOT as expected[/]'}: {expectation.title}")
        console.rule("the last night again")
        again = retrained(at_s)
        is_so = bool(again.get("was_over")) and again["models"] == answer["models"]
        num_wrong += not is_so
        console.print(f"  {'as expected' if is_so else '[red]NOT as expected[/]'}: nothing is trained twice")
    took_s = time.monotonic() - started_s
    came = f"{num_wrong} expectations did not hold" if num_wrong else "all was as expected"
    console.print(f"\n{len(NIGHTS)} nights in {took_s:.0f} s; {came}.")
    console.print(f"MLflow has all of it: RINGMASTER_HOME={HOME} .venv/bin/ringmaster up --no-worker")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
