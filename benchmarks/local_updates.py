"""Local updates against `ddp` over a slow link: seconds of training to the same held-out loss.

    python -m benchmarks.local_updates [--rate 20mbit] [--steps 40]     (as root: it makes network namespaces)

Two ranks, each in a network namespace of its own, train a small Llama. `ddp` trains some steps; then the job with local
updates trains until its loss is as low, evaluated at the ends of rounds, which does not count. Contenders take turns
over the seeds. The same is done over a link without a limit. Writes benchmarks/results/local_updates.json and the
section of docs/benchmarks.md between the markers `<!-- local_updates -->`.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

from benchmarks.overlap import lines_of_ranks
from benchmarks.page import write_section

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "local_updates.json"
GOAL, FAST, SEEDS, SYNC_EVERY = 3.0, "10gbit", 3, 16
SEQ_LEN, ROWS, VOCAB_SIZE = 64, 16, 512
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def rank_main(rank, *, folder, num_steps):
    """Trains one rank under both contenders, seed after seed; rank 0 prints a line of figures for each seed."""
    from ringmaster.features.local_updates.job import LocalUpdates
    from ringmaster.techniques import DataSpec, EvaluationSpec, Job, ModelSpec, OptimizerSpec, registry
    from ringmaster.techniques.processes.order import TRAIN, GangOrder, Slot
    from ringmaster.techniques.processes.ranks import join
    from ringmaster.techniques.training.trainer import Trainer

    plain = Job(
        name="llama",
        model=ModelSpec(architecture="LlamaForCausalLM", config=MODEL),
        data=DataSpec(source="python-stdlib", seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE),
        optimizer=OptimizerSpec(lr=2e-3),
        global_batch_size=ROWS,
        num_steps=8 * num_steps,
        evaluation=EvaluationSpec(max_batches=8),
    )
    local = plain.with_features(LocalUpdates(workers=2, sync_every=SYNC_EVERY))
    cores = sorted(os.sched_getaffinity(0))
    slots = tuple(Slot(kind="cpu", index=i, cores=(cores[i % len(cores)],)) for i in range(2))

    def order(job):
        technique = "ddp" if job.num_workers is None else "local"
        return GangOrder(
            purpose=TRAIN,
            job=job,
            technique=registry.dotted_path(technique),
            config={"micro_batch": ROWS // 2, "recompute": "none"},
            slots=slots,
            folder=str(folder),
            cache_dir=str(folder / "cache"),
        )

    ranks = join(order(plain), rank, num_ranks=2, axes={"dp_replicate": 2})

    def trainer_of(job, seed):
        given = order(replace(job, seed=seed))
        return Trainer(given, registry.load(given.technique), ranks, beat=lambda: None)

    def seconds(trainer):
        return ranks.max(trainer.step().seconds)

    for seed in range(SEEDS):
        synchronous = trainer_of(plain, seed)
        ddp_s = [seconds(synchronous) for _ in range(num_steps)]
        goal = synchronous.evaluate()["loss"]
        trainer, local_s, loss = trainer_of(local, seed), [], float("inf")
        while loss > goal and len(local_s) < 8 * num_steps:
            local_s += [seconds(trainer) for _ in range(SYNC_EVERY)]
            loss = trainer.evaluate()["loss"]
        if rank == 0:
            figures = {"seed": seed, "loss": goal, "ddp_s": sum(ddp_s), "local_s": sum(local_s), "local_loss": loss}
            sizes = {"ddp_steps": num_steps, "local_steps": len(local_s)}
            print(json.dumps({**figures, **sizes, "reached": loss <= goal}), flush=True)
    if rank == 0:
        print(json.dumps({"num_parameters": sum(p.numel() for p in synchronous.model.parameters())}), flush=True)
    ranks.agree(True)
    os._exit(0)


def summary(seeds):
    """Returns the ratio of the times to the same loss, its extremes, and the steps that local updates took."""
    if not all(one["reached"] for one in seeds):
        raise RuntimeError(f"a run with local updates never reached the loss: {seeds}")
    ratios = [one["ddp_s"] / one["local_s"] for one in seeds]
    return {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios), "seeds": seeds}


def write(results, *, rate, num_parameters):
    """Writes the result as JSON, and as a table in the docs."""
    result = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {os.uname().machine}, shared",
        "model": MODEL,
        "num_parameters": num_parameters,
        "sync_every": SYNC_EVERY,
        "rows": ROWS,
        "links": {link: summary(seeds) for link, seeds in results.items()},
        "goal": GOAL,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    rows = ""
    for link, found in result["links"].items():
        middle = {key: statistics.median(one[key] for one in found["seeds"]) for key in ("ddp_s", "local_s")}
        steps = ", ".join(f"{one['local_steps']}" for one in found["seeds"])
        rows += f"| {link} | {middle['ddp_s']:.1f} | {middle['local_s']:.1f} | {steps} "
        rows += f"| **{found['ratio']:.2f}** ({found['least']:.2f} to {found['most']:.2f}) |\n"
    text = f"""{result["date"]}, {result["machine"]}; a Llama of {num_parameters / 1e6:.1f} M parameters,
{ROWS} x {SEQ_LEN} tokens a step, AdamW, two workers that average every {SYNC_EVERY} steps, {SEEDS} seeds; `ddp` trains
{result["links"][rate]["seeds"][0]["ddp_steps"]} steps.

| link | `ddp`, s | local updates to the same held-out loss, s | their steps | times sooner |
|---|---|---|---|---|
{rows}
The goal is {GOAL:g} over {rate}.
"""
    write_section("local_updates", text)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="20mbit", help="of the slow link, as tc reads it")
    parser.add_argument("--steps", type=int, default=40, help="that `ddp` trains")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.rank, folder=given.folder, num_steps=given.steps)
    if os.geteuid() != 0:
        sys.exit("network namespaces need root. To fix: run it with sudo")
    results, num_parameters = {}, 0
    for rate in (given.rate, FAST):
        lines = lines_of_ranks("-m", "benchmarks.local_updates", "--steps", str(given.steps), rate=rate)
        *results[rate], sizes = lines
        num_parameters = sizes["num_parameters"]
    result = write(results, rate=given.rate, num_parameters=num_parameters)
    print(json.dumps({link: found["ratio"] for link, found in result["links"].items()}, indent=1))


if __name__ == "__main__":
    main()
