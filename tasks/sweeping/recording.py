"""Recording of a sweep in MLflow: its leaderboard, two figures, and the best trial as a challenger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringmaster.model_lineage import model_pages
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.records import ModelRecord
from ringmaster.tasks.promotion.names import CHALLENGER
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.tasks.sweeping.drawing import learning_curves, parallel_coordinates
from ringmaster.tasks.sweeping.leaderboard import best
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.text import markdown

LEADERBOARD, PARALLEL, CURVES = "sweep/leaderboard.json", "sweep/parallel_coordinates.svg", "sweep/learning_curves.svg"


def figures(sweep_scheduler: SweepScheduler, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the figures of a sweep as SVG, by the paths of their artifacts."""
    spec, won = sweep_scheduler.spec, best(rows)
    common: dict[str, Any] = {
        "objective": spec.objective,
        "reports": sweep_scheduler.reports,
        "done": [row["job"] for row in rows if row["status"] == JobStatus.DONE],
        "best": None if won is None else won["job"],
    }
    totals = {trial.total for trial in sweep_scheduler.trials()}
    rungs = spec.stopping.rungs(max(totals, default=1))
    return {
        PARALLEL: parallel_coordinates(spec.name, spec.space, values=sweep_scheduler.values, **common),
        CURVES: learning_curves(spec.name, rungs=rungs, **common),
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


def challenge(ledger: Ledger, uri: str, name: str) -> ModelRecord:
    """Registers a recorded model as a version of `name` and makes it the challenger.

    Raises LedgerError if the model does not exist.
    """
    model = ledger.add_version(ledger.resolve_model(uri), name)
    assert model.version is not None, "a version that was made just now"
    ledger.set_alias(name, CHALLENGER, model.version)
    return model


def _sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    won, num_done = best(rows), sum(row["status"] == JobStatus.DONE for row in rows)
    found = "no trial has come to its end" if won is None else f"the best is **{markdown(won['job'])}**"
    return f"Of {len(rows)} trials {num_done} were trained to their end; {found}."
