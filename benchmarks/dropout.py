"""The cost of hashed dropout: seconds a step against torch's generator, for the same model and rows, in alternation.

    python -m benchmarks.dropout [--rounds 7] [--steps 6]

Two trainers run in one process and take turns; one draws from torch's generator, as release 0.1 did. Writes
benchmarks/results/dropout.json and the section of docs/benchmarks.md between the markers `<!-- dropout -->`.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

from benchmarks.page import write_section
from ringmaster.techniques import DataSpec, Job, ModelSpec, registry
from ringmaster.techniques.processes.order import TRAIN, GangOrder, Slot
from ringmaster.techniques.processes.ranks import RankContext
from ringmaster.techniques.training import trainer as trainers
from ringmaster.techniques.training.dropout import DrawSites

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "dropout.json"
TOKENS, ROWS = 128, 8


def bert(width, num_heads):
    layers = {"num_hidden_layers": 4, "num_attention_heads": num_heads}
    return "BertForMaskedLM", {**layers, "hidden_size": width, "intermediate_size": 4 * width}


def gpt2(width, num_heads):
    return "GPT2LMHeadModel", {"n_embd": width, "n_layer": 4, "n_head": num_heads}


CASES = [
    ("BERT, width 64", *bert(64, 4)),
    ("BERT, width 256", *bert(256, 4)),
    ("BERT, width 512", *bert(512, 8)),
    ("GPT-2, width 256", *gpt2(256, 4)),
    ("GPT-2, width 512", *gpt2(512, 8)),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="of each contender a round; one more is not counted")
    arguments = parser.parse_args()
    rows = []
    for name, architecture, config in CASES:
        for attention in (0.1, 0.0):
            label = f"{name}, attention {'drops out' if attention else 'does not'}"
            key = "attn_pdrop" if "GPT2" in architecture else "attention_probs_dropout_prob"
            model = ModelSpec(architecture=architecture, config={**config, key: attention})
            rows.append({"name": label, **compare(model, arguments.rounds, arguments.steps)})
            print(line(rows[-1]), flush=True)
    record(rows)


def compare(model, num_rounds, num_steps):
    """Returns the ratios of the medians of whole steps, one for each round."""
    data = DataSpec(source="python-stdlib", seq_len=TOKENS, vocab_size=2048)
    job = Job(
        name="dropout",
        model=model,
        data=data,
        global_batch_size=ROWS,
        num_steps=1000,
    )
    with tempfile.TemporaryDirectory() as folder:
        hashed, drawn = contender(job, Path(folder)), contender(job, Path(folder), by_hash=False)
        rounds = [(median_s(hashed, num_steps), median_s(drawn, num_steps)) for _ in range(num_rounds)]
    return {
        "hashed_s": statistics.median(a for a, _ in rounds),
        "drawn_s": statistics.median(b for _, b in rounds),
        "ratios": sorted(a / b for a, b in rounds),
    }


def contender(job, folder, *, by_hash=True):
    """Returns a trainer in this process; `by_hash`: with hashed dropout, else drawn as in release 0.1."""
    order = GangOrder(
        purpose=TRAIN,
        job=job,
        technique=registry.dotted_path("single"),
        config={"micro_batch": ROWS, "recompute": "none"},
        slots=(Slot(kind="cpu", index=0),),
        folder=str(folder),
        cache_dir=str(folder / "cache"),
        last_step=job.total_steps,
    )
    ranks = RankContext(rank=0, num_ranks=1, device=torch.device("cpu"), mesh=None)
    find = trainers.draws_of
    if not by_hash:
        trainers.draws_of = lambda *_, **__: DrawSites()
    try:
        return trainers.Trainer(order, registry.load(order.technique), ranks, beat=lambda: None)
    finally:
        trainers.draws_of = find


def median_s(trainer, num_steps):
    trainer.step()
    seconds = []
    for _ in range(num_steps):
        began_s = time.perf_counter()
        trainer.step()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def line(row):
    low, middle, high = row["ratios"][0], statistics.median(row["ratios"]), row["ratios"][-1]
    return (
        f"| {row['name']} | {1000 * row['drawn_s']:.0f} ms | {1000 * row['hashed_s']:.0f} ms "
        f"| {middle:.2f} ({low:.2f} to {high:.2f}) |"
    )


def record(rows):
    """Writes the figures, and the table on the page."""
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({"date": date.today().isoformat(), "machine": platform.processor(), "rows": rows}, indent=1)
    )
    threads = f"{torch.get_num_threads()} threads"
    head = f"{date.today()}, {threads}, torch {torch.__version__}, {ROWS} rows of {TOKENS} tokens.\n"
    table = [
        "| model | torch's generator | by hash | ratio, median (range of the rounds) |",
        "| --- | ---: | ---: | ---: |",
    ]
    write_section("dropout", [head, *table, *map(line, rows)])


if __name__ == "__main__":
    main()
