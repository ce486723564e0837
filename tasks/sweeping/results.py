"""Results of a sweep: its leaderboard, the recording of it and of figures in MLflow, and the challenger.

The module `sweep` of a feature lists functions that return a further section of the results, or None, in `SECTIONS`.
In `PREPARATIONS` it lists functions that import what these need, which get the number of trials.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from ringmaster.errors import LedgerError
from ringmaster.features import listed
from ringmaster.model_lineage import model_pages
from ringmaster.model_lineage.ledger.families import CHALLENGER_OF, NOBODY
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.records import CHALLENGER, ModelRecord
from ringmaster.tasks.background_worker import in_a_thread
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.tasks.sweeping.figures import SweepFigures
from ringmaster.tasks.sweeping.ranking import Ranking, Reports, Standing, last
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.sweeping.space import Values
from ringmaster.techniques.processes.gang_events import NUM_ROWS
from ringmaster.text import enumerated, markdown

VARIED = {"model": "varied model"}
"""Columns of varied keys of a job that the tables have another column for."""
HELD_OUT_ROWS = "held-out rows"
"""The column with the number of rows that the last metrics of a trial were computed of."""
LEADERBOARD, PARALLEL, CURVES = "sweep/leaderboard.json", "sweep/parallel_coordinates.svg", "sweep/learning_curves.svg"


@dataclass(frozen=True, kw_only=True)
class ResultSection:
    """A part of the results of a sweep, which a feature adds.

    key: the key of `value` in the JSON of the results.
    lines: Markdown for the terminal and for the pages of MLflow and Prefect.
    figures: SVG, by the paths of their artifacts.
    """

    key: str
    value: Any
    lines: Sequence[str] = ()
    figures: Mapping[str, str] = field(default_factory=dict)


def sections(sweep_scheduler: SweepScheduler, rows: Sequence[Mapping[str, Any]]) -> list[ResultSection]:
    """Returns the sections that features add to the results of a sweep. rows: its leaderboard."""
    made = (section_of(sweep_scheduler, rows) for section_of in listed("sweep", "SECTIONS"))
    return [section for section in made if section is not None]


def prepare_sections(num_trials: int) -> None:
    """Lets features prepare their sections, each on a thread, while the last of so many trials train."""
    for prepare in listed("sweep", "PREPARATIONS"):
        in_a_thread("results of the sweep", partial(prepare, num_trials))


def why_no_winner(sweep_scheduler: SweepScheduler, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns why no completed trial of a sweep has a rank; empty where one has. rows: its leaderboard."""
    done = [row["job"] for row in rows if row["status"] == JobStatus.DONE]
    finals = {name: last(sweep_scheduler.reports.get(name, {})) for name in done}
    return "" if first_ranked(rows) else sweep_scheduler.spec.ranking.why_no_winner(finals)


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
        metrics=spec.ranking.metrics[1:],
        notes=sweep_scheduler.records.notes(sweep_scheduler.reports),
    )
    rungs = spec.stopping.rungs(max((trial.total for trial in sweep_scheduler.trials()), default=1))
    return {
        PARALLEL: drawn.parallel_coordinates(spec.space, sweep_scheduler.trial_values()),
        CURVES: drawn.learning_curves(rungs),
    }


def record(
    ledger: Ledger,
    run_id: str,
    rows: Sequence[Mapping[str, Any]],
    drawn: Mapping[str, str],
    *,
    lines: Sequence[str] = (),
) -> None:
    """Writes the leaderboard, the figures and lines into the batch's run and its note. Repeated, it changes nothing.

    Raises LedgerError if MLflow cannot store them.
    """
    ledger.write_table(run_id, LEADERBOARD, rows)
    for path, svg in drawn.items():
        ledger.write_svg(run_id, path, svg)
    note = ledger.note(run_id)
    pictures = [model_pages.picture(title_of(path), run_id, path) for path in drawn]
    if pictures[0] not in note:
        path = model_pages.artifact_path(ledger.experiment_of(run_id), run_id, LEADERBOARD)
        board = f"All of them: {model_pages.link('leaderboard', path)}."
        ledger.set_note(run_id, "\n\n".join([f"{_sentence(rows)} {board}", *lines, *pictures, note]))


def title_of(path: str) -> str:
    """Returns the title of a figure, by the path of its artifact."""
    return PurePosixPath(path).stem.replace("_", " ").capitalize()


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
    text = f"; the best is **{markdown(won['job'])}**" if won is not None else ""
    return f"Of {len(rows)} trials {num_done} were trained completely{text}."


def leaderboard(
    trials: Sequence[str],
    *,
    ranking: Ranking,
    values: Mapping[str, Values],
    reports: Reports,
    jobs: Sequence[Mapping[str, Any]],
    further: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Returns a row per trial: completed trials as they are ranked, then the others by their number of steps.

    All rows have the same keys; a trial has None where it has no value, such as the metrics of a failed one. A trial
    without a finite value of the objective has no rank.

    values: by trial, as far as proposed. jobs: the rows of a batch's result. further: columns that describe the last
    metrics of trials, by trial.
    """
    further = further or {}
    ended = {row["name"]: row for row in jobs}
    finals = {name: last(reports.get(name, {})) for name in trials}
    done = [name for name in trials if ended[name]["status"] == JobStatus.DONE]
    standings = {
        **ranking.standings({name: finals[name] for name in done}, are_done=True),
        **ranking.standings({name: finals[name] for name in trials if name not in done}, are_done=False),
    }

    def order(name: str) -> tuple[bool, bool, int, tuple[float, ...]]:
        is_done, standing = name in done, standings[name]
        num_steps = 0 if is_done else max(reports.get(name, {}), default=0)
        return not standing.is_ranked, not is_done, -num_steps, standing.place

    rows = [
        _row(
            name,
            place,
            standings[name],
            values=values,
            reports=reports,
            job=ended[name],
            of_metrics=further.get(name, {}),
        )
        for place, name in enumerate(sorted(trials, key=order), start=1)
    ]
    groups = ("columns", "metrics", "of_metrics", "values")
    columns, metrics, of_metrics, keys = (dict.fromkeys(key for row in rows for key in row[group]) for group in groups)
    return [
        {
            **{key: row[key] for key in ("rank", "job")},
            **{key: row["columns"].get(key) for key in columns},
            **{f"held-out {key}": row["metrics"].get(key) for key in metrics},
            **{key: row["of_metrics"].get(key) for key in of_metrics},
            **{VARIED.get(key, key): row["values"].get(key) for key in keys},
            **{key: row[key] for key in ("status", "steps", "device seconds", "model")},
        }
        for row in rows
    ]


def best(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns the row of the best trial; None if no trial that was completed has a rank, or several share the first."""
    first = first_ranked(rows)
    return first[0] if len(first) == 1 else None


def first_ranked(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of the completed trials of the first rank."""
    ranked = [dict(row) for row in rows if row["status"] == JobStatus.DONE and row["rank"] is not None]
    return [row for row in ranked if row["rank"] == ranked[0]["rank"]]


def _row(
    name: str,
    place: int,
    standing: Standing,
    *,
    values: Mapping[str, Values],
    reports: Reports,
    job: Mapping[str, Any],
    of_metrics: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "rank": (standing.rank or place) if standing.is_ranked else None,
        "columns": standing.columns,
        "job": name,
        "metrics": {key: _figure(value) for key, value in last(reports.get(name, {})).items()},
        "values": {
            key: str(value) if isinstance(value, (list, dict)) else value for key, value in values.get(name, {}).items()
        },
        "of_metrics": {HELD_OUT_ROWS: job.get(NUM_ROWS), **of_metrics},
        "status": job["status"],
        "steps": job["num_steps"],
        "device seconds": round(sum(s["device_s"] for s in job["segments"]), 1),
        "model": job["model_uri"],
    }


def _figure(value: float) -> float | None:
    """Rounds a metric for tables; a value that is not finite, which JSON lacks, becomes None."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
