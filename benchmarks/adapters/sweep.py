"""A sweep of sixteen LoRA trials as a whole command: in groups, each trial in its own gang, and one after another."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml

from benchmarks.adapters.jobs import Size, jobs_on, save_base

ROOT = Path(__file__).resolve().parents[2]
TOGETHER, ALONE, IN_TURN = "planned, with groups", "planned, each trial by itself", "one trial after another"
COLD, WARM = "cold", "warm"
# Contender -> (changes of the template, changes of the file, number of cores).
CONTENDERS: Mapping[str, tuple[dict, dict, int]] = {
    TOGETHER: ({}, {}, 2),
    ALONE: ({"techniques": ["single", "ddp"]}, {}, 2),
    IN_TURN: ({"techniques": ["single"]}, {"devices": {"cpu": 1}}, 1),
}
RANKS, RATES = (4, 8), (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3, 1.28e-2)


def sweep_of(
    base: Path, size: Size, *, steps: int, template: Mapping, ranks: Sequence[int], rates: Sequence[float]
) -> dict:
    """Returns the sweep file's content."""
    job = {
        "model": {"from_pretrained": str(base)},
        "adapter": {"kind": "lora", "rank": ranks[0]},
        "data": {"source": "python-stdlib", "seq_len": size.tokens},
        "global_batch_size": size.rows,
        "num_steps": steps,
        "evaluation": {"metrics": ["loss"], "max_batches": 32},
        **template,
    }
    return {
        "name": "ranks-and-rates",
        "template": {"job": job},
        "space": {"adapter.rank": list(ranks), "optimizer.lr": list(rates)},
        "sampler": "grid",
        "num_trials": len(ranks) * len(rates),
        "early_stopping": {"policy": "none"},
        "objective": "loss",
    }


def measure_sweeps(
    folder: Path, size: Size, *, steps: int, rounds: int, say: Callable[[str], None], few: bool = False
) -> list[dict]:
    """Returns a row for each round, contender and state of the profiles; `few` trials test the benchmark itself."""
    from ringmaster.techniques.data import prepare

    base = save_base(folder, size)
    prepare(jobs_on(base, size, num=1, steps=1)[0].data, cache_dir=folder / "prepared")
    space = {"ranks": RANKS[:2], "rates": RATES[:1]} if few else {"ranks": RANKS, "rates": RATES}
    rows = []
    for number in range(rounds):
        homes = {}
        for state in (COLD, WARM):
            for name, (template, more, cores) in CONTENDERS.items():
                if state == COLD:
                    homes[name] = folder / f"{number}-{len(homes)}"
                    shutil.copytree(folder / "prepared", homes[name] / "cache")
                file = homes[name] / "sweep.yaml"
                file.write_text(
                    yaml.safe_dump({**sweep_of(base, size, steps=steps, template=template, **space), **more})
                )
                row = {"round": number, "who": name, "profiles": state, **_swept(file, homes[name], cores=cores)}
                rows.append(row)
                told = f"{row['seconds']:.1f} s, of them training {row['training_s']:.1f}"
                say(f"round {number + 1}, {state}: {name}: {told}")
    return rows


def _swept(file: Path, home: Path, *, cores: int) -> dict:
    """Returns the seconds of the whole command, and its results."""
    allowed = sorted(os.sched_getaffinity(0))[-cores:]
    command = [sys.executable, "-m", "ringmaster.flows.entry", "sweep", str(file), "--json"]
    started_s = time.perf_counter()
    done = subprocess.run(
        ["taskset", "-c", ",".join(map(str, allowed)), *command],
        cwd=ROOT,
        env={**os.environ, "RINGMASTER_HOME": str(home), "DO_NOT_TRACK": "true"},
        stdout=subprocess.PIPE,
        stderr=(home / "said.txt").open("a"),
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started_s
    if done.returncode:
        raise RuntimeError(f"{file} ended with {done.returncode}:\n{(home / 'said.txt').read_text()[-2000:]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    batch = result["batch"]
    assert batch["status"] == "done", batch["status"]
    losses = {row["job"]: row["held-out loss"] for row in result["leaderboard"]}
    return {
        "seconds": seconds,
        "training_s": batch["makespan_s"],
        "planned_s": batch["plan"]["makespan_s"],
        "profiling_s": batch["profiling_s"],
        "trials": batch["num_trials"],
        "losses": losses,
    }


def summary(rows: Sequence[Mapping]) -> list[dict]:
    """Returns, by state and contender, the median seconds and their ratio to the grouped sweep in the same rounds."""
    found = []
    for state in (COLD, WARM):
        of = {(row["round"], row["who"]): row for row in rows if row["profiles"] == state}
        for name in CONTENDERS:
            mine = {number: row for (number, who), row in of.items() if who == name}
            if not mine:  # an interrupted measurement
                continue
            times = [row["seconds"] / of[number, TOGETHER]["seconds"] for number, row in mine.items()]
            found.append(
                {
                    "who": name,
                    "profiles": state,
                    "seconds": statistics.median(row["seconds"] for row in mine.values()),
                    "training_s": statistics.median(row["training_s"] for row in mine.values()),
                    "profiling_s": statistics.median(row["profiling_s"] for row in mine.values()),
                    "times": statistics.median(times),
                }
            )
    return found
