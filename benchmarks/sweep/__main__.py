"""Benchmark of a whole sweep of adapters: by Ringmaster, by hand with peft, and by Ray Tune.

    python -m benchmarks.sweep                # three rounds, 20 minutes and more on two cores
    python -m benchmarks.sweep --quick        # one round of short trials, about a minute; writes nothing
    python -m benchmarks.sweep --product      # 32 adapters, with and without groups and early stopping; with --quick, 8

The sweep is examples/recipes/sweep.yaml, on the base that examples/recipes/make_base.py trains. Three commands take
turns, each with an empty home:

- `ringmaster sweep`, with the file;
- every configuration to its last step, one after another, with transformers' Trainer and peft (peft_sweep.py), at the
  number of threads that is fastest;
- Ray Tune with ASHA (ray_sweep.py): the same function, rungs and reduction factor, a trial a core.

Seconds are those of whole commands. The winners are loaded by transformers and peft, and compared by one function: the
mean loss over all tokens of the held-out answers. Writes benchmarks/results/sweep.json, the section of
docs/benchmarks.md between the markers `<!-- sweep -->`, and the picture docs/images/sweep-of-adapters.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from benchmarks.page import write_section
from benchmarks.sweep.peft_sweep import Sweep
from benchmarks.sweep.picture import draw

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "examples" / "recipes" / "sweep.yaml"
DATA = ROOT / "examples" / "recipes" / "data"
RESULTS = ROOT / "benchmarks" / "results" / "sweep.json"
PICTURE = ROOT / "docs" / "images" / "sweep-of-adapters.svg"
RINGMASTER, PEFT, RAY = "Ringmaster", "peft, one after another", "Ray Tune, ASHA"
GOALS = {PEFT: 2.5, RAY: 1.8}  # times as long as Ringmaster
LARGEST_LOSS_RATIO = 1.01  # of Ringmaster's winner over that of all configurations
LARGEST_DIFFERENCE = 1e-3  # of a loss as reported, and of the adapter that peft loads
QUICK = {"num_steps": 90, "min_steps": 10, "lr": [1e-3, 4e-3], "rank": [4, 8]}
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error",
         "DO_NOT_TRACK": "true"}  # fmt: skip


def main() -> None:
    """Measures all contenders, and writes the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each contender")
    parser.add_argument("--threads", type=int, help="of the script with peft; by default, as many as are fastest")
    parser.add_argument("--quick", action="store_true", help="short trials, which test this benchmark")
    parser.add_argument("--product", action="store_true", help="what groups and early stopping save, and both")
    parser.add_argument("--steps", type=int, help="of each trial, with --product; by default, those of the example")
    parser.add_argument("--batch-size", type=int, help="of each step, with --product; by default, that of the example")
    options = parser.parse_args()
    if not (DATA / "base").exists():
        subprocess.run([sys.executable, ROOT / "examples" / "recipes" / "make_base.py"], check=True)
    with tempfile.TemporaryDirectory(prefix="bench-sweep-") as folder:
        if options.product:
            changed = {"num_steps": options.steps, "global_batch_size": options.batch_size}
            rows = measure_product(Path(folder), quick=options.quick, changed={k: v for k, v in changed.items() if v})
            print(json.dumps(rows, indent=1))
            return
        measured = measure(
            Path(folder), rounds=1 if options.quick else options.rounds, threads=options.threads, quick=options.quick
        )
    print(table(measured))
    if not options.quick:
        write(measured)


def measure(folder: Path, *, rounds: int, threads: int | None, quick: bool) -> dict[str, Any]:
    """Runs all contenders in turns; returns the results of each round, with the evaluations and their times."""
    raw = sweep_of(num_steps=QUICK["num_steps"] if quick else None)
    if quick:
        raw["early_stopping"]["min_steps"] = QUICK["min_steps"]
        raw["space"] = {"optimizer.lr": QUICK["lr"], "adapter.rank": QUICK["rank"]}
    first, factor = raw["early_stopping"]["min_steps"], raw["early_stopping"]["reduction_factor"]
    plain = plain_of(raw)
    plain = replace(plain, threads=threads or (1 if quick else best_threads(plain, folder)))
    rows = []
    for number in range(rounds):
        load = os.getloadavg()[0]
        for who in (RINGMASTER, PEFT, RAY):
            home = folder / f"{number}-{len(rows)}"
            home.mkdir()
            started_s = time.time()
            if who == RINGMASTER:
                found = by_ringmaster(raw, home)
            elif who == PEFT:
                found = by_script("peft_sweep.py", replace(plain, folder=str(home)), home)
            else:
                at = (first, first * factor)
                found = by_script("ray_sweep.py", replace(plain, folder=str(home), evaluated_at=at), home)
            evaluations = [{**each, "at": each["at"] - started_s} for each in found.pop("evaluations")]
            for span in found.get("spans", ()):
                span["start_s"], span["end_s"] = span["start_s"] - started_s, span["end_s"] - started_s
            loss = loss_of(plain, found["model"])
            assert abs(loss - found.pop("reported")) < LARGEST_DIFFERENCE, (
                f"{who}: another loss than it reports: {loss}"
            )
            rows.append({"round": number, "who": who, "load": load, **found, "loss": loss, "evaluations": evaluations})
            say(f"round {number + 1}: {who}: {found['seconds']:.1f} s, {found['best']}, loss {loss:.4f}")
            if who != RINGMASTER or number < rounds - 1:
                shutil.rmtree(home, ignore_errors=True)
    return {
        "date": date.today().isoformat(),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}",
        "threads": plain.threads,
        "trials": len(plain.configurations),
        "steps": plain.num_steps,
        "base_loss": loss_of(plain, None),
        "rows": rows,
    }


def sweep_of(*, num_steps: int | None) -> dict[str, Any]:
    """Returns the sweep of the example, with absolute paths, and with other steps if they are given."""
    raw: dict[str, Any] = yaml.safe_load(FILE.read_text())
    job = raw["template"]["job"]
    job["num_steps"] = num_steps or job["num_steps"]
    job["model"]["from_pretrained"] = str(DATA / "base")
    job["data"] = {key: str(DATA / Path(value).name) for key, value in job["data"].items()}
    return raw


def plain_of(raw: Mapping[str, Any]) -> Sweep:
    """Returns a sweep as the scripts read it, with one thread."""
    job = raw["template"]["job"]
    return Sweep(
        base=job["model"]["from_pretrained"],
        train=job["data"]["path"],
        test=job["data"]["held_out_path"],
        folder="",
        threads=1,
        alpha=job["adapter"]["alpha"],
        warmup_steps=job["schedule"]["warmup_steps"],
        clip_grad_norm=job["clip_grad_norm"],
        batch_size=job["global_batch_size"],
        num_steps=job["num_steps"],
        configurations=[
            {"lr": float(lr), "rank": rank}
            for lr, rank in product(raw["space"]["optimizer.lr"], raw["space"]["adapter.rank"])
        ],
    )


def measure_product(folder: Path, *, quick: bool, changed: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns what one sweep takes by the script with peft, with and without groups of trials, and early stopping.

    Early stopping is measured with evaluations of all rows, and with ones that stop when they are decided.

    changed: settings of the job that replace those of the example.
    device_s: of all segments, with their starts and evaluations; of the script, its seconds on one core. times: those
    of the script over these. loss_ratio: the winner's loss over that of the script's.
    """
    raw = sweep_of(num_steps=QUICK["num_steps"] if quick else None)
    job = raw["template"]["job"]
    job |= changed
    rates = [3e-4 * 1.7**k for k in range(4 if quick else 8)]
    raw["space"] = {"optimizer.lr": rates, "adapter.rank": [4, 8] if quick else [4, 8, 16, 32]}
    raw["num_trials"] = len(rates) * len(raw["space"]["adapter.rank"])
    home = folder / "peft"
    home.mkdir()
    plain = replace(plain_of(raw), folder=str(home))
    script = by_script("peft_sweep.py", plain, home)
    script["device_s"], script["loss"] = script["seconds"], loss_of(plain, script["model"])
    rows = [{"who": PEFT, "times": 1.0, "loss_ratio": 1.0} | {k: script[k] for k in ("seconds", "device_s", "loss")}]
    say(f"{rows[0]}")
    cut, none = {"policy": "cut"}, {"policy": "none"}
    in_parts = {**cut, "evaluation_error": 0.01}
    for are_grouped, early_stopping in ((True, in_parts), (True, cut), (True, none), (False, cut), (False, none)):
        job.pop("techniques", None)
        job |= {} if are_grouped else {"techniques": ["single"]}
        home = folder / f"product-{len(rows)}"
        home.mkdir()
        found = by_ringmaster({**raw, "early_stopping": early_stopping}, home)
        row = {"who": RINGMASTER, "groups": are_grouped, **early_stopping, "loss": loss_of(plain, found["model"])}
        row |= {key: found[key] for key in ("seconds", "device_s")}
        row |= {"times": script["device_s"] / row["device_s"], "loss_ratio": row["loss"] / script["loss"]}
        rows.append(row)
        say(f"{row}")
    return rows


def best_threads(sweep: Sweep, folder: Path) -> int:
    """Returns the number of threads at which the script trains a tenth of one configuration fastest."""
    few = replace(sweep, num_steps=max(sweep.num_steps // 10, 30), configurations=sweep.configurations[:1])
    seconds = {}
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        into = folder / f"threads-{threads}"
        into.mkdir()
        seconds[threads] = by_script("peft_sweep.py", replace(few, threads=threads, folder=str(into)), into)["seconds"]
    say(f"peft by the number of threads: {seconds}")
    return min(seconds, key=seconds.__getitem__)


def by_script(script: str, sweep: Sweep, home: Path) -> dict[str, Any]:
    """Runs one of the scripts as a whole command."""
    file = home / "sweep.json"
    file.write_text(json.dumps(asdict(sweep)))
    # By default Ray's workers run at the niceness 15, which only costs them time when the machine has other work.
    environment = {"OMP_NUM_THREADS": str(sweep.threads), "RAY_worker_niceness": "0"}
    seconds, found = command([sys.executable, Path(__file__).parent / script, file], environment, home)
    lines = (home / "evaluations.jsonl").read_text().splitlines()
    return {"seconds": seconds, "reported": found["loss"], **found, "evaluations": [json.loads(line) for line in lines]}


def by_ringmaster(raw: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """Runs `ringmaster sweep` as a whole command, with an empty home."""
    file, ringmaster = home / "sweep.yaml", [sys.executable, "-m", "ringmaster.flows.entry"]
    file.write_text(yaml.safe_dump(raw))
    environment = {"RINGMASTER_HOME": str(home / "home")}
    seconds, found = command([*ringmaster, "sweep", file, "--json"], environment, home)
    batch, best = found["batch"], found["best"]
    _, timeline = command([*ringmaster, "watch", raw["name"], "--json"], environment, home)
    model_dir = next(job["model_dir"] for job in batch["jobs"] if job["name"] == best["job"])
    return {
        "seconds": seconds,
        "best": best["job"],
        "model": model_dir,
        "reported": best["held-out loss"],
        "training_s": batch["makespan_s"],
        "device_s": sum(segment["device_s"] for job in batch["jobs"] for segment in job["segments"]),
        "evaluations": [*evaluations_of(home / "home"), *final_evaluations(batch, timeline)],
        "spans": [
            {**span, "start_s": timeline["zero_s"] + span["start_s"], "end_s": timeline["zero_s"] + span["end_s"]}
            for span in timeline["past"]
        ],
    }


def final_evaluations(batch: Mapping[str, Any], timeline: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the evaluations of the trials that trained to their last step, at the ends of their last segments."""
    ends = {span["job"]: timeline["zero_s"] + span["end_s"] for span in timeline["past"]}
    return [
        {"name": job["name"], "step": job["num_steps"], "loss": job["metrics"]["loss"], "at": ends[job["name"]]}
        for job in batch["jobs"]
        if job["status"] == "done" and job["name"] in ends
    ]


def evaluations_of(home: Path) -> list[dict[str, Any]]:
    """Returns the evaluations of a sweep's trials as MLflow has them, with their times since the epoch."""
    query = (
        "SELECT runs.name, step, value, timestamp / 1000.0 FROM metrics JOIN runs USING (run_uuid) "
        "WHERE key = 'eval/loss' ORDER BY timestamp"
    )
    with sqlite3.connect(home / "mlflow.db") as connection:
        return [
            {"name": name, "step": step, "loss": loss, "at": at} for name, step, loss, at in connection.execute(query)
        ]


def command(arguments: Sequence[str | Path], environment: Mapping[str, str], home: Path) -> tuple[float, Any]:
    """Runs a command; returns its seconds, and the JSON object in the last line that it printed."""
    started_s = time.perf_counter()
    with (home / "errors.txt").open("a") as errors:
        done = subprocess.run(
            list(map(str, arguments)), env={**os.environ, **QUIET, **environment}, stdout=subprocess.PIPE,
            stderr=errors, text=True, check=False, cwd=home,
        )  # fmt: skip
    seconds = time.perf_counter() - started_s
    if done.returncode:
        raise RuntimeError(f"{arguments} ended with {done.returncode}:\n{(home / 'errors.txt').read_text()[-3000:]}")
    return seconds, json.loads(done.stdout.strip().splitlines()[-1])


def loss_of(sweep: Sweep, model: str | None) -> float:
    """Returns the loss of an adapter, loaded by peft, or of the base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

    from benchmarks.sweep.peft_sweep import loss_on, read_rows

    loaded = AutoModelForCausalLM.from_pretrained(sweep.base)
    if model is not None:
        loaded = PeftModel.from_pretrained(loaded, model)
    collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(sweep.base))
    return loss_on(loaded, read_rows(sweep.base, sweep.test), collator)


def say(text: str) -> None:
    """Prints a line of progress."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Medians over the rounds of one contender. times: its seconds over Ringmaster's in the same round."""

    who: str
    seconds: float
    times: float
    steps: float
    loss: float


def summary(measured: Mapping[str, Any]) -> list[Figures]:
    """Returns the figures of each contender."""
    ours = {row["round"]: row["seconds"] for row in measured["rows"] if row["who"] == RINGMASTER}
    found = []
    for who in (RINGMASTER, PEFT, RAY):
        rows = [row for row in measured["rows"] if row["who"] == who]
        found.append(
            Figures(
                who=who,
                seconds=statistics.median(row["seconds"] for row in rows),
                times=statistics.median(row["seconds"] / ours[row["round"]] for row in rows),
                steps=statistics.median(num_steps(row["evaluations"]) for row in rows),
                loss=statistics.median(row["loss"] for row in rows),
            )
        )
    return found


def table(measured: Mapping[str, Any]) -> str:
    """Returns the figures as a table in Markdown, with what was measured."""
    rows, found = measured["rows"], summary(measured)
    lines = [
        "| | seconds | times Ringmaster's | goal | steps trained | winner's loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {each.who} | {each.seconds:.1f} | {each.times:.2f} | {GOALS.get(each.who, '')} | {each.steps:.0f} | "
            f"{each.loss:.4f} |"
            for each in found
        ),
    ]
    losses = {(row["round"], row["who"]): row["loss"] for row in rows}
    rounds = sorted({row["round"] for row in rows})
    ratio = statistics.median(losses[number, RINGMASTER] / losses[number, PEFT] for number in rounds)
    loads = [row["load"] for row in rows]
    return f"""{measured["date"]}, {measured["machine"]}, a load of {min(loads):.1f} to {max(loads):.1f} by other work
before a round; {measured["trials"]} trials of {measured["steps"]} steps; medians of {len(rounds)} round(s) of whole
commands in turns, with empty homes. The script with peft has {measured["threads"]} thread(s).

{chr(10).join(lines)}

Ringmaster's winner has {ratio:.4f} times the loss of the best of all configurations (goal: at most
{LARGEST_LOSS_RATIO}). The base alone has a loss of {measured["base_loss"]:.4f}. Losses are those of the
adapters as peft loads them.
"""


def num_steps(evaluations: Sequence[Mapping[str, Any]]) -> int:
    """Returns the steps of all trials up to their last evaluations."""
    return sum({each["name"]: each["step"] for each in sorted(evaluations, key=lambda e: e["step"])}.values())


def write(measured: Mapping[str, Any]) -> None:
    """Writes the results, the section of the page, and the picture of the median round."""
    rows = [{key: value for key, value in row.items() if key != "model"} for row in measured["rows"]]
    RESULTS.write_text(json.dumps({**measured, "rows": rows}, indent=1) + "\n")
    write_section("sweep", table(measured))
    ours = sorted((r for r in measured["rows"] if r["who"] == RINGMASTER), key=lambda row: row["seconds"])
    number = ours[len(ours) // 2]["round"]
    PICTURE.write_text(draw([row for row in measured["rows"] if row["round"] == number]))


if __name__ == "__main__":
    main()
