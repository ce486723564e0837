"""What is left of a sweep in MLflow: its leaderboard, two figures, and the best trial as a challenger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringmaster.model_lineage import links
from ringmaster.model_lineage.ledger import Ledger
from ringmaster.model_lineage.records import ModelRecord
from ringmaster.tasks.execution.journal import DONE
from ringmaster.tasks.promotion.names import CHALLENGER
from ringmaster.tasks.sweeping.conductor import Conductor
from ringmaster.tasks.sweeping.drawing import learning_curves, parallel_coordinates
from ringmaster.tasks.sweeping.leaderboard import best

LEADERBOARD, PARALLEL, CURVES = "sweep/leaderboard.json", "sweep/parallel_coordinates.svg", "sweep/learning_curves.svg"


def figures(conductor: Conductor, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The figures of a sweep as SVG, by the path of the artifact that each becomes."""
    spec, won = conductor.spec, best(rows)
    common: dict[str, Any] = {
        "objective": spec.objective,
        "reports": conductor.reports,
        "done": [row["job"] for row in rows if row["status"] == DONE],
        "best": None if won is None else won["job"],
    }
    totals = {trial.total for trial in conductor.trials()}
    rungs = spec.stopping.rungs(max(totals, default=1))
    return {
        PARALLEL: parallel_coordinates(spec.name, spec.space, values=conductor.values, **common),
        CURVES: learning_curves(spec.name, rungs=rungs, **common),
    }


def record(ledger: Ledger, run_id: str, rows: Sequence[Mapping[str, Any]], drawn: Mapping[str, str]) -> None:
    """Writes the leaderboard and the figures into the batch's run, and shows them in its note; again changes nothing.

    Raises LedgerError where MLflow cannot take them.
    """
    ledger.write_table(run_id, LEADERBOARD, rows)
    for path, svg in drawn.items():
        ledger.write_svg(run_id, path, svg)
    note = ledger.note(run_id)
    mark = links.picture("Parallel coordinates", run_id, PARALLEL)
    if mark not in note:
        curves = links.picture("Learning curves", run_id, CURVES)
        experiment_id = str(ledger.experiment_id(ledger.experiment))
        board = f"All of them: {links.link('leaderboard', links.artifact_path(experiment_id, run_id, LEADERBOARD))}."
        ledger.set_note(run_id, f"{_sentence(rows)} {board}\n\n{mark}\n\n{curves}\n\n{note}")


def challenge(ledger: Ledger, uri: str, name: str) -> ModelRecord:
    """Makes a recorded model the challenger of registered model `name`, of which it becomes a version.

    Raises LedgerError where it is not there.
    """
    model = ledger.add_version(ledger.resolve_model(uri), name)
    assert model.version is not None, "a version that was made just now"
    ledger.set_alias(name, CHALLENGER, model.version)
    return model


def _sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    won, num_done = best(rows), sum(row["status"] == DONE for row in rows)
    found = "no trial has come to its end" if won is None else f"the best is **{won['job']}**"
    return f"Of {len(rows)} trials {num_done} were trained to their end; {found}."
