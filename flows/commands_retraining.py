"""The commands of sweeps and of retraining: the same flows that their deployments run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markdown import Markdown

from flows import settings
from flows.output import AsJson, error_console, print_json
from techniques.dotted import resolve

Seed = Annotated[int, typer.Option(help="Of the planner.", min=0)]


def sweep(
    sweep_file: Annotated[Path, typer.Argument(help="A file such as examples/sweep.yaml, which shows what it says.")],
    as_json: AsJson = False,
) -> None:
    """Train one job under every combination of some values, as one planned batch, and rank what comes of it."""
    from flows.sweep_form import load_sweep

    form = load_sweep(sweep_file)
    result = _run("flows.sweep:sweep", form.parameters())
    console = error_console()
    console.print(_table(result["leaderboard"]))
    if as_json:
        print_json(result)
    raise typer.Exit(0 if result["status"] == "done" else 1)


def retrain(
    models_file: Annotated[Path, typer.Argument(help="A file of models, such as examples/retraining.yaml.")],
    as_json: AsJson = False,
    seed: Seed = 0,
) -> None:
    """Train the production models whose data has changed, and promote what turns out better."""
    from tasks.promotion.production import load_production

    load_production(models_file)  # so that a wrong file is told before anything is imported that takes seconds
    result = _run("flows.retrain_daily:retrain_daily", {"file": str(models_file), "seed": seed})
    error_console().print(Markdown(result["report"]))
    if as_json:
        print_json(result)
    raise typer.Exit(0 if result["status"] == "done" else 1)


def _run(flow: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Runs a flow under a view of its progress; imports it only now, when the settings of Prefect are made."""
    settings.embed(settings.home())
    run = resolve(flow)
    from flows.views import shown

    with shown(error_console()):
        result: dict[str, Any] = run(**parameters)
    return result


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(*(rows[0] if rows else ()), header_style="bold")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else "" if v is None else str(v) for v in row.values()))
    return table
