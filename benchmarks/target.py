"""Batch sizes that are chosen on the way to a target, compared with those that an exhaustive search would choose.

usage: python -m benchmarks.target [--tasks TASK ...] [--seeds N] [--replay]

Three tasks: an MLP on digits (with SGD and AdamW), a Llama on bytes of text, and a BERT that classifies made-up
sequences. A run with batches of 16 sets the target: what it reaches after its steps. Runs with each other batch size,
and the learning rate that the noise scale of the first run's probe calls for, determine how many steps each takes; and
a run that changes its batch size after the probe, by the code that changes it in a batch, what the choice is worth.

Seconds are those of a model, a + c B a step, whose figures are fitted to the processor time of steps: another process
on the machine makes no difference. Each row is written to benchmarks/results/target.json, with the noise that was
measured, and to the table between the markers in docs/benchmarks.md. What is recorded is not measured again: the
predictions of all rows are those of the present formulas.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.page import write_section
from ringmaster.codec import from_json
from ringmaster.features.target.execute import MIN_GAIN, choose_variant
from ringmaster.features.target.job import Phases, Target, Variables
from ringmaster.features.target.noise_scale import (
    GradientNoise,
    NoiseBlock,
    learning_rate_factor,
    noise_blocks,
    probe_steps,
    ratio_interval,
    steps_ratio,
)
from ringmaster.techniques import DataSpec, EvaluationSpec, Job, ModelSpec, OptimizerSpec, registry
from ringmaster.techniques.job import TrainingPhase
from ringmaster.techniques.processes.order import TRAIN, GangOrder, Slot
from ringmaster.techniques.processes.ranks import alone
from ringmaster.techniques.training.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "target.json"
OWN, SIZES = 16, (16, 32, 64, 128)
EVALUATED_SAMPLES = 160  # between two evaluations
LONGEST = 1.5  # of the samples in proportion to which a larger batch is given steps, before it counts as not there
TIMED_STEPS = 30
SEEDS = 3


class Mlp(nn.Module):
    """Two hidden layers on the pixels of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Returns logits [batch, 10]."""
        logits: Tensor = self.layers(pixel_values.flatten(1))
        return logits


class Majorities(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Made-up sequences of 24 of 64 tokens; the label is which quarter of the vocabulary has most of them."""

    num_labels = 4

    def __init__(self, size: int, *, seed: int) -> None:
        self.tokens = torch.randint(64, (size, 24), generator=torch.Generator().manual_seed(seed))
        self.labels = nn.functional.one_hot(self.tokens // 16, 4).sum(1).argmax(1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def majorities() -> tuple[Majorities, Majorities]:
    """Returns the data (training, held_out)."""
    return Majorities(8192, seed=0), Majorities(512, seed=1)


def mlp() -> nn.Module:
    """Returns the model of the digits."""
    return Mlp()


def cross_entropy(logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Returns the loss of the MLP as (sum, count)."""
    return nn.functional.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits)


_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_DIGITS = {
    "model": ModelSpec(factory="benchmarks.target:mlp"),
    "data": DataSpec(source="digits"),
    "loss": "benchmarks.target:cross_entropy",
}
TASKS: dict[str, dict[str, Any]] = {
    "digits, SGD": {**_DIGITS, "optimizer": OptimizerSpec(name="sgd", lr=0.05), "num_steps": 1000},
    "digits, AdamW": {**_DIGITS, "optimizer": OptimizerSpec(lr=1e-3), "num_steps": 800},
    "Llama, AdamW": {
        "model": ModelSpec(architecture="LlamaForCausalLM", config={**_TINY, "num_key_value_heads": 2}),
        "data": DataSpec(source="python-stdlib", seq_len=64, vocab_size=257),
        "optimizer": OptimizerSpec(lr=2e-3),
        "num_steps": 800,
    },
    "BERT, AdamW": {
        "model": ModelSpec(
            architecture="BertForSequenceClassification",
            config={**_TINY, "vocab_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        ),
        "data": DataSpec(factory="benchmarks.target:majorities"),
        "optimizer": OptimizerSpec(lr=1e-3),
        "num_steps": 1000,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--replay", action="store_true", help="measure nothing: write the tables of what is recorded")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = recorded()
    with tempfile.TemporaryDirectory() as folder:
        for task, seed in product(chosen.tasks, range(0 if chosen.replay else chosen.seeds)):
            if not any((row["task"], row["seed"]) == (task, seed) for row in rows):
                rows.append({"task": task, "seed": seed, **measure(task, seed, Path(folder) / f"{task}-{seed}")})
                print(line(rows[-1]), flush=True)
                record(rows)
    if not rows:
        parser.error(f"{RESULTS} has no rows: leave --replay out")
    record(rows)
    print("\n".join([*summary(rows), "", *table(rows)]))


def recorded() -> list[dict[str, Any]]:
    """Returns the rows of earlier runs; those of releases that stored no noise are measured again."""
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    for row in (rows := [row for row in rows if "blocks" in row]):
        for key in ("steps", "step_s"):
            row[key] = {int(size): value for size, value in row[key].items()}
    return rows


class Run:
    """A job that trains in this process, alone on one thread."""

    def __init__(self, job: Job, folder: Path) -> None:
        order = GangOrder(
            purpose=TRAIN,
            job=job,
            technique=registry.dotted_path("single"),
            config={"micro_batch": max(SIZES), "recompute": "none"},
            slots=(Slot(kind="cpu", index=0),),
            folder=str(folder),
            cache_dir=str(folder.parent / "cache"),
            checkpoint_dir=str(folder / "checkpoints"),
            last_step=job.total_steps,
        )
        self.job, self.folder, self.noise = job, folder, list[GradientNoise]()
        technique = registry.load(order.technique)
        self.trainer = Trainer(order, technique, alone(torch.device("cpu")), beat=lambda: None)
        self.trainer.restore(self.folder / "checkpoints")

    def losses(self, last_step: int) -> Iterator[tuple[int, float]]:
        """Trains up to a step; yields the step and the loss of each evaluation on the way."""
        while self.trainer.next_step < last_step:
            report = self.trainer.step()
            self.noise += [from_json(GradientNoise, each) for each in report.measurements]
            if self.job.is_evaluated(self.trainer.next_step) or self.trainer.next_step == last_step:
                yield self.trainer.next_step, self.trainer.evaluate()["loss"]

    def step_s(self) -> float:
        """Returns the processor time of a step, of several those that others have disturbed least."""
        times = []
        for _ in range(TIMED_STEPS):
            began_s = time.thread_time()
            self.trainer.step()
            times.append(time.thread_time() - began_s)
        return float(np.quantile(times, 0.2))


def job_of(task: str, seed: int, *, size: int = OWN, num_steps: int | None = None) -> Job:
    """Returns the job of a task with batches of `size`."""
    values = TASKS[task]
    evaluation = EvaluationSpec(every_steps=max(1, EVALUATED_SAMPLES // size), max_batches=max(1, 512 // size))
    job = Job(name="job", seed=seed, global_batch_size=size, evaluation=evaluation, **values)
    return replace(job, num_steps=num_steps or job.num_steps)


def measure(task: str, seed: int, folder: Path) -> dict[str, Any]:
    """Returns the figures of a task and a seed."""
    own = job_of(task, seed)
    step_s = dict(zip(SIZES, step_costs(task, folder), strict=True))
    varying = own.with_features(Variables(global_batch_size=SIZES), Target(metric="loss", at_most=0.0))
    first, probe = probe_steps(own.total_steps), Run(varying, folder / "probe")
    early = dict(probe.losses(first))
    probe.trainer.save(folder / "probe" / "checkpoints")
    measured = [each for each in probe.noise if each.step < int(0.9 * first)]
    blocks = noise_blocks(measured)
    # The target is what the last steps reach on average: a single evaluation may be lucky.
    losses = {**early, **dict(Run(own, folder / "own").losses(own.total_steps))}
    target = statistics.fmean([*losses.values()][-5:])
    steps = {OWN: reached(losses.items(), target, default=own.total_steps)}
    for size in SIZES[1:]:
        factor = learning_rate_factor(blocks, size=OWN, new_size=size)
        job = job_of(task, seed, size=size, num_steps=round(LONGEST * own.total_steps))
        job = replace(job, optimizer=replace(job.optimizer, lr=job.optimizer.lr * factor))
        steps[size] = reached(Run(job, folder / str(size)).losses(job.total_steps), target, default=job.total_steps)
    seconds = {size: steps[size] * step_s[size] for size in SIZES}
    choice = choose_variant(
        varying, measured, first_step=first, step_s={(size, "fp32"): cost for size, cost in step_s.items()}
    )
    size = min(
        SIZES, key=lambda each: step_s[each] * (steps_ratio(blocks, size=OWN, new_size=each) if each != OWN else 1)
    )
    return {
        "noise_scale": choice.noise_scale,
        "target": target,
        "steps": steps,
        "blocks": [(block.signal, block.noise) for block in blocks],
        "step_s": step_s,
        "best": min(seconds, key=lambda each: seconds[each]),
        "chosen": size,
        "regret": seconds[size] / min(seconds.values()),
        "gain": changed_gain(varying, choice.phases(own), folder, target, early=early, own=steps[OWN], step_s=step_s),
        "promised": choice.gain,
    }


def reached(losses: Any, target: float, *, default: int) -> int:
    """Returns the step of the first evaluation that has reached the target."""
    return next((step for step, loss in losses if loss <= target), default)


def changed_gain(
    job: Job,
    phases: tuple[TrainingPhase, ...],
    folder: Path,
    target: float,
    *,
    early: dict[int, float],
    own: int,
    step_s: dict[int, float],
) -> float:
    """Returns by what factor the target is reached sooner by a run that changes its batch size after the probe."""
    if not phases or any(loss <= target for loss in early.values()):
        return 1.0
    changed = replace(job, num_steps=phases[-1].num_steps).with_features(Phases(phases=phases))
    first, size = phases[-1].first_step, phases[-1].global_batch_size
    last = reached(Run(changed, folder / "probe").losses(changed.total_steps), target, default=0)
    # A job that has not reached its target is begun again with its own batch size.
    rest_s = (last - first) * step_s[size] if last else (changed.total_steps - first) * step_s[size] + own * step_s[OWN]
    return own * step_s[OWN] / (first * step_s[OWN] + rest_s)


def step_costs(task: str, folder: Path) -> list[float]:
    """Returns the seconds of a step for each batch size, by a line through the measured ones."""
    timed = [Run(job_of(task, 0, size=size, num_steps=10**6), folder / f"time-{size}").step_s() for size in SIZES]
    slope, start = np.polyfit(SIZES, timed, 1)
    return [float(max(start, 0.0) + slope * size) for size in SIZES]


def intervals(row: dict[str, Any]) -> dict[int, tuple[float, float, float]]:
    """Returns, by batch size, the least, the predicted and the greatest steps, by the formulas as they are now."""
    blocks, own = [NoiseBlock(signal=signal, noise=noise) for signal, noise in row["blocks"]], row["steps"][OWN]
    found = {}
    for size in SIZES[1:]:
        low, high = ratio_interval(blocks, size=OWN, new_size=size)
        found[size] = (low * own, steps_ratio(blocks, size=OWN, new_size=size) * own, high * own)
    return found


def inside(row: dict[str, Any]) -> list[bool]:
    """Returns of each batch size whether its steps lie in their interval."""
    return [low <= row["steps"][size] <= high for size, (low, _, high) in intervals(row).items()]


def line(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    steps = ", ".join(str(row["steps"][size]) for size in SIZES)
    predicted = ", ".join(f"{each:.0f}" for _, each, _ in intervals(row).values())
    return (
        f"| {row['task']} | {row['seed']} | {row['noise_scale']:.1f} | {steps} | {predicted} | "
        f"{sum(inside(row))} of {len(inside(row))} | {row['best']} | {row['chosen']} | "
        f"{row['regret']:.2f} | {row['promised']:.2f} | {row['gain']:.2f} |"
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the rows as lines of markdown."""
    return [
        f"| task | seed | noise scale | steps at {', '.join(map(str, SIZES))} | predicted | inside | best | chosen | "
        "regret | promised | sooner |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *map(line, rows),
    ]


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the figures that have goals."""
    regrets = [row["regret"] for row in rows]
    are_inside = [each for row in rows for each in inside(row)]
    ends = [(low / each, high / each) for row in rows for low, each, high in intervals(row).values()]
    low, high = map(statistics.median, zip(*ends, strict=True))
    digits = [row["gain"] for row in rows if row["task"].startswith("digits")]
    sooner = f"{min(digits):.2f} to {max(digits):.2f} times sooner on digits (goal 1.7)" if digits else ""
    return [
        f"Regret {statistics.median(regrets):.2f} in the median (goal 1.07), {max(regrets):.2f} at worst (goal 1.25); "
        f"{sum(are_inside)} of {len(are_inside)} numbers of steps inside the predicted interval (goal 9 of 10), which "
        f"is {low:.2f} to {high:.2f} times the prediction in the median; {sooner}. "
        f"Nothing changes for less than {MIN_GAIN:.0%}."
    ]


def record(rows: list[dict[str, Any]]) -> None:
    """Writes the measurements so far, so that an interrupted run keeps its rows."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    RESULTS.write_text(f'{{"date": "{date.today().isoformat()}", "rows": [\n{lines}\n]}}\n')
    runs = f"{date.today().isoformat()}, {len(rows)} of {SEEDS * len(TASKS)} runs."
    write_section("target", [runs, *summary(rows), "", *table(rows)])


if __name__ == "__main__":
    main()
