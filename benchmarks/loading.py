"""The gain of loading the next batch in a thread: steps with and without, of one job in one process, in alternation.

    python -m benchmarks.loading [--rounds 7] [--steps 8]

Samples wait, compute in numpy, are decoded from image files, or are tokens in memory. Where they wait or compute,
loading takes about as long as a step without it. Writes benchmarks/results/loading.json and the section of
docs/benchmarks.md between the markers `<!-- loading -->`.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.page import write_section
from ringmaster.techniques import DataSpec, Job, ModelSpec, registry
from ringmaster.techniques.processes.order import TRAIN, GangOrder, Slot
from ringmaster.techniques.processes.ranks import alone
from ringmaster.techniques.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "loading.json"
ROWS, NUM_SAMPLES = 8, 256
VIT = ModelSpec(
    architecture="ViTForImageClassification",
    config={
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 96,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
)
GPT2 = ModelSpec(
    architecture="GPT2LMHeadModel",
    config={"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 2},
)
# Name -> the model, how a sample is loaded, and the cores.
CASES = {
    "wait": (VIT, "wait", 2),
    "are tokens in memory": (GPT2, "tokens", 2),
    "compute in numpy": (VIT, "numpy", 2),
    "compute in numpy, one core": (VIT, "numpy", 1),
    "are decoded from PNG of 256 x 256 pixels": (VIT, "files", 2),
}


class Samples:
    """Images or tokens. seconds: of loading one of those that wait or compute; it may be set later."""

    def __init__(self, how, folder):
        self.how, self.folder, self.seconds = how, Path(folder), 0.0
        self.tokens = torch.randint(512, (NUM_SAMPLES, 32), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return NUM_SAMPLES

    def rows(self, indices):
        """Tokens as one batch, as all built-in kinds of data return them."""
        if self.how == "tokens":
            tokens = self.tokens[torch.as_tensor(indices)]
            return {"input_ids": tokens, "labels": tokens}
        return torch.utils.data.default_collate([self[index] for index in indices])

    def __getitem__(self, index):
        if self.how == "tokens":
            return {name: rows[0] for name, rows in self.rows([index]).items()}
        if self.how == "wait":
            time.sleep(self.seconds)
        elif self.how == "numpy":
            until_s, values = time.thread_time() + self.seconds, np.ones(1 << 16)
            while time.thread_time() < until_s:
                np.sqrt(values, out=values)
        if self.how == "files":
            with Image.open(self.folder / f"{index % 16}.png") as image:
                pixels = np.array(image.resize((32, 32)).convert("RGB"), dtype=np.float32).transpose(2, 0, 1) / 255
        else:
            pixels = np.full((3, 32, 32), index / NUM_SAMPLES, dtype=np.float32)
        return {"pixel_values": torch.from_numpy(pixels), "labels": torch.tensor(index % 2)}


def samples(how, folder):
    """Returns the job's data: training and held-out samples."""
    return Samples(how, folder), Samples(how, folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="of each contender a round; two more are not counted")
    arguments = parser.parse_args()
    rows, cores = [], sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(16):
            noise = np.random.default_rng(number).integers(0, 256, (256, 256, 3), dtype=np.uint8)
            Image.fromarray(noise).save(Path(folder) / f"{number}.png", compress_level=1)
        for name, (model, how, num_cores) in CASES.items():
            os.sched_setaffinity(0, cores[:num_cores])
            torch.set_num_threads(num_cores)
            rows.append({"name": name, **compare(model, how, Path(folder), arguments.rounds, arguments.steps)})
            print(line(rows[-1]), flush=True)
            record(rows)


def compare(model, how, folder, num_rounds, num_steps):
    """Returns the seconds a step with and without the thread, and their ratios in each round."""
    ahead, plain = contender(model, how, folder), contender(model, how, folder)
    plain._loader._is_thread_safe = False
    for trainer in (ahead, plain):
        trainer.step()
    compute_s = min(timed(plain, num_steps)[0] for _ in range(2))
    for trainer in (ahead, plain):
        trainer._training.seconds = compute_s / ROWS
    rounds = []
    for number in range(num_rounds):
        order = (ahead, plain) if number % 2 else (plain, ahead)
        measured = {trainer is ahead: timed(trainer, num_steps) for trainer in order}
        rounds.append((*measured[True], *measured[False]))
    return {
        "ahead_s": statistics.median(each[0] for each in rounds),
        "plain_s": statistics.median(each[2] for each in rounds),
        "ratios": sorted(each[2] / each[0] for each in rounds),
        "processor_ratio": statistics.median(each[3] / each[1] for each in rounds),
        "is_ahead": ahead._loader.is_ahead,
    }


def contender(model, how, folder):
    """Returns a trainer in this process."""
    job = Job(
        name="loading",
        model=model,
        data=DataSpec(factory="benchmarks.loading:samples", kwargs={"how": how, "folder": str(folder)}),
        global_batch_size=ROWS,
        num_steps=100_000,
    )
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
    return Trainer(order, registry.load(order.technique), alone(torch.device("cpu")), beat=lambda: None)


def timed(trainer, num_steps):
    """Returns seconds and processor seconds a step."""
    for _ in range(2):
        trainer.step()
    wall_s, processor_s = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        trainer.step()
    spent = (time.perf_counter() - wall_s) / num_steps, (time.process_time() - processor_s) / num_steps
    trainer._loader.settle()  # the other contender seeds the generators of this process
    return spent


def line(row):
    low, middle, high = row["ratios"][0], statistics.median(row["ratios"]), row["ratios"][-1]
    return (
        f"| {row['name']} | {'yes' if row['is_ahead'] else 'no'} | {1e3 * row['plain_s']:.1f} ms "
        f"| {1e3 * row['ahead_s']:.1f} ms | {middle:.2f} ({low:.2f} to {high:.2f}) | {row['processor_ratio']:.2f} |"
    )


def record(rows):
    """Writes the figures, and the table on the page."""
    load = os.getloadavg()[0]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"date": date.today().isoformat(), "load": round(load, 1), "rows": rows}, indent=1))
    head = f"{date.today()}, 2 cores at a load of {load:.0f}, torch {torch.__version__}, {ROWS} samples a step.\n"
    table = [
        "| samples | ahead | a step without | with the thread | ratio, median (range) | ratio of processor time |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    write_section("loading", [head, *table, *map(line, rows)])


if __name__ == "__main__":
    main()
