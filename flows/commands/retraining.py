"""The commands of sweeps and of retraining: the same flows that their deployments run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markdown import Markdown

from ringmaster.flows import settings
from ringmaster.flows.commands.running import training
from ringmaster.flows.examples import located
from ringmaster.flows.output import STARTING_SERVERS, AsJson, Verbose, error_console, print_json, working
from ringmaster.flows.services import server_process
from ringmaster.techniques.dotted_names import resolve

Seed = Annotated[int, typer.Option(help="Of the planner; on a pool the controller has its own.", min=0)]


def sweep(
    sweep_file: Annotated[Path, typer.Argument(help="A file such as examples/sweep.yaml, which shows what it says.")],
    as_json: AsJson = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the last run of this sweep, which did not end well.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Train one job under many values as one planned batch, stop what is not worth it, and rank the rest."""
    with working(f"reading {sweep_file}"):
        from ringmaster.flows.sweeps.file import load_sweep, spec_of

        form = load_sweep(located(sweep_file))
        batch = spec_of(form).batch()
    with training(batch, is_verbose=verbose, is_resumed=resume) as end:
        from ringmaster.flows.sweep import sweep as sweep_flow

        end.result = sweep_flow(**form.parameters(), resume=resume)
    result: dict[str, Any] = end.result
    console = error_console()
    console.print(_table(result["leaderboard"]))
    if result["challenger"]:
        console.print(f"{result['best']['job']} is the challenger now: {result['challenger']}")
    for fault in result["faults"]:
        console.print(f"not recorded: {fault}", style="yellow")
    if result["batch"]["faults"]:
        console.print("To fix: remove the cause, and `ringmaster sweep SWEEP.yaml --resume` records the rest")
    if as_json:
        print_json(result)
    raise typer.Exit(exit_code(result))


def retrain(
    models_file: Annotated[Path, typer.Argument(help="A file of models, such as examples/retraining.yaml.")],
    night: Annotated[
        str | None, typer.Option(help="Date of the run, such as 2026-11-20; by default of the one that started last.")
    ] = None,
    force: Annotated[list[str], typer.Option(help="A model to train in any case; may be given again.")] = [],  # noqa: B006
    as_json: AsJson = False,
    seed: Seed = 0,
    verbose: Verbose = False,
) -> None:
    """Train the production models that are due, as many as fit before the deadline, and promote the better ones.

    A retraining run is stored under its date: repeated, it resumes where it was interrupted, and trains nothing twice.
    """
    with working(f"reading {models_file}"):
        from ringmaster.tasks.retraining.production import load_production

        load_production(models_file)  # so that a wrong file is told before anything is imported that takes seconds
    asked = {"file": str(models_file), "night": night, "force": force, "seed": seed}
    result = _run("ringmaster.flows.retrain_daily:retrain_daily", asked, is_verbose=verbose)
    error_console().print(Markdown(result["report"], hyperlinks=False))
    if as_json:
        print_json(result)
    raise typer.Exit(exit_code(result))


def exit_code(result: Mapping[str, Any]) -> int:
    """Returns 0 if a sweep or a retraining run is done and all of it is recorded, else 1."""
    return 0 if result["status"] == "done" and not result["faults"] and not result.get("was_skipped") else 1


def _run(flow: str, parameters: dict[str, Any], *, is_verbose: bool) -> dict[str, Any]:
    """Runs a flow under a view of its progress; imports it only now, when the settings of Prefect are made."""
    settings.embed(settings.home())
    is_alone = settings.pool() is None
    with working(STARTING_SERVERS) if is_alone else nullcontext():
        if is_alone:
            server_process.start_ahead()
        run = resolve(flow)
        from ringmaster.flows.batch.flow_runs import kept_result
        from ringmaster.flows.reports.progress import shown

    with shown(error_console(), is_verbose=is_verbose), kept_result() as end:
        end.result = run(**parameters)
    result: dict[str, Any] = end.result
    return result


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(*(rows[0] if rows else ()), header_style="bold")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else "" if v is None else str(v) for v in row.values()))
    return table
