"""Simulation of the expected gain of a sweep's other trials: is its interval right, and what does ending by it save?

    python -m benchmarks.sweep.expected_gain             # a minute
    python -m benchmarks.sweep.expected_gain --quick     # few sweeps; writes nothing

Sweeps of forty trials are replayed. Final scores are drawn from distributions; proposed by TPE, which is told the value
of a function with noise; or of recorded learning curves on the 8x8 digits, under policies of early stopping. The
estimate is the product's own (`gain_of`). Whenever four more trials have ended, it is compared with the gain that the
others have really brought in the end. A sweep ends at the first of these moments at which the rule proposes it; what
that saves is the share of the steps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from random import Random

from benchmarks.page import write_section
from benchmarks.sweep.early_stopping import NUM_STEPS, num_trained, played, trained_curves
from ringmaster.features.expected_gain.estimate import MIN_FINALS, ExpectedGain
from ringmaster.features.expected_gain.sweep import DEFAULT_GAIN, gain_of
from ringmaster.tasks.sweeping.early_stopping import StoppingPolicy, SweepTrial
from ringmaster.tasks.sweeping.ranking import Ranking
from ringmaster.tasks.sweeping.sampling import RANDOM, TPE, ProposedTrial, propose
from ringmaster.tasks.sweeping.space import Range
from ringmaster.tasks.sweeping.spec import SweepSpec
from ringmaster.tasks.sweeping.stop_rules import SweepProgress

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "expected_gain.json"
NUM_TRIALS, NUM_SWEEPS, NUM_SLOW_SWEEPS = 40, 40, 12
EVERY = 4  # trials that end between two estimates
GAINS = (DEFAULT_GAIN, 0.005, 0.02)
DISTRIBUTIONS: Mapping[str, Callable[[Random], float]] = {
    "loss, 1 parameter matters": lambda draw: 0.3 + draw.uniform(-1, 1) ** 2 + abs(draw.gauss(0, 0.005)),
    "loss, 2 parameters": lambda draw: 0.3 + sum(draw.uniform(-1, 1) ** 2 for _ in range(2)),
    "loss, 4 parameters": lambda draw: 0.3 + sum(draw.uniform(-1, 1) ** 2 for _ in range(4)),
    "loss, chance alone": lambda draw: draw.gauss(1.0, 0.02),
    "loss, no bound": lambda draw: 5.0 + math.log(-math.log(1.0 - draw.random())),
    "error on 400 rows": lambda draw: round((0.05 + 0.1 * draw.random() ** 2) * 400) / 400,
}
TPE_SPACE = tuple(Range(key=f"optimizer.x{i}", low=-1.0, high=1.0) for i in range(3))


@dataclass(frozen=True, kw_only=True)
class SimulatedMoment:
    """A moment of a simulated sweep.

    expected: None where too few trials have ended.
    gain: what the other trials have really brought in the end. share: of the steps, what had been trained.
    """

    expected: ExpectedGain | None
    gain: float
    share: float


def main() -> None:
    """Simulates the sweeps, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sweeps; writes nothing")
    quick = parser.parse_args().quick
    rows = [row_of(name, sweeps) for name, sweeps in simulated(4 if quick else 1)]
    print(table(rows))
    if not quick:
        RESULTS.write_text(json.dumps({"date": date.today().isoformat(), "rows": rows}, indent=1) + "\n")
        write_section("expected_gain", table(rows))


def simulated(divisor: int) -> Iterator[tuple[str, list[list[SimulatedMoment]]]]:
    """Yields the moments of the sweeps of each kind. divisor: of the number of sweeps."""
    num = NUM_SWEEPS // divisor
    for name, drawn in DISTRIBUTIONS.items():
        finals = [[drawn(draw) for _ in range(NUM_TRIALS)] for draw in map(Random, range(num))]
        yield name, [moments(in_order(each), sampler=RANDOM) for each in finals]
    proposed = [proposed_losses(seed) for seed in range(NUM_SLOW_SWEEPS // divisor)]
    yield "TPE, 3 parameters", [moments(in_order(each), sampler=TPE) for each in proposed]
    populations = [trained_curves(kind, seed, num=90) for kind in ("constant", "cosine") for seed in (2, 3)]
    draws = [Random(n).sample(populations[n % len(populations)], NUM_TRIALS) for n in range(num)]
    yield "digits", [moments(in_order([curve[NUM_STEPS] for curve in draw]), sampler=RANDOM) for draw in draws]
    for policy in ("median", "cut"):
        stopping = StoppingPolicy(policy=policy)
        states = (played(stopping, draw) for draw in draws[: NUM_SLOW_SWEEPS // divisor])
        yield f"digits, {policy}", [moments(each, sampler=RANDOM) for each in states]


def in_order(losses: Sequence[float]) -> Iterator[list[SweepTrial]]:
    """Yields the states of trials that are trained one after another to their ends."""
    for num in range(1, len(losses) + 1):
        yield [
            SweepTrial(name=str(n), total=NUM_STEPS, goal=NUM_STEPS, scores={NUM_STEPS: -loss}, has_ended=True)
            if n < num
            else SweepTrial(name=str(n), total=NUM_STEPS)
            for n, loss in enumerate(losses)
        ]


def proposed_losses(seed: int) -> list[float]:
    """Returns the losses of trials that TPE proposes, of a function of three parameters with noise."""
    draw, trials = Random(seed), list[ProposedTrial]()
    for number in range(NUM_TRIALS):
        values = propose(
            TPE_SPACE, sampler=TPE, number=number, earlier=trials, seed=seed, num_trials=NUM_TRIALS, num_targets=1
        )
        loss = 0.3 + sum((x - 0.3) ** 2 for x in values.values()) + abs(draw.gauss(0, 0.01))
        trials.append(ProposedTrial(values=values, targets=(-loss,)))
    return [-trial.targets[0] for trial in trials if trial.targets]


def moments(states: Iterator[list[SweepTrial]], *, sampler: str) -> list[SimulatedMoment]:
    """Returns the moments of a sweep after each `EVERY` ended trials, and its end."""
    spec = SweepSpec(
        name="simulated",
        template={},
        folder=Path(),
        space=TPE_SPACE,
        sampler=sampler,
        stopping=StoppingPolicy(policy="none"),
        ranking=Ranking(metric="loss"),
        num_trials=NUM_TRIALS,
    )
    names, seen, kept = spec.trials, 0, list[tuple[ExpectedGain | None, float, int]]()
    for trials in states:
        num_ended = sum(trial.has_ended for trial in trials)
        finals = {i: t.scores[NUM_STEPS] for i, t in enumerate(trials) if t.has_ended and NUM_STEPS in t.scores}
        best, steps = max(finals.values(), default=-math.inf), num_trained(trials)
        if num_ended >= seen + EVERY and len(finals) >= MIN_FINALS and num_ended < len(trials):
            seen = num_ended
            progress = SweepProgress(
                spec=spec,
                trials=[SweepTrial(**{**vars(trial), "name": names[i]}) for i, trial in enumerate(trials)],
                reports={names[i]: {NUM_STEPS: {"loss": -score}} for i, score in finals.items()},
                done=frozenset(names[i] for i in finals),
                device_s=0.0,
            )
            kept.append((gain_of(progress), best, steps))
    kept.append((None, best, steps))
    return [SimulatedMoment(expected=e, gain=best - b, share=num / steps) for e, b, num in kept]


def row_of(name: str, sweeps: Sequence[Sequence[SimulatedMoment]]) -> dict:
    """Returns the figures of the sweeps of a kind."""
    pairs = [(each.expected, each.gain) for sweep in sweeps for each in sweep if each.expected is not None]
    row = {
        "sweeps": name,
        "num": len(sweeps),
        "moments": len(pairs),
        "covered": statistics.fmean(e.low <= gain <= e.high for e, gain in pairs),
        "expected": statistics.fmean(e.gain for e, _ in pairs),
        "gain": statistics.fmean(gain for _, gain in pairs),
        "probability": statistics.fmean(e.probability for e, _ in pairs),
        "better": statistics.fmean(gain > 0 for _, gain in pairs),
    }
    for least in GAINS:
        ends = [
            next(each for each in sweep if each.expected is None or each.expected.share < least) for sweep in sweeps
        ]
        bests = [sweep[0].expected.best if sweep[0].expected else 1.0 for sweep in sweeps]
        row[f"time at {least}"] = statistics.fmean(end.share for end in ends)
        row[f"regret at {least}"] = statistics.fmean(e.gain / abs(b) for e, b in zip(ends, bests, strict=True))
    return row


def table(rows: Sequence[Mapping]) -> str:
    """Returns the figures as a table in Markdown, with what was simulated."""
    lines = [
        f"| {row['sweeps']} | {row['covered']:.0%} | {row['expected']:.3g} | {row['gain']:.3g} | "
        f"{row['probability']:.0%} | {row['better']:.0%} | "
        + " | ".join(f"{row[f'time at {g}']:.0%}, {row[f'regret at {g}']:.2%}" for g in GAINS)
        + " |"
        for row in rows
    ]
    slow = f"{NUM_SLOW_SWEEPS} with TPE, `median` and `cut`"
    heads = " | ".join(f"{gain:.1%}" for gain in GAINS)
    return f"""{date.today().isoformat()}; {NUM_SWEEPS} sweeps of {NUM_TRIALS} trials each
({slow}), judged whenever {EVERY} more trials have ended. Last columns, where `gain` is as
given: the share of the steps until the sweep ends, and the regret, as a share of the best.

| sweeps | within the 90 % interval | expected gain | real gain | expected chance of any | real | {heads} |
|---|---:|---:|---:|---:|---:|{"---:|" * len(GAINS)}
{chr(10).join(lines)}
"""


if __name__ == "__main__":
    main()
