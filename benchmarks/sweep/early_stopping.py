"""Benchmark of early stopping: what each policy costs, and what it loses, on recorded learning curves.

    python -m benchmarks.sweep.early_stopping             # trains the curves, ten seconds
    python -m benchmarks.sweep.early_stopping --quick     # few of them; writes nothing

A population of configurations of a small network on the 8x8 digits is trained to the end, under two training seeds and
two schedules, with an evaluation at each hundredth of the steps. Draws of thirty of them are then replayed under each
policy by its own code (`StoppingPolicy.judge`), two at a time. The cost is the share of all steps that are trained;
the regret is how much more the winner loses than the best of the draw trained completely.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from os import sched_getaffinity
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.page import write_section
from ringmaster.tasks.sweeping.early_stopping import StoppingPolicy, SweepTrial

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "sweeps.json"
NUM_STEPS, BATCH, POPULATION = 300, 16, 90
NUM_DRAWS, NUM_TRIALS, NUM_SLOTS = 10, 30, 2
GOALS = {"cost": 0.25, "regret": 0.01}
POLICIES = {
    "cut": StoppingPolicy(),
    "asha": StoppingPolicy(policy="asha"),
    "halving": StoppingPolicy(policy="halving"),
    "median": StoppingPolicy(policy="median"),
    "none": StoppingPolicy(policy="none"),
}

Curve = Mapping[int, float]  # the held-out loss by step


def main() -> None:
    """Trains the curves, replays the draws, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few configurations and draws; writes nothing")
    quick = parser.parse_args().quick
    keys = [("constant", 0)] if quick else [(kind, seed) for kind in ("constant", "cosine") for seed in (0, 1)]
    curves = {key: trained_curves(*key, num=NUM_TRIALS if quick else POPULATION) for key in keys}
    rows = measured(curves, num_draws=1 if quick else NUM_DRAWS)
    print(table(rows))
    if not quick:
        RESULTS.write_text(json.dumps({"date": date.today().isoformat(), "rows": rows}, indent=1) + "\n")
        write_section("sweeps", table(rows))


def trained_curves(kind: str, seed: int, *, num: int) -> list[Curve]:
    """Returns the learning curves of configurations that differ in rate, decay and first weights."""
    steps = range(NUM_STEPS // 100, NUM_STEPS + 1, NUM_STEPS // 100)
    losses = trained_losses(kind, seed, num=num, num_held_out=397, steps=steps)
    return [{step: float(each[number].mean()) for step, each in losses.items()} for number in range(num)]


def trained_losses(kind: str, seed: int, *, num: int, num_held_out: int, steps: Collection[int]) -> dict[int, Any]:
    """Returns the loss of each held-out row after `steps`, [configurations, rows] by step.

    The configurations differ in rate, decay and first weights, and are trained side by side.

    Each is a network of its own: the batched products mix nothing, and AdamW updates each element by itself.
    """
    import torch
    from sklearn.datasets import load_digits
    from torch.nn import functional

    torch.set_num_threads(1)
    draw, width = Random(0), 48
    drawn = [(10 ** draw.uniform(-4.5, -0.7), 10 ** draw.uniform(-4, -1), draw.uniform(0.3, 3.0)) for _ in range(num)]
    rates, decays, scales = (torch.tensor(each).view(num, 1, 1) for each in zip(*drawn, strict=True))
    digits = load_digits()
    rows, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.Generator().manual_seed(seed)
    first = torch.randn(num, 64, width, generator=order) * scales / 8
    second = torch.randn(num, width, 10, generator=order) * scales / width**0.5
    weights = [first, torch.zeros(num, 1, width), second, torch.zeros(num, 1, 10)]
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]

    def losses(at: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(rows[at] @ weights[0] + weights[1])
        logits = hidden @ weights[2] + weights[3]
        return functional.cross_entropy(logits.flatten(0, 1), labels[at].repeat(num), reduction="none").view(num, -1)

    result, num_training = {}, len(rows) - num_held_out
    for step in range(1, NUM_STEPS + 1):
        factor = (1 + math.cos(math.pi * (step - 1) / NUM_STEPS)) / 2 if kind == "cosine" else 1.0
        for weight in weights:
            weight.requires_grad_()
        loss = losses(torch.randint(num_training, (BATCH,), generator=order)).mean(1).sum()
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
                mean, square = moments[i]
                mean.lerp_(gradient, 0.1)
                square.lerp_(gradient**2, 0.001)
                update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
                weights[i] = weight - factor * rates * (update + decays * weight)
            if step in steps:
                result[step] = losses(torch.arange(num_training, len(rows))).numpy()
    return result


def measured(curves: Mapping[tuple[str, int], Sequence[Curve]], *, num_draws: int) -> list[dict]:
    """Returns what each policy costs and loses, by schedule and training seed, over the draws."""
    result = []
    for name, policy in POLICIES.items():
        for (kind, seed), population in curves.items():
            draws = [Random(number).sample(population, NUM_TRIALS) for number in range(num_draws)]
            pairs = [replayed(policy, draw) for draw in draws]
            regrets = [regret for _, regret in pairs]
            result.append(
                {
                    "policy": name,
                    "schedule": kind,
                    "seed": seed,
                    "cost": statistics.fmean(cost for cost, _ in pairs),
                    "regret": statistics.fmean(regrets),
                    "worst": max(regrets),
                    "kept": sum(regret == 0 for regret in regrets),
                    "draws": num_draws,
                }
            )
    return result


def replayed(policy: StoppingPolicy, curves: Sequence[Curve]) -> tuple[float, float]:
    """Returns the share of the steps that a policy trains, and the regret of its winner."""
    *_, trials = played(policy, curves)
    last = {n: curve[NUM_STEPS] for n, curve in enumerate(curves) if math.isfinite(curve[NUM_STEPS])}
    won = min(last[n] for n in last if NUM_STEPS in trials[n].scores)
    return num_trained(trials) / (len(curves) * NUM_STEPS), won / min(last.values()) - 1


def num_trained(trials: Sequence[SweepTrial]) -> int:
    """Returns how many steps were trained."""
    return sum(max(trial.scores, default=0) for trial in trials)


def played(policy: StoppingPolicy, curves: Sequence[Curve]) -> Iterator[list[SweepTrial]]:
    """Yields the states of the trials after each time that the policy was asked.

    Trials continue one evaluation at a time, those that were started first first, `NUM_SLOTS` of them side by side.
    """
    first = policy.rungs(NUM_STEPS)[0]
    goals, steps, stopped = dict.fromkeys(range(len(curves)), first), dict.fromkeys(range(len(curves)), 0), set()
    every = NUM_STEPS // 100
    while True:
        running = [n for n in goals if n not in stopped and steps[n] < goals[n]][:NUM_SLOTS]
        for number in running:
            steps[number] = min(steps[number] + every, goals[number])
        trials = [
            SweepTrial(
                name=str(n),
                total=NUM_STEPS,
                goal=goals[n],
                scores={step: _score(loss) for step, loss in curve.items() if step <= steps[n]},
                has_ended=n in stopped or steps[n] >= NUM_STEPS,
            )
            for n, curve in enumerate(curves)
        ]
        decisions = policy.judge(trials, num_slots=NUM_SLOTS)
        goals |= {int(name): goal for name, goal in decisions.goals.items()}
        stopped |= {int(name) for name in decisions.stops}
        yield [
            replace(trial, goal=goals[n], has_ended=trial.has_ended or n in stopped) for n, trial in enumerate(trials)
        ]
        if not running and not decisions.goals and not decisions.stops:
            return


def _score(loss: float) -> float:
    return -loss if math.isfinite(loss) else -math.inf


def table(rows: Sequence[Mapping]) -> str:
    """Returns the figures as a table in Markdown, with what was measured."""
    lines = []
    for name in POLICIES:
        own = [row for row in rows if row["policy"] == name]
        kept, draws = sum(row["kept"] for row in own), sum(row["draws"] for row in own)
        lines.append(
            f"| {name} | {statistics.fmean(row['cost'] for row in own):.0%} | "
            f"{statistics.fmean(row['regret'] for row in own):.1%} | "
            f"{min(row['regret'] for row in own):.1%} to {max(row['regret'] for row in own):.1%} | "
            f"{max(row['worst'] for row in own):.1%} | {kept} of {draws} |"
        )
    machine = f"{len(sched_getaffinity(0))} cores, {platform.machine()}"
    return f"""{date.today().isoformat()}, {machine}; {NUM_DRAWS} draws of {NUM_TRIALS} configurations of a small
network on digits, {NUM_STEPS} steps each, under constant and cosine rates and two training seeds; goals of `cut`: at
most {GOALS["cost"]:.0%} of the steps, and a mean regret of {GOALS["regret"]:.0%}.

| policy | steps trained | mean regret | by schedule and seed | worst | best one kept |
|---|---:|---:|---:|---:|---:|
{chr(10).join(lines)}
"""


if __name__ == "__main__":
    main()
