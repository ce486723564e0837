"""Benchmark of early stopping: the same sweep with and without ASHA, compared by device time and by winner.

    python -m benchmarks.sweep.early_stopping               # five seeds, about eight minutes on two cores
    python -m benchmarks.sweep.early_stopping --seeds 3     # one of them; the others' rows stay

Both sweeps have the same sixteen trials, since trials are a function of the seed. Device time is the sum of every
segment's seconds, with its start, evaluations and checkpoint, times its devices.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results" / "sweeps.json"
SEEDS = range(5)
GOAL = 0.5  # of the device time without early stopping
NUM_STEPS, NUM_TRIALS, MIN_STEPS, FACTOR = 400, 16, 50, 2

JOB = {
    "model": {
        "architecture": "LlamaForCausalLM",
        "config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    },
    "data": {"source": "python-stdlib", "seq_len": 32, "vocab_size": 512},
    "global_batch_size": 16,
    "num_steps": NUM_STEPS,
    "clip_grad_norm": 1.0,
    "evaluation": {"every_steps": MIN_STEPS, "metrics": ["loss"], "max_batches": 4},
    "techniques": ["single"],
    "num_devices": [1],
}


def main() -> None:
    """Measures the requested seeds, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-early-stopping-") as home:
        os.environ["RINGMASTER_HOME"] = home
        for seed in chosen.seeds:
            row = {"seed": seed, "none": swept("none", seed=seed), "asha": swept("asha", seed=seed)}
            write(row)
            print(line(row), flush=True)


def swept(policy: str, *, seed: int) -> dict:
    """Runs one sweep; returns its device seconds, its winner with its values, and the number of completed trials."""
    from ringmaster.flows import settings

    settings.embed(settings.home())
    from ringmaster.flows.sweep import sweep

    result = sweep(
        name=f"bench-{policy}-{seed}",
        template={"job": JOB},
        space=[{"key": "optimizer.lr", "low": 1e-4, "high": 1e-1, "log": True}],
        num_trials=NUM_TRIALS,
        early_stopping={"policy": policy, "min_steps": MIN_STEPS, "reduction_factor": FACTOR},
        objective="loss",
        devices={"kind": "cpu", "count": 2},
        seed=seed,
    )
    rows = result["leaderboard"]
    return {
        "device_s": sum(row["device seconds"] for row in rows),
        "steps": sum(row["steps"] for row in rows),
        "makespan_s": result["batch"]["makespan_s"],
        "num_done": sum(row["status"] == "done" for row in rows),
        "winner": result["best"]["job"],
        "lr": result["best"]["optimizer.lr"],
        "loss": result["best"]["held-out loss"],
    }


def line(row: dict) -> str:
    """Returns a row of the table."""
    none, asha = row["none"], row["asha"]
    share = asha["device_s"] / none["device_s"]
    same = "the same" if none["winner"] == asha["winner"] else f"{asha['winner']}, loss {asha['loss']:.4f}"
    return (
        f"| {row['seed']} | {none['device_s']:.0f} | {asha['device_s']:.0f} | {share:.0%} | "
        f"{asha['steps'] / none['steps']:.0%} | {asha['num_done']} | "
        f"{none['winner']} (lr {none['lr']:.2g}, loss {none['loss']:.4f}) | {same} |"
    )


def write(row: dict) -> None:
    """Adds a row to the results, and rewrites the table in the docs."""
    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = sorted([*(r for r in known if r["seed"] != row["seed"]), row], key=lambda r: r["seed"])
    machine = f"{os.cpu_count()} cores, {platform.machine()}, shared"
    RESULTS.write_text(
        json.dumps({"date": date.today().isoformat(), "machine": machine, "rows": rows}, indent=1) + "\n"
    )
    shares = [r["asha"]["device_s"] / r["none"]["device_s"] for r in rows]
    num_same = sum(r["asha"]["winner"] == r["none"]["winner"] for r in rows)
    text = f"""{date.today().isoformat()}, {machine}; {NUM_TRIALS} trials of a small Llama, {NUM_STEPS} steps each,
learning rates from 1e-4 to 1e-1; rungs at {MIN_STEPS} steps and {FACTOR} times as many, and so on.

| seed | device seconds without | with ASHA | share | share of the steps | to the end | best without | best with ASHA |
|---:|---:|---:|---:|---:|---:|---|---|
{chr(10).join(map(line, rows))}

The device time is {statistics.median(shares):.0%} in the median and {max(shares):.0%} at the most (goal {GOAL:.0%});
the winner is the same for {num_same} of {len(rows)} seeds.
"""
    page = PAGE.read_text()
    PAGE.write_text(re.sub(r"(?s)(<!-- sweeps -->\n).*?(<!-- /sweeps -->)", lambda m: m[1] + text + m[2], page))


if __name__ == "__main__":
    main()
