"""Results of a sweep: its leaderboard, the recording of it and of figures in MLflow, and the challenger."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ringmaster.errors import LedgerError
from ringmaster.model_lineage import model_pages
from ringmaster.model_lineage.ledger.families import CHALLENGER_OF, NOBODY
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.records import CHALLENGER, ModelRecord
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.tasks.sweeping.figures import Reports, SweepFigures, last
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.sweeping.space import Values
from ringmaster.techniques.metric import metric_named
from ringmaster.techniques.processes.gang_events import NUM_ROWS
from ringmaster.text import enumerated, markdown

VARIED = {"model": "varied model"}
"""Columns of varied keys of a job that the tables have another column for."""
LEADERBOARD, PARALLEL, CURVES = "sweep/leaderboard.json", "sweep/parallel_coordinates.svg", "sweep/learning_curves.svg"


def figures(sweep_scheduler: SweepScheduler, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the figures of a sweep as SVG, by the paths of their artifacts."""
    spec, won = sweep_scheduler.spec, best(rows)
    drawn = SweepFigures(
        name=spec.name,
        objective=spec.objective,
        reports=sweep_scheduler.reports,
        done=[row["job"] for row in rows if row["status"] == JobStatus.DONE],
        ranked=[row["job"] for row in rows if row["rank"] is not None],
        best=None if won is None else won["job"],
    )
    rungs = spec.stopping.rungs(max((trial.total for trial in sweep_scheduler.trials()), default=1))
    return {
        PARALLEL: drawn.parallel_coordinates(spec.space, sweep_scheduler.trial_values()),
        CURVES: drawn.learning_curves(rungs),
    }


def record(ledger: Ledger, run_id: str, rows: Sequence[Mapping[str, Any]], drawn: Mapping[str, str]) -> None:
    """Writes the leaderboard and the figures into the batch's run and its note. A repeated call changes nothing.

    Raises LedgerError if MLflow cannot store them.
    """
    ledger.write_table(run_id, LEADERBOARD, rows)
    for path, svg in drawn.items():
        ledger.write_svg(run_id, path, svg)
    note = ledger.note(run_id)
    mark = model_pages.picture("Parallel coordinates", run_id, PARALLEL)
    if mark not in note:
        curves = model_pages.picture("Learning curves", run_id, CURVES)
        path = model_pages.artifact_path(ledger.experiment_of(run_id), run_id, LEADERBOARD)
        board = f"All of them: {model_pages.link('leaderboard', path)}."
        ledger.set_note(run_id, f"{_sentence(rows)} {board}\n\n{mark}\n\n{curves}\n\n{note}")


def name_fault(ledger: Ledger, sweep: str) -> str | None:
    """Returns why the best trial of a sweep that challenges no other model cannot be registered under its name.

    The registered model of that name may be one in production, for which no challenger was requested.
    """
    others = ledger.batches_of(sweep) - {sweep}
    if not others:
        return None
    makers = enumerated([f"batch {other}" if other else "another program" for other in sorted(others)])
    return (
        f"the sweep has the name of the registered model {sweep}, of which {makers} has made versions. "
        f"To fix: rename the sweep, or set `challenger_of: {sweep}`"
    )


def challenge(ledger: Ledger, uri: str, *, sweep: str, challenger_of: str) -> ModelRecord:
    """Registers the best model of a sweep as a version of `challenger_of`, and makes it the challenger.

    Where that is empty, it becomes a version of the model with the name of the sweep, and no candidate of retraining.

    Raises LedgerError if the model does not exist, or if that name is taken.
    """
    if not challenger_of and (fault := name_fault(ledger, sweep)):
        raise LedgerError(fault)
    name = challenger_of or sweep
    model = ledger.add_version(ledger.resolve_model(uri), name)
    assert model.version is not None, "a version that was made just now"
    ledger.client.set_model_version_tag(name, str(model.version), CHALLENGER_OF, challenger_of or NOBODY)
    ledger.set_alias(name, CHALLENGER, model.version)
    return model


def _sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    won, num_done = best(rows), sum(row["status"] == JobStatus.DONE for row in rows)
    text = "no trial has been trained completely" if won is None else f"the best is **{markdown(won['job'])}**"
    return f"Of {len(rows)} trials {num_done} were trained completely; {text}."


def leaderboard(
    trials: Sequence[str],
    *,
    objective: str,
    values: Mapping[str, Values],
    reports: Reports,
    jobs: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Returns a row per trial: completed trials ordered by the objective, then the others by their number of steps.

    All rows have the same keys; a trial has None where it has no value, such as the metrics of a failed one.

    values: by trial, as far as proposed. jobs: the rows of a batch's result. A trial without a finite value of the
    objective has no rank; the first completed one is the best.
    """
    ended = {row["name"]: row for row in jobs}
    sign = -1.0 if metric_named(objective).higher_is_better else 1.0

    def order(name: str) -> tuple[bool, int, float]:
        value = last(reports.get(name, {})).get(objective, math.nan)
        is_done = ended[name]["status"] == JobStatus.DONE
        return not is_done, 0 if is_done else -max(reports.get(name, {}), default=0), sign * value

    ranked = [name for name in trials if math.isfinite(last(reports.get(name, {})).get(objective, math.nan))]
    ranked.sort(key=order)
    rows = [
        _row(name, place if name in ranked else None, values=values, reports=reports, job=ended[name])
        for place, name in enumerate([*ranked, *(name for name in trials if name not in ranked)], start=1)
    ]
    metrics, keys = (dict.fromkeys(key for row in rows for key in row[part]) for part in ("metrics", "values"))
    return [
        {
            **{key: row[key] for key in ("rank", "job")},
            **{f"held-out {key}": row["metrics"].get(key) for key in metrics},
            "held-out rows": row["held-out rows"],
            **{VARIED.get(key, key): row["values"].get(key) for key in keys},
            **{key: row[key] for key in ("status", "steps", "device seconds", "model")},
        }
        for row in rows
    ]


def best(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns the row of the best trial, or None if no trial has completed."""
    return next((dict(row) for row in rows if row["status"] == JobStatus.DONE and row["rank"] is not None), None)


def _row(
    name: str, rank: int | None, *, values: Mapping[str, Values], reports: Reports, job: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "rank": rank,
        "job": name,
        "metrics": {key: _figure(value) for key, value in last(reports.get(name, {})).items()},
        "values": {
            key: str(value) if isinstance(value, (list, dict)) else value for key, value in values.get(name, {}).items()
        },
        "held-out rows": job.get(NUM_ROWS),
        "status": job["status"],
        "steps": job["num_steps"],
        "device seconds": round(sum(s["device_s"] for s in job["segments"]), 1),
        "model": job["model_uri"],
    }


def _figure(value: float) -> float | None:
    """Rounds a metric for tables; a value that is not finite, which JSON lacks, becomes None."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
