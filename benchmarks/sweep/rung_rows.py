"""Benchmark of evaluations that stop when decided: the held-out rows that a sweep computes at its rungs.

    python -m benchmarks.sweep.rung_rows             # a few minutes
    python -m benchmarks.sweep.rung_rows --quick     # few configurations and draws; writes nothing
    python -m benchmarks.sweep.rung_rows --commands  # two real sweeps, minutes

The population of `benchmarks.sweep.early_stopping` is trained with 1,024 held-out rows, the most of an evaluation by
default, and the loss of each row is recorded at the rungs. Draws of thirty configurations are replayed under `halving`
by its own code (`StoppingPolicy.judge`), with all rows and with `evaluation_error: 0.01`. Further
rows are evaluated by one gang a device: of all trials together, as of adapters of one base, or of one trial after
another. Starts are the trials that gangs begin to evaluate further.

With `--commands`, the command `ringmaster sweep` trains sixteen variants of the model of examples/sweep.yaml, with all
rows and with `evaluation_error`. The rows are those that the journals of the sweeps have.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml

from benchmarks.page import write_section
from benchmarks.sweep.early_stopping import NUM_STEPS, NUM_TRIALS, POPULATION, trained_losses
from ringmaster.features.rung_evaluation.comparison import EvaluatedRows
from ringmaster.features.rung_evaluation.row_parts import ENOUGH, PARTS, num_at_once, place_of
from ringmaster.features.rung_evaluation.sweep import ROWS, PartialEvaluationPolicy, RowTrial
from ringmaster.techniques.job_specs import EvaluationSlice

EXAMPLE = Path(__file__).parents[2] / "examples" / "sweep.yaml"
NUM_ROWS, ERROR = 1024, 0.01
NUM_DRAWS = {True: 25, False: 5}  # with all trials together, and one after another, which takes ten times as long
GOALS = {"rows": 0.35, "same winner": 0.98}
POLICIES = {
    "four": {"reduction_factor": 4, "min_steps": 30},
    "two": {"reduction_factor": 2, "min_steps": 30},
}
NUM_SLOTS = 2

Losses = Mapping[int, Any]  # of each configuration and row, [configurations, rows], by step


@dataclass(frozen=True, kw_only=True)
class ReplayedSweep:
    """What a replayed sweep has kept and computed."""

    winner: int
    kept: frozenset[int]
    num_rows: int
    num_visits: int
    num_starts: int


def main() -> None:
    """Trains the curves, replays the draws, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few configurations and draws; writes nothing")
    parser.add_argument("--commands", action="store_true", help="trains two real sweeps, and writes what they computed")
    options = parser.parse_args()
    if options.commands:
        with tempfile.TemporaryDirectory(prefix="bench-rows-") as folder:
            text = table_of_commands([trained_sweep(Path(folder), error=error) for error in (None, ERROR)])
        print(text)
        write_section("rung-rows-of-commands", text)
        return
    quick = options.quick
    keys = [("constant", 0)] if quick else [(kind, seed) for kind in ("constant", "cosine") for seed in (0, 1)]
    steps = {
        step
        for options in POLICIES.values()
        for step in PartialEvaluationPolicy(policy="halving", **options).rungs(NUM_STEPS)
    }
    populations = [
        trained_losses(*key, num=NUM_TRIALS if quick else POPULATION, num_held_out=NUM_ROWS, steps=steps)
        for key in keys
    ]
    text = table(
        [
            row_of(name, populations, num_draws=2 if quick else NUM_DRAWS[is_together], is_together=is_together)
            for is_together in (True, False)
            for name in POLICIES
        ]
    )
    print(text)
    if not quick:
        write_section("rung-rows", text)


@dataclass(frozen=True, kw_only=True)
class TrainedSweep:
    """What a sweep that was trained has recorded.

    num_visits, num_rows: the evaluations at rungs, and their rows.
    num_points: the figures of parts in MLflow, each with an interval around it.
    num_intervals: the trials whose last figure has an interval in the leaderboard.
    final_rows: the numbers of rows of the evaluations of finished models.
    """

    error: float | None
    winner: str
    num_visits: int
    num_rows: int
    num_points: int
    num_intervals: int
    final_rows: frozenset[int]


def trained_sweep(folder: Path, *, error: float | None) -> TrainedSweep:
    """Trains a sweep by the command, in an empty home."""
    home = folder / str(error)
    home.mkdir()
    raw = yaml.safe_load(EXAMPLE.read_text())
    raw["template"]["job"] |= {"num_steps": 256, "evaluation": {"max_rows": NUM_ROWS}}
    errors = {} if error is None else {"evaluation_error": error}
    raw |= {"num_trials": 16, "early_stopping": {"policy": "halving", "min_steps": 16, "reduction_factor": 4, **errors}}
    file = home / "sweep.yaml"
    file.write_text(yaml.safe_dump(raw))
    arguments = [sys.executable, "-m", "ringmaster.flows.entry", "sweep", file, "--json"]
    environment = {**os.environ, "RINGMASTER_HOME": str(home / "home")}
    done = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    board = found["leaderboard"]
    final_rows = frozenset(row["held-out rows"] for row in board if row["status"] == "done")
    (journal,) = (home / "home").glob("batches/**/journal.db")
    with closing(sqlite3.connect(journal)) as connection:
        facts = {key: json.loads(value)[0] for key, value in connection.execute("SELECT key, value FROM facts")}
    visits = [(name, at) for name, each in facts["sweep"]["reports"].items() for at in each if int(at) < 256]
    parts = [part for key, steps in facts.items() if key.startswith(ROWS) for part in steps.values()]
    rows = [len(part["rows"]["values"]) for part in parts] or [max(final_rows)] * len(visits)
    return TrainedSweep(
        error=error,
        winner=found["best"]["job"],
        num_visits=len(visits),
        num_rows=sum(rows),
        num_points=len(figures_of_parts(home / "home" / "mlflow.db")),
        num_intervals=sum(row.get("interval of part") is not None for row in board),
        final_rows=final_rows,
    )


def figures_of_parts(database: Path) -> list[float]:
    """Returns the figures of parts in MLflow. Each lies in its interval, and is no figure of a model."""
    query = "SELECT run_uuid, step, key, value FROM metrics WHERE key LIKE 'eval-part/%'"
    values: dict[tuple[str, int], dict[str, float]] = {}
    with closing(sqlite3.connect(database)) as connection:
        for run, step, key, value in connection.execute(query):
            values.setdefault((run, step), {})[key.removeprefix("eval-part/")] = value
    assert all(each["lower"] <= each["loss"] <= each["upper"] for each in values.values())
    return [each["loss"] for each in values.values()]


def table_of_commands(sweeps: Sequence[TrainedSweep]) -> str:
    """Returns what sweeps that were trained have computed, as a table in Markdown."""
    lines = [
        f"| {each.error or 'all rows'} | {each.winner} | {each.num_visits} | {each.num_rows:,} "
        f"({each.num_rows / sweeps[0].num_rows:.0%}) | {each.num_points} | {each.num_intervals} | "
        f"{', '.join(f'{rows:,}' for rows in sorted(each.final_rows))} |"
        for each in sweeps
    ]
    return f"""{date.today().isoformat()}; `ringmaster sweep` with the model of examples/sweep.yaml: 16 trials of
256 steps, halving at 16 and 64, on {len(os.sched_getaffinity(0))} cores. At rungs: evaluations there. Parts in MLflow
and intervals in the leaderboard are those of figures that are not of all rows.

| `evaluation_error` | winner | at rungs | rows there | parts in MLflow | intervals | rows at the end |
|---|---|---:|---:|---:|---:|---:|
{chr(10).join(lines)}
"""


def row_of(name: str, populations: Sequence[Losses], *, num_draws: int, is_together: bool) -> dict[str, Any]:
    """Returns the figures of a policy over the draws of all populations. is_together: whether trials share gangs."""
    options, pairs = POLICIES[name], list[tuple[ReplayedSweep, ReplayedSweep]]()
    for losses in populations:
        for number in range(num_draws):
            drawn = Random(number).sample(range(len(losses[NUM_STEPS])), NUM_TRIALS)
            whole = PartialEvaluationPolicy(policy="halving", **options)
            part = PartialEvaluationPolicy(policy="halving", evaluation_error=ERROR, **options)
            num = NUM_TRIALS if is_together else NUM_SLOTS
            runs = [replayed(each, losses, drawn, seed=number, num_together=num) for each in (whole, part)]
            pairs.append((runs[0], runs[1]))
    return {
        "policy": name,
        "gangs": "all together" if is_together else "one trial each",
        "sweeps": len(pairs),
        "rows": statistics.fmean(part.num_rows / whole.num_rows for whole, part in pairs),
        "same winner": sum(part.winner == whole.winner for whole, part in pairs),
        "same choices": sum(part.kept == whole.kept for whole, part in pairs),
        "starts": statistics.fmean(part.num_starts / part.num_visits for _, part in pairs),
    }


def replayed(
    policy: PartialEvaluationPolicy, losses: Losses, drawn: Sequence[int], *, seed: int, num_together: int
) -> ReplayedSweep:
    """Returns what a policy keeps and computes of the configurations `drawn`.

    seed: of the order of the rows. num_together: of trials that are evaluated on further rows.
    """
    order = Random(seed).sample(range(NUM_ROWS), NUM_ROWS)
    rungs = policy.rungs(NUM_STEPS)
    goals = dict.fromkeys(drawn, rungs[0])
    rows: dict[int, dict[int, EvaluatedRows]] = {n: {} for n in drawn}
    stopped, num_starts = set[int](), 0
    parts: dict[int, EvaluationSlice] = {}  # those that are being evaluated, and then those that wait

    def evaluate(number: int, step: int, place: int) -> None:
        values = -losses[step][number][order][:place].astype(np.float64)
        rows[number][step] = EvaluatedRows(values=values, counts=np.ones(len(values)), whole=NUM_ROWS)

    while True:
        for number, goal in goals.items():
            if number not in stopped and goal < NUM_STEPS and goal not in rows[number]:
                evaluate(number, goal, place_of(policy.first_part, NUM_ROWS))
        trials = [
            RowTrial(
                name=str(n),
                total=NUM_STEPS,
                goal=goals[n],
                scores={step: own.mean for step, own in rows[n].items()},
                has_ended=n in stopped or goals[n] == NUM_STEPS,
                rows=rows[n],
                part=parts.get(n),
            )
            for n in drawn
        ]
        decisions = policy.judge(trials, num_slots=NUM_SLOTS)
        goals |= {int(name): goal for name, goal in decisions.goals.items()}
        stopped |= {int(name) for name in decisions.stops}
        requested, enough = (decisions.of_features.get(key, {}) for key in (PARTS, ENOUGH))
        num_starts += len(requested.keys() - {str(n) for n in parts})
        parts |= {int(name): part for name, part in requested.items()}
        for number in [*map(int, (*enough, *decisions.goals, *decisions.stops))]:
            parts.pop(number, None)
        if not decisions.goals and not decisions.stops and not parts:
            break
        for number, part in list(parts.items())[:num_together]:
            place, end = len(rows[number][part.step].values), place_of(part.end, NUM_ROWS)
            place = min(end, place + num_at_once(place))
            evaluate(number, part.step, place)
            if place >= end:
                del parts[number]
    kept = frozenset(n for n in drawn if goals[n] == NUM_STEPS)
    return ReplayedSweep(
        winner=min(kept, key=lambda n: float(np.nan_to_num(losses[NUM_STEPS][n].mean(), nan=np.inf))),
        kept=kept,
        num_rows=sum(len(own.values) for each in rows.values() for own in each.values()),
        num_visits=sum(len(each) for each in rows.values()),
        num_starts=num_starts,
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the figures as a table in Markdown, with what was measured."""
    lines = [
        f"| {row['gangs']} | {row['policy']} | {row['rows']:.0%} | {row['same winner']} of {row['sweeps']} | "
        f"{row['same choices']} of {row['sweeps']} | {row['starts']:.0%} |"
        for row in rows
    ]
    return f"""{date.today().isoformat()}; draws of {NUM_TRIALS} configurations of a small network on digits,
{NUM_ROWS:,} held-out rows, under constant and cosine rates and two training seeds; goals: at most
{GOALS["rows"]:.0%} of the rows, and the same winner in {GOALS["same winner"]:.0%}. Starts: trials that gangs begin to
evaluate further, for each trial at a rung.

| gangs | halving, one of | rows computed | same winner | same choices | starts |
|---|---|---:|---:|---:|---:|
{chr(10).join(lines)}
"""


if __name__ == "__main__":
    main()
