"""Communication over a slow link: `zero2` with and without overlap, and exact `ddp` against ordinary `ddp`.

    python -m benchmarks.overlap [--rate 200mbit] [--rounds 5]     (as root: it makes network namespaces)

Two ranks run in network namespaces of their own. Virtual interfaces connect them, limited to the rate by a token
bucket (tbf) on either side. All contenders run in the same two processes and take turns of some steps each; seconds a
step are compared within a round. Writes benchmarks/results/overlap.json and the section of docs/benchmarks.md between
the markers `<!-- overlap -->`.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "overlap.json"
GOAL, EXACT_GOAL = 1.6, 1.3
WITHOUT, WITH, ORDINARY, EXACT = "`zero2` without overlap", "`zero2`", "`ddp`", "`ddp`, `exact: true`"
SEQ_LEN, VOCAB_SIZE, NUM_SAMPLES = 256, 1024, 4096
BUCKET_BYTES = 1_200_000
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": SEQ_LEN,
}
STEPS_A_ROUND, CHUNKS_A_RANK = 4, 2


class Tokens:
    """Random tokens: speed does not depend on their values."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        import torch

        draw = torch.Generator().manual_seed(index)
        row = torch.randint(VOCAB_SIZE, (SEQ_LEN,), generator=draw)
        return {"input_ids": row, "labels": row}


def tokens():
    """Returns the job's data: training and held-out samples."""
    return Tokens(), Tokens()


def rank_main(rank, *, folder, num_rounds, rows):
    """Trains one rank under all contenders in turn; rank 0 prints the seconds and sent bytes a step of each round."""
    import psutil

    from ringmaster.techniques import DataSpec, Job, ModelSpec, registry
    from ringmaster.techniques.processes.order import TRIAL, GangOrder, Slot
    from ringmaster.techniques.processes.ranks import join
    from ringmaster.techniques.training.trainer import Trainer

    job = Job(
        name="overlap",
        model=ModelSpec(architecture="LlamaForCausalLM", config={**MODEL, "vocab_size": VOCAB_SIZE}),
        data=DataSpec(factory="overlap:tokens"),
        global_batch_size=2 * rows,
        num_steps=10_000,
    )
    cores = sorted(os.sched_getaffinity(0))
    slots = tuple(Slot(kind="cpu", index=i, cores=(cores[i % len(cores)],)) for i in range(2))
    chunk = rows // CHUNKS_A_RANK
    exact = replace(job, exact=True, exact_chunk=chunk)
    contenders = {
        WITHOUT: (job, "zero2", {"micro_batch": rows, "bucket_bytes": BUCKET_BYTES, "overlap": False}),
        WITH: (job, "zero2", {"micro_batch": rows, "bucket_bytes": BUCKET_BYTES, "overlap": True}),
        ORDINARY: (job, "ddp", {"micro_batch": rows}),
        EXACT: (exact, "ddp", {"micro_batch": chunk}),
    }
    orders = {
        name: GangOrder(
            purpose=TRIAL,
            job=job,
            technique=registry.dotted_path(technique),
            config={"recompute": "none", **config},
            slots=slots,
            folder=str(folder),
            cache_dir=str(folder / "cache"),
        )
        for name, (job, technique, config) in contenders.items()
    }
    ranks = join(orders[WITH], rank, num_ranks=2, axes={"dp_replicate": 2})
    trainers = {
        name: Trainer(order, registry.load(order.technique), ranks, beat=lambda: None) for name, order in orders.items()
    }

    def num_bytes():
        return psutil.net_io_counters(pernic=True)["slow"].bytes_sent

    def measure(trainer, num_steps):
        ranks.agree(True)
        started_s, sent_before = time.perf_counter(), num_bytes()
        for _ in range(num_steps):
            trainer.step()
        getattr(trainer.model, "wait_for_weights", lambda: None)()
        seconds = ranks.max(time.perf_counter() - started_s) / num_steps
        return {"seconds": seconds, "megabytes": (num_bytes() - sent_before) / num_steps / 1e6}

    for trainer in trainers.values():
        measure(trainer, 1)
    for _ in range(num_rounds):
        result = {name: measure(trainer, STEPS_A_ROUND) for name, trainer in trainers.items()}
        if rank == 0:
            print(json.dumps(result), flush=True)
    ranks.agree(True)
    os._exit(0)


@contextmanager
def two_namespaces(rate):
    """Yields the names of two network namespaces, joined by a link that carries `rate` in either direction."""
    names = [f"overlap-{os.getpid()}-{i}" for i in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "slow", "netns", names[0], "type", "veth", "peer", "slow", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", "slow")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "slow", "up")
            limit = ["qdisc", "add", "dev", "slow", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
            subprocess.run(["tc", "-n", name, *limit], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


def lines_of_ranks(*arguments, rate):
    """Runs a Python program as two ranks, one in each namespace; returns the JSON lines that rank 0 prints."""
    with two_namespaces(rate) as names, tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "slow", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        command = [sys.executable, *arguments, "--folder", folder]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command, "--rank", str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(names)
        ]
        try:
            output, _ = ranks[0].communicate(timeout=3000)
            if ranks[0].returncode or ranks[1].wait(timeout=60):
                raise RuntimeError("a rank failed; what it said is above")
        finally:
            for rank in ranks:
                rank.kill()
        return [json.loads(line) for line in output.splitlines()]


def write(rounds, *, rate, rows):
    """Writes the result as JSON, and as a table in the docs."""
    middle = {
        name: {key: statistics.median(one[name][key] for one in rounds) for key in rounds[0][name]}
        for name in rounds[0]
    }

    def ratio(name, other, key="seconds"):
        return statistics.median(one[name][key] / one[other][key] for one in rounds)

    gain, slower = ratio(WITHOUT, WITH), ratio(EXACT, ORDINARY)
    result = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, shared",
        "rate": rate,
        "rows_a_rank": rows,
        "bucket_bytes": BUCKET_BYTES,
        "model": MODEL,
        "rounds": rounds,
        "median": middle,
        "gain_of_overlap": gain,
        "exact": {"seconds": slower, "bytes": ratio(EXACT, ORDINARY, "megabytes")},
        "goals": {"gain_of_overlap": GOAL, "exact": EXACT_GOAL},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    table = "\n".join(f"| {name} | {one['seconds']:.2f} | {one['megabytes']:.1f} |" for name, one in middle.items())
    text = f"""{result["date"]}, {result["machine"]}; {rate} between two ranks of a Llama of
{MODEL["num_hidden_layers"]} layers and width {MODEL["hidden_size"]}, {rows} x {SEQ_LEN} tokens a rank, exact steps in
{CHUNKS_A_RANK} chunks of them, buckets of {BUCKET_BYTES / 1e6:g} MB; medians of {len(rounds)} rounds of
{STEPS_A_ROUND} steps.

| | seconds a step | MB sent a step and rank |
|---|---|---|
{table}

With overlap {gain:.2f} times as fast (goal {GOAL}). Exact steps take {slower:.2f} times an ordinary one's seconds and
{result["exact"]["bytes"]:.2f} times its bytes (goal at most {EXACT_GOAL}).
"""
    from benchmarks.page import write_section  # ranks run this file by its path, without the package

    write_section("overlap", text)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="200mbit", help="of the link, as tc reads it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8, help="samples a rank and step: how much there is to compute")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.rank, folder=given.folder, num_rounds=given.rounds, rows=given.rows)
    if os.geteuid() != 0:
        sys.exit("network namespaces need root. To fix: run it with sudo")
    rounds = lines_of_ranks(__file__, "--rounds", str(given.rounds), "--rows", str(given.rows), rate=given.rate)
    result = write(rounds, rate=given.rate, rows=given.rows)
    print(json.dumps({key: result[key] for key in ("median", "gain_of_overlap", "exact")}, indent=1))


if __name__ == "__main__":
    main()
