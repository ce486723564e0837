"""`single` against Hugging Face's Trainer: seconds a step of the same model on the same rows, in alternation.

    python -m benchmarks.trainers [--rounds 5] [--steps 8]

Both run in one process with the same threads and take turns; each uses its fastest optimizer kernel. The medians of
whole steps (data, forward, backward, clipping, update) are compared within a round. Writes
benchmarks/results/trainers.json and the section of docs/benchmarks.md between the markers `<!-- trainers -->`.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

from benchmarks.page import write_section

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "trainers.json"
# (name, hidden size, layers, tokens a row, rows a step)
SIZES = [("small, 1.4 M", 128, 4, 128, 8), ("medium, 9 M", 320, 6, 128, 8), ("large, 29 M", 512, 8, 256, 4)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each contender a round; two more are not counted")
    arguments = parser.parse_args()
    rows = []
    for name, *size in SIZES:
        rows.append(compare(name, *size, num_rounds=arguments.rounds, num_steps=arguments.steps))
        print(line(rows[-1]), flush=True)
    record(rows)


def compare(name, hidden_size, num_layers, seq_len, batch_size, *, num_rounds, num_steps):
    """Compares one model: ratios of medians, one for each round."""
    with tempfile.TemporaryDirectory() as folder:
        job = llama(hidden_size, num_layers, seq_len, batch_size)
        ours, theirs = Ours(job, Path(folder)), Theirs(job, Path(folder))
        rounds = [
            {"ours_s": statistics.median(ours.steps(num_steps)), "theirs_s": statistics.median(theirs.steps(num_steps))}
            for _ in range(num_rounds)
        ]
    return {
        "name": name,
        "rows_tokens": [batch_size, seq_len],
        "ours_s": statistics.median(r["ours_s"] for r in rounds),
        "theirs_s": statistics.median(r["theirs_s"] for r in rounds),
        "ratios": sorted(r["theirs_s"] / r["ours_s"] for r in rounds),
    }


def llama(hidden_size, num_layers, seq_len, batch_size):
    """Returns a job on text that every machine has."""
    from ringmaster.techniques import DataSpec, Job, ModelSpec, OptimizerSpec

    config = {
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": hidden_size // 64,
        "max_position_embeddings": seq_len,
    }
    return Job(
        name="llama",
        model=ModelSpec(architecture="LlamaForCausalLM", config=config),
        data=DataSpec(source="python-stdlib", seq_len=seq_len),
        optimizer=OptimizerSpec(name="adamw", lr=3e-4),
        clip_grad_norm=1.0,
        global_batch_size=batch_size,
        num_steps=100_000,
    )


class Ours:
    """The job under `single`, as a gang of one trains it; cores: empty for all."""

    def __init__(self, job, folder, cores=()):
        from ringmaster.techniques import registry
        from ringmaster.techniques.processes.order import TRIAL, GangOrder, Slot
        from ringmaster.techniques.processes.ranks import join
        from ringmaster.techniques.training.trainer import Trainer

        path = registry.dotted_path("single")
        order = GangOrder(
            purpose=TRIAL,
            job=job,
            technique=path,
            config={"micro_batch": job.global_batch_size, "recompute": "none"},
            slots=(Slot(kind="cpu", index=0, cores=tuple(cores) or tuple(sorted(os.sched_getaffinity(0)))),),
            folder=str(folder),
            cache_dir=str(folder),
        )
        ranks = join(order, 0, num_ranks=1, axes={})
        self.trainer = Trainer(order, registry.load(path), ranks, beat=lambda: None)

    def steps(self, num):
        """Returns the seconds of `num` steps, after two warm-up steps."""
        return [report.seconds for report in self.reports(num + 2)][2:]

    def reports(self, num):
        """Returns the loss and the seconds of each of the next `num` steps."""
        return [self.trainer.step() for _ in range(num)]


class Theirs:
    """The job under Hugging Face's Trainer, with the same model, rows, threads, clipping and optimizer kernel."""

    def __init__(self, job, folder):
        from ringmaster.techniques.data import open_data, prepare
        from ringmaster.techniques.models.build import build_model

        prepared = prepare(job.data, cache_dir=folder)
        self.data, _ = open_data(job.data, cache_dir=folder, prepared=prepared)
        self.model = build_model(job.model, data=prepared, seed=job.seed)
        self.job, self.folder = job, folder

    def steps(self, num):
        """Returns the seconds from the end of each step to the end of the next."""
        from transformers import Trainer, TrainingArguments

        clock = stopwatch()
        arguments = TrainingArguments(**settings(self.job, self.folder, num + 2))
        Trainer(model=self.model, args=arguments, train_dataset=self.data, callbacks=[clock]).train()
        return clock.seconds()[1:]


def settings(job, folder, num_steps):
    """Returns arguments of any trainer that inherits from Hugging Face's, for `num_steps` steps of a job."""
    return {
        "output_dir": str(folder / "trainer"),
        "per_device_train_batch_size": job.global_batch_size,
        "max_steps": num_steps,
        "learning_rate": job.optimizer.lr,
        "lr_scheduler_type": "constant",
        "max_grad_norm": job.clip_grad_norm,
        "optim": "adamw_torch_fused",
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": [],
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def stopwatch():
    """Returns a callback that records when steps end."""
    from transformers import TrainerCallback

    class Stopwatch(TrainerCallback):
        def __init__(self):
            self.ends = []

        def on_step_end(self, *_, **__):
            self.ends.append(time.perf_counter())

        def seconds(self):
            """Returns the seconds from the end of each step to the end of the next."""
            return [b - a for a, b in itertools.pairwise(self.ends)]

    return Stopwatch()


def line(row):
    least, middle, most = row["ratios"][0], statistics.median(row["ratios"]), row["ratios"][-1]
    batch, tokens = row["rows_tokens"]
    return (
        f"| {row['name']} | {batch} x {tokens} | {1e3 * row['ours_s']:.0f} ms | {1e3 * row['theirs_s']:.0f} ms | "
        f"{middle:.2f} | {least:.2f} to {most:.2f} |"
    )


def record(rows):
    """Writes the figures, and the section of the page between the markers."""
    said = stamped(rows)
    RESULTS.write_text(json.dumps(said, indent=1) + "\n")
    table = [
        f"`single` compared with Hugging Face's Trainer on {said['cores']} cores, {said['date']}: medians of whole",
        "steps of a Llama in fp32 with AdamW, in alternation in one process. Above 1, ours is quicker.",
        "",
        "| parameters | rows x tokens | ours | Trainer | Trainer / ours | over the rounds |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *map(line, rows),
    ]
    write_section("trainers", table)


def stamped(rows):
    """Returns rows with their date and machine."""
    return {
        "date": str(date.today()),
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "rows": rows,
    }


if __name__ == "__main__":
    main()
