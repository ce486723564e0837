"""Decisions when to retrain, compared with an oracle: what each policy costs on replayed streams of data.

usage: python -m benchmarks.retraining [--seeds N] [--streams STREAM ...]

On each of 180 days a stream brings rows for training and other rows for measuring. A linear model, fitted to the days
of a window, loses worth x its true squared error a day; each training costs a price. The *regret* of a policy is its
cost over that of the oracle, which knows all errors and has the cheapest schedule and windows (dynamic programming).
Policies: retraining every so many days; when the product's drift tests find drift in labels, predictions or errors;
both with each window; and by value (`due: {value: ...}`), which chooses the window too. The seeds differ from those by
which the rule was written. A whole run writes benchmarks/results/retraining.json and the table between the markers in
docs/benchmarks.md; a partial run prints.
"""

import argparse
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.page import write_section
from ringmaster.features.retraining_value.value import MetricMeasurement, RunObservation, ValueTerms, decide
from ringmaster.tasks.retraining.drift import DriftEntry, FeatureReference, drifts_of, references_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "retraining.json"
NUM_DAYS, NUM_BEFORE = 180, 56  # days of decisions; days of data before them
NUM_FEATURES, NUM_ROWS, NOISE = 10, 100, 0.5
WINDOWS = (7, 14, 28, 56)
PRICES, WORTH = (1.0, 3.0, 10.0), 1.0
EVERY = (3, 7, 14, 28, 56)
DRIFT_RULES = {"psi 0.2": DriftEntry(psi=0.2, ks=None), "ks 0.001": DriftEntry(psi=None, ks=0.001)}
NUM_SEEDS, FIRST_SEED = 10, 100
STREAMS = ("none", "gradual", "sudden", "recurring", "seasons", "mixed")
BY_VALUE = "by value"

Array = np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="of each stream")
    parser.add_argument("--streams", nargs="*", default=STREAMS, choices=STREAMS)
    chosen = parser.parse_args()
    regrets: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ProcessPoolExecutor(2) as processes:
        for stream in chosen.streams:
            seeds = range(FIRST_SEED, FIRST_SEED + chosen.seeds)
            for regret in processes.map(partial(regrets_of, stream), seeds):
                for policy, values in regret.items():
                    regrets[policy][stream] += values
            print(f"{stream}: {mean(regrets[BY_VALUE][stream]):.2f} {BY_VALUE}", flush=True)
    lines = table(regrets, chosen.streams)
    print("\n".join(lines))
    if chosen == parser.parse_args([]):
        record(regrets, lines)


# -- streams -----------------------------------------------------------------------------------------------------------


def coefficients(stream: str, draw: np.random.Generator) -> tuple[Array, Array]:
    """Returns the true coefficients [days, features] of a stream, and the standard deviation [days] of its noise."""
    num_days = NUM_BEFORE + NUM_DAYS
    days = np.arange(num_days)
    first, noise = draw.normal(size=NUM_FEATURES), np.full(num_days, NOISE)
    result = np.tile(first, (num_days, 1))
    if stream in ("gradual", "mixed"):
        speed = draw.uniform(0.005, 0.02) if stream == "gradual" else draw.uniform(0.002, 0.01)
        result += np.outer(days, direction(draw) * speed)
    if stream in ("sudden", "mixed"):
        num_changes = draw.integers(1, 5) if stream == "sudden" else 2
        for day in draw.choice(days[NUM_BEFORE + 5 : -5], size=num_changes, replace=False):
            result[day:] += direction(draw) * draw.uniform(0.3, 1.2)
    if stream == "recurring":
        period, phase = draw.integers(20, 45), draw.integers(0, 45)
        result[((days + phase) // period) % 2 == 1] += direction(draw) * draw.uniform(0.5, 1.2)
    if stream == "seasons":  # the rows are harder at times, for any model
        period = draw.choice([7, 30])
        noise *= 1 + draw.uniform(0.1, 0.35) * np.sin(2 * np.pi * (days + draw.integers(0, 30)) / period)
    return result, noise


def direction(draw: np.random.Generator) -> Array:
    """Returns a random unit vector."""
    vector = draw.normal(size=NUM_FEATURES)
    result: Array = vector / np.linalg.norm(vector)
    return result


class Replay:
    """A stream with a model for each day and window.

    models: [days, windows, features]; losses: [days, day of the model, windows], the true squared errors.
    """

    def __init__(self, stream: str, seed: int) -> None:
        draw = np.random.default_rng([seed, STREAMS.index(stream)])
        true, noise = coefficients(stream, draw)
        shape = (len(true), NUM_ROWS)
        self.inputs, self.held_out = draw.normal(size=(2, *shape, NUM_FEATURES))
        self.labels, self.held_out_labels = (
            np.einsum("tnd,td->tn", rows, true) + draw.normal(size=shape) * noise[:, None]
            for rows in (self.inputs, self.held_out)
        )
        gram = np.einsum("tnd,tne->tde", self.inputs, self.inputs)
        moment = np.einsum("tnd,tn->td", self.inputs, self.labels)
        self.models = np.array([[self._fit(gram, moment, day, w) for w in WINDOWS] for day in range(NUM_DAYS)])
        self.losses = np.array(
            [
                ((self.models - true[NUM_BEFORE + day]) ** 2).sum(-1) + noise[NUM_BEFORE + day] ** 2
                for day in range(NUM_DAYS)
            ]
        )

    @staticmethod
    def _fit(gram: Array, moment: Array, day: int, window: int) -> Array:
        days = slice(NUM_BEFORE + day - window + 1, NUM_BEFORE + day + 1)
        return np.linalg.solve(gram[days].sum(0), moment[days].sum(0))

    def measured(self, day: int, model: "Training") -> MetricMeasurement:
        """Returns the squared error of a model on the rows of a day that are held out."""
        errors = self.errors(day, model) ** 2
        return MetricMeasurement(day=day, value=float(errors.mean()), stderr=float(errors.std() / math.sqrt(NUM_ROWS)))

    def errors(self, day: int, model: "Training") -> Array:
        """Returns the errors [rows] of a model on the rows of a day that are held out."""
        at = NUM_BEFORE + day
        return self.held_out_labels[at] - self.held_out[at] @ self.models[model.day, model.window]

    def features(self, days: slice, model: "Training") -> Mapping[str, Array]:
        """Returns what the drift tests observe: labels, predictions and, on the last day, errors."""
        coefficients = self.models[model.day, model.window]
        return {
            "label": self.labels[days].ravel(),
            "prediction": (self.inputs[days] @ coefficients).ravel(),
            "error": self.errors(days.stop - 1 - NUM_BEFORE, model),
        }

    def oracle(self, price: float) -> float:
        """Returns the least cost of any schedule."""
        until = np.concatenate([np.zeros((1, NUM_DAYS, len(WINDOWS))), self.losses.cumsum(0)]) * WORTH
        least = np.zeros(NUM_DAYS + 1)  # from the training of a day to the end
        for day in reversed(range(NUM_DAYS)):
            own = (until[day + 1 :, day] - until[day, day]).min(-1)
            least[day] = (own + least[day + 1 :] + price * (np.arange(day + 1, NUM_DAYS + 1) < NUM_DAYS)).min()
        return float(least[0])


# -- policies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training that was promoted: its day, and the index of its window."""

    day: int
    window: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All trainings that a policy has chosen. num_rejected: of further ones, whose models were not promoted."""

    trainings: tuple[Training, ...]
    num_rejected: int = field(default=0)

    def cost(self, replay: Replay, price: float) -> float:
        """Returns the cost of the losses of all days, and of all trainings but the first."""
        ends = [*(each.day for each in self.trainings[1:]), NUM_DAYS]
        losses = sum(
            replay.losses[each.day : end, each.day, each.window].sum()
            for each, end in zip(self.trainings, ends, strict=True)
        )
        return float(losses * WORTH + price * (len(self.trainings) - 1 + self.num_rejected))


def every(days: int, replay: Replay, window: int) -> Schedule:
    """Retrains every so many days."""
    return Schedule(trainings=tuple(Training(day=day, window=window) for day in range(0, NUM_DAYS, days)))


def by_drift(rule: DriftEntry, replay: Replay, window: int) -> Schedule:
    """Retrains when a test finds drift since the last training."""

    def references(model: Training) -> Mapping[str, FeatureReference]:
        at = NUM_BEFORE + model.day
        return references_of(replay.features(slice(at - WINDOWS[window] + 1, at + 1), model))

    chosen = [Training(day=0, window=window)]
    known = references(chosen[0])
    for day in range(1, NUM_DAYS):
        now = replay.features(slice(NUM_BEFORE + day, NUM_BEFORE + day + 1), chosen[-1])
        if any(drift.has_drifted for drift in drifts_of(known, now, rule)):
            chosen.append(Training(day=day, window=window))
            known = references(chosen[-1])
    return Schedule(trainings=tuple(chosen))


def by_value(replay: Replay, price: float) -> Schedule:
    """Retrains when it pays; a model that is not better is not promoted."""
    terms = ValueTerms(price=price, worth=WORTH, windows=WINDOWS)
    chosen, num_rejected = [Training(day=0, window=2)], 0
    seen = [RunObservation(candidate=replay.measured(0, chosen[0]), is_promoted=True)]
    for day in range(1, NUM_DAYS):
        before, now = decide(seen, terms), RunObservation(champion=replay.measured(day, chosen[-1]))
        window_days = max(WINDOWS) if before is None or before.window_days is None else before.window_days
        # As in the product, data are read before the champion is measured on them.
        decision = decide([*seen, now], replace(terms, windows=(window_days,)))
        if decision is not None and decision.is_due:
            training = Training(day=day, window=WINDOWS.index(window_days))
            candidate = replay.measured(day, training)
            is_better = now.champion is not None and candidate.value < now.champion.value
            now = replace(now, candidate=candidate, is_promoted=is_better, window_days=window_days)
            if is_better:
                chosen.append(training)
            else:
                num_rejected += 1
        seen.append(now)
    return Schedule(trainings=tuple(chosen), num_rejected=num_rejected)


POLICIES: Mapping[str, Callable[[Replay, int], Schedule]] = {
    **{f"every {days} days": partial(every, days) for days in EVERY},
    "never": partial(every, NUM_DAYS),
    **{name: partial(by_drift, rule) for name, rule in DRIFT_RULES.items()},
}


def regrets_of(stream: str, seed: int) -> dict[str, list[float]]:
    """Returns the regret of each policy on one stream, for each price."""
    replay = Replay(stream, seed)
    oracle = {price: replay.oracle(price) for price in PRICES}
    result = {
        f"{name}, {WINDOWS[window]} days of data": schedule_regrets(policy(replay, window), replay, oracle)
        for name, policy in POLICIES.items()
        for window in range(len(WINDOWS))
    }
    result[BY_VALUE] = [by_value(replay, price).cost(replay, price) - oracle[price] for price in PRICES]
    return result


def schedule_regrets(schedule: Schedule, replay: Replay, oracle: Mapping[float, float]) -> list[float]:
    """Returns the regret of a schedule that does not depend on the price, for each price."""
    return [schedule.cost(replay, price) - least for price, least in oracle.items()]


# -- the table ---------------------------------------------------------------------------------------------------------


def table(regrets: Mapping[str, Mapping[str, Sequence[float]]], streams: Sequence[str]) -> list[str]:
    """Returns the mean regrets as lines of markdown: by value, each other policy with its best window, and ratios."""
    means = {policy: {s: mean(by_stream[s]) for s in streams} for policy, by_stream in regrets.items()}
    others = [policy for policy in means if policy != BY_VALUE]
    kinds = {policy.split(",")[0]: policy for policy in sorted(others, key=lambda p: -mean(means[p].values()))}
    best = min(others, key=lambda policy: mean(means[policy].values()))
    of_stream = {stream: min(means[policy][stream] for policy in others) for stream in streams}

    def line(name: str, values: Mapping[str, float], last: float) -> str:
        return f"| {name} | " + " | ".join(f"{values[s]:.2f}" for s in streams) + f" | {last:.2f} |"

    def rows() -> Iterator[str]:
        yield "| policy | " + " | ".join(streams) + " | mean |"
        yield "| --- |" + " ---: |" * (len(streams) + 1)
        for policy in [BY_VALUE, *sorted(kinds.values(), key=lambda p: mean(means[p].values()))]:
            yield line(policy, means[policy], mean(means[policy].values()))
        yield line("best other one of each stream", of_stream, mean(of_stream.values()))
        ratio = mean(means[BY_VALUE].values()) / mean(means[best].values())
        yield line(
            f"by value over the best other one ({best})",
            {s: means[BY_VALUE][s] / max(means[best][s], 1e-9) for s in streams},
            ratio,
        )

    return list(rows())


def record(regrets: Mapping[str, Mapping[str, Sequence[float]]], lines: Sequence[str]) -> None:
    """Writes the regrets, and the table on the page."""
    machine = {"cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 1)}
    rounded = {name: {s: [round(x, 2) for x in row] for s, row in rows.items()} for name, rows in regrets.items()}
    RESULTS.write_text(json.dumps({"date": date.today().isoformat(), "machine": machine, "regrets": rounded}) + "\n")
    body = [
        f"{date.today().isoformat()}. Mean regret over {NUM_SEEDS} draws of each stream and three prices of a training",
        f"({', '.join(f'{price:g}' for price in PRICES)} units of squared error for a day); of each policy the best "
        "window.",
        "",
        *lines,
    ]
    write_section("retraining", body)


if __name__ == "__main__":
    main()
