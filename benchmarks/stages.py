"""The gain of balancing a pipeline's stages by measured layer times, against balancing them by parameters.

    python -m benchmarks.stages [--rounds 15]

Both cuts of each model run in the same two ranks, on two CPU slots, and take turns: some steps under `1f1b` each, of
the same micro-batches. Within a round, the seconds a step are compared, and the CPU seconds of the busiest rank, which
other processes disturb less. Writes benchmarks/results/stages.json and the section of docs/benchmarks.md between the
markers `<!-- stages -->`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.page import write_section
from ringmaster.codec import from_json
from ringmaster.tasks.cluster import detect
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment, preflight_jobs, slots_of
from ringmaster.techniques import DataSpec, Job, ModelSpec, registry
from ringmaster.techniques.data import PreparedData
from ringmaster.techniques.estimates.device_rates import in_children
from ringmaster.techniques.models.build import skeleton
from ringmaster.techniques.preflight_result import Candidate, Preflight
from ringmaster.techniques.processes.forkserver_client import ForkServer
from ringmaster.techniques.processes.order import TRIAL, GangOrder
from ringmaster.techniques.processes.ranks import join
from ringmaster.techniques.sharding.pipe import parts_of
from ringmaster.techniques.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "stages.json"
MICRO_BATCH, NUM_MICRO_BATCHES, STEPS_A_ROUND = 2, 8, 2
LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
MODELS = {
    "Llama, a head of 8,192 words": ModelSpec(architecture="LlamaForCausalLM", config=LLAMA),
    "GPT-2, tied ends": ModelSpec(architecture="GPT2LMHeadModel", config={"n_embd": 128, "n_layer": 8, "n_head": 4}),
    "Mixtral, 2 of 8 experts a token": ModelSpec(architecture="MixtralForCausalLM", config=LLAMA | EXPERTS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    num_rounds = parser.parse_args().rounds
    rows = measure(num_rounds)
    write(rows, num_rounds=num_rounds)


def measure(num_rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each model: its cuts, and the times of both in each round."""
    cluster, rows = detect({"cpu": 2}), []
    preload = tuple(f"transformers:{model.architecture}" for model in MODELS.values())
    with TemporaryDirectory() as folder, ForkServer(preload=preload) as server:
        environment = GangEnvironment(server=server, devices=cluster.devices, cache_dir=Path(folder))
        for number, (name, model) in enumerate(MODELS.items()):
            job = Job(
                name="job",
                model=model,
                data=DataSpec(source="python-stdlib", seq_len=128, vocab_size=8192),
                techniques=("pipeline",),
                num_devices=(2,),
                global_batch_size=MICRO_BATCH * NUM_MICRO_BATCHES,
                num_steps=10,
            )
            preflights, faults = preflight_jobs([job], environment=environment, cluster=cluster, notice=lambda _: None)
            assert not faults, faults
            preflight = preflights["job"]
            data = from_json(PreparedData, preflight.data)
            by_time = dict(_candidate(preflight).config)
            parts = parts_of(skeleton(model, data), 2)
            by_parameters = {**by_time, "stage_layers": [len(part.layers) for part in parts]}
            (gang := Path(folder) / str(number)).mkdir()
            orders = [_order(job, preflight, config, gang, environment) for config in (by_parameters, by_time)]
            ranks = in_children([partial(_run, rank, orders, num_rounds) for rank in (0, 1)])
            rows.append({"model": name, "cuts": [o.config["stage_layers"] for o in orders], "rounds": _rounds(ranks)})
            print(_line(rows[-1]), flush=True)
    return rows


def _candidate(preflight: Preflight) -> Candidate:
    wanted = {"schedule": "1f1b", "recompute": "none", "micro_batch": MICRO_BATCH}
    return next(c for c in preflight.candidates if wanted.items() <= c.config.items())


def _order(
    job: Job, preflight: Preflight, config: dict[str, Any], folder: Path, environment: GangEnvironment
) -> GangOrder:
    return GangOrder(
        purpose=TRIAL,
        job=job,
        technique=registry.BUILTIN["pipeline"],
        config=config,
        slots=slots_of(environment.devices),
        folder=str(folder),
        cache_dir=str(environment.cache_dir),
        data=preflight.data,
    )


def _run(rank: int, orders: list[GangOrder], num_rounds: int) -> dict[str, Any]:
    """Runs one rank: returns [round][cut] of (seconds, CPU seconds) a step."""
    ranks = join(orders[0], rank, num_ranks=2, axes={"pp": 2})
    trainers = [Trainer(order, registry.load(order.technique), ranks, beat=lambda: None) for order in orders]
    for trainer in trainers:
        trainer.step()
    rounds = []
    for number in range(num_rounds):
        took = [(0.0, 0.0)] * len(trainers)
        for which in (0, 1) if number % 2 else (1, 0):
            ranks.agree(True)
            started_s, used_s = time.perf_counter(), time.process_time()
            for _ in range(STEPS_A_ROUND):
                trainers[which].step()
            used_s = time.process_time() - used_s
            took[which] = ((time.perf_counter() - started_s) / STEPS_A_ROUND, used_s / STEPS_A_ROUND)
        rounds.append(took)
    return {"rounds": rounds}


def _rounds(ranks: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Returns, by round, the seconds a step and the busiest rank's CPU seconds, under each of the cuts."""
    return [
        {
            "seconds": [max(s for s, _ in of_ranks) for of_ranks in zip(*both, strict=True)],
            "busiest_cpu_s": [max(c for _, c in of_ranks) for of_ranks in zip(*both, strict=True)],
        }
        for both in zip(*(rank["rounds"] for rank in ranks), strict=True)
    ]


def write(rows: list[dict[str, Any]], *, num_rounds: int) -> None:
    """Writes the result as JSON, and as a table in the docs."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, shared"
    result = {"date": date.today().isoformat(), "machine": machine, "rows": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    lines = [_line(row) for row in rows]
    text = f"""{result["date"]}, {machine}; 8 layers on two slots of one core, `1f1b`,
{NUM_MICRO_BATCHES} micro-batches of {MICRO_BATCH} x 128 tokens; {num_rounds} rounds of {STEPS_A_ROUND} steps each.
Medians, and of ratios the middle half. The last column compares the CPU seconds of the rank that computes most.

| model | layers, by parameters | by time | ms a step | by time | times as fast | times as little CPU |
|---|---|---|---|---|---|---|
{chr(10).join(lines)}
"""
    write_section("stages", text)


def _line(row: dict[str, Any]) -> str:
    cuts = [" + ".join(map(str, cut)) for cut in row["cuts"]]
    before_s, after_s = (statistics.median(r["seconds"][which] for r in row["rounds"]) for which in (0, 1))
    seconds, cpu = (_ratios(row, key) for key in ("seconds", "busiest_cpu_s"))
    return (
        f"| {row['model']} | {cuts[0]} | {cuts[1]} | {before_s * 1e3:.0f} | {after_s * 1e3:.0f} | {seconds} | {cpu} |"
    )


def _ratios(row: dict[str, Any], key: str) -> str:
    ratios = [r[key][0] / r[key][1] for r in row["rounds"]]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
